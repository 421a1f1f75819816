"""Messages between a client and the daemon over the spool's sockets, their versions, and the client's connection.

The package imports `core` and `spool`; `client`, `daemon`, `doctor`, `check` and `cli` import it.
"""
