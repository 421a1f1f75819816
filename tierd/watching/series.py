"""Compare a checkpoint with the others of its series: names that differ only in the step, in one directory. Pure.

A program that no file identifies leaves no mark when it has finished a save. What all others of the series have, and
one lacks, is then the only sign that it was killed in that save, or is still at work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from posixpath import dirname

from tierd.watching.completeness import WEIGHTS
from tierd.watching.programs import COMPOSER, DCP, DIRECTORY, FILE, UnitLayout
from tierd.watching.step_in_name import RANK, directory_step, is_best, step_in, without_numbers, without_step
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
    parts = _newest_parts(whole, names)  # these show of no other what a save has
    return [_compared(unit, whole, names, last_written, parts) if unit.path in names else unit for unit in units]


def compare_nested(units: Sequence[Unit]) -> list[Unit]:
    """Return all units, after comparing those that lie alone in a directory of a step, as `epoch_1/step_20`, with
    those in the other directories of its series."""
    nested: dict[str, list[Unit]] = {}
    for unit in units:
        home = home_of(unit)
        if unit.layout is DIRECTORY and unit.missing in (None, _ALONE) and home != dirname(unit.path):
            nested.setdefault(home, []).append(unit)
    compared = {unit.path: unit for group in nested.values() for unit in _compare_group(group)}
    return [compared.get(unit.path, unit) for unit in units]


def _compare_group(group: Sequence[Unit]) -> Iterator[Unit]:
    names = {unit.path: _names(unit) for unit in group}
    parts = _newest_parts(group, names)
    for unit in group:
        own = names[unit.path]
        others = [other for other in group if other is not unit and own & names[other.path]]
        whole = [names[other.path] for other in others if other.path not in parts]
        yield _judged(_lacking(replace(unit, missing=None), own, whole) if others else unit, parts)


def _judged(unit: Unit, parts: Mapping[str, str]) -> Unit:
    return replace(unit, missing=unit.missing or parts.get(unit.path))


def _newest_parts(units: Sequence[Unit], names: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return why the newest of each series is incomplete, by path, if it lacks a file that the newest before it has.

    Older ones prove less: their program may have removed some of their files, and the disk may have lost some.
    """
    parts = {}
    ordered = sorted(units, key=lambda unit: unit.step or 0, reverse=True)
    for unit in ordered:
        own = names[unit.path]
        before = next((other for other in ordered if other is not unit and own & names[other.path]), None)
        if before is None or (before.step or 0) >= (unit.step or 0):
            continue
        needed = names[before.path]
        if unit.layout is DCP:
            own, needed = _beside_shards(own), _beside_shards(needed)
        elif unit.layout not in UNCERTAIN:
            own, needed = _beside(own), _beside(needed)
        if lacking := _absent(own, [frozenset(filter(_is_each_time, needed))]):
            parts[unit.path] = f"{min(lacking)} is not there, which {before.path} has, the checkpoint before it"
    return parts


def _renamed(own: frozenset[str], needed: frozenset[str]) -> frozenset[str]:
    """Return the files that have other names in each save, as the chunks of zarr, which have digests for names."""
    fresh = {_place(name) for name in own - needed if _is_numbered(name)}
    return frozenset(name for name in needed - own if _is_numbered(name) and _place(name) in fresh)


def _is_numbered(name: str) -> bool:
    return re.search(r"\d|#", RANK.sub("", name.rpartition("/")[2])) is not None


def _place(name: str) -> tuple[str, str]:
    """Return the directory of a name, and its ending."""
    directory, _, last = name.rpartition("/")
    return directory, last.rpartition(".")[2] if "." in last else ""


def _is_each_time(name: str) -> bool:
    return not is_best(name.partition("/")[2] or name)  # a directory says it of all that it has


def home_of(unit: Unit) -> str:
    """Return the path of the directory in which a unit lies, with a mark in the place of each step."""
    parents = unit.path.split("/")[:-1]
    return "/".join(name if directory_step(name) is None else without_step(name) for name in parents)


