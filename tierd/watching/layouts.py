"""Find the units in a listing: what belongs together as one checkpoint, and whether it is complete.

Pure: units are a function of a listing. A listing cannot show whether a file is whole (see `inspect`). It cannot show
whether ranks are missing at the end if no file records their number. Nor can it show whether a writer is still at work:
a watcher compares successive listings for that.

Invariant: no unit is a part of a checkpoint. A directory that no program's file identifies is one unit with all that
lies below it, and entries of one step beside each other are one unit. Two steps are never one unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tierd.watching.completeness import (
    Directory,
    absent_goal,
    absent_in_ranks,
    absent_index,
    absent_of_count,
    final_name,
    is_temporary,
    temporary_name,
    unfinished,
)
from tierd.watching.directory_layouts import Claim, claim
from tierd.watching.listing import Listing, below, joined
from tierd.watching.loose_files import LISTS_OF_PARTS, file_units, is_config, lone_file
from tierd.watching.own_layout import own_units
from tierd.watching.programs import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    DIRECTORY,
    FILE,
    KERAS,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    SHARDED,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    UnitLayout,
)
from tierd.watching.saves_below import has_weights, holds_saves, is_checkpoint, is_of_run
from tierd.watching.series import compare_nested, compare_series
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
from tierd.watching.unit import WITHOUT_STEP, Unit
from tierd.watching.unknown_names import may_hold_state


def units(listing: Listing) -> list[Unit]:
    """Return the units in a listing, sorted by path."""
    if listing.own is not None:
        return own_units(listing, listing.own)
    tree = listing.tree()
    found = _units_in(Directory("", tree[""], listing, tree))
    return sorted(compare_nested(found), key=lambda unit: unit.path)


def names_of_units(listing: Listing) -> dict[str, set[str]]:
    """Return the names of the units' files, links and markers, by directory."""
    names: dict[str, set[str]] = {}
    for unit in units(listing):
        for path in (*unit.files, *unit.strange, *unit.markers):
            directory, _, name = path.rpartition("/")
            names.setdefault(directory, set()).add(name)
    return names


def _units_in(here: Directory) -> list[Unit]:
    """Return the units in a directory that is no unit itself."""
    own, inner, parts = file_units(here), [], _parts(here)
    if parts:
        taken = {path for unit in own for path in unit.files}
        lists = (joined(here.path, name) for name in LISTS_OF_PARTS if here.has(name))
        own += [lone_file(path) for path in lists if path not in taken]
    for name in sorted(here.directories):
        child = here.at(joined(here.path, name))
        claimed = claim(child)
        if claimed is None and is_checkpoint(child):
            claimed = Claim(DIRECTORY, None)
        if claimed is not None:
            own.append(_unit_in(child, claimed))
            continue
        step = _step_beside(own, name)
        if step is None and (counted := counted_step(name)) is not None and not holds_saves(child):
            step = counted
        if name in parts or (step is not None and has_weights(child)):
            own.append(replace(_unit_in(child, Claim(DIRECTORY, None)), step=step))
            continue
        found = _units_in(child)
        is_all = len(found) == 1 and _is_all_below(child, found[0]) and found[0].step is None
        begun = is_temporary(name) and (child.candidates or _is_named_by_step(child) or is_all)
        if begun or _is_one(child, found) or (not found and _is_of_step_beside(child, own)):
            own.append(_unit_in(child, Claim(DIRECTORY, None)))
        elif is_all:
            own += found
        else:
            inner += found
    return [*compare_series(_joined(here.path, own + _unknown(here, own)), last_written=_MARKERS), *inner]


def _unknown(here: Directory, units: Sequence[Unit]) -> list[Unit]:
    """Return the files that may hold state although nothing knows their names, if no name says which save is theirs.

    EasyLM writes `streaming_train_state` beside `metadata.pkl`, which alone is known.
    """
    own = [unit for unit in units if unit.path.rpartition("/")[0] == here.path]
    if any(unit.step is not None for unit in own) or not any(unit.layout is FILE for unit in own):
        return []
    taken = {path for unit in own for path in unit.files}
    names = (name for name, entry in sorted(here.names.items()) if entry.kind == "file" and may_hold_state(name))
    unknown = [lone_file(path) for name in names if (path := joined(here.path, name)) not in taken]
    if len(unknown) > _MOST_UNKNOWN:
        why = f"{len(unknown)} files whose format is not known lie beside {own[0].path}; name its files by --unit"
        return [replace(unknown[0], missing=why)]
    return unknown


