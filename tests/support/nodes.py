"""Several nodes on one run: a spool and a daemon each, over one tier, which is watched.

Invariant: what must hold after any step is checked here, at every change of the tier and of a spool, and nowhere else;
a test only makes things happen. It is said independently of core/planning/plan.py, from names and manifests.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
from support.doubles import is_manifest
from support.timed import NEVER_MS, Ticking, timed
from support.world import CHUNK, RUN, commit, config, part

from tierd.core.errors import StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.manifest_codec import decode
from tierd.core.planning.place import SPOOL, Action, Prune
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.launch_chain import order_by_timeline
from tierd.core.timeline.restore_order import RestoreOrder, restore_candidates
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer, ObjectInfo, Store
from tierd.stores.memory_store import MemoryStore

TIER = "tier"


class Inline(ThreadPoolExecutor):
    """Does at once what it is given: with it, one seed is one order of events."""

    def submit(self, fn, /, *args, **kwargs):
        done: Future = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def one_thread(monkeypatch) -> None:
    """Calls in threads are done where they are asked for, no clock decides about turns, and no power will be cut."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    inline = Inline(1)
    monkeypatch.setattr("tierd.daemon.concurrency.BACKGROUND_POOL", inline)

    async def to_thread(call, /, *args, **kwargs):
        await asyncio.sleep(0)
        return call(*args, **kwargs)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    timed(monkeypatch, wall_ns=Ticking(), own_stale_ms=NEVER_MS, mark_reads=20, mark_pause_s=0.0)


def launch_of(checkpoint: CheckpointId) -> int:
    """The number that `support.world.attempt` made an attempt of."""
    return int(checkpoint.attempt[-8:], 16)


def is_whole(parts: Iterable[PartId]) -> bool:
    """Whether every rank of one world size is there."""
    by_world: dict[int, set[int]] = defaultdict(set)
    for one in parts:
        by_world[one.world].add(one.rank)
    return any(ranks == set(range(world)) for world, ranks in by_world.items())


class Tier(MemoryStore):
    """The shared tier, watched. Attributes: `ever`: parts whose manifest was ever there; `pruned`: who took which
    checkpoint's manifests; `aware`: also protect what a resume would take by attempts of which only some ranks are
    there, which a daemon that looked before they came cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.ever: set[PartId] = set()
        self.pruned: list[tuple[str, CheckpointId]] = []
        self.aware = True
        self.checks = 0
        self._read: dict[tuple[str, int], Manifest] = {}

    # -- what it shows ----------------------------------------------------------------------------------------------

    def manifests(self, under: str = "manifests") -> dict[PartId, Manifest]:
        found = {}
        for key in self.keys:
            if f"/{under}/" in key and (which := PartId.parse_key(key)):
                data, number = self.objects[key]
                if (key, number) not in self._read:
                    self._read[key, number] = decode(data, which)
                found[which] = self._read[key, number]
        return found

    def checkpoints(self) -> dict[CheckpointId, list[PartId]]:
        found = defaultdict(list)
        for which in self.manifests():
            found[which.checkpoint].append(which)
        return found

    def whole(self) -> set[CheckpointId]:
        return {one for one, parts in self.checkpoints().items() if is_whole(parts)}

    def steps(self) -> list[tuple[int, int, bool]]:
        """`(launch, step, whole)` of everything, oldest first."""
        whole = self.whole()
        return [(launch_of(one), one.step, one in whole) for one in sorted(self.checkpoints())]

    def first(self) -> set[CheckpointId]:
        """What must not go: the newest whole checkpoint down the newest timeline, known from whole checkpoints alone
        and, where `aware`, from every part."""
        origins = {which.checkpoint.attempt: manifest.origin for which, manifest in self.manifests().items()}
        whole = self.whole()
        launches = {one.attempt for one in whole}
        paths = [order_by_timeline(whole, whole, {one: origins[one] for one in launches}).path]
        if self.aware:
            paths.append(order_by_timeline(set(self.checkpoints()), whole, origins).path)
        return {path[0] for path in paths if path}

    # -- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every manifest names only chunks that are there, in the size that it says."""
        self.checks += 1
        for which, manifest in self.manifests().items():
            for chunk in manifest.chunks():
                assert chunk.stored is not None
                key = f"{RUN}/{chunk.stored.key}"
                assert key in self.objects, f"{which} has lost {key}"
                assert len(self.objects[key][0]) == chunk.stored.size, f"{which}: {key} is of another size"

    async def put(self, key: str, data: Buffer) -> str:
        answer = await super().put(key, data)
        if is_manifest(key):
            self.ever.add(PartId.parse_key(key))
            self.check()
        return answer

    async def delete(self, keys: Sequence[str]) -> None:
        await self.take(keys, "nobody")

    async def take(self, keys: Sequence[str], who: str) -> None:
        await asyncio.sleep(0)
        gone = {PartId.parse_key(key).checkpoint for key in keys if is_manifest(key) and key in self.objects}
        quarantined = set(self.manifests("quarantine"))
        held = {which for which in self.manifests() if which.checkpoint in gone}
        before = self.first() if gone else set()
        for key in keys:  # at once, so that nothing comes between what was and what is
            if self.objects.pop(key, None) is not None:
                self.keys.remove(key)
        if gone and not held & quarantined:
            self.pruned += [(who, one) for one in sorted(gone)]
            lost = before - self.whole()
            assert not lost, f"{who} deleted {', '.join(map(str, lost))}, which a resume would take"
        self.check()


