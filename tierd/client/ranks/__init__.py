"""The ranks of a launch: their identity, their communication, their shared attempt, and other launches of the same run.

Part of `client`.
"""
