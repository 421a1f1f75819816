"""Simulated nodes: the real reconciler, scrubber, stores' retries and control on a simulated disk and line, and ranks
that save and restore there by the client's own code.

Invariant: a crash ends a life between two callbacks, or between two calls to the disk, and takes with it all but what
the disk kept. What was on its way to a tier may still arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import msgspec
from faults.rounds import Lost
from faults.simulation.disk import Disk, Watch
from faults.simulation.loop import ProcessLife, SimLoop
from faults.simulation.store import Bucket, Line, Weather
from faults.simulation.truth import HOMES, Checkpoint, Part, Truth, committed, content
from support.world import RUN, commit, config, part

from tierd.client.ranks.attempts import RankClock
from tierd.client.restoring import part_source, restorer, verified_chunks
from tierd.core.config import Config
from tierd.core.errors import CheckpointNotFound, StepRefused, TierdError
from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL, Flush, Prune
from tierd.core.planning.plan import plan
from tierd.daemon.control_socket import ControlServer
from tierd.daemon.reconciler import Reconciler
from tierd.ipc import message_codec, messages
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.retry import RetryingStore

_FLUSHED = re.compile(r"\S+ step (\d+) \(attempt \S+-([0-9a-f]{8})\) rank (\d+) of ")
_DROPPED = re.compile(r"what attempt \S+-([0-9a-f]{8}) resumed from cannot be told any more")
_PATIENCE = 120.0  # seconds of real time that a trainer may take for what it does by itself


@dataclass
class World:
    """What all nodes of a trial share. `options` are the configuration's."""

    loop: SimLoop
    rng: random.Random
    home: Path
    watch: Watch
    weather: Weather
    buckets: list[Bucket]
    truth: Truth
    keep: int
    keep_local: int
    options: dict[str, Any]
    count: Counter[str] = field(default_factory=Counter)
    nodes: list[Node] = field(default_factory=list)

    def spools(self, nodes: Iterable[Node] | None = None) -> list[tuple[Path, int]]:
        return [(node.root, node.disk.version) for node in (self.nodes if nodes is None else nodes)]


def number(which: PartId) -> Part:
    return int(which.checkpoint.attempt[-8:], 16), which.checkpoint.step, which.rank


class WatchedSpool(Spool):
    """Says what goes, before it does. A daemon takes whatever is raised in it for a failure, so the loop is told."""

    machine: Machine
    life: ProcessLife

    def remove(self, parts: Iterable[PartId], reuse: Collection[str] = ()) -> None:
        parts = list(parts)
        for one in parts:
            if not self.life.dead and self.has(one):
                self.machine.judged(lambda one=one: self.machine.may_go(one))  # type: ignore[misc]
        super().remove(parts, reuse)
        if not self.life.dead:
            self.machine.gone(parts)

    def quarantine(self, one: PartId) -> None:
        if not self.life.dead:
            self.machine.judged(lambda: self.machine.may_be_quarantined(one))
        super().quarantine(one)
        if not self.life.dead:
            self.machine.gone([one])


class _NoHandOff:
    """No trainer left anything in memory."""

    busy = False

    async def settled(self) -> None: ...

    def handed_over_bytes(self) -> int:
        return 0


class Machine:
    """A disk, and the daemon that lives there now. `up`: whether it does. `world`: what all machines share."""

    spool_type: type[WatchedSpool] = WatchedSpool

    def __init__(self, world: Any, name: str, skew: float = 0.0) -> None:
        self.world, self.name, self.skew = world, name, skew
        self.up = False
        self._lives = 0
        self.mount()

    @property
    def root(self) -> Path:
        """Of its spool."""
        return self.disk.root / "spool"

    def _place(self) -> Path:
        self._lives += 1
        place: Path = self.world.home / f"{self.name}.{self._lives}"
        return place

    def mount(self) -> None:
        """A disk with nothing on it."""
        home = self._place()
        home.mkdir()
        self._use(Disk(home, self.world.rng, self.world.watch))

    def _use(self, disk: Disk) -> None:
        self.disk = disk
        disk.target = self._about_to_cut

    def _about_to_cut(self) -> Path:
        return self._place()

    def start(self) -> None:
        self.life = ProcessLife(self.name, self.skew)
        self.life.run(self._start)

    def _start(self) -> None:
        self.spool = self.spool_type(self.root)
        self.spool.machine, self.spool.life = self, self.life
        self.lines = {line.bucket.name: line for line in self._made_lines()}
        stores = {name: RetryingStore(line, rng=self.world.rng.random) for name, line in self.lines.items()}
        settings = self._config()
        jitter = random.Random(self.world.rng.random())
        self.daemon = Reconciler(settings, self.spool, stores, self._heard, jitter=jitter)
        self.control = ControlServer(self.daemon, _NoHandOff())  # type: ignore[arg-type]
        self.work = self.life.spawn(self.daemon.run())
        self.up = True

    def judged(self, ask: Callable[[], None]) -> None:
        """Have the judge look at something; what it finds ends the trial."""
        try:
            ask()
        except Exception as error:  # the judge's own too
            self.world.loop.lose(error)

    # What a trial's machines differ in.

    def _made_lines(self) -> Iterable[Line]:
        raise NotImplementedError

    def _config(self) -> Config:
        raise NotImplementedError

    def _heard(self, event: Event) -> None:
        """A daemon's event."""

    def may_go(self, one: PartId) -> None:
        """A copy is about to be deleted from the spool."""

    def may_be_quarantined(self, one: PartId) -> None:
        """A copy is about to be quarantined in the spool."""

    def gone(self, parts: list[PartId]) -> None:
        """Copies were deleted from the spool, or quarantined there."""


