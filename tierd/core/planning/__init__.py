"""What a daemon does next: the inventory of all places, the plan, and the parts of the plan (demand, flush candidates,
order, verdicts, pruning and its batches, eviction, scrub).

Part of `core`: pure, and imports only `core`.
"""
