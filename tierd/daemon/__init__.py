"""The node's daemon: it observes all places, plans, and acts until nothing is left to do.

This package holds the daemon's composition root, the reconciler, the sockets, and `status`.

It imports everything but `client`, `state` and `dcp`; `reading` and `cli` import it.
"""
