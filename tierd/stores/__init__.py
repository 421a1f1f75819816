"""Object stores: the `Store` contract, its implementations, and wrappers around any store.

`base` defines the contract. The stores that `open` opens implement it, and so does `memory_store`. The wrappers add
deadlines and retries (`retry`), rate limits and request counts (`store_wrappers`), and encryption (`encrypted_store`).
`ForeignStore` in `retry` reads objects that other programs put. `mounted_directories` finds directories that overlap.

This package imports `core`, `threads` and the spool's direct I/O. `daemon`, `events`, `reading`, `doctor`, `bench` and
`cli` import it.
"""
