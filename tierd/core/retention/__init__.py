"""Which checkpoints a run keeps: the policy and its verdicts, its stored form on a tier, and which of several policies
holds.

Part of `core`: pure, and imports only `core`.
"""
