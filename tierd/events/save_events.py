"""Events about saves: committed, failed, observed in the spool, complete on a tier.

Invariant: each is reported once, by the trainer's hand-over or by an observation, depending on which comes first.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tierd.core.event_kinds import metrics_of
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.timeline.launches import beside, disowning, unvouched, warning
from tierd.events.first_seen import NewCheckpoints
from tierd.events.journal import SAVES, Journal
from tierd.spool.commit import CommittedPart

log = logging.getLogger("tierd.daemon")

_MIN_OBSERVATIONS = 2  # observations


class SaveEvents:
    """Reports events about saves to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._first_seen = NewCheckpoints()
        self._refused: set[PartId] = set()  # parts whose trainers learn from the daemon that the commit failed
        self._rolled_back: dict[tuple[str, str], str] = {}  # by tier and run, the reported reason
        self._append_only: set[str] = set()  # tiers
        # Observations that showed this tier, run and attempt.
        self._unvouched: Counter[tuple[str, str, str]] = Counter()
        self._reported_launches: dict[str, frozenset[str]] = {}  # by run, the launches that were reported

    def persisting(self, part: PartId, under_way: bool) -> None:
        """Record that the commit of a trainer's snapshot begins or ends.

        Call this before the part can be in the spool, because an observation in between would report it without the
        times that only `taken` knows.
        """
        self._first_seen.persisting(part, under_way)

    def taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Record that a part was committed from a trainer's handed-over snapshot, or that the commit failed."""
        if isinstance(outcome, Exception):
            self._refused.add(part)
            self._record_failure(part, str(outcome))
        else:
            self._journal.counters["persisted"] += 1
            how = "past the page cache" if outcome.direct else "through the page cache"
            if self._first_seen.take(part):
                times = {"blocked_s": _rounded(outcome.blocked_s), "seconds": _rounded(outcome.durable_s)}
                self._record_save(part, outcome.size, f", {how}", outcome.metrics, **times)

    def restored(self, part: PartId, place: str, seconds: float) -> None:
        """Record that a rank read and verified its part of the checkpoint that all ranks load."""
        self._journal.counters["restores"] += 1
        self._journal.record("restored", place, part, "read and verified", seconds=round(seconds, 3))

    def fell_back(self, checkpoint: CheckpointId, skipped: Sequence[str]) -> None:
        """Record that a restore passed over newer checkpoints."""
        self._journal.counters["fallbacks"] += 1
        self._journal.record("fell back", SPOOL, checkpoint, f"passed over: {'; '.join(skipped)}")

    def absent(self, odd: Mapping[CheckpointId, str]) -> None:
        """Have the status show the copies that count as absent, because no directory lies in their place."""
        warnings = self._journal.warnings
        for key in [warning_key for warning_key in warnings if warning_key[0] == "odd"]:
            del warnings[key]
        for checkpoint, why in odd.items():
            warnings["odd", str(checkpoint)] = f"{checkpoint} counts as absent from the spool: {why}"

    def given_up(self, part: PartId, why: str) -> None:
        """Record that a trainer gave a save up. A failure that the trainer learned from the daemon is reported once."""
        if part not in self._refused:
            self._record_failure(part, why)
        self._refused.discard(part)

    def fetched(self, part: PartId) -> None:
        """Record that a part is about to be fetched from a tier, so that it is not reported as a save."""
        self._first_seen.take(part)

    def came(self, spool: Place) -> None:
        """Process an observation of the spool. A part that no trainer handed over was committed by its trainer."""
        for part in self._first_seen.came(spool):
            facts = spool.facts(part)
            self._record_save(part, facts.size if facts else 0, ", by its trainer", facts.metrics if facts else {})

    def launches(self, inventory: Inventory) -> None:
        """Process an observation of any place: report, once, launches of a run that save at the same time."""
        reported: dict[str, frozenset[str]] = {}
        for run in inventory.spool.alive:
            if rivals := beside(inventory, run, time.time()):
                reported[run] = frozenset(rival.attempt for rival in rivals)
                if not reported[run] <= self._reported_launches.get(run, frozenset()):
                    self._journal.record("two launches", SPOOL, run, warning(rivals), run=run)
        self._reported_launches = reported

    def rolled_back(self, tier: str, run: str, why: str | None) -> None:
        """Process an observation of a tier: report once, while it lasts, that a run's history there was rolled back."""
        if why and self._rolled_back.get((tier, run)) != why:
            self._journal.record("rolled back", tier, run, why, run=run)
        self._rolled_back = {key: reported for key, reported in self._rolled_back.items() if key != (tier, run)}
        if why:
            self._rolled_back[tier, run] = why

    def append_only(self, tier: str, why: str) -> None:
        """Record whether a tier permits deletions. A refusal is reported once, until the tier permits them again.

        Args:
            tier: the tier's name.
            why: the tier's refusal; empty if it permits deletions.
        """
        if why and tier not in self._append_only:
            self._append_only.add(tier)
            self._journal.record("append only", tier, "deleting", f"nothing is pruned there: {why}")
        elif not why and tier in self._append_only:
            self._append_only.remove(tier)
            log.info("%s: it lets objects be deleted again, so retention prunes there", tier)

    def unvouched(self, tier: str, inventory: Inventory) -> None:
        """Process an observation of a tier: log, once, names of launches of which nothing can be read.

        The first observation that shows them logs nothing, because damaged manifests are quarantined after it.
        """
        for run in {checkpoint.run for checkpoint in inventory.spool.checkpoints} | inventory.spool.launches.keys():
            for attempt in unvouched(inventory, tier, run):
                self._unvouched[tier, run, attempt] += 1
                if self._unvouched[tier, run, attempt] == _MIN_OBSERVATIONS:
                    log.warning(
                        "%s: %s: nothing is pruned: by the names of its objects attempt %s is the newest, and none of "
                        "them can be read (it is damaged, of a newer tierd, of another key, or not tierd's); %s",
                        tier,
                        run,
                        attempt,
                        disowning(run, attempt),
                    )

    def relayed(self, tier: str, part: PartId) -> None:
        """Record that a part is about to be relayed to a tier that lacks it."""
        if part.rank == 0:
            self._first_seen.expect(tier, part.checkpoint, time.monotonic())

    def durable(self, tier: str, spool: Place, tiers: Mapping[str, Place | None]) -> None:
        """Report the checkpoints that are complete on a tier. Call this after an observation or a flush."""
        place = tiers[tier]
        if place is None:
            return
        other_tiers = [tier_place for name, tier_place in tiers.items() if tier_place and name != tier]
        for checkpoint, duration_s in self._first_seen.whole(tier, spool, place, time.monotonic(), other_tiers):
            copy = place.checkpoints[checkpoint]
            facts = copy.facts.values()
            raw, stored = (
                sum(part_facts.size for part_facts in facts),
                sum(part_facts.stored_size for part_facts in facts),
            )
            ranks = max((world for world, ranks in copy.ranks.items() if len(ranks) == world), default=0)
            why = f"every part of {ranks} ranks is there, verified; {len(facts)} of them read, {raw} bytes as {stored}"
            sizes = {"raw_bytes": raw, "stored_bytes": stored} if len(facts) == ranks else {}
            numbers = metrics_of(next(iter(facts)).metrics) if facts else None
            self._journal.record(
                "durable",
                tier,
                checkpoint,
                why,
                seconds=round(duration_s, 3),
                world_size=ranks,
                metrics=numbers,
                **sizes,
            )

    def _record_failure(self, part: PartId, why: str) -> None:
        self._journal.counters["persist_failures"] += 1
        self._journal.record("persist failed", SPOOL, part, why)
        self._journal.failed((SAVES, part.writer), "save", SPOOL, part, why)

    def _record_save(
        self, part: PartId, size: int, how: str, metrics: Mapping[str, float], **times: float | None
    ) -> None:
        numbers = metrics_of(metrics)
        self._journal.record("persisted", SPOOL, part, f"{size} bytes{how}", raw_bytes=size, metrics=numbers, **times)
        self._journal.saved(part)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
