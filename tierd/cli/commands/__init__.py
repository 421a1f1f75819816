"""The commands, in modules of which a command line loads one: `MODULES` in `cli/__init__.py` names the module of each.

Part of `cli`.
"""

from __future__ import annotations
