"""Find the units in a listing: what belongs together as one checkpoint, and whether it is complete.

Pure: units are a function of a listing. A listing cannot show whether a file is whole (see `unit_inspection`). It
cannot show whether ranks are missing at the end if no file records their number. Nor can it show whether a writer is
still at work: a watcher compares successive listings for that (`settling_units`).

Invariant: no unit is a part of a checkpoint. A directory that no program's file identifies is one unit with all that
lies below it, and entries of one step beside each other are one unit. Two steps are never one unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from posixpath import basename

from tierd.watching.directory_layouts import (
    DirectoryLayout,
    has_weights,
    holds_several_saves,
    is_checkpoint,
    is_of_run,
    match_layout,
)
from tierd.watching.loose_units import LISTS_OF_PARTS, file_units, is_config, lone_file_unit, may_hold_state, user_units
from tierd.watching.missing_files import (
    Directory,
    absent_in_ranks,
    absent_index,
    absent_of_count,
    final_name,
    is_temporary,
    leftover_temporary_file,
    temporary_name_reason,
    unfinished_reason,
)
from tierd.watching.series_comparison import compare_nested, compare_series
from tierd.watching.step_in_name import (
    counted_step,
    directory_step,
    is_log,
    names_beside,
    step_in,
    steps_beside,
    updates_beside,
    without_numbers,
)
from tierd.watching.unit import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    DIRECTORY_LAYOUT,
    FILE_LAYOUT,
    KERAS,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    SHARDED_LAYOUT,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    WITHOUT_STEP,
    Listing,
    Unit,
    UnitLayout,
    files_below,
    join_path,
)


def units(listing: Listing) -> list[Unit]:
    """Return the units in a listing, sorted by path."""
    if listing.user_layout is not None:
        return user_units(listing, listing.user_layout)
    tree = listing.tree()
    collected = _units_in(Directory("", tree[""], listing, tree))
    return sorted(compare_nested(collected), key=lambda unit: unit.path)


def names_of_units(listing: Listing) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for unit in units(listing):
        for path in (*unit.files, *unit.special_files, *unit.markers):
            directory, _, name = path.rpartition("/")
            names.setdefault(directory, set()).add(name)
    return names


def _units_in(directory: Directory) -> list[Unit]:
    """Return the units in a directory that is no unit itself."""
    direct, inner, parts = file_units(directory), [], _part_directories(directory)
    if parts:
        unit_paths = {path for unit in direct for path in unit.files}
        lists = (join_path(directory.path, name) for name in LISTS_OF_PARTS if directory.has_file(name))
        direct += [lone_file_unit(path) for path in lists if path not in unit_paths]
    for name in sorted(directory.directories):
        child = directory.directory_at(join_path(directory.path, name))
        claimed = match_layout(child)
        if claimed is None and is_checkpoint(child):
            claimed = DirectoryLayout(DIRECTORY_LAYOUT, None)
        if claimed is not None:
            direct.append(_unit_with_missing_reason(child, claimed))
            continue
        step = _step_beside(direct, name)
        if step is None and (counted := counted_step(name)) is not None and not holds_several_saves(child):
            step = counted
        if name in parts or (step is not None and has_weights(child)):
            direct.append(replace(_unit_with_missing_reason(child, DirectoryLayout(DIRECTORY_LAYOUT, None)), step=step))
            continue
        child_units = _units_in(child)
        is_all = len(child_units) == 1 and _is_all_below(child, child_units[0]) and child_units[0].step is None
        is_unfinished = is_temporary(name) and (child.candidates or _is_named_by_step(child) or is_all)
        has_step_beside = not child_units and _is_of_step_beside(child, direct)
        if is_unfinished or has_step_beside or _is_one_checkpoint(child, child_units):
            direct.append(_unit_with_missing_reason(child, DirectoryLayout(DIRECTORY_LAYOUT, None)))
        elif is_all:
            direct += child_units
        else:
            inner += child_units
    joined = _join_steps(directory.path, direct + _unknown_units(directory, direct))
    return [*compare_series(joined, marked_layouts=_MARKERS), *inner]


def _unknown_units(directory: Directory, units: Sequence[Unit]) -> list[Unit]:
    """Return the files that may hold state although nothing knows their names, if no name says which save is theirs.

    EasyLM writes `streaming_train_state` beside `metadata.pkl`, which alone is known.
    """
    siblings = [unit for unit in units if unit.path.rpartition("/")[0] == directory.path]
    if any(unit.step is not None for unit in siblings) or not any(unit.layout is FILE_LAYOUT for unit in siblings):
        return []
    unit_paths = {path for unit in siblings for path in unit.files}
    names = (name for name, entry in sorted(directory.names.items()) if entry.kind == "file" and may_hold_state(name))
    unknown = [lone_file_unit(path) for name in names if (path := join_path(directory.path, name)) not in unit_paths]
    if len(unknown) > _MOST_UNKNOWN:
        why = f"{len(unknown)} files whose format is not known lie beside {siblings[0].path}; name its files by --unit"
        return [replace(unknown[0], missing_reason=why)]
    return unknown


def _part_directories(directory: Directory) -> list[str]:
    """Return the directories of a model's parts, by the file that lists them.

    These are `scheduler/` and `unet/` of diffusers' pipeline, `1_Pooling/` of a sentence-transformer.
    """
    if not directory.has_file(*LISTS_OF_PARTS):
        return []
    children = ((name, directory.child(name)) for name in directory.directories if directory_step(name) is None)
    return [
        name for name, child in children if child and match_layout(child) is None and any(map(is_config, child.names))
    ]


def _is_named_by_step(directory: Directory) -> bool:
    inside = files_below(directory.tree, directory.path)
    return step_in(directory.name) is not None and any(entry.kind == "file" for _, entry in inside)


def _step_beside(units: Sequence[Unit], name: str) -> int | None:
    """Return the step of a directory that has the name of a file beside it and more, as `lora-000004-state`."""
    stems = ((unit.step, path.rpartition("/")[2].partition(".")[0]) for unit in units for path in unit.files)
    return next((step for step, stem in stems if step is not None and re.match(rf"{re.escape(stem)}[-_.]", name)), None)


def _is_of_step_beside(directory: Directory, units: Sequence[Unit]) -> bool:
    """Whether a directory has the step of a file beside it, as HugeCTR's `wdl0_sparse_5000.model/key`."""
    step = step_in(directory.name)
    has_sibling = step is not None and any(unit.step == step for unit in units)
    return has_sibling and any(map(may_hold_state, directory.names_below()))


