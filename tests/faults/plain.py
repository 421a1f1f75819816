"""Mutants that ordinary tests find: faults of a kind that needs no kit."""

from __future__ import annotations

from faults.rounds import Mutant

PLAIN: tuple[Mutant, ...] = ()
