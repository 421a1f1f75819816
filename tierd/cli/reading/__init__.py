"""Commands that change nothing in a spool or on a tier: they list, show, verify, follow, restore and examine.

Imported by `cli/__init__.py` and by the other commands.
"""
