"""Judge at which steps launches began: from the start though there was a checkpoint, or apart from each other.

Invariant: pure. Samples and losses cannot show these mistakes, because a rank that does everything anew does it right.
"""

from __future__ import annotations

from collections import Counter

from tierd.check.cause import Cause
from tierd.check.history import CheckedRun


def never_restored(killed: CheckedRun, start: int) -> Cause | None:
    """Return a cause if every launch began at the first step, because nothing was checked then."""
    if any(killed.resumes(rank, start) for rank in range(len(killed.launches[0]))):
        return None
    saves = sorted({step for launch in killed.launches for record in launch for step in record.saves})
    if not saves:
        return Cause(
            "never restored", f"every launch began at step {start}: none had saved through tierd when it ended"
        )
    return Cause(
        "never restored",
        f"every launch began at step {start}, though saves of steps {', '.join(map(str, saves[:5]))} were made: "
        "nothing is restored, or each kill came before the first save was complete",
    )


def left_behind(killed: CheckedRun, start: int) -> Cause | None:
    """Return a cause if a rank began anew in a launch in which another one resumed, though it had a checkpoint.

    It had one if it restored one, or if an earlier launch saved twice: only the last save may have died with a launch.
    """
    saved: Counter[int] = Counter()  # the most saves of one launch
    for number, launch in enumerate(killed.launches, start=1):
        resumed = [
            rank for rank, rank_history in enumerate(launch) if number > 1 and (rank_history.first or start) > start
        ]
        for rank, record in enumerate(launch):
            restored = any(capture.at == "loaded" and capture.step >= start for capture in record.taken)
            if resumed and record.first == start and (restored or saved[rank] > 1):
                return Cause(
                    "ranks",
                    f"rank {rank} began launch {number} at step {start}, and rank {resumed[0]} at step "
                    f"{launch[resumed[0]].first}: rank {rank} "
                    + ("left out what it had restored" if restored else "did not restore what it had saved"),
                )
            saved[rank] = max(saved[rank], len(set(record.saves)))
    return None


def apart_from_the_start(*histories: CheckedRun) -> Cause | None:
    """Return a cause if ranks of a launch on an empty spool began at different steps."""
    for launch in (history.launches[0] for history in histories):
        first = [record.first for record in launch if record.first is not None]
        if len(set(first)) > 1:
            ahead = first.index(max(first))
            return Cause(
                "ranks",
                f"a launch on an empty spool began at step {first[ahead]} on rank {ahead}, and at step {min(first)} on "
                f"rank {first.index(min(first))}: rank {ahead} restored what the other had saved meanwhile; each needs "
                "its own state",
            )
    return None
