"""Notices that this node or job ends: signals, metadata servers of clouds, and how all ranks agree on one step.

`client/save_schedule.py` imports it.
"""
