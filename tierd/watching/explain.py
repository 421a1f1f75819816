"""Explain which units a listing has: why each is one, its step, and why a watch would not take it.

Pure: it reads only through its `Opener`, and only the small files that say a step. It reads no weights, so it does not
find damage (see `inspect`), and it sees one moment, so it does not find that a program is at work (see `settle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tierd.formats.byte_source import ByteSource
from tierd.watching.describe import describe
from tierd.watching.layouts import units
from tierd.watching.listing import ListedEntry, Listing
from tierd.watching.passed_over import PassedOver, passed_over
from tierd.watching.programs import DIRECTORY, FILE, OWN
from tierd.watching.series import UNCERTAIN
from tierd.watching.unit import WITHOUT_STEP, Unit

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
    passed_over: tuple[PassedOver, ...]
    unreadable: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


def explain(
    directory: str,
    listing: Listing,
    opened: Callable[[str, ListedEntry], AbstractContextManager[ByteSource]],
    unreadable: tuple[str, ...] = (),
    unnamed: tuple[str, ...] = (),
) -> WatchExplanation:
    """Explain a listing.

    Args:
        directory: the listed directory.
        listing: everything below it.
        opened: opens a listed file.
        unreadable, unnamed: what the listing skipped, as `Tree` has it.
    """
    entries, listed_units = listing.entries, units(listing)
    steps = {unit.path: describe(unit, lambda path: opened(path, entries[path])).step for unit in listed_units}
    explained = tuple(_explain_unit(unit, steps[unit.path], entries, listed_units, unnamed) for unit in listed_units)
    return WatchExplanation(directory, explained, *passed_over(listing, listed_units), unreadable, unnamed)


def _explain_unit(
    unit: Unit,
    step: int | None,
    entries: Mapping[str, ListedEntry],
    listed_units: Sequence[Unit],
    unnamed: tuple[str, ...],
) -> ExplainedUnit:
    source = "its path" if unit.layout is OWN else "its name"
    order = _ORDERED_BY_TIME if step is None else source if step == unit.step else "a file in it"
    if unit.step is None and any(sibling.step is not None for sibling in listed_units):
        step, order = None, _STEPLESS
    size = sum(entries[path].size for path in unit.files)
    return ExplainedUnit(
        unit.path, unit.layout.program, why(unit), step, order, len(unit.files), size, _refusal_reason(unit, unnamed)
    )


def why(unit: Unit) -> str:
    """Say why the files of a unit are one checkpoint."""
    proof = next((path for path in unit.markers if len(unit.markers) < len(unit.files) or path not in unit.files), "")
    if unit.layout is OWN:
        return f"a glob of --unit matches it{f'; {proof} is there' if proof else ''}"
    if unit.layout not in UNCERTAIN and proof:
        return f"{proof} is there, which {unit.layout.program} writes"
    outside = [path for path in (*unit.files, *unit.strange) if not path.startswith(f"{unit.path}/")]
    if unit.path.rpartition("/")[2] == WITHOUT_STEP:
        return "what lies in one directory and has no step in its name, together"
    if unit.layout is DIRECTORY and not outside:
        return "a directory with a step in its name" if unit.step is not None else "a directory with weights, whole"
    if unit.layout in (FILE, DIRECTORY):
        return "what has this step in its name, together" if len(outside) > 1 else "a file with the name of weights"
    return f"it has the layout of {unit.layout.program}: {unit.layout.unit.replace('`', '')}"


def _refusal_reason(unit: Unit, unnamed: tuple[str, ...]) -> str:
    if unit.missing:
        return f"it is not complete: {unit.missing}"
    if unit.strange:
        return f"{unit.strange[0]} is a link, or is neither a file nor a directory that can be read"
    if any(path.startswith(f"{unit.path}/") for path in unnamed):
        return "the name of a file in it is not UTF-8"
    return ""
