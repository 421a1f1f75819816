"""Events about saves: committed, failed, observed in the spool, complete on a tier."""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from tierd.core.event_kinds import metrics_of
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, changed_checkpoints, total_stored_size
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place
from tierd.core.timeline.concurrent_launches import (
    concurrency_warning,
    concurrent_launches,
    disown_advice,
    unproven_attempts,
)
from tierd.core.units import format_size
from tierd.events.journal import SAVES, Journal
from tierd.spool.commit import CommittedPart


class NewCheckpoints:
    """Remembers parts and checkpoints for as long as a place lists them."""

    def __init__(self) -> None:
        self._spool: Place | None = None  # the last observation
        self._suppressed: set[PartId] = set()  # parts that are not reported when the spool lists them
        self._persisting: Counter[PartId] = Counter()  # hand-offs that are being committed, by part
        self._withheld: set[PartId] = set()  # parts that an observation showed while they were being committed
        # Checkpoints whose rank 0 the spool has or had, and when it was first observed.
        self._since: dict[CheckpointId, float] = {}
        self._awaited: dict[str, set[CheckpointId]] = {}  # by tier, checkpoints that were not complete there
        self._settled: dict[str, set[CheckpointId]] = {}  # by tier, checkpoints that were complete there
        # By tier, the copies in all places at the last call of `newly_complete`; the same ones again give nothing new.
        self._last_listings: dict[str, list[Mapping[CheckpointId, CheckpointCopy]]] = {}

    def set_persisting(self, part: PartId, under_way: bool) -> None:
        """Record that a hand-off of the part begins or ends. In between, only `claim_new` reports the part.

        A part that was observed in between, and that `claim_new` did not report, is reported by the first observation
        after the end.
        """
        self._persisting[part] += 1 if under_way else -1
        if not self._persisting[part]:
            del self._persisting[part]

    def claim_new(self, part: PartId) -> bool:
        """Return whether the part is new, and do not report it again."""
        listed = self._spool is not None and self._spool.lists(part)
        new = part not in self._suppressed and (part in self._persisting or not listed)
        self._suppressed.add(part)
        self._withheld.discard(part)
        return new

    def new_parts(self, spool: Place) -> list[PartId]:
        """Return the parts that were committed since the last observation of the spool."""
        before, self._spool = spool if self._spool is None else self._spool, spool
        fresh = [
            spool.checkpoints[checkpoint]
            for checkpoint in changed_checkpoints(before.checkpoints, spool.checkpoints)
            if checkpoint in spool.checkpoints
        ]
        arrived = {part for copy in fresh for part in copy.parts() if not before.lists(part)}
        arrived |= {part for part in self._withheld if spool.lists(part)}
        arrived -= self._suppressed
        self._withheld = {part for part in arrived if part in self._persisting}
        self._suppressed = {part for part in self._suppressed if not (spool.lists(part) or before.lists(part))}
        return sorted(arrived - self._withheld)

    def expect_flush(self, tier: str, checkpoint: CheckpointId, now: float) -> None:
        """Record that a flush begins of a checkpoint that is incomplete on the tier and may not be in the spool."""
        if checkpoint not in self._settled.setdefault(tier, set()):
            self._awaited.setdefault(tier, set()).add(checkpoint)
            self._since.setdefault(checkpoint, now)
            self._last_listings.pop(tier, None)

    def newly_complete(
        self, tier: str, spool: Place, place: Place, now: float, other_tiers: Collection[Place] = ()
    ) -> list[tuple[CheckpointId, float]]:
        """Return the checkpoints that became complete on a tier, each with the seconds since the spool first listed it.

        Call this after each observation of the spool or the tier, before any flush that follows from it. `now` is in
        monotonic seconds. A checkpoint that one of the other tiers holds may still be flushed to this tier.
        """
        listings = [observation.checkpoints for observation in (spool, place, *other_tiers)]
        last_listings = self._last_listings.get(tier, [])
        if len(last_listings) == len(listings) and all(map(operator.is_, last_listings, listings)):
            return []
        self._last_listings[tier] = listings
        awaited, settled = self._awaited.setdefault(tier, set()), self._settled.setdefault(tier, set())
        for checkpoint in spool.checkpoints.keys() - awaited - settled:
            if any(0 in ranks for ranks in spool.checkpoints[checkpoint].ranks.values()):
                self._since.setdefault(checkpoint, now)
                copy = place.checkpoints.get(checkpoint)
                (settled if copy and copy.usable else awaited).add(checkpoint)
        completed = sorted(
            candidate for candidate in awaited if (copy := place.checkpoints.get(candidate)) and copy.usable
        )
        durations = [(candidate, now - self._since[candidate]) for candidate in completed]
        settled.update(completed)
        awaited.difference_update(completed)
        for group in (awaited, settled):
            group -= group.difference(*listings)
        for pruned in (
            self._since.keys() - spool.checkpoints.keys() - set[CheckpointId]().union(*self._awaited.values())
        ):
            del self._since[pruned]
        return durations


