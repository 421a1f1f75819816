"""The node's daemon: it observes all places, plans, and acts until nothing is left to do.

This package holds the daemon's composition root, the reconciler, the two sockets, `status` and the runs for the page,
the spool's observation, the daemon's own files, and the bounds on concurrent work.

It imports everything but `client`, `state` and `dcp`; `reading`, `doctor`, `bench` and `cli` import it.
"""
