"""The history of a run: attempts, the chain of their origins, heads, launches that live at the same time, and the order
in which a restore tries checkpoints.

Part of `core`: pure, and imports only `core`.
"""