def _compared(
    unit: Unit,
    units: Sequence[Unit],
    names: Mapping[str, frozenset[str]],
    last_written: Container[UnitLayout],
    parts: Mapping[str, str],
) -> Unit:
    own = names[unit.path]
    others = [other for other in units if other is not unit and own & names[other.path]]
    whole = [names[other.path] for other in others if other.path not in parts]
    if unit.layout not in UNCERTAIN:  # its program says what its directory has, and nothing of what lies beside it
        return _judged(_lacking(unit, own, [frozenset(filter(_is_flat, other)) for other in whole]), parts)
    if not others:
        has_names = any(_inside(other) <= _inside(own) for path, other in names.items() if path != unit.path)
        begun = unit.layout is DIRECTORY and _looks_begun(unit) and not has_names
        return replace(unit, missing=_ALONE) if begun else unit
    # Only the newest may have been begun. A program also removes files, as the states beside older weights.
    is_newest = unit.layout is DIRECTORY and all((other.step or 0) < (unit.step or 0) for other in others)
    for other in others if is_newest else ():
        if other.layout in last_written and own < names[other.path]:
            why = f"it lacks the file that {other.layout.program} writes last, and {other.path} has it"
            return replace(unit, layout=other.layout, missing=why, begun=True)
    counted = frozenset(filter(partial(_is_beside, own), frozenset.union(*names.values())))
    # Of files beside each other, a program may remove some, as older optimizer states: those of a rank it does not.
    if unit.layout is not DIRECTORY:
        counted = frozenset(name for name in counted if RANK.search(name))
    return _judged(_lacking(unit, own, [other & counted for other in whole]), parts)


def _beside_shards(names: frozenset[str]) -> frozenset[str]:
    """Return the files that are none of DCP's, whose number follows the ranks: what the loop writes after them."""
    return frozenset(name for name in names if not name.endswith((".distcp", ".metadata")))


def _inside(names: frozenset[str]) -> frozenset[str]:
    """Return the paths within a directory, whose name may have another form: `epoch-1`, `epoch-1-iter-500`."""
    return frozenset(name.partition("/")[2] for name in names)


def _is_flat(name: str) -> bool:
    return "/" not in name


def _is_beside(own: frozenset[str], name: str) -> bool:
    """Whether a name is not in a directory of which a checkpoint has nothing.

    A program may remove such a directory as a whole, as `lora-000004-state/` beside `lora-000004.safetensors`, or write
    it seldom, as `step2000-unsharded/` beside `step2000/`.
    """
    return _is_flat(name) or name.partition("/")[0] in _beside(own)


def _lacking(unit: Unit, own: frozenset[str], others: Sequence[frozenset[str]]) -> Unit:
    lacking = _absent(own, others)
    if not lacking:
        return unit
    return replace(unit, missing=f"{min(lacking)} is not there, which all other checkpoints of its series have")


def _absent(own: frozenset[str], others: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the names that all others have, and this one lacks."""
    common = frozenset.intersection(*others) if others else frozenset()
    absent = common - own - _renamed(own, common)
    # Another number may stand in the name: `checkpoint_1_500.pt` and `checkpoint_2_1000.pt`.
    forms, needed = _forms(own), [_forms(other) for other in others]
    return frozenset(name for name in absent if forms[_form(name)] < min(other[_form(name)] for other in needed))


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
    wanted = {_form(path): path for path in earlier}
    absent = wanted.keys() - own - _renamed(own, frozenset(wanted))
    return min((wanted[form] for form in absent if layout is DIRECTORY or _is_each_time(wanted[form])), default=None)


def beside(unit: Unit, paths: Iterable[str]) -> list[str]:
    """Return those of another checkpoint's files that do not lie in a directory of which a unit has nothing."""
    depth = unit.path.count("/") + 1

    def top(path: str) -> str:
        return _form("/".join(path.split("/")[:depth]))

    own = {top(path) for path in unit.files}
    return [path for path in paths if path.count("/") < depth or top(path) in own]


def is_of_series(paths: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a file of one checkpoint differs from one of the other in nothing but numbers."""
    return not {*map(_form, paths)}.isdisjoint(map(_form, others))


def has_each(paths: Iterable[str], others: Iterable[str]) -> bool:
    """Whether each of these files differs from some file of others in nothing but numbers."""
    return {*map(_form, paths)} <= {*map(_form, others)}


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
