"""Commands that change a spool, a tier, a program's directory, or what the daemon does.

Imported by `cli/__init__.py`.
"""
