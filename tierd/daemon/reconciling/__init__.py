"""The parts of the reconciler: the requests of clients, the live inventory, the backlog of each tier, and the actions.

`daemon/reconcile.py` holds the loop, and only it imports this package. Imports are those of `daemon`.
"""