log = logging.getLogger("tierd.daemon")

_MIN_OBSERVATIONS = 2  # observations


class SaveEvents:
    """Reports events about saves to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._first_seen = NewCheckpoints()
        self._refused: set[PartId] = set()  # parts whose trainers learn from the daemon that the commit failed
        self._rolled_back: set[tuple[str, str]] = set()  # the reported tiers and runs
        self._append_only: set[str] = set()  # tiers
        # Observations that showed this tier, run and attempt.
        self._unvouched: Counter[tuple[str, str, str]] = Counter()
        self._reported_launches: dict[str, frozenset[str]] = {}  # by run, the launches that were reported

    def set_persisting(self, part: PartId, under_way: bool) -> None:
        """Record that the commit of a trainer's snapshot begins or ends.

        Call this before the part can be in the spool, because an observation in between would report it without the
        times that only `record_handoff` knows.
        """
        self._first_seen.set_persisting(part, under_way)

    def record_handoff(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Record that a part was committed from a trainer's handed-over snapshot, or that the commit failed."""
        if isinstance(outcome, Exception):
            self._refused.add(part)
            self._record_failure(part, str(outcome))
        else:
            self._journal.counters["persisted"] += 1
            how = outcome.origin or ("past the page cache" if outcome.direct else "through the page cache")
            if self._first_seen.claim_new(part):
                times = {"blocked_s": _rounded(outcome.blocked_s), "seconds": _rounded(outcome.durable_s)}
                self._record_save(part, outcome.size, f", {how}", outcome.metrics, **times)

    def record_restore(self, part: PartId, place: str, seconds: float) -> None:
        """Record that a rank read and verified its part of the checkpoint that all ranks load."""
        self._journal.counters["restores"] += 1
        self._journal.record("restored", place, part, "read and verified", seconds=round(seconds, 3))

    def record_fallback(self, checkpoint: CheckpointId, skipped: Sequence[str]) -> None:
        """Record that a restore passed over newer checkpoints."""
        self._journal.counters["fallbacks"] += 1
        self._journal.record("fell back", SPOOL, checkpoint, f"passed over: {'; '.join(skipped)}")

    def show_absent_copies(self, odd: Mapping[CheckpointId, str]) -> None:
        """Have the status show the copies that count as absent, because no directory lies in their place."""
        warnings = self._journal.warnings
        for key in [warning_key for warning_key in warnings if warning_key[0] == "odd"]:
            del warnings[key]
        for checkpoint, why in odd.items():
            warnings["odd", str(checkpoint)] = f"{checkpoint} counts as absent from the spool: {why}"

    def record_given_up(self, part: PartId, why: str) -> None:
        """Record that a trainer gave a save up. A failure that the trainer learned from the daemon is reported once."""
        if part not in self._refused:
            self._record_failure(part, why)
        self._refused.discard(part)

    def expect_fetch(self, part: PartId) -> None:
        """Record that a part is about to be fetched from a tier, so that it is not reported as a save."""
        self._first_seen.claim_new(part)

    def report_new_parts(self, spool: Place) -> None:
        """Process an observation of the spool. A part that nobody handed over was committed by its trainer,
        or by a watch whose report follows."""
        for part in self._first_seen.new_parts(spool):
            facts = spool.facts(part)
            self._record_save(part, facts.size if facts else 0, ", found in the spool", facts.metrics if facts else {})

    def report_rival_launches(self, inventory: Inventory) -> None:
        """Process an observation of any place: report, once, launches of a run that save at the same time."""
        reported: dict[str, frozenset[str]] = {}
        for run in inventory.spool.alive:
            if rivals := concurrent_launches(inventory, run, time.time()):
                reported[run] = frozenset(rival.attempt for rival in rivals)
                if not reported[run] <= self._reported_launches.get(run, frozenset()):
                    self._journal.record("two launches", SPOOL, run, concurrency_warning(rivals), run=run)
        self._reported_launches = reported

    def report_rollback(self, tier: str, run: str, why: str | None) -> None:
        """Process an observation of a tier: report once, while it lasts, that a run's history there was rolled back."""
        if not why:
            self._rolled_back.discard((tier, run))
        elif (tier, run) not in self._rolled_back:  # the reason changes when this node puts its next head there
            self._rolled_back.add((tier, run))
            self._journal.record("rolled back", tier, run, why, run=run)

    def report_append_only(self, tier: str, why: str) -> None:
        """Record whether a tier permits deletions. A refusal is reported once, until the tier permits them again: `why`
        is empty.
        """
        if why and tier not in self._append_only:
            self._append_only.add(tier)
            self._journal.record("append only", tier, "deleting", f"nothing is pruned there: {why}")
        elif not why and tier in self._append_only:
            self._append_only.remove(tier)
            log.info("%s: it lets objects be deleted again, so retention prunes there", tier)

    def log_unreadable_launches(self, tier: str, inventory: Inventory) -> None:
        """Process an observation of a tier: log, once, names of launches of which nothing can be read.

        The first observation that shows them logs nothing, because damaged manifests are quarantined after it.
        """
        for run in {checkpoint.run for checkpoint in inventory.spool.checkpoints} | inventory.spool.launches.keys():
            for attempt in unproven_attempts(inventory, tier, run):
                self._unvouched[tier, run, attempt] += 1
                if self._unvouched[tier, run, attempt] == _MIN_OBSERVATIONS:
                    log.warning(
                        "%s: %s: nothing is pruned: by the names of its objects attempt %s is the newest, and none of "
                        "them can be read (it is damaged, of a newer tierd, of another key, or not tierd's); %s",
                        tier,
                        run,
                        attempt,
                        disown_advice(run, attempt),
                    )

    def expect_relay(self, tier: str, part: PartId) -> None:
        """Record that a part is about to be relayed to a tier that lacks it."""
        if part.rank == 0:
            self._first_seen.expect_flush(tier, part.checkpoint, time.monotonic())

    def report_durable(self, tier: str, spool: Place, tiers: Mapping[str, Place | None]) -> None:
        """Report the checkpoints that are complete on a tier. Call this after an observation or a flush."""
        place = tiers[tier]
        if place is None:
            return
        other_tiers = [tier_place for name, tier_place in tiers.items() if tier_place and name != tier]
        for checkpoint, duration_s in self._first_seen.newly_complete(
            tier, spool, place, time.monotonic(), other_tiers
        ):
            copy = place.checkpoints[checkpoint]
            facts = copy.facts.values()
            raw = sum(part_facts.size for part_facts in facts)
            stored = total_stored_size(copy.facts)
            ranks = max((world for world, ranks in copy.ranks.items() if len(ranks) == world), default=0)
            why = "verified" if ranks == 1 else f"the parts of all {ranks} ranks are there, verified"
            if facts:
                of = "" if len(facts) == ranks else f"{len(facts)} of them read, "
                why += f"; {of}{format_size(raw)} stored as {format_size(stored)}"
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
        self._journal.record_failure((SAVES, part.writer), "save", SPOOL, part, why)

    def _record_save(
        self, part: PartId, size: int, how: str, metrics: Mapping[str, float], **times: float | None
    ) -> None:
        numbers = metrics_of(metrics)
        self._journal.record(
            "persisted", SPOOL, part, f"{format_size(size)}{how}", raw_bytes=size, metrics=numbers, **times
        )
        self._journal.record_save(part)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
