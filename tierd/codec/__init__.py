"""Encode and decode one chunk: byte planes for numbers, and detection of the numbers that a chunk holds.

It imports `core` and `spool`; `daemon` uses it.
"""