def _parts(here: Directory) -> list[str]:
    """Return the directories of a model's parts, by the file that lists them.

    These are `scheduler/` and `unet/` of diffusers' pipeline, `1_Pooling/` of a sentence-transformer.
    """
    if not here.has(*LISTS_OF_PARTS):
        return []
    children = ((name, here.child(name)) for name in here.directories if directory_step(name) is None)
    return [name for name, child in children if child and claim(child) is None and any(map(is_config, child.names))]


def _is_named_by_step(here: Directory) -> bool:
    return step_in(here.name) is not None and any(entry.kind == "file" for _, entry in below(here.tree, here.path))


def _step_beside(units: Sequence[Unit], name: str) -> int | None:
    """Return the step of a directory that has the name of a file beside it and more, as `lora-000004-state`."""
    stems = ((unit.step, path.rpartition("/")[2].partition(".")[0]) for unit in units for path in unit.files)
    return next((step for step, stem in stems if step is not None and re.match(rf"{re.escape(stem)}[-_.]", name)), None)


def _is_of_step_beside(here: Directory, units: Sequence[Unit]) -> bool:
    """Whether a directory has the step of a file beside it, as HugeCTR's `wdl0_sparse_5000.model/key`."""
    step = step_in(here.name)
    is_beside = step is not None and any(unit.step == step for unit in units)
    return is_beside and any(map(may_hold_state, here.names_below()))


_MOST_UNKNOWN = 1000  # files; more are rather a data set


def _is_one(here: Directory, found: Sequence[Unit]) -> bool:
    """Whether a directory without a step in its name, and without steps or programs below, is one checkpoint.

    A directory with logs is one of results, which change for as long as its program runs.
    """
    if not found or any(unit.step is not None or not _is_unknown(unit) for unit in found):
        return False
    inside = [path for path, _ in below(here.tree, here.path)]
    is_named = found[0].path.rpartition("/")[2] != WITHOUT_STEP
    if is_named and len(found) == 1 and _is_all_below(here, found[0]):
        return False  # a unit of its own has all of it
    begun = any(is_temporary(name) for path in inside for name in path[len(here.path) :].split("/")[:-1])
    return not begun and not any(is_log(path.rpartition("/")[2]) for path in inside)


def _is_unknown(unit: Unit) -> bool:
    """Whether a unit without a step is of no program, or a file whose format others write as well."""
    is_file = len(unit.files) == 1 and unit.files[0] == unit.path
    return unit.layout in (FILE, SHARDED, DIRECTORY) or (is_file and unit.layout in (LIGHTNING, KERAS))


def _is_all_below(here: Directory, unit: Unit) -> bool:
    return sorted((*unit.files, *unit.strange)) == [path for path, _ in below(here.tree, here.path)]


def _unit_in(here: Directory, claimed: Claim) -> Unit:
    inside = list(below(here.tree, here.path))
    files = tuple(path for path, entry in inside if entry.kind == "file")
    strange = tuple(path for path, entry in inside if entry.kind != "file")
    layout, missing, begun = claimed
    missing = (
        missing
        or _nested(here)
        or absent_of_count(files)
        or (absent_in_ranks(files) if layout is DIRECTORY else None)
        or ((absent_index(here) or absent_goal(files)) if layout is DIRECTORY else None)
    )
    marked = None if begun else temporary_name(here.name)
    step = directory_step(final_name(here.name)) if layout is DIRECTORY else step_in(here.name)
    if layout is DIRECTORY and is_of_run(here):
        step = None
    if marked:
        # Else it may be a person's own directory, or of a program that calls its final ones so.
        missing, begun = marked, step is not None and bool(here.candidates)
    elif not missing and (missing := unfinished(here.tree[here.parent], here.name)):
        begun = True
    return Unit(layout, here.path, step, files, strange, missing, _markers(here, layout, files), begun)


