"""What a watch reports: events, passed on from its thread to the event loop, and what its last listing shows."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import SPOOL
from tierd.daemon.component_status import WatchStatus, nothing_taken
from tierd.daemon.intake.active_watch import ActiveWatch
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.daemon.reconciler import Reconciler
from tierd.spool.commit import CommittedPart

log = logging.getLogger("tierd.daemon")


class ReconcilerReports:
    """The `WatchReports` of a run's watch, for a reconciler: made on its event loop, called in any thread."""

    def __init__(self, reconciler: Reconciler, run: str) -> None:
        self._reconciler, self._run = reconciler, run
        self._loop = asyncio.get_running_loop()

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        def report() -> None:
            if not isinstance(outcome, Exception):
                self._reconciler.scrubber.note_taken(part)
            self._reconciler.note_commit(part, outcome)

        self._loop.call_soon_threadsafe(report)

    def report_refused(self, path: str, why: str) -> None:
        def report() -> None:
            self._reconciler.journal.record("not taken", SPOOL, path, why, run=self._run)

        self._loop.call_soon_threadsafe(report)

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        why = (
            f"{path} has a later step and an earlier time than other checkpoints: its program went back, or the times "
            "are wrong. Each such one is pinned, so that nothing is lost, until every tier has a later one of its "
            "series"
        )

        def report() -> None:
            self._reconciler.journal.record("in doubt", SPOOL, checkpoint, why)

        self._loop.call_soon_threadsafe(report)


def show_watch(reconciler: Reconciler, active_watch: ActiveWatch, watch: UnitWatch, awaited: str) -> None:
    """Have the status show what a watch that just listed its directory does not take, passed over or could not read.

    `awaited` says for which other watch it waits; empty: for none.
    """
    directory, subject = active_watch.watch.directory, ("watch", active_watch.watch.run)
    status = reconciler.watches[active_watch.watch.run] = replace(watch.status, waits=awaited)
    active_watch.awaited_s = None if status.checkpoints else active_watch.awaited_s
    active_watch.refused = dict(watch.refused)
    active_watch.is_untaken = not (watch.has_taken_any or awaited or active_watch.stepless or watch.leaves_stepless)
    texts = [f"{directory}: {awaited}"] if awaited else []
    texts += [f"{directory}/{path} is not taken: {why}" for path, why in watch.refused.items()]
    texts += [f"{directory}/{path} cannot be listed, and is skipped" for path in watch.unreadable]
    if not texts and _is_untaken_for_long(reconciler, active_watch, watch, status):
        texts = [nothing_taken(status)]
        if not active_watch.untaken_reported:
            active_watch.untaken_reported = True
            reconciler.journal.record("nothing taken", SPOOL, directory, texts[0], run=active_watch.watch.run)
    if active_watch.watch.series is None and (count := watch.superseded_series):
        texts.append(_many_series(directory, count))
        if not active_watch.series_reported:
            active_watch.series_reported = True
            log.warning("%s", texts[-1])
    if texts:
        suffix = f"; and {len(texts) - 1} more" if texts[1:] else ""
        reconciler.journal.warnings[subject] = f"{texts[0]}{suffix}"
    else:
        reconciler.journal.warnings.pop(subject, None)


def _many_series(directory: str, count: int) -> str:
    """Say that the pins of many series last, and what to do about it."""
    return (
        f"{directory}: {count} series of checkpoints were not saved since ten or more newer ones began. Their newest "
        "checkpoints are pinned, on each tier and in the spool. If such series are launches that are over, give the "
        "watch `series = 3` (`--series 3`), which pins those of the last 3 alone; otherwise the number that you need"
    )


def _is_untaken_for_long(
    reconciler: Reconciler, active_watch: ActiveWatch, watch: UnitWatch, status: WatchStatus
) -> bool:
    """Whether nothing was ever taken of a directory that has had files for long, and no unit may be being written."""
    if not active_watch.is_untaken or not (status.files or status.checkpoints):
        active_watch.untaken_s = None
        return False
    if active_watch.untaken_s is None:
        active_watch.untaken_s = time.monotonic()
    return not watch.is_waiting and time.monotonic() - active_watch.untaken_s >= reconciler.timings.untaken_s


def show_absent_directory(reconciler: Reconciler, active_watch: ActiveWatch) -> None:
    """Have the status show that a watch waits for its directory."""
    directory, run = active_watch.watch.directory, active_watch.watch.run
    reconciler.watches[run] = WatchStatus(directory, run, waits="it does not exist yet")
    reconciler.journal.warnings["watch", run] = f"{directory} does not exist yet, and is waited for"


def hide_watch(reconciler: Reconciler, active_watch: ActiveWatch) -> None:
    """Have the status show nothing of a watch that ends."""
    reconciler.journal.warnings.pop(("watch", active_watch.watch.run), None)
    reconciler.watches.pop(active_watch.watch.run, None)
