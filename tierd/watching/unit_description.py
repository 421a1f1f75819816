"""Describe units: a unit's step, metrics and number of ranks, from its files; and for people, why each unit of a
listing is one, why a watch would not take it, and which files belong to none.

Invariant: what is read is untrusted and only describes. Nothing is loaded or unpickled, and a file that cannot be read
so leaves a gap, never an error. It reads only through its `Opener`, and only small files, so it does not find damage
(`unit_inspection` does). It sees one moment, so it does not find that a program is at work (`settling_units` does).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from posixpath import basename
from typing import Any

from tierd.core.ids import MAX_STEP
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.formats.byte_source import ByteSource, DamagedFile, UncheckedFile
from tierd.formats.file_checks import read_json
from tierd.formats.torch_pickles import find_int
from tierd.formats.zip_archives import read_zip_record
from tierd.watching.loose_units import POINTER_NAMES, USUAL_ENDINGS
from tierd.watching.series_comparison import UNCERTAIN_LAYOUTS
from tierd.watching.unit import (
    DIRECTORY_LAYOUT,
    FILE_LAYOUT,
    LIGHTNING,
    USER_LAYOUT,
    EntryKind,
    ListedEntry,
    Listing,
    Unit,
)
from tierd.watching.unit_detection import units
from tierd.watching.unit_inspection import ChangedFile, Opener

_TRAINER_STATE = "trainer_state.json"
_MAX_PICKLE = 16 << 20  # bytes of a pickle in which a step is looked for
# The rank in names of files that each rank writes: HF, Accelerate, DCP, DeepSpeed, torch_checkpointing, Composer.
_RANK_FILE = re.compile(
    r"(?:rng_state_|random_states_|(?:bf16_)?zero_pp_rank_|.+-rank|__)(\d{1,5})(?:\.pth|\.pkl|_mp_rank_.*|\.pt|_\d+\.distcp)"
)
_METRIC = re.compile(r"([A-Za-z][\w/.]*?)=(-?\d+\.\d+(?:e[+-]?\d+)?)(?=[-_.]|$)")  # Lightning's `val_loss=0.25`


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """What a unit's files say about it."""

    step: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1  # how many ranks wrote it, as far as names of files show it


def describe_unit(unit: Unit, opener: Opener) -> UnitDescription:
    step, metrics = unit.step, {match[1]: float(match[2]) for match in _METRIC.finditer(basename(unit.path))}
    state = next((path for path in unit.files if basename(path) == _TRAINER_STATE), None)
    if state is not None and isinstance(trainer_state := _read_file(opener, state, read_json), dict):
        step = step if unit.layout is USER_LAYOUT else _valid_step(trainer_state.get("global_step"), step)
        metrics |= _logged_metrics(trainer_state.get("log_history"))
    elif unit.layout is LIGHTNING and len(unit.files) == 1 and "step=" not in basename(unit.path):
        data = _read_file(opener, unit.files[0], lambda source: read_zip_record(source, "/data.pkl", _MAX_PICKLE))
        step = _valid_step(find_int(data, "global_step") if data else None, step)
    matches = (_RANK_FILE.fullmatch(basename(path)) for path in unit.files)
    ranks = max((int(match[1]) + 1 for match in matches if match), default=1)
    kept_metrics = dict(list(metrics.items())[:MAX_METRICS])
    return UnitDescription(_valid_step(step, None), kept_metrics, ranks)


def _read_file(opener: Opener, path: str, read: Any) -> Any:
    try:
        with opener(path) as source:
            return read(source)
    except (ChangedFile, OSError, DamagedFile, UncheckedFile):
        return None


def _valid_step(number: object, otherwise: int | None) -> int | None:
    is_step = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_STEP
    return number if is_step else otherwise  # type: ignore[return-value]  # `is_step` says that it is an int


