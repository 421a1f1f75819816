"""Compare a checkpoint with the others of its series: names that differ only in the step, in one directory. Pure.

A program that no file identifies leaves no mark when it has finished a save. What all others of the series have, and
one lacks, is then the only sign that it was killed in that save, or is still at work.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from tierd.watching.completeness import WEIGHTS
from tierd.watching.programs import COMPOSER, DIRECTORY, FILE, UnitLayout
from tierd.watching.step_in_name import RANK, without_step
from tierd.watching.unit import Unit

UNCERTAIN = (DIRECTORY, FILE, COMPOSER)  # no program's own file identifies these


def compare_series(units: Sequence[Unit], last_written: Container[UnitLayout]) -> list[Unit]:
    """Return the units of one directory, with a reason where one lacks what all others of its series have.

    Args:
        units: the units of one directory.
        last_written: the layouts whose programs write a file last that they alone write.
    """
    whole = [unit for unit in units if unit.step is not None and not unit.missing]
    names = {unit.path: _names(unit) for unit in whole}
    return [_compared(unit, whole, names, last_written) if unit.path in names else unit for unit in units]


def _compared(
    unit: Unit, whole: Sequence[Unit], names: Mapping[str, frozenset[str]], last_written: Container[UnitLayout]
) -> Unit:
    own = names[unit.path]
    others = [other for other in whole if other is not unit and own & names[other.path]]
    if unit.layout not in UNCERTAIN:  # its program says what its directory has, and nothing of what lies beside it
        return _lacking(unit, _beside(own), [_beside(names[other.path]) for other in others])
    if not others:
        return replace(unit, missing=_ALONE) if unit.layout is DIRECTORY and _looks_begun(unit) else unit
    for other in others:
        if other.layout in last_written and own < names[other.path]:
            why = f"it lacks the file that {other.layout.program} writes last, and {other.path} has it"
            return replace(unit, layout=other.layout, missing=why, begun=True)
    # Files beside each other are no series of saves that have all the same files: only those of ranks are.
    counted = [name for name in frozenset.union(*names.values()) if unit.layout is DIRECTORY or RANK.search(name)]
    return _lacking(unit, own, [names[other.path].intersection(counted) for other in others])


def _lacking(unit: Unit, own: frozenset[str], others: Sequence[frozenset[str]]) -> Unit:
    lacking = frozenset.intersection(*others) - own if others else None
    if not lacking:
        return unit
    return replace(unit, missing=f"{min(lacking)} is not there, which all other checkpoints of its series have")


def _beside(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in names)


_ALONE = (
    "it may be a save that Trainer or Accelerate began: neither trainer_state.json nor random_states_0.pkl is there, "
    "and no other checkpoint beside it has its files"
)
_EARLY = re.compile(rf"{WEIGHTS}|config\.json|training_args\.bin|(optimizer|scheduler|sampler)(_\d+)?\.(bin|pt)")


def _looks_begun(unit: Unit) -> bool:
    """Whether a directory has names that Trainer or Accelerate write before the file that identifies them."""
    return any(_EARLY.fullmatch(path[len(unit.path) + 1 :]) for path in unit.files)


def _names(unit: Unit) -> frozenset[str]:
    """Return the paths of a unit's files from its directory, with a mark in the place of each step."""
    home = len(unit.path.rpartition("/")[0])
    return frozenset(_marked(path[home + 1 :] if home else path, unit.step) for path in unit.files)


def _marked(path: str, step: int | None) -> str:
    marked = "/".join(map(without_step, path.split("/")))
    # The step may stand where no rule finds it in this file's name, as in `model-3000.data-00000-of-00001`.
    return marked if marked != path else re.sub(rf"(?<!\d)0*{step}(?!\d)", "#", path, count=1)
