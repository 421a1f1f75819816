"""The parts of the reconciler: clients' requests, the live inventory, the backlog, the next action of each worker, and
the code that carries out flushes, prunes and repairs.

Part of `daemon`. `daemon/reconciler.py` makes and runs these parts; elsewhere only the class `TierWorker` is imported.
"""