def _logged_metrics(history: object) -> dict[str, float]:
    """Return the last value of each number in a Trainer's log; its step and epoch are no metrics."""
    metrics: dict[str, float] = {}
    for entry in history if isinstance(history, list) else ():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            number = _finite_number(value)
            if number is not None and is_metric_name(name) and name not in ("step", "epoch"):
                metrics[name] = number
    return metrics


def _finite_number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return number if math.isfinite(number) else None


_GROUPS = 20
_NAMES = 3
_EVENTS = "events.out.tfevents."  # of TensorBoard; a host's name follows
_ENDING = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,15}")
_REASONS: dict[EntryKind, str] = {
    "link": "links are not followed, and one that leads to a checkpoint is recorded with it",
    "other": "it is neither a file nor a directory that can be read",
}
_HIDDEN = "a name that begins with a dot is not a checkpoint's"
_POINTS = "it is recorded with the checkpoint that it names"
_USUAL = "such names are of logs, settings, texts and pictures"
_UNMATCHED = "no glob of --unit, or of `unit` in a [[watch]], matches it"
_UNKNOWN = "no layout that tierd knows has such names"


@dataclass(frozen=True, slots=True)
class UnmatchedFiles:
    """Files of one directory that belong to no checkpoint.

    Attributes:
        directory: the directory, from the watched one; empty for the watched one itself.
        ending: the ending of their names, with its dot; empty if they have none.
        count: how many there are.
        names: the first names.
        why: why no checkpoint has them.
    """

    directory: str
    ending: str
    count: int
    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        suffix = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        where = f" in {self.directory}" if self.directory else ""
        return f"{', '.join(self.names)}{suffix}{where}: {self.why}"


def group_unmatched_files(listing: Listing, units: Iterable[Unit]) -> tuple[int, tuple[UnmatchedFiles, ...]]:
    """Return how many files, links and special files belong to no unit, and groups of them.

    Names of no known kind come first, then the largest groups.
    """
    unit_paths = {path for unit in units for path in (*unit.files, *unit.special_files, *unit.markers)}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, entry in listing.entries.items():
        if entry.kind != "directory" and path not in unit_paths:
            directory, _, name = path.rpartition("/")
            ending = _ending(name)
            why = _UNMATCHED if listing.user_layout and entry.kind == "file" else _reason(name, ending, entry.kind)
            groups.setdefault((directory, ending, why), []).append(name)
    groups_shown = [
        UnmatchedFiles(directory, ending, len(names), tuple(sorted(names)[:_NAMES]), why)
        for (directory, ending, why), names in groups.items()
    ]
    groups_shown.sort(
        key=lambda group: (group.why not in (_UNKNOWN, _UNMATCHED), -group.count, group.directory, group.ending)
    )
    return sum(group.count for group in groups_shown), tuple(groups_shown[:_GROUPS])


def _ending(name: str) -> str:
    if name.startswith(_EVENTS):
        return ".tfevents"
    _, dot, ending = name.rpartition(".")
    return f".{ending}" if dot and _ENDING.fullmatch(ending) else ""


def _reason(name: str, ending: str, kind: EntryKind) -> str:
    if kind != "file":
        return _REASONS[kind]
    if name.startswith("."):
        return _HIDDEN
    if name in POINTER_NAMES:
        return _POINTS
    return _USUAL if ending.lower() in USUAL_ENDINGS else _UNKNOWN


_ORDERED_BY_TIME = "the time of its last write, because nothing in it says a step"
_STEPLESS = "the time of its last write, in a run of its own: its name has no step, and others there have one"


@dataclass(frozen=True, slots=True)
class ExplainedUnit:
    """A checkpoint as a watch sees it.

    Attributes:
        path: its path in the directory.
        program: the program whose layout it has.
        why: why these files are one checkpoint, and by which file the program is known.
        step: its step; null if nothing says one.
        order: what says its step, or orders it without one.
        files: how many files it has.
        bytes: their size together.
        not_taken: why a watch would not take it as it is; empty: it would, once it rests, if it is not damaged.
    """

    path: str
    program: str
    why: str
    step: int | None
    order: str
    files: int
    bytes: int
    not_taken: str


