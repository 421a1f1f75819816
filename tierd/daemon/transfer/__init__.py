"""Transfers of chunks: spool -> tier, tier -> tier, tier -> spool or directory, within one memory budget.

Part of `daemon`.
"""
