"""Find the units in a listing, for the programs in `programs`, and decide whether each is complete.

Pure: units are a function of a listing. A listing cannot show whether a file is whole (see `inspect`). It cannot show
whether ranks are missing at the end if no file records their number. Nor can it show whether a writer is still at work:
a watcher compares successive listings for that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.watching.completeness import (
    SHARD,
    WEIGHTS,
    Directory,
    absent_index,
    absent_name,
    absent_of_count,
    unfinished,
)
from tierd.watching.directory_layouts import claim
from tierd.watching.listing import Listing, below, gap, joined
from tierd.watching.programs import (
    ACCELERATE,
    COMPOSER,
    DCP,
    DEEPSPEED,
    FILE,
    KERAS,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    SHARDED,
    TENSORFLOW,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    UnitLayout,
)
from tierd.watching.step_in_name import step_in


@dataclass(frozen=True, slots=True)
class Unit:
    """One checkpoint of a program, as found in a listing.

    Attributes:
        layout: the layout of its program.
        path: the directory or file, from the listing's directory; for several files, the prefix of their names, or the
            first of them.
        step: the step in its name; None if the name has none.
        files: its regular files, as sorted paths from the listing's directory.
        strange: its links and special files, in the same form.
        missing: the reason why it is not complete; None if the listing shows it complete.
        markers: the files that its program writes last, also outside of its directory. If there is no such file, all of
            its files.
    """

    layout: UnitLayout
    path: str
    step: int | None
    files: tuple[str, ...]
    strange: tuple[str, ...]
    missing: str | None
    markers: tuple[str, ...]


def units(listing: Listing) -> list[Unit]:
    """Return the units in a listing, sorted by path."""
    tree = listing.tree()
    found: list[Unit] = []
    pending = [""]
    while pending:
        path = pending.pop()
        here = Directory(path, tree[path], listing, tree)
        claimed = claim(here) if path else None
        if claimed is not None:
            found.append(_unit_in(here, *claimed))
            continue
        found += _groups(here)
        pending += [joined(path, name) for name in here.directories]
    return sorted(found, key=lambda unit: unit.path)


def names_of_units(listing: Listing) -> dict[str, set[str]]:
    """Return the names of the units' files, links and markers, by directory."""
    names: dict[str, set[str]] = {}
    for unit in units(listing):
        for path in (*unit.files, *unit.strange, *unit.markers):
            directory, _, name = path.rpartition("/")
            names.setdefault(directory, set()).add(name)
    return names


def _unit_in(here: Directory, layout: UnitLayout, missing: str | None) -> Unit:
    inside = list(below(here.tree, here.path))
    files = tuple(path for path, entry in inside if entry.kind == "file")
    strange = tuple(path for path, entry in inside if entry.kind != "file")
    missing = missing or _nested(here) or absent_of_count(files) or unfinished(here.tree[here.parent], here.name)
    return Unit(layout, here.path, step_in(here.name), files, strange, missing, _markers(here, layout, files))


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
            missing = (claimed and claimed[1]) or _nested(inner)
            if missing:
                return f"{name}: {missing}"
    return None


_BUNDLE = re.compile(r"(.+)\.(?:index|data-\d{5,}-of-\d{5,})")
_INDEXED = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_RANKED = re.compile(r"(.+)-rank(\d+)(\.pt|\.tar)?")
_SINGLE = (
    ((".ckpt",), LIGHTNING),
    ((".keras", ".h5", ".hdf5"), KERAS),
    ((".pt", ".pth", ".bin", ".pkl", ".npz", ".safetensors"), FILE),
)


def _groups(here: Directory) -> list[Unit]:
    """Return the units among the files of a directory that is no unit itself."""
    if here.path and here.has("config.json", "adapter_config.json") and here.files(WEIGHTS):
        return [_model(here)]
    bundles = {match[1] for match in here.files(r"(.+)\.data-\d{5,}-of-\d{5,}")}
    groups: dict[tuple[UnitLayout, str], list[str]] = {}
    for name in here.candidates:
        if (match := _BUNDLE.fullmatch(name)) and match[1] in bundles:
            key = TENSORFLOW, match[1]
        elif match := _INDEXED.fullmatch(name) or SHARD.fullmatch(name):
            key = SHARDED, f"{match[1]}.{match[2]}"
        elif (match := _RANKED.fullmatch(name)) and match[3]:
            key = COMPOSER, f"{match[1]}-rank*{match[3]}"
        elif layout := next((layout for endings, layout in _SINGLE if name.endswith(endings)), None):
            key = layout, name
        else:
            continue
        groups.setdefault(key, []).append(name)
    return [_group(here, layout, name, names) for (layout, name), names in _joined_by_step(groups).items()]


def _joined_by_step(groups: Mapping[tuple[UnitLayout, str], list[str]]) -> dict[tuple[UnitLayout, str], list[str]]:
    """Join the files of one step that a program writes side by side, such as `model_10.pt` and `opt_10.pt`."""
    found: dict[tuple[UnitLayout, str], list[str]] = {}
    first: dict[int, str] = {}  # by step, the name of its first file
    for (layout, name), names in groups.items():
        step = step_in(name) if layout is FILE else None
        key = name if step is None else first.setdefault(step, name)
        found.setdefault((layout, key), []).extend(names)
    return found


def _model(here: Directory) -> Unit:
    """Return the unit of a model's directory.

    It has only the directory's own files, because a Trainer saves checkpoints in subdirectories.
    """
    files = tuple(joined(here.path, name) for name, entry in sorted(here.names.items()) if entry.kind == "file")
    strange = tuple(
        joined(here.path, name) for name, entry in sorted(here.names.items()) if entry.kind in ("link", "other")
    )
    missing = absent_of_count(files) or absent_index(here)
    return Unit(SHARDED, here.path, step_in(here.name), files, strange, missing, files)


def _group(here: Directory, layout: UnitLayout, name: str, names: list[str]) -> Unit:
    missing = absent_of_count(names) or unfinished(here.names, name)
    if layout is TENSORFLOW:
        temporary = here.name.endswith("_temp")
        missing = "it lies where TensorFlow gathers a save's shards" if temporary else missing
        missing = missing or absent_name(here, f"{name}.index")
    elif layout is SHARDED:
        missing = missing or absent_name(here, f"{name}.index.json")
    elif layout is COMPOSER:
        ranks = [match for one in names if (match := _RANKED.fullmatch(one))]
        absent = gap((int(match[2]) for match in ranks), 0)
        missing = missing if absent is None else f"the file of rank {absent} is not there, and {ranks[0][0]} is"
    files = tuple(joined(here.path, one) for one in names)
    markers = tuple(one for one in files if layout is TENSORFLOW and one.endswith(".index")) or files
    return Unit(layout, joined(here.path, name), step_in(name), files, (), missing, markers)


def lone_file(name: str) -> Unit:
    """Return a unit for a file that no layout matches."""
    return Unit(FILE, name, None, (name,), (), None, (name,))
