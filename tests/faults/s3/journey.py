"""A reconciler at work over a storm of faults, and nodes that restore in one: what must come of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from faults.rounds import Lost
from faults.s3.proxy import BROKEN, DAMAGED, HARMLESS, LOST, REFUSALS, SAID, UNHEARD, Fault, Request
from faults.s3.slot import PREFIX, Slot, calm, chunks_of
from faults.streamed import read_streamed, serving
from support import by_hand
from support.world import commit, config, part, running

import tierd
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import CheckpointNotFound, CorruptChunk, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.planning.plan import plan
from tierd.daemon.reconciler import Reconciler
from tierd.spool.spool import Spool

_ALL = (*REFUSALS, *UNHEARD, *LOST, *BROKEN, *HARMLESS, *DAMAGED, *SAID)
_SLOW = ("stall in request", "stall before answer", "stall in answer", "endless drip", "slow drip")
_TIER = "s3"
_CONVERGED_S = 60.0


class Storm:
    """Faults at random, each request by itself, until `left` were chosen.

    A body is not flipped twice in a row on its way to one reader: a reader that reads it wrong twice may call it
    corrupt.
    """

    def __init__(self, rng: random.Random, rate: float, left: int, *, stale: bool) -> None:
        self._rng, self._rate, self.left, self._stale = rng, rate, left, stale
        self._whole: set[str] = set()  # whose next answer is to come as it is

    def __call__(self, request: Request) -> Fault | None:
        rng = self._rng
        spared = request.operation == "GetObject" and request.name in self._whole
        if not self.left or rng.random() > self._rate:
            self._whole.discard(request.name)
            return None
        name = rng.choice(_ALL)
        if request.operation == "GetObject" and rng.random() < 0.2:
            name = "flipped answer"
        if name in _SLOW and rng.random() < 0.8:
            name = rng.choice(list(REFUSALS))
        if name == "stale" and not self._stale:
            return None
        if name == "hollow 200" and request.operation == "DeleteObjects":
            return None  # no answer to it tells more
        if name == "flipped answer":
            if request.operation != "GetObject" or spared:
                return None
            self._whole.add(request.name)
        self.left -= 1
        return Fault(name, rng.random())


@contextlib.contextmanager
def _no_fallback(doing: str) -> Iterator[None]:
    """What goes wrong in a storm may be raised, and is never called corrupt or absent: all of it passes."""
    try:
        yield
    except (CheckpointNotFound, CorruptChunk, ManifestError, ObjectNotFound) as error:
        raise Lost(f"{doing} takes what passes for corrupt or gone: {error!r}") from error
    except TierdError:
        pass


class Siege:
    """One object that no GET gives, `left` times: the same fault each time."""

    def __init__(self, rng: random.Random, key: str, left: int) -> None:
        self._rng, self._key, self.left = rng, key, left
        self._fault = rng.choice((*REFUSALS, *LOST, "reset after request", "reset in answer", "hollow 200"))

    def __call__(self, request: Request) -> Fault | None:
        if not self.left or (request.operation, request.name) != ("GetObject", self._key):
            return None
        self.left -= 1
        return Fault(self._fault, self._rng.random())


async def trial(slot: Slot, seed: int, rng: random.Random) -> None:
    home = slot.room / f"{seed}"
    try:
        await _Journey(slot, seed, rng, home).whole()
    finally:
        shutil.rmtree(home, ignore_errors=True)


class _Journey:
    def __init__(self, slot: Slot, seed: int, rng: random.Random, home: Path) -> None:
        self.slot, self.rng, self.home = slot, rng, home
        self.run = f"r{seed}"
        self.world = rng.choice((1, 1, 2))
        self.steps = list(range(10, 10 * (rng.randrange(2, 6) + 1), 10))
        self.keep = rng.choice((1, 2, 2, 100))
        self.files: dict[PartId, dict[str, bytes]] = {}
        self.spool = Spool(home / "spool")
        self.frozen = rng.randbytes(2500)  # the same in every step: shared chunks

    async def whole(self) -> None:
        await self._fill()
        await self.slot.compared()  # from here on the mirror is what the server itself says
        self._check_tier()
        await self._scrub()
        await self._restore()
        await self.slot.compared()
        self._check_tier()

    def _storm(self, left: int, *, stale: bool = False) -> None:
        self.slot.judge = Storm(self.rng, self.rng.choice((0.1, 0.2, 0.4)), left, stale=stale)

    def _commit(self, step: int) -> None:
        for rank in range(self.world):
            one = part(step, rank=rank, world=self.world, run=self.run)
            files = {
                "weights.bin": self.rng.randbytes(self.rng.choice((900, 2500, 4000))),
                "frozen.bin": self.frozen + bytes([rank]),
                "state.json": b'{"step": %d}' % step * self.rng.choice((1, 200)),
            }
            self.files[one] = commit(self.spool, one, files)

    def _reconciler(self, spool: Spool, keep: int) -> Reconciler:
        return Reconciler(config(spool, _TIER, keep=keep, keep_local=1), spool, {_TIER: self.slot.store})

    async def _fill(self) -> None:
        """Flush and prune as checkpoints come, then let the storm pass."""
        first = self.rng.choice((1, 1, 1, len(self.steps) - 1))
        for step in self.steps[:first]:
            self._commit(step)
        self._storm(self.rng.randrange(10, 60), stale=True)
        async with running(self._reconciler(self.spool, self.keep)) as daemon:
            for step in self.steps[first:]:
                await self._sent(self.rng.choice((0.1, 5.0, 5.0)))
                self._commit(step)
                daemon.wake()
            storm = self.slot.judge
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(6):
                    while storm.left:  # type: ignore[attr-defined]
                        await asyncio.sleep(0.02)
                        daemon.wake()
            self.slot.judge = calm
            self.slot.reported.append("calm")
            await self._converge(daemon)
            self._check_quiet(daemon)

    async def _sent(self, patience_s: float) -> None:
        """Let the newest step get to the tier, where the next one may then have it pruned."""
        end, newest = time.monotonic() + patience_s, max(one.checkpoint for one in self.files)
        wanted = {one.manifest_key for one in self.files if one.checkpoint == newest}
        while time.monotonic() < end and not wanted <= self.slot.below(f"{self.run}/manifests/").keys():
            await asyncio.sleep(0.02)

    async def _converge(self, daemon: Reconciler) -> None:
        """Until, by a fresh look, nothing is left to do, and no turn is left over."""
        quiet, end = 0, time.monotonic() + _CONVERGED_S
        while quiet < 2:
            for lane in daemon.workers.values():
                lane.retry_now()
            daemon.wake()
            await asyncio.sleep(0.05)
            await daemon.observe(_TIER)
            world = daemon.inventory()
            todo = plan(world, daemon.config, {}, 0.0)
            turns = [*self.slot.below(f"{self.run}/flushing/"), *self.slot.below(f"{self.run}/pruning/")]
            working = [lane.doing for lane in daemon.workers.values() if lane.doing]
            quiet = 0 if todo or turns or working or world.busy else quiet + 1
            if time.monotonic() > end:
                errors = [lane.last_error for lane in daemon.workers.values()]
                raise Lost(f"not converged {_CONVERGED_S:.0f} s after the last fault: {todo} {turns} {errors}")

    def _check_quiet(self, daemon: Reconciler) -> None:
        for counter in ("corruptions", "quarantined"):
            if daemon.journal.counters[counter]:
                raise Lost(f"{counter}, and nothing is corrupt: {[str(event) for event in daemon.journal.events][-5:]}")
        if quarantined := daemon.spool.quarantined():
            raise Lost(f"set aside in the spool: {list(quarantined)}")

    def _check_tier(self) -> None:
        """What a calm tier holds: whole checkpoints, those that the policy keeps, and nothing else."""
        found = self.slot.below(f"{self.run}/")
        manifests = {key: data for key, data in found.items() if "/manifests/" in key}
        kept = self.steps[-self.keep :]
        wanted = {one.manifest_key: one for one in self.files if one.checkpoint.step in kept}
        if manifests.keys() != wanted.keys():
            raise Lost(f"of steps {self.steps}, keeping {self.keep}, the tier holds {sorted(manifests)}")
        named: set[str] = set()
        for key, data in manifests.items():
            named |= {name.removeprefix("p/") for name in chunks_of(f"p/{key}", data)}
            self._check_content(wanted[key], data)
        for key in found.keys() - manifests.keys() - named:
            self._check_spare(key, found[key], manifests)

    def _check_spare(self, key: str, data: bytes, manifests: dict[str, bytes]) -> None:
        """What a flush that was cut off has put may lie beside an equal chunk that the next one named: it goes with its
        checkpoint. And the run's policy and its head lie there. Nothing else may be left over."""
        pieces = key.split("/")
        if pieces[1] == "timeline" and _newest(data) == self.steps[-1]:
            return
        if pieces[1] == "retention" and json.loads(data)["retention"] == {"keep_last": self.keep}:
            return
        for name, manifest in manifests.items():
            if pieces[1] == "chunks" and pieces[-3] == name.split("/")[2]:
                digests = {chunk["xxh3_128"] for file in json.loads(manifest)["files"] for chunk in file["chunks"]}
                if pieces[-1].partition(".")[0] in digests:
                    return
        raise Lost(f"left over when all was calm, of {self.steps}, keeping {self.keep}: {key}")

    def _check_content(self, one: PartId, manifest: bytes) -> None:
        """Put a part together by hand, from what the server holds."""
        described = by_hand.sealed(manifest)
        if described is None:
            raise Lost(f"{one}: the seal is broken")
        for file in described["files"]:
            data = b""
            for chunk in file["chunks"]:
                for below in by_hand.chain(chunk):
                    stored = self.slot.mirror[f"p/{self.run}/{below['stored']['key']}"]
                    if by_hand.digest(stored) != below["stored"]["xxh3_128"]:
                        raise Lost(f"{one}: {below['stored']['key']} holds other bytes")
                data += by_hand.raw(chunk, lambda key: self.slot.mirror[f"p/{self.run}/{key}"])
            if data != self.files[one][file["path"]]:
                raise Lost(f"{one}: {file['path']} is wrong on the tier")
        if {file["path"] for file in described["files"]} != set(self.files[one]):
            raise Lost(f"{one}: files are missing on the tier")

    async def _scrub(self) -> None:
        """Read all again in a storm: nothing that goes wrong on the way is called corrupt."""
        daemon = self._reconciler(self.spool, self.keep)
        self._storm(20)
        for _ in range(2):
            for name in (_TIER, "local"):
                with contextlib.suppress(TierdError):
                    await daemon.observe(name)
            for one in self.files:
                if one.checkpoint.step in self.steps[-self.keep :]:
                    with _no_fallback("a scrub"):
                        await daemon.scrubber.scrub(ScrubbedCopy(_TIER, one))
        self.slot.judge = calm
        self._check_quiet(daemon)

    async def _restore(self) -> None:
        """On new nodes: in a storm, with one object that nobody gets, and at last a calm one.

        A restore of directories goes through the spool, and what a trainer reads past it where it can.
        """
        chance = random.Random(f"stream {self.run}")
        for number in range(3):
            restore = chance.choice((self._check_directories, self._check_streamed))
            with self._node(number) as spool:
                async with self._serving(spool) as daemon:
                    if number == 0:
                        self._storm(25)
                    elif number == 1:
                        await daemon.observe(_TIER)  # so that it is asked for, and then not to be had
                        rng = random.Random(self.run)  # of its own: how much a storm draws, a race decides
                        self.slot.judge = Siege(rng, rng.choice(self._newest()), 60)
                    with _no_fallback("a restore"):
                        await restore(spool)
                        self.slot.notes["a restore came through its storm"] += number < 2
                    self.slot.judge = calm
                    await restore(spool)

    def _newest(self) -> list[str]:
        """The keys in the bucket of what a restore on rank 0 needs of the newest checkpoint: the manifest as often as
        all its chunks."""
        one = part(self.steps[-1], world=self.world, run=self.run)
        name = f"{PREFIX}{one.manifest_key}"
        chunks = sorted(chunks_of(name, self.slot.mirror[name]))
        return [*chunks, *[name] * len(chunks)]

    @contextlib.contextmanager
    def _node(self, number: int) -> Iterator[Spool]:
        home = self.home / f"node{number}"
        yield Spool(home)
        shutil.rmtree(home)

    @contextlib.asynccontextmanager
    async def _serving(self, spool: Spool) -> AsyncIterator[Reconciler]:
        """A daemon of that spool."""
        async with serving(self._reconciler(spool, 100)) as daemon:
            yield daemon
        self._check_quiet(daemon)

    async def _check_directories(self, spool: Spool) -> None:
        self._check_restored(await asyncio.to_thread(self._restored, spool))

    async def _check_streamed(self, spool: Spool) -> None:
        newest = part(self.steps[-1], world=self.world, run=self.run)
        files, is_past = await asyncio.to_thread(read_streamed, spool, newest)
        if files != self.files[newest]:
            raise Lost("a restore past the spool gave wrong bytes")
        self.slot.notes[f"a restore {'past' if is_past else 'through'} the spool"] += 1

    def _restored(self, spool: Spool) -> Restored | None:
        attempt = tierd.new_attempt()
        with tierd.Checkpointer(spool.root, self.run, 0, self.world, attempt=attempt) as checkpointer:
            return checkpointer.restore()

    def _check_restored(self, found: Restored | None) -> None:
        newest = part(self.steps[-1], world=self.world, run=self.run)
        if found is None or found.step != newest.checkpoint.step or found.skipped:
            raise Lost(f"a restore found {found}, and the newest is {newest}")
        for name, data in self.files[newest].items():
            if (found.directory / name).read_bytes() != data:
                raise Lost(f"a restore gave wrong bytes of {name}")


def _newest(head: bytes) -> int | None:
    """The newest whole step of the newest launch, as a head says it."""
    launches = json.loads(head)["launches"]
    newest: int | None = launches[max(launches)]["newest"]
    return newest
