"""Object stores: the `Store` contract, its implementations, and wrappers around any store.

`base` defines the contract. `file`, `s3/`, `cloud/` and `memory` implement it. The wrappers add retries, rate limits, a
window of concurrent requests, request counts, and encryption. `foreign` reads objects that other programs put.

This package imports `core`, `priority` and the spool's direct I/O. `daemon`, `events` and `reading` import it.
"""