class Line(Store):
    """A node's line to the tier. With `rng` it is slow by chance. `down` makes every call fail; `cut` is for a node
    that is lost: what it had on its way takes effect or not, and it hears no answer."""

    def __init__(self, tier: Tier, name: str, rng: random.Random | None) -> None:
        self.tier, self.name, self.rng = tier, name, rng
        self.down = self.cut = False
        self.doing = ""  # the call that is being made
        self.meanwhile: Callable[[], Awaitable[None]] | None = None  # done between any two calls

    async def _lag(self) -> None:
        for _ in range(self.rng.choice((0, 0, 1, 2, 5, 30)) if self.rng else 0):
            await asyncio.sleep(0)

    async def _enter(self, doing: str) -> None:
        self.doing = doing
        if self.down:
            raise StoreUnavailable("no route")
        await self._lag()
        if self.meanwhile:
            await self.meanwhile()
        if self.cut and (self.rng is None or self.rng.random() < 0.7):
            await asyncio.Event().wait()

    async def _leave(self) -> None:
        await self._lag()
        if self.cut:
            await asyncio.Event().wait()

    async def put(self, key: str, data: Buffer) -> str:
        await self._enter("put")
        await self.tier.put(key, data)
        await self._leave()
        return ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        await self._enter("get")
        found = await self.tier.get(key, into)
        await self._leave()
        return found

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        await self._enter("scan")
        found = [info async for info in self.tier.scan(prefix, after)]
        await self._leave()
        for info in found:
            yield info

    async def delete(self, keys: Sequence[str]) -> None:
        await self._enter("delete")
        if self.rng is None:
            await self.tier.take(keys, self.name)
        else:
            for key in self.rng.sample(list(keys), len(keys)):  # not all at once, and in no order
                await self.tier.take([key], self.name)
                await self._lag()
        await self._leave()

    async def aclose(self) -> None: ...


class WatchedSpool(Spool):
    """Asserts that a copy goes only after a tier held it, or when enough newer ones are whole, there or here."""

    tier: Tier
    keep: int

    def remove(self, parts: Iterable[PartId], reuse: Collection[str] = ()) -> None:
        parts, here = list(parts), Counter((one.checkpoint, one.world) for one in self.parts())
        local = {one for (one, world), ranks in here.items() if ranks == world}
        for which in parts:
            whole = {*self.tier.whole(), *(local if which.checkpoint in local else ())}
            newer = sum(one > which.checkpoint for one in whole)
            assert which in self.tier.ever or newer >= self.keep, f"{which} went before any tier held it"
        super().remove(parts, reuse)


class Node:
    """A spool, a daemon over it, and a line to the tier."""

    def __init__(
        self,
        name: str,
        home: Path,
        tier: Tier,
        rng: random.Random | None,
        keep: int,
        rules: Mapping[str, object],
        options: Mapping[str, object],
    ) -> None:
        self.name, self.home, self.tier = name, home, tier
        self.line = Line(tier, name, rng)
        self.keep, self.rules, self.options = keep, rules, options
        self.start()

    def start(self) -> None:
        """A daemon over what lies in the spool: at first, or anew."""
        self.spool = WatchedSpool(self.home)
        self.spool.tier, self.spool.keep = self.tier, self.keep
        settings = config(self.spool, TIER, keep=self.keep, **self.options)
        policy = RetentionPolicy(keep_last=self.keep, **self.rules)
        tiers = tuple(msgspec.structs.replace(one, retention=policy) for one in settings.tier)
        settings = msgspec.structs.replace(settings, tier=tiers)
        self.daemon = Reconciler(settings, self.spool, {TIER: self.line})
        self.daemon.requests.requested_runs.add(RUN)

    def steps(self) -> list[tuple[int, int]]:
        """`(launch, step)` of everything in the spool, oldest first."""
        found = {which.checkpoint for which in self.spool.parts()}
        return [(launch_of(one), one.step) for one in sorted(found)]

    async def planned(self) -> list[Action]:
        """What the daemon would do now, from a fresh look."""
        await self.daemon.observe(TIER)
        return list(plan(self.daemon.inventory(), self.daemon.config, {}, 0.0))

    async def turn(self, rng: random.Random | None = None) -> Action | None:
        """Look, and do the first thing of a tier worker; what it was."""
        actions = await self.planned()
        if not actions:
            return None
        lanes = sorted({action.tier for action in actions})
        lane = rng.choice(lanes) if rng else actions[0].tier
        action = next(action for action in actions if action.tier == lane)
        if isinstance(action, Prune) and action.tier == TIER:
            self._may_prune()
        await self.daemon._loop.act(action)
        return action

    def _may_prune(self) -> None:
        world = self.daemon.inventory()
        mine = {which.checkpoint.attempt for which in self.spool.parts() if which.rank == 0}
        seen = {which.checkpoint.attempt for which in (*self.spool.parts(), *world.tiers[TIER].parts())}
        assert max(seen) in mine, f"{self.name} is no janitor of {max(seen)}"


