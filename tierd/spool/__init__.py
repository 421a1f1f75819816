"""The local tier: everything between a snapshot in memory and its committed part on this node's disk.

This package imports only `core`. `client`, `daemon`, `state`, `ipc` and `cli` import this package, because all of them
read or write a spool.
"""
