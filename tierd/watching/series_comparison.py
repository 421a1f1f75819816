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

from tierd.watching.missing_files import WEIGHTS_PATTERN
from tierd.watching.step_in_name import RANK, directory_step, is_best, step_in, without_numbers, without_step
from tierd.watching.unit import COMPOSER, DCP, DIRECTORY_LAYOUT, FILE_LAYOUT, Unit, UnitLayout

UNCERTAIN_LAYOUTS = (DIRECTORY_LAYOUT, FILE_LAYOUT, COMPOSER)  # no program's own file identifies these


def compare_series(units: Sequence[Unit], marked_layouts: Container[UnitLayout]) -> list[Unit]:
    """Return the units of one directory, with a reason where one lacks what all others of its series have.

    `marked_layouts` are those whose programs write a file last that they alone write.
    """
    complete = [unit for unit in units if unit.step is not None and not unit.missing_reason]
    names = {unit.path: _file_names(unit) for unit in complete}
    parts = _newest_parts(complete, names)  # these show of no other what a save has
    return [
        _compare_unit(unit, complete, names, marked_layouts, parts) if unit.path in names else unit for unit in units
    ]


def compare_nested(units: Sequence[Unit]) -> list[Unit]:
    """Return all units, after comparing those that lie alone in a directory of a step, as `epoch_1/step_20`, with
    those in the other directories of its series."""
    nested: dict[str, list[Unit]] = {}
    for unit in units:
        home = series_directory(unit)
        may_be_whole = unit.layout is DIRECTORY_LAYOUT and unit.missing_reason in (None, _LONE_SAVE_REASON)
        if may_be_whole and home != dirname(unit.path):
            nested.setdefault(home, []).append(unit)
    compared = {unit.path: unit for group in nested.values() for unit in _compare_group(group)}
    return [compared.get(unit.path, unit) for unit in units]


def _compare_group(group: Sequence[Unit]) -> Iterator[Unit]:
    names = {unit.path: _file_names(unit) for unit in group}
    parts = _newest_parts(group, names)
    for unit in group:
        unit_names = names[unit.path]
        siblings = [sibling for sibling in group if sibling is not unit and unit_names & names[sibling.path]]
        complete = [names[sibling.path] for sibling in siblings if sibling.path not in parts]
        if siblings:
            unit = _report_absent(replace(unit, missing_reason=None), unit_names, complete)
        yield _add_reason(unit, parts)


def _add_reason(unit: Unit, parts: Mapping[str, str]) -> Unit:
    return replace(unit, missing_reason=unit.missing_reason or parts.get(unit.path))


