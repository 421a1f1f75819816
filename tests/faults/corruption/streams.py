"""Trials in which a trainer on a fresh node reads a part from harmed tiers, past its spool where that can be: for
`faults.corruption`. One tier may stop in the middle.

Required: only right bytes, whatever can be had, and no verdict over bytes by a tier that does not answer.
"""

from __future__ import annotations

import asyncio
import random
import shutil

from faults.corruption.places import TIERS
from faults.corruption.trials import Trials, Whole
from faults.rounds import Lost
from faults.streamed import read_streamed, serving
from support.doubles import Double, is_chunk
from support.world import reconciler

from tierd.core.errors import CorruptChunk, DaemonUnavailable, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import PartId
from tierd.events.journal import Journal
from tierd.spool.spool import Spool

ANSWERS = ("past the spool", "through the spool", "lost")
_STOPS = (None, None, None, *range(8))  # after how many reads of chunks a tier stops; None: never


def _stop(tier: Double, reads: int) -> None:
    """Have a tier answer no more after so many reads of chunks."""
    asked = 0

    def count(operation: str, key: str) -> None:
        nonlocal asked
        asked += operation == "get" and is_chunk(key)
        if asked > reads:
            tier.error = StoreUnavailable("the tier has stopped")
            raise tier.error

    tier.before = count


class Streams(Trials):
    """The trials of one process, on its own world."""

    async def _stream(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        spool, name, reads = Spool(self._root / "fresh"), noise.choice(TIERS), noise.choice(_STOPS)
        tier = Double(self.places.stores[name])
        can = self.judge.can_be_had(focus, spool=False)
        # Of two intact manifests that contradict each other, nobody can tell the right one while a tier is silent.
        contradicts = self.judge.readable(name, focus) and not self.judge.honest(name, focus)
        is_spared = not contradicts and all(before[other, focus] for other in TIERS if other != name)
        daemon = reconciler(spool, {**self.places.stores, name: tier})
        try:
            async with serving(daemon):
                if reads is not None:
                    _stop(tier, reads)
                answer = await self._read_on_fresh_node(spool, focus, tier, can=can)
                if tier.error is None:
                    return answer
                if answer == "no answer" and is_spared:
                    raise Lost(f"{name} stopped, every other tier has {focus} right, and it was not given")
                tier.before = tier.error = None
                return f"a tier stopped, then {await self._read_on_fresh_node(spool, focus, tier, can=can)}"
        finally:
            # Of the tiers alone: the fresh node's spool is not the one whose copies the judge knows.
            journal.events.extend(event for event in daemon.journal.events if event.place in TIERS)
            shutil.rmtree(spool.root)

    async def _read_on_fresh_node(self, spool: Spool, focus: PartId, tier: Double, *, can: bool) -> str:
        try:
            files, is_past = await asyncio.to_thread(read_streamed, spool, focus)
        except (CorruptChunk, ManifestError) as error:
            if can:
                raise Lost(f"{focus} can be had and was given up: {error}") from error
            if self.judge.exists(focus, spool=False) and tier.error is None:
                raise Lost(f"{focus} is proven corrupt everywhere and was not quarantined") from error
            return "lost"
        except ObjectNotFound as error:  # also if it was proven corrupt, and quarantined, before the restore read it
            if can or self.judge.exists(focus, spool=False):
                raise Lost(f"{focus} is there and was not found") from error
            return "absent"
        except (StoreUnavailable, DaemonUnavailable) as error:
            if tier.error is None:
                raise Lost(f"{focus}: every tier answered, and it was not given: {error}") from error
            return "no answer"
        if files != self.places.held[focus]:
            raise Lost(f"{focus}: wrong bytes were restored on a fresh node")
        if not can and not self.judge.lenient(focus):
            raise Lost(f"{focus} cannot be had and was given all the same")
        return "past the spool" if is_past else "through the spool"
