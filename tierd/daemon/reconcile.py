"""Observe, plan, act. One lane for the spool and one for each tier, so that a tier that is down delays only itself.

Law: truth is what lies in the spool and on the tiers. A lane looks, takes the plan's first action for its place, does
it, and looks again; events only shorten the wait. Every failure ends in a backoff of its lane and in `status`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tierd.commit import Written
from tierd.core.config import Config
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest, decode
from tierd.core.plan import Action, Discard, Flush, Mend, Prune, pending, plan
from tierd.core.retention import seconds
from tierd.core.world import SPOOL, Place, World
from tierd.daemon.flush import Twin, flush
from tierd.daemon.journal import Event, Journal
from tierd.daemon.lane import Lane
from tierd.daemon.observe import SpoolEye, TierEye
from tierd.daemon.prune import holds, prune, quarantine
from tierd.daemon.repair import Repairer
from tierd.spool import Spool
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")


_STUCK = 60.0  # seconds that a part rests which could neither be sent nor mended
_ABANDONED = 5.0  # seconds that a stage is seen unlocked before it counts as left over
_ANSWER = 5.0  # seconds that one tier waits for another's manifest, which it could do without
_LOOK = 120.0  # seconds; deadline of one look at a tier, above all retries of its calls


class Reconciler:
    """Keeps the tiers and the spool as the configuration wants them.

    Args:
        config: what is wanted.
        spool: the local tier, already locked for this daemon.
        stores: tier name -> open store, in order of preference.
        told: called with every event as it happens.
    """

    def __init__(
        self,
        config: Config,
        spool: Spool,
        stores: Mapping[str, Store],
        told: Callable[[Event], None] | None = None,
    ) -> None:
        self.config = config
        self.spool = spool
        self.stores = stores
        self.journal = Journal(told)
        self._repairer = Repairer(spool, stores, self.journal)
        self.held: Counter[CheckpointId] = Counter()
        self.writers: Callable[[], frozenset[str]] = frozenset  # `PartId.lane` of whoever will write again
        self.interest: set[str] = set()  # runs that a trainer asked for, beside those in the spool
        self.moved = asyncio.Condition()  # notified after every look and every action
        self.lanes = {name: Lane(name) for name in (SPOOL, *stores)}
        self._eyes = {name: TierEye(store) for name, store in stores.items()}
        self._spool_eye = SpoolEye(spool)
        self._place = Place()
        self._free = 1.0
        self._leftovers: tuple[str, ...] = ()
        self._tiers: dict[str, Place | None] = dict.fromkeys(stores)
        self._busy: Counter[PartId] = Counter()
        self._stuck: dict[PartId, float] = {}
        self._unlocked: dict[str, float] = {}
        self._looking = asyncio.Lock()
        self._clock = itertools.count()
        self._seen = dict.fromkeys(stores, -1)  # tier -> the beginning of the look that `_tiers` shows
        self._draining = False
        self._random = random.Random()  # noqa: S311  # jitter

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes.values():
                group.create_task(self._run_lane(lane))

    def wake(self) -> None:
        """Look again soon: something may have changed."""
        for lane in self.lanes.values():
            lane.wake.set()

    async def drain(self, timeout: float) -> None:
        """Let flushes go on, newest first, for at most `timeout` seconds; nothing else is begun any more."""
        self._draining = True
        await self._look_at_spool()
        for lane in self.lanes.values():
            lane.retry_now()
        self.wake()
        try:
            async with asyncio.timeout(timeout), self.moved:
                await self.moved.wait_for(lambda: not self.pending())
        except TimeoutError:
            log.warning("drain time is up: %d parts are still only in the spool", len(self.pending()))

    def taken(self, part: PartId, outcome: Written | Exception) -> None:
        """A part was committed from a trainer's memory, or could not be."""
        if isinstance(outcome, Exception):
            self.journal.counters["persist_failures"] += 1
            self.journal.tell("persist failed", SPOOL, part, str(outcome))
        else:
            self.journal.counters["persisted"] += 1
            how = "past the page cache" if outcome.direct else "through the page cache"
            self.journal.tell("persisted", SPOOL, part, f"{outcome.size} bytes, {how}")
        self.wake()

    def world(self) -> World:
        """The latest look at everything."""
        return World(
            self._place,
            dict(self._tiers),
            self._free,
            self._leftovers,
            frozenset(self.held),
            frozenset(self._busy),
        )

    def pending(self) -> set[PartId]:
        """Parts in the spool that some tier still lacks and wants; all of them while a tier does not answer."""
        world = self.world()
        found = {action.part for action in plan(world, self.config, {}, 0.0) if isinstance(action, Flush)}
        if any(place is None for place in self._tiers.values()):
            found |= set(self._place.parts)
        return found | set(self._busy)

    async def _run_lane(self, lane: Lane) -> None:
        while True:
            lane.wake.clear()
            action = None
            try:
                await self.look(lane.name)
                action = self._next(lane)
                if action is not None:
                    lane.doing = _describe(action)
                    await self._act(action)
                    self.wake()
                lane.succeeded()
            except Exception as error:  # a lane never ends: what is not known either is logged whole, and tried again
                self._failed(lane, action, error)
            finally:
                lane.doing = None
            async with self.moved:
                self.moved.notify_all()
            if action is None or lane.last_error:
                await lane.rest(seconds(self.config.rescan))

    def _next(self, lane: Lane) -> Action | None:
        backoff = {name: other.retry_at for name, other in self.lanes.items()}
        for action in plan(self.world(), self.config, backoff, lane.now()):
            stuck = isinstance(action, Flush | Mend) and self._stuck.get(action.part, 0.0) > lane.now()
            if action.tier == lane.name and not stuck and (isinstance(action, Flush) or not self._draining):
                return action
        return None

    def _failed(self, lane: Lane, action: Action | None, error: Exception) -> None:
        self.journal.counters["errors"] += 1
        delay = lane.failed(error, self._random, long=isinstance(error, StoreRefused))
        doing = _describe(action) if action else "looking"
        known = isinstance(error, TierdError | OSError)
        log.warning("%s: %s failed, again in %.0f s: %s", lane.name, doing, delay, error, exc_info=not known)

    # -- looking ----------------------------------------------------------------------------------------------------

    async def look(self, name: str) -> None:
        """Look at one place afresh; a tier that does not answer becomes unknown, and the error is raised."""
        await self._look_at_spool()
        if name == SPOOL:
            return
        runs = {part.checkpoint.run for part in self._place.parts} | self.interest
        begun = next(self._clock)
        try:
            async with asyncio.timeout(_LOOK):
                self._saw(name, begun, await self._eyes[name].look(runs))
        except TimeoutError as error:
            self._saw(name, begun, None)
            raise StoreUnavailable(f"{name}: did not answer within {_LOOK:.0f} s") from error
        except TierdError:
            self._saw(name, begun, None)
            raise

    def _saw(self, name: str, begun: int, place: Place | None) -> None:
        # A lane and an asker may look at once: what began later saw the newer truth, whichever ends first.
        if begun >= self._seen[name]:
            self._seen[name], self._tiers[name] = begun, place

    async def _look_at_spool(self) -> None:
        async with self._looking:
            before = set(self._place.parts)
            self._place = await asyncio.to_thread(self._spool_eye.look)
            free, total = self.spool.free()
            self._free = free / total if total else 1.0
            self._leftovers = self._aged(await asyncio.to_thread(self.spool.leftovers))
            if set(self._place.parts) != before:
                self.wake()

    def _aged(self, names: list[str]) -> tuple[str, ...]:
        # A stage is without its lock for a moment after it is made: only what stays so is left over.
        now = time.monotonic()
        self._unlocked = {name: self._unlocked.get(name, now) for name in names}
        return tuple(name for name, since in self._unlocked.items() if now - since >= _ABANDONED)

    # -- acting -----------------------------------------------------------------------------------------------------

    async def _act(self, action: Action) -> None:
        match action:
            case Flush(part, tier):
                await self._flush(part, tier)
            case Prune(checkpoint, tier, reasons):
                await self._prune(checkpoint, tier, reasons)
            case Mend(part, tier):
                await self._mend(part, tier)
            case Discard(name):
                await asyncio.to_thread(self.spool.discard, name)
                log.info("local: discarded %s", name)

    async def _flush(self, part: PartId, tier: str) -> None:
        self._busy[part] += 1
        try:
            done = await flush(self.spool, part, self.stores[tier], await self._twin(part, tier))
        except ObjectNotFound:
            return  # removed from the spool since the look
        except (CorruptChunk, ManifestError) as error:
            self.journal.counters["corruptions"] += 1
            self.journal.tell("corrupt", SPOOL, part, str(error))
            await self._mend(part, SPOOL)
            return
        except OSError:  # this part's disk, not the tier's: others of this lane go first meanwhile
            self._stuck[part] = time.monotonic() + _STUCK
            raise
        finally:
            self._busy -= Counter([part])
        self.journal.counters["flushed"] += 1
        self.journal.counters["flushed_raw_bytes"] += done.raw
        self.journal.counters["flushed_sent_bytes"] += done.sent
        await self.look(tier)
        self.journal.tell("flushed", tier, part, f"verified, {done.raw} bytes as {done.stored}")

    async def _twin(self, part: PartId, tier: str) -> Twin | None:
        """Another tier that, as last seen, holds the part: a chunk is the same bytes on every tier."""
        for name, store in self.stores.items():
            if name != tier and self.has(part, name):
                try:
                    async with asyncio.timeout(_ANSWER):
                        return Twin(store, decode(bytes(await store.get(part.manifest_key)), part))
                except TimeoutError:
                    self._tiers[name] = None  # it is not asked for every part; its own lane finds out
                except TierdError:
                    continue
        return None

    async def _prune(self, checkpoint: CheckpointId, tier: str, reasons: tuple[str, ...]) -> None:
        if tier == SPOOL:
            if not await self._covered(checkpoint):
                self.wake()
                return
            if checkpoint in self.held or any(part.checkpoint == checkpoint for part in self._busy):
                return  # taken up while the tiers were asked; the next plan decides
            low = self._free * 100 < self.config.min_free_percent  # then space is worth more than speed
            await asyncio.to_thread(self.spool.remove, checkpoint, () if low else self.writers())
            if low:
                await asyncio.to_thread(self.spool.drop_recycled, ())
        else:
            await prune(self.stores[tier], checkpoint)
            self._eyes[tier].forget(checkpoint)
        self.journal.counters["pruned"] += 1
        self.journal.tell("pruned", tier, checkpoint, "; ".join(reasons))

    async def _covered(self, checkpoint: CheckpointId) -> bool:
        """Look once more at the tiers before a local copy goes: one holds it, or none wants it any more."""
        parts = self._place.checkpoints.get(checkpoint, [])
        tiers = [name for name, place in self._tiers.items() if place and all(place.parts.get(part) for part in parts)]
        if not tiers:
            return True  # the plan, made of this same world, says that every tier has retired it
        local = {part: await asyncio.to_thread(self._readable, part) for part in parts}
        for name in tiers:
            if all([await holds(self.stores[name], part, local[part]) for part in parts]):
                return True
            for part in parts:
                self.journal.tell("corrupt", name, part, "chunks are missing; it will be flushed again")
                await quarantine(self.stores[name], part)
            self._tiers[name] = None
        return False

    def _readable(self, part: PartId) -> Manifest | None:
        try:
            return self.spool.manifest(part)
        except (ObjectNotFound, ManifestError):
            return None

    async def _mend(self, part: PartId, tier: str) -> None:
        if tier != SPOOL:
            await self._repairer.set_aside(tier, part, "its manifest is corrupt")
            return
        try:
            await self.fetch(part)
        except CorruptChunk:
            pass  # told and set aside by fetch
        except TierdError:
            self._stuck[part] = time.monotonic() + _STUCK  # others of this lane go first meanwhile
            raise

    async def fetch(self, part: PartId) -> tuple[str, ...]:
        """Make the spool's copy of `part` whole, as `Repairer.heal` does, and look again."""
        try:
            return await self._repairer.heal(part)
        finally:
            self.wake()

    def has(self, part: PartId, tier: str) -> bool:
        """Whether the latest look saw a usable manifest of `part` on `tier`, that is, a verified copy."""
        place = self._tiers[tier]
        return bool(place and place.parts.get(part))

    def is_retired(self, part: PartId, tier: str) -> bool:
        """Whether the tier, as last seen, lacks a part and will not be sent it: nobody has it, or nobody wants it."""
        if self._tiers[tier] is None or self._busy[part]:
            return False
        if part in self._place.parts and self._place.parts[part] is None:
            return False  # it is mended, or set aside, first
        return Flush(part, tier) not in plan(self.world(), self.config, {}, 0.0)

    def backlog(self, tier: str) -> tuple[int, int]:
        """`(parts, bytes)` that the spool has and the tier, as last seen, lacks and wants."""
        parts = {action.part for action in plan(self.world(), self.config, {}, 0.0) if isinstance(action, Flush)}
        place = self._tiers[tier] or Place()
        runs = {part.checkpoint.run for part in self._place.parts}
        found = [part for run in runs for part in pending(self._place, place, run)]
        wanted = [part for part in found if self._tiers[tier] is None or part in parts or part in self._busy]
        return len(wanted), sum(facts.size for part in wanted if (facts := self._place.parts[part]))


def _describe(action: Action) -> str:
    match action:
        case Flush(part):
            return f"flushing {part}"
        case Prune(checkpoint):
            return f"pruning {checkpoint}"
        case Mend(part):
            return f"mending {part}"
        case Discard(name):
            return f"discarding {name}"
