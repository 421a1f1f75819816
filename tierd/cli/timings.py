"""The command line's durations that no option sets. A command asks `given`, so a test shortens a wait in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CliTimings:
    """How long commands wait.

    Attributes:
        poll_s: between two questions for the daemon's backlog.
        listing_s: between two listings of tiers to which other nodes send.
        listens_s: until a daemon that holds the spool has to listen.
        shown_s: until an operation that lasts shows its progress.
        logged_s: between two lines of progress where there is no terminal.
        examined_s: that a group of `doctor`'s checks may take.
        damaged_s: before a unit counts as damaged, because its writer may be between two writes.
    """

    poll_s: float = 0.5
    listing_s: float = 1.0
    listens_s: float = 10.0
    shown_s: float = 2.0
    logged_s: float = 60.0
    examined_s: float = 30.0
    damaged_s: float = 1.0


USUAL = CliTimings()


def given() -> CliTimings:
    """Return the timings of a command that runs now."""
    return USUAL