def _joined(directory: str, found: Sequence[Unit]) -> list[Unit]:
    """Join the units of one step that lie in one directory, and those without a step.

    A program that names others by their steps rewrites these together. Without others, what names its program also
    tells its step, and is not joined.
    """
    own = {unit.path: unit for unit in found if unit.path.rpartition("/")[0] == directory}
    names = {path.rpartition("/")[2]: unit.step for path, unit in own.items() if unit.layout is FILE}
    beside = steps_beside(names) | names_beside(names) | updates_beside(path.rpartition("/")[2] for path in own)
    found = [
        replace(unit, step=beside.get(unit.path.rpartition("/")[2], unit.step)) if unit.path in own else unit
        for unit in found
    ]
    steps = {unit.step for unit in found} - {None}
    forms = Counter(without_numbers(unit.path) for unit in found if unit.step is None)
    groups: dict[object, list[Unit]] = {}
    for unit in found:
        if unit.step is None and unit.layout is DIRECTORY and (step := step_in(unit.path.rpartition("/")[2])) in steps:
            unit = replace(unit, step=step)  # `optim_10/` beside `model_10.pt`
        is_part = unit.layout in (FILE, DIRECTORY) or (not unit.is_directory and forms[without_numbers(unit.path)] > 1)
        alone = unit.step is None and (unit.missing or not (steps or is_part))
        alone = alone or is_temporary(unit.path.rpartition("/")[2])
        groups.setdefault(unit.path if alone else unit.step, []).append(unit)
    groups = {(key, numbers): some for key, group in groups.items() for numbers, some in _apart(group).items()}
    joint = (group[0] if len(group) == 1 else _as_one(directory, group) for group in groups.values())
    return [replace(unit, missing=unit.missing or _absent_file(unit)) for unit in joint]


_APART = re.compile(r"(?<![A-Za-z])(epoch|fold|seed|recovery|e(?=\d+_b\d))s?[-_=.]?(\d{1,18})(?!\d)", re.IGNORECASE)


def _apart(group: Sequence[Unit]) -> dict[object, list[Unit]]:
    """Part what has one step by the epochs, folds and seeds in its names, as `epoch_1_iter_100`, `epoch_2_iter_100`.

    timm names its saves `recovery-EPOCH-BATCH`.

    What names none is of the last one.
    """
    named = [
        {word.lower(): int(number) for word, number in _APART.findall(unit.path.rpartition("/")[2])} for unit in group
    ]
    last = {word: max(numbers.get(word, 0) for numbers in named) for word in {*chain.from_iterable(named)}}
    parts: dict[object, list[Unit]] = {}
    for unit, numbers in zip(group, named, strict=True):
        parts.setdefault(tuple(sorted((last | numbers).items())), []).append(unit)
    return parts


def _absent_file(unit: Unit) -> str | None:
    return (absent_of_count(unit.files) or absent_in_ranks(unit.files)) if unit.layout is FILE else None


def _as_one(directory: str, group: Sequence[Unit]) -> Unit:
    first = min(group, key=lambda unit: (unit.layout in (FILE, DIRECTORY), not unit.is_directory, unit.path))
    return replace(
        first,
        path=first.path if first.step is not None else joined(directory, WITHOUT_STEP),
        files=tuple(sorted(path for unit in group for path in unit.files)),
        strange=tuple(sorted(path for unit in group for path in unit.strange)),
        missing=next((unit.missing for unit in group if unit.missing), None),
        markers=tuple(path for unit in group for path in unit.markers),
        begun=any(unit.begun for unit in group),
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
_BESIDE = {DEEPSPEED: "latest", MEGATRON: "latest_checkpointed_iteration.txt"}


def _markers(here: Directory, layout: UnitLayout, files: tuple[str, ...]) -> tuple[str, ...]:
    pattern = re.compile(_MARKERS.get(layout, r"(?!)"))
    found = [path for path in files if pattern.fullmatch(path[len(here.path) + 1 :])]
    beside = joined(here.parent, _BESIDE.get(layout, ""))
    return (*found, *([beside] if beside in here.listing.entries and layout in _BESIDE else [])) or files


def _nested(here: Directory) -> str | None:
    """Return the reason why a directory within a unit is not complete; None if all are.

    DeepSpeed's and DCP's directories are nested in those of HF Trainer and Accelerate.
    """
    for name in sorted(here.directories):
        inner = here.child(name)
        if inner is not None:
            claimed = claim(inner)
            missing = (claimed and claimed.missing) or _nested(inner)
            if missing:
                return f"{name}: {missing}"
    return None


def units_of(listing: Listing, name: str) -> list[Unit]:
    """Return the units at one entry of the listing: a file has the others of its step with it, if it has a step."""
    found = [unit for unit in units(listing) if unit.path == name or name in unit.files]
    is_file = listing.entries[name].kind == "file"
    return (
        [lone_file(name)] if is_file and all(unit.path.rpartition("/")[2] == WITHOUT_STEP for unit in found) else found
    )
