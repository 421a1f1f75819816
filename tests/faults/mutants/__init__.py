"""Mutants that ordinary tests find: one module for each package of tierd/ (`core/planning/` is `core_planning`).

Where a module would be too long, a subject has a module beside it. A kit holds its own mutants.
"""

from __future__ import annotations

import importlib
import pkgutil

from faults.rounds import Mutant

PLAIN: tuple[Mutant, ...] = tuple(
    mutant
    for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    for mutant in importlib.import_module(module.name).MUTANTS
)
