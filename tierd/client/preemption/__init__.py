"""Notices that this node or job ends: signals, metadata servers of clouds, and how all ranks agree on one step.

`client/schedule.py` and `client/checkpointer.py` import it.
"""