class Node(Machine):
    """A machine of a `World`, that loses power."""

    def __init__(self, world: World, name: str) -> None:
        self.cut_step: int | None = None  # the loop's step after which the power goes
        self.down_for = 0.0
        self.restoring = False
        self._required: set[Part] = set()
        super().__init__(world, name, world.rng.choice((0.0, 0.0, 0.0, 120.0, -3000.0, 3000.0)))
        world.nodes.append(self)

    def renew(self) -> None:
        """Another disk, with nothing on it."""
        self.world.watch.leave(self.disk)
        self.mount()

    def _made_lines(self) -> Iterable[Line]:
        world = self.world
        return [Line(one, self.life, world.weather, world.rng, world.count) for one in world.buckets]

    def _config(self) -> Config:
        world = self.world
        names = [bucket.name for bucket in world.buckets]
        return config(self.spool, *names, keep=world.keep, keep_local=world.keep_local, **world.options)

    def may_go(self, one: PartId) -> None:
        self.world.truth.may_go(self.name, number(one), self.root)

    def may_be_quarantined(self, one: PartId) -> None:
        if number(one) in self.world.truth.in_spool(self.root, -1):
            raise Lost(f"{one} is set aside in the spool, and is right there")

    def gone(self, parts: list[PartId]) -> None:
        self.world.truth.excused -= {(self.name, number(one)) for one in parts}

    def _heard(self, event: Event) -> None:
        """Told that a part lies on a tier, a trainer counts on it: this node may be lost the next moment."""
        if event.what == "flushed" and (found := _FLUSHED.match(event.subject)):
            part = int(found[2], 16), int(found[1]), int(found[3])
            self.judged(lambda: self.world.truth.flushed(event.place, part, self.name))

    # -- crashing ---------------------------------------------------------------------------------------------------

    def _about_to_cut(self) -> Path:
        truth = self.world.truth
        # What is being fetched is in its place, perhaps, and not durable there yet.
        coming = {number(part) for part in self.daemon.repairs.running_fetches} if self.up else set()
        self._required = (truth.acked & truth.in_spool(self.root, self.disk.version)) - coming
        return self._place()

    def is_due(self) -> bool:
        return self.disk.cut_off is not None or (self.cut_step is not None and self.world.loop.steps >= self.cut_step)

    def crash(self) -> None:
        """The power goes, and comes back after a while."""
        old, truth = self.disk, self.world.truth
        doing = {lane.doing.split()[0] for lane in self.daemon.workers.values() if lane.doing}
        self.world.count.update(f"crashes while {one}" for one in doing | ({"restoring"} if self.restoring else set()))
        self.restoring = False
        new = old.cut_off or old.cut()
        self.life.end()
        self.world.watch.leave(old)
        self._use(new)
        self.up, self.cut_step = False, None
        self.world.count["crashes"] += 1
        left = truth.in_spool(self.root, self.disk.version)
        if lost := {one for one in self._required - left if (self.name, one) not in truth.excused}:
            raise Lost(f"{self.name}: acknowledged, and lost in a power cut: {sorted(lost)}")
        truth.floor = max(truth.whole(self.world.spools()), default=None)
        self.world.loop.call_later(self.down_for, self.start)

    # -- quiet ------------------------------------------------------------------------------------------------------

    def is_calm(self, *, strict: bool) -> bool:
        """Whether nothing is left to do, as far as the daemon knows. If not `strict`, nothing but pruning a tier, and
        the flushes to one where the mark of another node's interrupted prune stops them, for a day."""
        if not self.up:
            return False
        world, stopped = self.daemon.inventory(), self._stopped() if not strict else set()
        workers = [one for name, one in self.daemon.workers.items() if name not in stopped]
        workers += self.daemon.scrubber._workers.values()
        calm = all(one.doing is None and not one.wake.is_set() and not one.last_error for one in workers)
        busy = world.busy and not stopped
        return calm and None not in world.tiers.values() and not busy and not self.planned(strict=strict)

    def planned(self, *, strict: bool = True) -> list[Any]:
        found = plan(self.daemon.inventory(), self.daemon.config, {}, 0.0)
        if strict:
            return list(found)
        here = [one for one in found if not isinstance(one, Prune) or one.tier == SPOOL]
        return [one for one in here if not isinstance(one, Flush) or one.tier not in self._stopped()]

    def _stopped(self) -> set[str]:
        """The tiers where a mark stops this daemon's flushes."""
        errors = {name: str(worker.last_error) for name, worker in self.daemon.workers.items()}
        return {name for name, error in errors.items() if "which it names, are being deleted" in error}


