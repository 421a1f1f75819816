"""Compare a checkpoint with the others of its series: names that differ only in the step, in one directory. Pure.

A program that no file identifies leaves no mark when it has finished a save. What all others of the series have, and
one lacks, is then the only sign that it was killed in that save, or is still at work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from tierd.watching.completeness import WEIGHTS
from tierd.watching.programs import COMPOSER, DIRECTORY, FILE, UnitLayout
from tierd.watching.step_in_name import RANK, directory_step, step_in, without_numbers, without_step
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


def compare_nested(units: Sequence[Unit]) -> list[Unit]:
    """Return all units, after comparing those that lie alone in a directory of a step, as `epoch_1/step_20`, with
    those in the other directories of its series."""
    names: dict[str, dict[str, frozenset[str]]] = {}
    for unit in units:
        if unit.layout is DIRECTORY and unit.missing in (None, _ALONE) and (home := _home(unit)) is not None:
            names.setdefault(home, {})[unit.path] = _names(unit)
    return [_compared_nested(unit, names.get(_home(unit) or "", {})) for unit in units]


def _compared_nested(unit: Unit, names: Mapping[str, frozenset[str]]) -> Unit:
    own = names.get(unit.path, frozenset())
    others = [other for path, other in names.items() if path != unit.path and own & other]
    return _lacking(replace(unit, missing=None), own, others) if others else unit


def _home(unit: Unit) -> str | None:
    """Return the path of a unit's directory, with a mark in the place of each step; None if it has no step."""
    parents = unit.path.split("/")[:-1]
    home = "/".join(name if directory_step(name) is None else without_step(name) for name in parents)
    return None if home == "/".join(parents) else home


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
    # Of files beside each other, a program may remove some, as older optimizer states: those of a rank it does not. The
    # newest save has yet to lose any.
    is_newest = all((unit.step or 0) > (other.step or 0) for other in others)
    counted = frozenset.union(*names.values())
    if unit.layout is not DIRECTORY:
        needed = _EACH_TIME if is_newest else RANK
        counted = frozenset(name for name in counted if needed.search(name))
    return _lacking(unit, own, [names[other.path].intersection(counted) for other in others])


def _lacking(unit: Unit, own: frozenset[str], others: Sequence[frozenset[str]]) -> Unit:
    lacking = frozenset.intersection(*others) - own if others else frozenset()
    # Another number may stand in the name: `checkpoint_1_500.pt` and `checkpoint_2_1000.pt`.
    forms, needed = _forms(own), [_forms(other) for other in others]
    lacking = frozenset(name for name in lacking if forms[_form(name)] < min(other[_form(name)] for other in needed))
    if not lacking:
        return unit
    return replace(unit, missing=f"{min(lacking)} is not there, which all other checkpoints of its series have")


def _without(step: int | None, name: str) -> str:
    """Mark the step in a name, but no other number: `states_1.pth` of step 20 is no series with `states_0.pth`."""
    return without_step(name) if step in (step_in(name), directory_step(name)) else name


def _forms(names: frozenset[str]) -> Counter[str]:
    return Counter(map(_form, names))


@lru_cache(1 << 16)  # because each unit that lies alone is compared with all others of the listing
def _form(name: str) -> str:
    return "/".join(map(without_numbers, name.split("/")))


def _beside(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in names)


def lacking(paths: Iterable[str], earlier: Iterable[str], layout: UnitLayout) -> str | None:
    """Return a file of the checkpoint before this one that has no counterpart in it; None if this one has all of them.

    Args:
        paths: the files of a checkpoint that no other of its series lies beside.
        earlier: those of the one that was taken before it.
        layout: its layout. Of files beside each other the best is not written in each save.
    """
    own = frozenset(map(_form, paths))
    wanted = {_form(path): path for path in earlier if layout is DIRECTORY or _EACH_TIME.search(path)}
    return min((path for form, path in wanted.items() if form not in own), default=None)


def is_of_series(paths: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a file of one checkpoint differs from one of the other in nothing but numbers."""
    return not {*map(_form, paths)}.isdisjoint(map(_form, others))


class LoneSaves:
    """The directories over successive listings that are alone in theirs, and look as if their save was only begun.

    A program that keeps one checkpoint never shows two at rest. Its second one is whole if it has what the first had.
    """

    def __init__(self) -> None:
        self._names: dict[str, dict[str, frozenset[str]]] = {}  # by directory: the last two lone saves, and their names

    def judge(self, unit: Unit) -> Unit:
        """Return a unit of the last listing, without its reason if the one before it had no other names."""
        if unit.missing != _ALONE:
            return unit
        lone = self._names.setdefault(unit.path.rpartition("/")[0], {})
        before = next((names for path, names in reversed(lone.items()) if path != unit.path), None)
        own = lone[unit.path] = _names(unit)
        for path in [path for path in lone if path != unit.path][:-1]:
            del lone[path]
        return replace(unit, missing=None) if before is not None and before <= own else unit


_DECIMAL = re.compile(r"(?<!\d)\d+\.\d+(?!\d)")
_EACH_TIME = re.compile(r"^(?!.*best)", re.IGNORECASE)  # the best is not written in each save
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
    # A decimal is a metric, as in `epoch050-0.25.pt`.
    marked = _DECIMAL.sub("#", "/".join(_without(step, name) for name in path.split("/")))
    # The step may stand where no rule finds it in this file's name, as in `model-3000.data-00000-of-00001`.
    return marked if marked != path else re.sub(rf"(?<!\d)0*{step}(?!\d)", "#", path, count=1)