class Restless(AssertionError):
    """Daemons that go on and on with nothing new to do."""


class Nodes:
    """Nodes by name over one tier. What is saved shares most of its chunks with the step before."""

    def __init__(
        self,
        home: Path,
        *names: str,
        keep: int = 2,
        rng: random.Random | None = None,
        lag: bool = False,
        rules: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        self.tier = Tier()
        self.rng = rng
        slow = rng if lag else None
        self._make = lambda name: Node(name, home / name, self.tier, slow, keep, rules or {}, options)
        self._all: dict[str, Node] = {name: self._make(name) for name in names}
        self.clock: Mapping[str, str] = {}  # node -> what its clock says, RFC 3339

    def __getitem__(self, name: str) -> Node:
        if name not in self._all:
            self._all[name] = self._make(name)
        return self._all[name]

    def names(self) -> list[str]:
        return sorted(self._all)

    def alive(self) -> list[Node]:
        return list(self._all.values())

    def lose(self, name: str, *, spool: bool = True) -> Node:
        """A node that is gone, with its `spool` or not: one of that name that comes later has it, or has nothing."""
        node = self._all.pop(name)
        node.line.cut = True
        if spool:
            shutil.rmtree(node.home)
        return node

    def save(
        self,
        step: int,
        launch: int,
        placing: Sequence[str],
        *,
        origin: tuple[int, int] | None = None,
        ranks: Collection[int] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> CheckpointId:
        """Commit a checkpoint: rank r's part on node `placing[r]`, for these ranks only; `origin`: (launch, step)."""
        start = part(origin[1], origin[0]).checkpoint if origin else None
        for rank, name in enumerate(placing):
            if ranks is None or rank in ranks:
                which = part(step, launch, rank, len(placing))
                noise = random.Random(f"{step} {launch} {rank}")
                files = {
                    "backbone": bytes([rank]) * (2 * CHUNK),
                    "rows": bytes([rank, step // 3 % 251]) * (CHUNK // 2) + bytes([rank, launch]) * (CHUNK // 2),
                    "news": noise.randbytes(CHUNK // 2),
                }
                commit(self[name].spool, which, files, start, metrics, self.clock.get(name))
        return part(step, launch).checkpoint

    async def settle(self, *names: str, limit: int = 300) -> list[tuple[str, Action]]:
        """Turns, one node after the other or by chance, until none of these (all) has anything to do."""
        done: list[tuple[str, Action]] = []
        nodes = [self._all[name] for name in names or self._all]
        while True:
            order = self.rng.sample(nodes, len(nodes)) if self.rng else nodes
            found = [(node.name, await node.turn(self.rng)) for node in order]
            done += [(name, action) for name, action in found if action]
            if not any(action for _, action in found):
                break
            if len(done) > limit:
                raise Restless("at last:\n" + "\n".join(map(str, done[-12:])))
        self.tier.check()
        return done

    async def resume(self, name: str | None = None) -> RestoreOrder:
        """What a restore on this node has to go on, from a fresh look; without one, on a fresh node."""
        spool = self._all[name].spool if name else None
        return restore_candidates(await observe_places(spool, {TIER: self.tier}, RUN), RUN)

    async def offered(self, name: str | None = None) -> list[tuple[int, int]]:
        """`(launch, step)` of what a restore would try, in order."""
        found = await self.resume(name)
        return [(launch_of(one.checkpoint), one.checkpoint.step) for one in found.candidates]


def pruned(done: Iterable[tuple[str, Action]]) -> list[tuple[str, int, int]]:
    """`(node, launch, step)` of what was deleted from the tier, in order."""
    return [
        (name, launch_of(action.checkpoint), action.checkpoint.step)
        for name, action in done
        if isinstance(action, Prune) and action.tier != SPOOL
    ]