# -- ranks ------------------------------------------------------------------------------------------------------------


class Caller:
    """Blocking code of a trainer, in a thread of its own that runs only while the loop waits for it."""

    here = threading.local()

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._begin: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None

    async def run(self, work: Callable[[], Any]) -> Any:
        outcome: list[Any] = []
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._main, work, outcome), daemon=True)
        thread.start()
        while True:
            if not self._back.acquire(timeout=_PATIENCE):
                raise Lost(f"{work} came to no answer within {_PATIENCE:.0f} s")
            if outcome:
                break
            assert self._begin is not None
            try:
                self._answer, self._error = await self._begin(), None
            except BaseException as error:
                self._answer, self._error = None, error
            self._go.release()
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[1]

    def _main(self, work: Callable[[], Any], outcome: list[Any]) -> None:
        self.here.caller = self
        try:
            found = work()
            outcome += [None, found]
        except BaseException as error:
            outcome.append(error)
        self._back.release()

    def ask(self, begin: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """In the thread: have the loop do something."""
        self._begin = begin
        self._back.release()
        self._go.acquire()
        if self._error is not None:
            raise self._error
        return self._answer


class _Link:
    """The client's line to the daemon of its node."""

    def __init__(self, spool: Any) -> None:
        self._node: Node = spool.node
        self._held: set[PartId] = set()
        self._life = self._node.life

    def greet(self) -> None:
        """Client and daemon are of one version here."""

    def ask(self, request: Any, timeout_s: float | None = None, on_progress: Any = None) -> dict[str, Any]:
        line = messages.encode_line(Caller.here.caller.ask(lambda: self._answer(request)))
        reply = msgspec.json.decode(line)
        if not reply.get("ok"):
            message_codec.raise_error(reply)
        return dict(reply)

    async def _answer(self, request: Any) -> dict[str, Any]:
        if isinstance(request, messages.Wait):
            self._node.world.count["restores that another node was asked for"] += 1
        try:
            return {"ok": True, **await self._life.spawn(self._node.control.handler.handle(request, self._held))}
        except (TierdError, TimeoutError, OSError) as error:
            return message_codec.error_reply(error)

    def close(self) -> None:
        for one in self._held:
            self._node.daemon.repairs.release(one)
        self._held.clear()


class _Board:
    """Where ranks tell each other."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._said: dict[int, Any] = {}
        self._heard: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    async def report(self, rank: int, value: Any) -> list[Any]:
        self._said[rank] = value
        heard = self._heard
        if len(self._said) == self._world:
            heard.set_result([self._said[one] for one in range(self._world)])
            self._said, self._heard = {}, asyncio.get_running_loop().create_future()
        return list(await asyncio.shield(heard))


@dataclass
class _Ranks:
    rank: int
    world: int
    board: _Board
    can_communicate: bool = True

    def gather(self, value: Any) -> list[Any]:
        return list(Caller.here.caller.ask(lambda: self.board.report(self.rank, value)))


class _Lost(Exception):
    """A node went while its ranks were at work."""


# What was there when a restore was asked for: what it should give, the newest launch, the injuries, what is whole.
_Before: TypeAlias = tuple[Checkpoint | None, int | None, int, set[Checkpoint]]


class Job:
    """One launch: a rank on each of these nodes."""

    def __init__(self, world: World, placing: list[Node]) -> None:
        self.world, self.placing = world, placing
        self.lives = [node.life for node in placing]
        self.number = 0
        self.origin: Checkpoint | None = None
        self.step = 0
        self.why: BaseException | None = None
        self.unreached: set[str] = set()  # what a restore named as tiers that did not answer

    @property
    def broken(self) -> bool:
        return any(life.dead for life in self.lives)

    async def resume(self, asked: Checkpoint | None = None) -> str:
        """Restore what is `asked` for by name, or the newest, and begin a launch; how that went: "resumed", "anew",
        "unavailable" or "broken"."""
        truth, nodes = self.world.truth, [*dict.fromkeys(self.placing)]
        self.unreached.clear()
        spools = self.world.spools(nodes)
        before = truth.expected(spools), truth.newest(spools), truth.injuries, truth.whole(spools)
        tells = truth.tells(self.world.spools(nodes))
        board, keep = _Board(len(self.placing)), self.world.rng.random() < 0.5
        local = [{one for one, _ in committed(node.root)} for node in self.placing]
        tasks = [
            life.spawn(Caller().run(lambda rank=rank: self._restore(rank, board, keep, asked)))  # type: ignore[misc]
            for rank, life in enumerate(self.lives)
        ]
        for node in nodes:
            node.restoring = True
        _, late = await asyncio.wait(tasks, timeout=90_000.0)
        for node in nodes:
            node.restoring = False
        if self.broken:
            await self._drop(tasks)
            return "broken"
        if late:
            await self._drop(tasks)
            raise Lost(f"a hang: {len(late)} ranks of {len(tasks)} did not come back from a restore within a day")
        failures = [failure for task in tasks if (failure := task.exception())]
        if failures:
            for failure in failures:
                if isinstance(failure, Lost) or not isinstance(failure, TierdError):
                    raise failure
            self.world.count["restores that raised"] += 1
            nothing = [str(one) for one in failures if isinstance(one, CheckpointNotFound)]
            # What a launch resumed from is in its manifests and in heads: while any can be read, it must be told.
            tells &= truth.tells(self.world.spools(nodes))
            dropped = {int(one, 16) for one in _DROPPED.findall("".join(nothing))} - tells
            ends = {one for one in dropped if truth.is_hurt(one) or one in truth.orphaned}
            if nothing and not (before[0] and any(before[0][0] < one for one in ends)):  # what lies above is reached
                self._check(None, before, nothing[0])
            self.world.count["origins that went with a node"] += bool(dropped & truth.orphaned)
            self.why = failures[0]
            return "unavailable"
        answers = [task.result() for task in tasks]
        if len({one and (one[0], one[1]) for one in answers}) != 1:
            raise Lost(f"ranks restored different checkpoints: {answers}")
        found = answers[0]
        if asked is None:
            self._check(found, before, "a restore")
        elif found != asked:
            raise Lost(f"a restore gave {found}, and was asked for {asked}")
        self._begin(found)
        self.world.count["restores"] += 1
        if found and any((*found, rank) not in parts for rank, parts in enumerate(local)):
            self.world.count["restores elsewhere"] += 1
        return "resumed" if found else "anew"

    async def _drop(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    def _begin(self, found: Checkpoint | None) -> None:
        truth = self.world.truth
        self.number = max(truth.origins, default=0) + 1
        self.origin, self.step = found, found[1] if found else 0
        truth.origins[self.number] = found

    def _restore(self, rank: int, board: _Board, keep: bool, asked: Checkpoint | None) -> Checkpoint | None:
        step, attempt = (asked[1], part(asked[1], asked[0]).checkpoint.attempt) if asked else (None, None)
        node = self.placing[rank]
        spool = Spool(node.root, write=False)
        spool.node = node  # type: ignore[attr-defined]
        ranks, truth, injuries = _Ranks(rank, len(self.placing), board), self.world.truth, -1

        def compare(found: restorer.VerifiedPart) -> dict[str, Any]:
            """Right after it was verified, before this rank waits for the others."""
            nonlocal injuries
            injuries, which = truth.injuries, number(found.part)
            for name, data in content(which).items():
                given = bytes(found.files[name]) if keep else (found.directory / name).read_bytes()
                if given != data:
                    raise Lost(f"a restore of {which} gave wrong bytes of {name}")
            return {}

        source = part_source.NodeSource(spool, RUN, tiers=True, keep=keep)  # type: ignore[arg-type]
        found = restorer.Restorer(source, ranks, lambda: RankClock(0, "0" * 8, None)).restore(step, attempt, compare)
        if found is None:
            return None
        which = number(found.part)
        self.unreached.update(found.unreached)
        # A rank may wait for another one for an hour, and meanwhile the trial may rot a file that was right when it was
        # verified. What was handed on in memory cannot rot so.
        if keep or not truth.is_hurt_since(injuries, node.name, which):
            compare(found)
        if found.hold:
            found.hold.close()
        return which[:2]

    def _check(self, found: Checkpoint | None, before: _Before, what: str) -> None:
        """An answer is no older than what was there when it was asked for, and lies on a timeline."""
        expected, newest, injuries, whole = before
        truth = self.world.truth
        if found is not None:
            if len({one for one in truth.begun if one[:2] == found}) != truth.world:
                raise Lost(f"{what} gave {found}, which not every rank has saved")
            now = [one(self.world.spools()) for one in (truth.newest, truth.shown)]
            paths = [truth.path(one) for one in (newest, *now)]
            if not any(one == found[0] and found[1] <= limit for path in paths for one, limit in path):
                raise Lost(f"{what} gave {found}, off the timeline of {newest}")
        if expected is None or truth.injuries != injuries:
            return
        # A launch that another node was still saving may have been seen since, and then its timeline is the one.
        now = truth.newest(self.world.spools())
        if now != newest and found is not None and found == truth.along(now, whole):
            return
        if found is None or (found != expected and found < expected):
            # A tier that `Restored.unreached` names may have newer ones, of which nothing that answered knows.
            spools = self.world.spools([*dict.fromkeys(self.placing)])
            answered = truth.along(newest, truth.whole(spools, self.unreached))
            if found is not None and self.unreached and found == answered:
                self.world.count["restores past a tier that was named silent"] += 1
                return
            raise Lost(f"{what} gave {found}, and {expected} was right there")

    async def save(self, ranks: Collection[int]) -> None:
        """One checkpoint of these ranks; each is told when its part is durable."""
        self.step += self.world.rng.choice((1, 1, 5))
        tasks = [self.lives[rank].spawn(self._save(rank, self.step)) for rank in ranks]
        done, _ = await asyncio.wait(tasks)
        for task in done:
            if not task.cancelled() and (failure := task.exception()):
                raise failure

    async def _save(self, rank: int, step: int) -> None:
        world, node, life = self.world, self.placing[rank], self.lives[rank]
        await asyncio.sleep(world.rng.choice((0.0, 0.0, 0.1, 5.0)))
        which = part(step, self.number, rank, len(self.placing))
        origin = part(self.origin[1], self.origin[0]).checkpoint if self.origin else None
        world.truth.begun.add(number(which))
        try:
            await asyncio.to_thread(commit, node.spool, which, content(number(which)), origin, homes=HOMES)
        except StepRefused as error:
            raise Lost(str(error)) from error
        if life.dead or node.disk.cut_off is not None:
            return
        world.truth.acked.add(number(which))
        world.count["saves"] += 1
        if world.rng.random() < 0.8:  # else the event is lost
            node.daemon.wake()


@contextlib.contextmanager
def tierd_here(loop: SimLoop) -> Iterator[None]:
    """What of tierd would reach outside: threads, sockets, and what tells this machine's nodes apart."""

    def name(home: Path) -> str:
        return digest(home.parent.name.partition(".")[0].encode())[:8]

    with contextlib.ExitStack() as stack:
        for target, value in (
            ("tierd.daemon.tiers.node_records.node_id", name),
            ("tierd.daemon.scrub.tier_repair.node_id", name),
            ("tierd.core.planning.flush_order.SMALLEST_SHARED_BYTES", 1),
            ("tierd.spool.file_io.ahead", lambda items, worth: contextlib.nullcontext(items)),
            ("tierd.spool.verified_reads.ahead", lambda items, worth: contextlib.nullcontext(items)),
            ("tierd.spool.direct_io.ahead", lambda items, worth: contextlib.nullcontext(items)),
        ):
            stack.enter_context(mock.patch(target, value))
        stack.enter_context(mock.patch.object(part_source, "DaemonConnection", _Link))
        stack.enter_context(mock.patch.object(verified_chunks, "HANDS", 0))
        yield