@dataclass(frozen=True, slots=True)
class WatchExplanation:
    """The answer of `tierd watch --explain`.

    Attributes:
        directory: the directory.
        units: its checkpoints, by path.
        files: how many files belong to no checkpoint.
        passed_over: these files, in at most 20 groups.
        unreadable: directories that may not be listed, and are skipped.
        unnamed: files and directories whose names are not UTF-8, which cannot be taken.
    """

    directory: str
    units: tuple[ExplainedUnit, ...]
    files: int
    passed_over: tuple[UnmatchedFiles, ...]
    unreadable: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


def explain_listing(
    directory: str,
    listing: Listing,
    opened: Callable[[str, ListedEntry], AbstractContextManager[ByteSource]],
    unreadable: tuple[str, ...] = (),
    unnamed: tuple[str, ...] = (),
) -> WatchExplanation:
    """Explain a listing; `unreadable` and `unnamed` are what it skipped, as `DirectoryTree` has them."""
    entries, listed_units = listing.entries, units(listing)
    steps = {unit.path: describe_unit(unit, lambda path: opened(path, entries[path])).step for unit in listed_units}
    explained = tuple(_explain_unit(unit, steps[unit.path], entries, listed_units, unnamed) for unit in listed_units)
    return WatchExplanation(directory, explained, *group_unmatched_files(listing, listed_units), unreadable, unnamed)


def _explain_unit(
    unit: Unit,
    step: int | None,
    entries: Mapping[str, ListedEntry],
    listed_units: Sequence[Unit],
    unnamed: tuple[str, ...],
) -> ExplainedUnit:
    source = "its path" if unit.layout is USER_LAYOUT else "its name"
    order = _ORDERED_BY_TIME if step is None else source if step == unit.step else "a file in it"
    if unit.step is None and any(sibling.step is not None for sibling in listed_units):
        step, order = None, _STEPLESS
    size = sum(entries[path].size for path in unit.files)
    why, not_taken = unit_reason(unit), _refusal_reason(unit, unnamed)
    return ExplainedUnit(unit.path, unit.layout.program, why, step, order, len(unit.files), size, not_taken)


def unit_reason(unit: Unit) -> str:
    """Say why the files of a unit are one checkpoint."""
    proof = next((path for path in unit.markers if len(unit.markers) < len(unit.files) or path not in unit.files), "")
    if unit.layout is USER_LAYOUT:
        return f"a glob of --unit matches it{f'; {proof} is there' if proof else ''}"
    if unit.layout not in UNCERTAIN_LAYOUTS and proof:
        return f"{proof} is there, which {unit.layout.program} writes"
    outside = [path for path in (*unit.files, *unit.special_files) if not path.startswith(f"{unit.path}/")]
    if unit.is_joint:
        return "what lies in one directory and has no step in its name, together"
    if unit.layout is DIRECTORY_LAYOUT and not outside:
        return "a directory with a step in its name" if unit.step is not None else "a directory with weights, whole"
    if unit.layout in (FILE_LAYOUT, DIRECTORY_LAYOUT):
        return "what has this step in its name, together" if len(outside) > 1 else "a file with the name of weights"
    return f"it has the layout of {unit.layout.program}: {unit.layout.unit.replace('`', '')}"


def _refusal_reason(unit: Unit, unnamed: tuple[str, ...]) -> str:
    if unit.missing_reason:
        return f"it is not complete: {unit.missing_reason}"
    if unit.special_files:
        return f"{unit.special_files[0]} is a link, or is neither a file nor a directory that can be read"
    if any(path.startswith(f"{unit.path}/") for path in unnamed):
        return "the name of a file in it is not UTF-8"
    return ""