_MOST_UNKNOWN = 1000  # files; more are rather a data set


def _is_one_checkpoint(directory: Directory, inner_units: Sequence[Unit]) -> bool:
    """Whether a directory without a step in its name, and without steps or programs below, is one checkpoint.

    A directory with logs is one of results, which change for as long as its program runs.
    """
    if not inner_units or any(unit.step is not None or not _is_unknown(unit) for unit in inner_units):
        return False
    inside = [path for path, _ in files_below(directory.tree, directory.path)]
    if not inner_units[0].is_joint and len(inner_units) == 1 and _is_all_below(directory, inner_units[0]):
        return False  # a unit of its own has all of it
    is_unfinished = any(is_temporary(name) for path in inside for name in path[len(directory.path) :].split("/")[:-1])
    return not is_unfinished and not any(is_log(path.rpartition("/")[2]) for path in inside)


def _is_unknown(unit: Unit) -> bool:
    """Whether a unit without a step is of no program, or a file whose format others write as well."""
    is_file = unit.files == (unit.path,)
    is_uncertain = unit.layout in (FILE_LAYOUT, SHARDED_LAYOUT, DIRECTORY_LAYOUT)
    return is_uncertain or (is_file and unit.layout in (LIGHTNING, KERAS))


def _is_all_below(directory: Directory, unit: Unit) -> bool:
    below = [path for path, _ in files_below(directory.tree, directory.path)]
    return sorted((*unit.files, *unit.special_files)) == below


def _unit_with_missing_reason(directory: Directory, claimed: DirectoryLayout) -> Unit:
    inside = list(files_below(directory.tree, directory.path))
    files = tuple(path for path, entry in inside if entry.kind == "file")
    strange = tuple(path for path, entry in inside if entry.kind != "file")
    layout, missing, is_unfinished = claimed
    missing = missing or _nested_reason(directory) or absent_of_count(files)
    if layout is DIRECTORY_LAYOUT:
        missing = missing or absent_in_ranks(files) or absent_index(directory) or leftover_temporary_file(files)
    marked = None if is_unfinished else temporary_name_reason(directory.name)
    step = directory_step(final_name(directory.name)) if layout is DIRECTORY_LAYOUT else step_in(directory.name)
    if layout is DIRECTORY_LAYOUT and is_of_run(directory):
        step = None
    if marked:
        # Else it may be a person's own directory, or of a program that calls its final ones so.
        missing, is_unfinished = marked, step is not None and bool(directory.candidates)
    elif not missing and (missing := unfinished_reason(directory.tree[directory.parent], directory.name)):
        is_unfinished = True
    markers = _markers(directory, layout, files)
    return Unit(layout, directory.path, step, files, strange, missing, markers, is_unfinished)


