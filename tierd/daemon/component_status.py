"""What the scrub and the watches tell of themselves, apart from them, because who shows it needs none of their work."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.watching.unit_description import UnmatchedFiles

_MAX_UNITS = 20  # units that a status names


@dataclass(frozen=True, slots=True)
class UntakenUnit:
    """A checkpoint in a watched directory that is not taken as it is.

    Attributes:
        path: its path in the directory.
        why: the reason, for people.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """A watched directory, as it was last listed.

    Attributes:
        directory: the directory.
        waits: for what the watch waits, as for the directory itself; empty: for nothing.
        checkpoints: how many checkpoints lie there, complete or not.
        not_taken: how many of them are not taken as they are.
        reasons: the first 20 of these, and why.
        files: how many files belong to no checkpoint; 0 for a run of checkpoints without a step.
        passed_over: these files, in at most 20 groups.
    """

    directory: str
    run: str
    waits: str = ""
    checkpoints: int = 0
    not_taken: int = 0
    reasons: tuple[UntakenUnit, ...] = ()
    files: int = 0
    passed_over: tuple[UnmatchedFiles, ...] = ()


def first_reasons(reasons_by_path: Mapping[str, str]) -> tuple[UntakenUnit, ...]:
    """Return the first units that are not taken, by path, and why."""
    return tuple(UntakenUnit(path, reasons_by_path[path]) for path in sorted(reasons_by_path)[:_MAX_UNITS])


def nothing_taken(status: WatchStatus) -> str:
    """Say why nothing was taken from a directory, and what to do about it."""
    explain = f"`tierd watch --explain {shlex.quote(status.directory)}` says why"
    if status.reasons:
        first = status.reasons[0]
        return f"{status.directory}: nothing was taken; {first.path}: {first.why}; {explain}"
    if not status.files:
        return f"{status.directory}: nothing was taken: it has no file; does the program write to another directory?"
    names = "; ".join(str(group) for group in status.passed_over[:2])
    of = "its only file belongs to none" if status.files == 1 else f"its {status.files} files belong to none"
    return f"{status.directory}: nothing was taken: it has no checkpoint that tierd knows, and {of}: {names}; {explain}"


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The progress of the scrub.

    Attributes:
        oldest: when the copy was verified whose verification is longest ago, RFC 3339; None: there is no copy, or
            scrubbing is off.
        due: copies that were not read within the period.
        doing: the copy that is being read; None: no copy.
    """

    oldest: str | None
    due: int
    doing: str | None
