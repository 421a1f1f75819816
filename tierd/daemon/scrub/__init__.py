"""The scrub: verify every copy again, quarantine corrupt copies, and repair them from another place.

Part of `daemon`.
"""
