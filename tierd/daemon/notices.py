"""What became of saves, told as it is seen: committed, failed, arrived in the spool, whole on a tier.

Law: whoever sees it first tells it, a trainer's hand-over or a look, and nobody tells it again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from tierd.commit import Written
from tierd.core.ids import PartId
from tierd.core.launches import beside, disowning, unvouched, warning
from tierd.core.news import News
from tierd.core.world import SPOOL, Place, World
from tierd.daemon.journal import SAVES, Journal

log = logging.getLogger("tierd.daemon")

_LASTS = 2  # looks


class Notices:
    """Tells the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._news = News()
        self._refused: set[PartId] = set()  # whose trainers are told that they could not be committed
        self._rolled_back: dict[tuple[str, str], str] = {}  # by tier and run, why, as it was told
        self._append_only: set[str] = set()  # tiers
        self._unvouched: Counter[tuple[str, str, str]] = Counter()  # looks that showed this tier, run and attempt
        self._beside: dict[str, frozenset[str]] = {}  # by run, the launches that were told of

    def taken(self, part: PartId, outcome: Written | Exception) -> None:
        """A part was committed from a trainer's memory, or could not be."""
        if isinstance(outcome, Exception):
            self._refused.add(part)
            self._failed(part, str(outcome))
        else:
            self._journal.counters["persisted"] += 1
            how = "past the page cache" if outcome.direct else "through the page cache"
            if self._news.take(part):
                self._saved(part, outcome.size, f", {how}")

    def given_up(self, part: PartId, why: str) -> None:
        """A trainer gave a save up: maybe since it was told so from here."""
        if part not in self._refused:
            self._failed(part, why)
        self._refused.discard(part)

    def fetched(self, part: PartId) -> None:
        """A part that is about to come from a tier is no save."""
        self._news.take(part)

    def came(self, spool: Place) -> None:
        """The spool was looked at: what nobody handed over was committed by its trainer."""
        for part in self._news.came(spool):
            facts = spool.facts(part)
            self._saved(part, facts.size if facts else 0, ", by its trainer")

    def launches(self, world: World) -> None:
        """Something was looked at: launches that save beside each other are told of, once."""
        told: dict[str, frozenset[str]] = {}
        for run in world.spool.alive:
            if rivals := beside(world, run, time.time()):
                told[run] = frozenset(one.attempt for one in rivals)
                if not told[run] <= self._beside.get(run, frozenset()):
                    self._journal.tell("two launches", SPOOL, run, warning(rivals), run=run)
        self._beside = told

    def rolled_back(self, tier: str, run: str, why: str | None) -> None:
        """A tier was looked at: that a run's history there is older than it was is told of, once while it stays so."""
        if why and self._rolled_back.get((tier, run)) != why:
            self._journal.tell("rolled back", tier, run, why, run=run)
        self._rolled_back = {one: told for one, told in self._rolled_back.items() if one != (tier, run)}
        if why:
            self._rolled_back[tier, run] = why

    def append_only(self, tier: str, why: str) -> None:
        """Something was done on a tier: that it lets nothing be deleted is told once, until it does. `why`: what it
        said, or empty."""
        if why and tier not in self._append_only:
            self._append_only.add(tier)
            self._journal.tell("append only", tier, "deleting", f"nothing is pruned there: {why}")
        elif not why and tier in self._append_only:
            self._append_only.remove(tier)
            log.info("%s: it lets objects be deleted again, so retention prunes there", tier)

    def unvouched(self, tier: str, world: World) -> None:
        """A tier was looked at: names of launches of which nothing can be read are logged once. Not by the first look
        that shows them, because what is damaged is set aside after that."""
        for run in {one.run for one in world.spool.checkpoints} | world.spool.launches.keys():
            for attempt in unvouched(world, tier, run):
                self._unvouched[tier, run, attempt] += 1
                if self._unvouched[tier, run, attempt] == _LASTS:
                    log.warning(
                        "%s: %s: nothing is pruned: names of attempt %s say that it is the newest, and nothing of it "
                        "can be read (it is damaged, of a newer tierd, of another key, or not tierd's); %s",
                        tier,
                        run,
                        attempt,
                        disowning(run, attempt),
                    )

    def relayed(self, tier: str, part: PartId) -> None:
        """A part is about to go from one tier to another, which has it not."""
        if part.rank == 0:
            self._news.expect(tier, part.checkpoint, time.monotonic())

    def durable(self, tier: str, spool: Place, tiers: Mapping[str, Place | None]) -> None:
        """The spool or a tier was looked at, or something was flushed there."""
        place = tiers[tier]
        if place is None:
            return
        others = [other for name, other in tiers.items() if other and name != tier]
        for checkpoint, took in self._news.whole(tier, spool, place, time.monotonic(), others):
            seen = place.checkpoints[checkpoint]
            known = seen.facts.values()
            raw, stored = sum(one.size for one in known), sum(one.stored_size for one in known)
            ranks = max((world for world, ranks in seen.ranks.items() if len(ranks) == world), default=0)
            why = f"every part of {ranks} ranks is there, verified; {len(known)} of them read, {raw} bytes as {stored}"
            more = {"raw_bytes": raw, "stored_bytes": stored} if len(known) == ranks else {}
            self._journal.tell("durable", tier, checkpoint, why, seconds=round(took, 3), world_size=ranks, **more)

    def _failed(self, part: PartId, why: str) -> None:
        self._journal.counters["persist_failures"] += 1
        self._journal.tell("persist failed", SPOOL, part, why)
        self._journal.failed((SAVES, part.lane), "save", SPOOL, part, why)

    def _saved(self, part: PartId, size: int, how: str) -> None:
        self._journal.tell("persisted", SPOOL, part, f"{size} bytes{how}", raw_bytes=size)
        self._journal.saved(part)