def _join_steps(directory: str, candidates: Sequence[Unit]) -> list[Unit]:
    """Join the units of one step that lie in one directory, and those without a step.

    A program that names others by their steps rewrites these together. Without others, a unit whose program is known is
    not joined.
    """
    direct = {unit.path: unit for unit in candidates if unit.path.rpartition("/")[0] == directory}
    names = {path.rpartition("/")[2]: unit.step for path, unit in direct.items() if unit.layout is FILE_LAYOUT}
    sibling_steps = steps_beside(names) | names_beside(names) | updates_beside(map(basename, direct))
    candidates = [
        replace(unit, step=sibling_steps.get(basename(unit.path), unit.step)) if unit.path in direct else unit
        for unit in candidates
    ]
    steps = {unit.step for unit in candidates} - {None}
    forms = Counter(without_numbers(unit.path) for unit in candidates if unit.step is None)
    groups: dict[object, list[Unit]] = {}
    for unit in candidates:
        step = step_in(basename(unit.path))
        if unit.step is None and unit.layout is DIRECTORY_LAYOUT and step in steps:
            unit = replace(unit, step=step)  # `optim_10/` beside `model_10.pt`
        has_form_beside = not unit.is_directory and forms[without_numbers(unit.path)] > 1
        is_part = unit.layout in (FILE_LAYOUT, DIRECTORY_LAYOUT) or has_form_beside
        alone = unit.step is None and (unit.missing_reason or not (steps or is_part))
        alone = alone or is_temporary(basename(unit.path))
        groups.setdefault(unit.path if alone else unit.step, []).append(unit)
    joint = (
        members[0] if len(members) == 1 else _merge_units(directory, members)
        for group in groups.values()
        for members in _split_by_epoch(group)
    )
    return [replace(unit, missing_reason=unit.missing_reason or _absent_file(unit)) for unit in joint]


_EPOCH_OR_SEED = re.compile(
    r"(?<![A-Za-z])(epoch|fold|seed|recovery|e(?=\d+_b\d))s?[-_=.]?(\d{1,18})(?!\d)", re.IGNORECASE
)


def _split_by_epoch(group: Sequence[Unit]) -> Iterable[list[Unit]]:
    """Part what has one step by the epochs, folds and seeds in its names, as `epoch_1_iter_100`, `epoch_2_iter_100`.

    timm names its saves `recovery-EPOCH-BATCH`. What names none is of the last one.
    """
    numbered = [
        {word.lower(): int(number) for word, number in _EPOCH_OR_SEED.findall(basename(unit.path))} for unit in group
    ]
    last = {word: max(numbers.get(word, 0) for numbers in numbered) for word in {*chain.from_iterable(numbered)}}
    parts: dict[object, list[Unit]] = {}
    for unit, numbers in zip(group, numbered, strict=True):
        parts.setdefault(tuple(sorted((last | numbers).items())), []).append(unit)
    return parts.values()


def _absent_file(unit: Unit) -> str | None:
    return (absent_of_count(unit.files) or absent_in_ranks(unit.files)) if unit.layout is FILE_LAYOUT else None


def _merge_units(directory: str, group: Sequence[Unit]) -> Unit:
    uncertain = (FILE_LAYOUT, DIRECTORY_LAYOUT)
    first = min(group, key=lambda unit: (unit.layout in uncertain, not unit.is_directory, unit.path))
    return replace(
        first,
        path=first.path if first.step is not None else join_path(directory, WITHOUT_STEP),
        files=tuple(sorted(path for unit in group for path in unit.files)),
        special_files=tuple(sorted(path for unit in group for path in unit.special_files)),
        missing_reason=next((unit.missing_reason for unit in group if unit.missing_reason), None),
        markers=tuple(path for unit in group for path in unit.markers),
        is_unfinished=any(unit.is_unfinished for unit in group),
    )


_MARKERS: dict[UnitLayout, str] = {
    TRAINER: r"trainer_state\.json",
    ACCELERATE: r"random_states_\d+\.pkl",
    LIGHTNING: r"meta\.pt",
    DCP: r"(__\d+)?\.metadata",
    TORCHTITAN: r"\.metadata|model\.safetensors\.index\.json",
    TORCH_CHECKPOINTING: r"metadata\.pkl",
    MEGATRON: r"metadata\.json",
    NEMO: r"weights/\.metadata",
    ORBAX: r"_CHECKPOINT_METADATA",
}
_TRACKERS = {DEEPSPEED: "latest", MEGATRON: "latest_checkpointed_iteration.txt"}


def _markers(directory: Directory, layout: UnitLayout, files: tuple[str, ...]) -> tuple[str, ...]:
    pattern = re.compile(_MARKERS.get(layout, r"(?!)"))
    markers = [path for path in files if pattern.fullmatch(path[len(directory.path) + 1 :])]
    tracker = join_path(directory.parent, _TRACKERS.get(layout, ""))
    return (*markers, *([tracker] if tracker in directory.listing.entries and layout in _TRACKERS else [])) or files


def _nested_reason(directory: Directory) -> str | None:
    """Return why a directory within a unit is not complete, as DeepSpeed's and DCP's in those of HF Trainer and
    Accelerate.
    """
    for name in sorted(directory.directories):
        if (inner := directory.child(name)) is not None:
            claimed = match_layout(inner)
            if missing := (claimed and claimed.missing_reason) or _nested_reason(inner):
                return f"{name}: {missing}"
    return None


def units_of(listing: Listing, name: str) -> list[Unit]:
    """Return the units at one entry of the listing: a file has the others of its step with it, if it has a step."""
    matching = [unit for unit in units(listing) if unit.path == name or name in unit.files]
    is_alone = listing.entries[name].kind == "file" and all(unit.is_joint for unit in matching)
    return [lone_file_unit(name)] if is_alone else matching