def _newest_parts(units: Sequence[Unit], names: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return why the newest of each series is incomplete, by path, if it lacks a file that the newest before it has.

    Older ones prove less: their program may have removed some of their files, and the disk may have lost some.
    """
    parts = {}
    ordered = sorted(units, key=lambda unit: unit.step or 0, reverse=True)
    for unit in ordered:
        unit_names = names[unit.path]
        siblings = (sibling for sibling in ordered if sibling is not unit and unit_names & names[sibling.path])
        before = next(siblings, None)
        if before is None or (before.step or 0) >= (unit.step or 0):
            continue
        expected_names = names[before.path]
        if unit.layout is DCP:
            unit_names, expected_names = _without_shards(unit_names), _without_shards(expected_names)
        elif unit.layout not in UNCERTAIN_LAYOUTS:
            unit_names, expected_names = _top_names(unit_names), _top_names(expected_names)
        if lacking := _absent(unit_names, [frozenset(filter(_is_each_time, expected_names))]):
            parts[unit.path] = f"{min(lacking)} is not there, which {before.path} has, the checkpoint before it"
    return parts


def _renamed_files(names: frozenset[str], expected: frozenset[str]) -> frozenset[str]:
    """Return the files that have other names in each save, as the chunks of zarr, which have digests for names."""
    fresh = {_directory_and_ending(name) for name in names - expected if _is_numbered(name)}
    return frozenset(name for name in expected - names if _is_numbered(name) and _directory_and_ending(name) in fresh)


def _is_numbered(name: str) -> bool:
    return re.search(r"\d|#", RANK.sub("", name.rpartition("/")[2])) is not None


def _directory_and_ending(name: str) -> tuple[str, str]:
    directory, _, last = name.rpartition("/")
    return directory, last.rpartition(".")[2] if "." in last else ""


def _is_each_time(name: str) -> bool:
    return not is_best(name.partition("/")[2] or name)  # a directory says it of all that it has


def series_directory(unit: Unit) -> str:
    """Return the path of the directory in which a unit lies, with a mark in the place of each step."""
    parents = unit.path.split("/")[:-1]
    return "/".join(name if directory_step(name) is None else without_step(name) for name in parents)


def _compare_unit(
    unit: Unit,
    units: Sequence[Unit],
    names: Mapping[str, frozenset[str]],
    marked_layouts: Container[UnitLayout],
    parts: Mapping[str, str],
) -> Unit:
    unit_names = names[unit.path]
    siblings = [sibling for sibling in units if sibling is not unit and unit_names & names[sibling.path]]
    complete = [names[sibling.path] for sibling in siblings if sibling.path not in parts]
    if unit.layout not in UNCERTAIN_LAYOUTS:
        # Its program says what its directory has, and nothing of what lies beside it.
        beside = [frozenset(filter(_is_flat, sibling_names)) for sibling_names in complete]
        return _add_reason(_report_absent(unit, unit_names, beside), parts)
    if not siblings:
        others, inside = (names[path] for path in names if path != unit.path), _paths_inside(unit_names)
        has_names = any(_paths_inside(sibling_names) <= inside for sibling_names in others)
        is_unfinished = unit.layout is DIRECTORY_LAYOUT and _looks_begun(unit) and not has_names
        return replace(unit, missing_reason=_LONE_SAVE_REASON) if is_unfinished else unit
    # Only the newest may have been begun. A program also removes files, as the states beside older weights.
    is_newest = unit.layout is DIRECTORY_LAYOUT and all((sibling.step or 0) < (unit.step or 0) for sibling in siblings)
    for candidate in siblings if is_newest else ():
        if candidate.layout in marked_layouts and unit_names < names[candidate.path]:
            why = f"it lacks the file that {candidate.layout.program} writes last, and {candidate.path} has it"
            return replace(unit, layout=candidate.layout, missing_reason=why, is_unfinished=True)
    counted = frozenset(filter(partial(_is_in_own_directory, unit_names), frozenset.union(*names.values())))
    # Of files beside each other, a program may remove some, as older optimizer states: those of a rank it does not.
    if unit.layout is not DIRECTORY_LAYOUT:
        counted = frozenset(name for name in counted if RANK.search(name))
    return _add_reason(_report_absent(unit, unit_names, [sibling_names & counted for sibling_names in complete]), parts)


def _without_shards(names: frozenset[str]) -> frozenset[str]:
    """Return the files that are none of DCP's, whose number follows the ranks: what the loop writes after them."""
    return frozenset(name for name in names if not name.endswith((".distcp", ".metadata")))


def _paths_inside(names: frozenset[str]) -> frozenset[str]:
    """Return the paths within a directory, whose name may have another form: `epoch-1`, `epoch-1-iter-500`."""
    return frozenset(name.partition("/")[2] for name in names)


def _is_flat(name: str) -> bool:
    return "/" not in name


def _is_in_own_directory(unit_names: frozenset[str], name: str) -> bool:
    """Whether a name is not in a directory of which a checkpoint has nothing.

    A program may remove such a directory as a whole, as `lora-000004-state/` beside `lora-000004.safetensors`, or write
    it seldom, as `step2000-unsharded/` beside `step2000/`.
    """
    return _is_flat(name) or name.partition("/")[0] in _top_names(unit_names)


def _report_absent(unit: Unit, unit_names: frozenset[str], sibling_names: Sequence[frozenset[str]]) -> Unit:
    lacking = _absent(unit_names, sibling_names)
    if not lacking:
        return unit
    return replace(unit, missing_reason=f"{min(lacking)} is not there, which all other checkpoints of its series have")


def _absent(unit_names: frozenset[str], sibling_names: Sequence[frozenset[str]]) -> frozenset[str]:
    common = frozenset.intersection(*sibling_names) if sibling_names else frozenset()
    absent = common - unit_names - _renamed_files(unit_names, common)
    # Another number may stand in the name: `checkpoint_1_500.pt` and `checkpoint_2_1000.pt`.
    forms, sibling_forms = _forms(unit_names), [_forms(names) for names in sibling_names]
    return frozenset(
        name for name in absent if forms[_form(name)] < min(counts[_form(name)] for counts in sibling_forms)
    )


def _mark_step(step: int | None, name: str) -> str:
    """Mark the step in a name, but no other number: `states_1.pth` of step 20 is no series with `states_0.pth`."""
    return without_step(name) if step in (step_in(name), directory_step(name)) else name


def _forms(names: frozenset[str]) -> Counter[str]:
    return Counter(map(_form, names))


@lru_cache(1 << 16)  # because each unit that lies alone is compared with all others of the listing
def _form(name: str) -> str:
    return "/".join(map(without_numbers, name.split("/")))


def _top_names(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in names)


def missing_counterpart(paths: Iterable[str], earlier: Iterable[str], layout: UnitLayout) -> str | None:
    """Return a file of the checkpoint before this one that has no counterpart in it; None if this one has all of them.

    Of files beside each other (`layout`) the best is not written in each save.
    """
    forms = frozenset(map(_form, paths))
    expected = {_form(path): path for path in earlier}
    absent = expected.keys() - forms - _renamed_files(forms, frozenset(expected))
    lacking = (expected[form] for form in absent)
    return min((path for path in lacking if layout is DIRECTORY_LAYOUT or _is_each_time(path)), default=None)


def files_in_own_directories(unit: Unit, paths: Iterable[str]) -> list[str]:
    """Return those of another checkpoint's files that do not lie in a directory of which a unit has nothing."""
    depth = unit.path.count("/") + 1

    def top(path: str) -> str:
        return _form("/".join(path.split("/")[:depth]))

    tops = {top(path) for path in unit.files}
    return [path for path in paths if path.count("/") < depth or top(path) in tops]


def shares_a_file_form(paths: Iterable[str], other_paths: Iterable[str]) -> bool:
    """Whether a file of one checkpoint differs from one of the other in nothing but numbers."""
    return not {*map(_form, paths)}.isdisjoint(map(_form, other_paths))


def covers_all_files(paths: Iterable[str], other_paths: Iterable[str]) -> bool:
    """Whether each of these files differs from some file of others in nothing but numbers."""
    return {*map(_form, paths)} <= {*map(_form, other_paths)}


class LoneSaveHistory:
    """The directories over successive listings that are alone in theirs, and look as if their save was only begun.

    A program that keeps one checkpoint never shows two at rest. Its second one is whole if it has what the first had.
    """

    def __init__(self) -> None:
        self._file_names: dict[str, dict[str, frozenset[str]]] = {}  # by directory, the last two lone saves' names

    def judge(self, unit: Unit) -> Unit:
        """Return a unit of the last listing, without its reason if the one before it had no other names."""
        if unit.missing_reason != _LONE_SAVE_REASON:
            return unit
        lone = self._file_names.setdefault(unit.path.rpartition("/")[0], {})
        before = next((names for path, names in reversed(lone.items()) if path != unit.path), None)
        unit_names = lone[unit.path] = _file_names(unit)
        for path in [path for path in lone if path != unit.path][:-1]:
            del lone[path]
        return replace(unit, missing_reason=None) if before is not None and before <= unit_names else unit


_DECIMAL = re.compile(r"(?<!\d)\d+\.\d+(?!\d)")
_LONE_SAVE_REASON = (
    "it may be a save that Trainer or Accelerate began: neither trainer_state.json nor random_states_0.pkl is there, "
    "and no other checkpoint beside it has its files"
)
_EARLY_FILES = re.compile(
    rf"{WEIGHTS_PATTERN}|config\.json|training_args\.bin|(optimizer|scheduler|sampler)(_\d+)?\.(bin|pt)"
)


def _looks_begun(unit: Unit) -> bool:
    """Whether a directory has names that Trainer or Accelerate write before the file that identifies them."""
    return any(_EARLY_FILES.fullmatch(path[len(unit.path) + 1 :]) for path in unit.files)


def _file_names(unit: Unit) -> frozenset[str]:
    """Return the paths of a unit's files from its directory, with a mark in the place of each step."""
    home = len(unit.path.rpartition("/")[0])
    return frozenset(_mark_path(path[home + 1 :] if home else path, unit.step) for path in unit.files)


def _mark_path(path: str, step: int | None) -> str:
    # A decimal is a metric, as in `epoch050-0.25.pt`.
    marked = _DECIMAL.sub("#", "/".join(_mark_step(step, name) for name in path.split("/")))
    # The step may stand where no rule finds it in this file's name, as in `model-3000.data-00000-of-00001`.
    return marked if marked != path else re.sub(rf"(?<!\d)0*{step}(?!\d)", "#", path, count=1)
