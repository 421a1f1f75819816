"""The parts of the reconciler: clients' requests, the live inventory, the backlog, the next action of each worker, and
the code that carries out flushes, prunes and repairs.

`daemon/reconcile.py` makes and runs these parts, and nothing else imports this package. It imports what `daemon` may
import.
"""
