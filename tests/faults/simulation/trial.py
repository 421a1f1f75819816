"""One trial: a small world of one to three nodes and one or two tiers, from its first save to its rest.

Its ranks save, die and restore; nodes lose power after any callback and before any call to the disk; lines fail in
every way; bits rot. Of three trials, one is a short story, cut at another step or call each time. Required, after every
step: what `truth` says. At the end faults stop, and everything comes to rest at what retention wants, with nothing left
over.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults.rounds import Lost
from faults.simulation.disk import OUTCOMES, Watch, watched
from faults.simulation.life import RegionLife
from faults.simulation.loop import SimLoop, clocked
from faults.simulation.loop import run as run_loop
from faults.simulation.node import Job, Node, World, tierd_here
from faults.simulation.store import Bucket, Weather
from faults.simulation.truth import HEAD, Truth, committed, named, part_of
from support.by_hand import sealed
from support.timed import timed

from tierd.core.errors import CheckpointNotFound

LIVES = 1_000_000  # seeds from here on are whole lives
_MOST = 600_000  # steps of a trial: more is a hang
_LEFT = 1000.0  # seconds after which a node takes away a prune's intent of its own that a failed call left
_VOICES = 0.15  # probability that a moment of chaos also takes a manifest or a head


class Trial:
    """One seed's world, from its first save to its rest."""

    def __init__(self, seed: int, home: Path) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.apart = random.Random(f"heads {seed}")  # so that all else is as it would be without them
        self.short = seed % 3 == 0
        self.failing = self.rng.choice((0.0, 0.05, 0.3))  # ranks that save nothing at a step
        self.loop = SimLoop(self.rng, _MOST)
        self.home = home
        self.faulty = 0  # steps while faults happened
        self.checked = 0

    def run(self) -> tuple[int, Counter[str]]:
        watch = Watch()
        with clocked(self.loop), watched(watch), tierd_here(self.loop), pytest.MonkeyPatch.context() as patch:
            if self.seed % 2:  # of every complete checkpoint
                timed(patch, summarised_ranks=1, summarised_manifests=0)
            try:
                run_loop(self.loop, self._story(watch))
            except Lost as error:
                error.add_note(f"after {self.loop.steps} steps, {self.loop.now - 1000:.1f} simulated seconds")
                raise
        return self.faulty, self.world.count

    # -- the world --------------------------------------------------------------------------------------------------

    def _make(self, watch: Watch) -> None:
        rng = self.rng
        self.ranks = 1 if self.short else rng.choice((1, 2, 2, 3))
        tiers = 1 if self.short else rng.choice((1, 1, 2))
        keep = 1 if self.short else rng.choice((1, 1, 2, 3))
        buckets = [Bucket(name) for name in ("near", "far")[:tiers]]
        truth = Truth(self.ranks, buckets, keep)
        keep_local = (
            1 if self.short else rng.randint(1, keep)
        )  # more would keep halves that nobody can tell from whole ones
        options: dict[str, Any] = {
            "rescan": rng.choice(("30s", "120s", "600s")),
            "scrub": rng.choice(("1h", "6h")),
            "scrub_rate": "1MB/s",
        }
        weather = Weather() if self.short else self._weather()
        self.world = World(self.loop, rng, self.home, watch, weather, buckets, truth, keep, keep_local, options)
        for bucket in buckets:
            bucket.changed = lambda *change, bucket=bucket: self._changed(bucket, *change)  # type: ignore[misc]
        for index in range(1 if self.short else rng.randint(1, self.ranks)):
            node = Node(self.world, "ABC"[index])
            if self.short:
                self._choose_a_cut(node)
            node.start()

    def _weather(self) -> Weather:
        rng = self.rng
        bad = rng.choice((0.0, 0.005, 0.02, 0.05))
        return Weather(
            fails=bad,
            lost=bad,
            late=bad,
            stalls=bad / 10,
            partial=2 * bad,
            spoils=rng.choice((0.0, 0.0, 0.04)),
            flips=rng.choice((0.0, 0.0, 0.004)),
            slow=rng.choice((0.001, 0.02, 0.3)),
        )

    def _changed(self, bucket: Bucket, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        self.world.count["patches put"] += new is not None and ".patch" in key
        self.world.count["summaries put"] += new is not None and "/0-summaries/" in key
        try:
            self.world.truth.changed(bucket, key, old, new, who)
        except Exception as error:  # also the judge's own: in the daemon it would pass for a fault of the store
            self.loop.lose(error)

    def _after(self) -> None:
        """What must hold after every step."""
        world = self.world
        for node in world.nodes:
            if node.up and node.is_due():
                node.crash()
        version = sum(node.disk.version for node in world.nodes) + sum(one.version for one in world.buckets)
        if version != self.checked:
            self.checked = version
            world.truth.never_goes_back(world.spools(), f"step {self.loop.steps}")

    # -- the story --------------------------------------------------------------------------------------------------

    async def _story(self, watch: Watch) -> None:
        self._make(watch)
        self.loop.after = self._after
        if self.short:
            await self._cut_short()
        else:
            chaos = asyncio.ensure_future(self._chaos())
            try:
                for _ in range(self.rng.randint(2, 5)):
                    await self._launch()
            finally:
                chaos.cancel()
                await asyncio.wait([chaos])
            if not chaos.cancelled() and (failure := chaos.exception()):
                raise failure
        await self._end()

    def _choose_a_cut(self, node: Node) -> None:
        """A cut before a call to the disk, from the making of the spool on, or after a step."""
        node.disk.outcome = self.rng.choice(OUTCOMES)
        if self.rng.random() < 0.5:
            node.disk.cut_at = self.rng.randint(1, 150)
        else:
            node.cut_step = self.rng.randint(1, 1200)

    async def _cut_short(self) -> None:
        """Saves, until the power is cut where it was said."""
        while self.world.count["crashes"] == 0 and self.loop.now < 1200:
            await self._launch(times=3, ranks_fail=False)

    async def _launch(self, times: int = 0, *, ranks_fail: bool = True) -> None:
        rng = self.rng
        if not self.short:
            await self._before_a_restore()
        up = [node for node in self.world.nodes if node.up]
        if not up:
            await asyncio.sleep(10.0)
            return
        job = Job(self.world, [rng.choice(up) for _ in range(self.ranks)])
        if await job.resume() not in ("resumed", "anew"):
            await asyncio.sleep(rng.choice((1.0, 60.0)))
            return
        for _ in range(times or rng.randint(1, 4)):
            if job.broken:
                break
            some = [rank for rank in range(self.ranks) if not ranks_fail or rng.random() >= self.failing]
            if some:
                await job.save(some)
            await asyncio.sleep(rng.choice((0.1, 5.0, 60.0)))

    async def _before_a_restore(self) -> None:
        """What it must not be misled by: a node that has nothing any more, and tiers that do not answer."""
        rng, up = self.rng, [node for node in self.world.nodes if node.up]
        if up and rng.random() < 0.2:
            self._lose(rng.choice(up))
            await asyncio.sleep(11.0)
        if rng.random() < 0.3:
            for line in (line for node in self.world.nodes if node.up for line in node.lines.values()):
                line.until = self.loop.now + rng.choice((0.0, 5.0, 60.0))

    async def _chaos(self) -> None:
        rng = self.rng
        while True:
            await asyncio.sleep(rng.choice((0.05, 1.0, 10.0, 60.0)))
            node = rng.choice(self.world.nodes)
            what = rng.choices(("crash", "cut", "slow", "rot", "lose", "wake"), (6, 6, 5, 3, 1, 1))[0]
            if what == "crash" and node.up and node.cut_step is None:
                node.cut_step = self.loop.steps + rng.randint(1, 300)
                node.down_for = rng.choice((0.1, 5.0, 300.0))
            elif what == "cut" and node.up and node.disk.cut_at is None:
                node.disk.cut_at = node.disk.ops + rng.randint(1, 60)
                node.down_for = rng.choice((0.1, 5.0, 300.0))
            elif what == "slow" and node.up:
                rng.choice(list(node.lines.values())).until = self.loop.now + rng.choice((1.0, 30.0, 400.0))
            elif what == "rot":
                self._rot()
            elif what == "lose" and node.up:
                self._lose(node)
            elif what == "wake" and node.up:
                node.daemon.wake()
            if self.apart.random() < _VOICES:
                self._lose_a_voice()

    def _lose_a_voice(self) -> None:
        """One of those that tell where launches came from is lost: a rank's manifest, or the head, on a tier or in a
        spool."""
        rng, truth, world = self.apart, self.world.truth, self.world
        what = rng.choice(("a manifest", "a head on a tier", "a head in a spool"))
        reported = truth.tells(world.spools())
        node, bucket = rng.choice(world.nodes), rng.choice(world.buckets)
        keys = [key for key in bucket.keys if ("/timeline/" if what == "a head on a tier" else "/manifests/") in key]
        if what == "a head in a spool":
            path = node.root / HEAD
            if not path.exists() or not (data := path.read_bytes()):
                return
            path.write_bytes(_flipped(data, rng) if rng.random() < 0.5 else b"")
            node.disk.version += 1
        elif not keys:
            return
        elif what == "a manifest":
            self._rot_object(bucket, rng.choice(keys), rng)
            node.disk.version += 1
            truth.injured(world.spools())
        else:
            key = rng.choice(keys)
            data, count = bucket.objects[key]
            if rng.random() < 0.5:
                bucket.objects[key] = _flipped(data, rng), count
                truth.hurt[bucket.name].add(key)
            else:
                del bucket.objects[key]
                bucket.keys.remove(key)
            bucket.version += 1
        truth.head_lost(reported, world.spools())
        world.count[f"lost: {what}"] += 1

    def _lose(self, node: Node) -> None:
        """A node is replaced by one with nothing on its disk."""
        truth = self.world.truth
        reported = truth.tells(self.world.spools())
        node.life.end()
        node.up, node.cut_step = False, None
        node.renew()
        truth.node_lost(reported, self.world.spools())
        truth.excused = {one for one in truth.excused if one[0] != node.name}
        truth.injured(self.world.spools())
        self.world.count["nodes lost"] += 1
        self.loop.call_later(10.0, node.start)

    def _rot(self) -> None:
        """A bit of an object or of a file flips, or the end or all of it is gone."""
        rng, truth = self.rng, self.world.truth
        node, bucket = rng.choice(self.world.nodes), rng.choice(self.world.buckets)
        files = [path for _, home in committed(node.root) for path in sorted(home.rglob("*")) if path.is_file()]
        files = [path for path in files if path.stat().st_size]
        keys = [key for key in bucket.keys if "/chunks/" in key or "/manifests/" in key]
        if rng.random() < 0.5 and files:
            path = rng.choice(files)
            data = path.read_bytes()
            at = rng.randrange(len(data))
            path.write_bytes(data[:at] + (bytes([data[at] ^ 4]) + data[at + 1 :] if rng.random() < 0.8 else b""))
            truth.excuse(node.name, (one for one, home in committed(node.root) if path.is_relative_to(home)))
            self.world.count["rot in a spool"] += 1
        elif keys:
            self._rot_object(bucket, rng.choice(keys), rng)
            self.world.count["rot on a tier"] += 1
        else:
            return
        node.disk.version += 1
        truth.injured(self.world.spools())

    def _rot_object(self, bucket: Bucket, key: str, rng: random.Random) -> None:
        truth = self.world.truth
        data, count = bucket.objects[key]
        truth.hurt[bucket.name].add(key)
        named_by = [whose[1] for one in bucket.keys if (whose := part_of(one)) and key in named(bucket.objects[one][0])]
        whose = part_of(key)
        truth.excuse(bucket.name, [*named_by, *([whose[1]] if whose else ())])
        if data and (rng.random() < 0.7 or whose):
            bucket.objects[key] = _flipped(data, rng), count
        else:
            del bucket.objects[key]
            bucket.keys.remove(key)
        bucket.version += 1

    # -- the end ----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Faults stop. The last launch goes on, and everything comes to hold what is wanted."""
        world, truth = self.world, self.world.truth
        self.faulty = self.loop.steps
        world.weather.calm()
        for node in world.nodes:
            node.cut_step = node.disk.cut_at = None
            if node.up:
                for line in node.lines.values():
                    line.until = 0.0
        await asyncio.sleep(400.0)  # who is down comes up, and what was on its way has arrived
        await self._settle()
        self.loop.jump(7 * 3600.0)
        await self._settle()
        placing = [world.nodes[rank % len(world.nodes)] for rank in range(self.ranks)]
        job, branch = Job(world, placing), truth.branch(world.spools())
        went = await job.resume()
        if truth.injuries and isinstance(job.why, CheckpointNotFound):  # `Job` has seen that it may say so
            world.count["runs of which nothing was left right"] += 1
            return  # it says so, and begins nothing anew by itself
        if branch and not truth.injuries:
            if not isinstance(job.why, CheckpointNotFound):
                raise Lost(f"a restore with {branch} off the timeline: {went}: {job.why}")
            world.count["runs that somebody sent back to a branch"] += 1
            job = Job(world, placing)
            went = await job.resume(branch)
        if went not in ("resumed", "anew"):
            raise Lost(f"a restore with no fault any more: {went}: {job.why}")
        await self._save_all(job)
        self.loop.jump(25 * 3600.0)
        await self._settle()
        await self._save_all(job)
        self.loop.jump(3600.0)
        await self._settle(strict=True)
        self.loop.jump(_LEFT)
        await self._settle(strict=True)
        self._at_rest(job)
        for node in world.nodes:
            world.count.update({f"daemon: {name}": many for name, many in node.daemon.journal.counters.items()})

    async def _save_all(self, job: Job) -> None:
        for _ in range(self.world.keep + 1):
            await job.save(range(self.ranks))
            await self._settle()

    async def _settle(self, *, strict: bool = False) -> None:
        """Until nothing is left to do. Not `strict`: what waits for an intent that was left behind may wait a day."""
        end, quiet = self.loop.now + 6 * 3600, 0
        while quiet < 3:
            if self.loop.now > end:
                raise Lost("no fixed point: " + "; ".join(self._unrest()))
            for node in self.world.nodes:
                if node.up:
                    node.daemon.wake()
            await asyncio.sleep(20.0)
            quiet = quiet + 1 if all(node.is_calm(strict=strict) for node in self.world.nodes) else 0
        nodes = self.world.nodes
        self.world.truth.at_rest({node.name: (node.root, node.disk.version) for node in nodes})

    def _unrest(self) -> list[str]:
        found = []
        for node in self.world.nodes:
            workers = [*node.daemon.workers.values(), *node.daemon.scrubber._workers.values()]
            said = [f"{one.name}: {one.doing} {one.last_error}" for one in workers if one.doing or one.last_error]
            found.append(f"{node.name}: {said} {node.planned()}")
        return found

    def _at_rest(self, job: Job) -> None:
        """Exactly what retention wants is there, all of it right, and nothing else."""
        world, truth = self.world, self.world.truth
        steps = sorted({step for launch, step, _ in truth.acked if launch == job.number})
        for bucket in world.buckets:
            wanted = {(job.number, step, rank) for step in steps[-world.keep :] for rank in range(self.ranks)}
            found = truth.on_tier(bucket)
            if {part for part, right in found.items() if right} != wanted or found.keys() != wanted:
                raise Lost(f"{bucket.name} holds {sorted(found.items())}, and should hold {sorted(wanted)}")
            manifests = [key for key in bucket.keys if part_of(key)]
            there = {key for one in manifests for key in named(bucket.objects[one][0])}
            shared, heads = {key.split("/")[-3] for key in there}, 0
            for key in bucket.keys:
                loose = "/chunks/" in key and key not in there
                # What came late, or was cut off on its way, under a name whose chunks others share goes with those.
                if loose and key.split("/")[-3] in shared and key not in truth.doomed[bucket.name]:
                    world.count["chunks that nothing tells of"] += 1
                    continue
                if "/timeline/" in key:
                    if key in truth.hurt[bucket.name] and not sealed(bucket.objects[key][0]):
                        continue  # the trial, or a line, has spoiled what another node wrote
                    heads += 1
                    launches = json.loads(bucket.objects[key][0])["launches"]
                    if launches[max(launches)]["newest"] != steps[-1]:
                        raise Lost(f"{bucket.name}: the head says {launches}, and the newest step is {steps[-1]}")
                    continue
                about = key in ("README.md", "README.md.id")
                if "/0-summaries/" in key and any(one.split("/")[2] == key.split("/")[3] for one in manifests):
                    continue
                if loose or not (about or key in manifests or "/chunks/" in key or "/retention/" in key):
                    raise Lost(f"{bucket.name}: {key} is left over")
            if heads != 1:
                raise Lost(f"{bucket.name}: {heads} heads can be read")
        for node in world.nodes:
            kept = {part for part, _ in committed(node.root)}
            wanted = {
                (job.number, step, rank)
                for step in steps[-world.keep_local :]
                for rank, one in enumerate(job.placing)
                if one is node
            }
            if kept != wanted or truth.in_spool(node.root, -1) != wanted:
                raise Lost(f"{node.name}'s spool holds {sorted(kept)}, and should hold {sorted(wanted)}")
            own = node.root / ".tierd"
            left = [path for room in ("stage", "fetch", "trash", "quarantine") for path in (own / room).rglob("*")]
            if left := [path for path in left if not path.is_dir() or path.parent.name != "quarantine"]:
                files = [
                    str(path.relative_to(own)) for path in left if not path.is_dir() or "quarantine" not in path.parts
                ]
                if files:
                    raise Lost(f"{node.name}: {files[:5]} is left over")


def _flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def play(seed: int) -> tuple[int, Counter[str]]:
    """Play one seed, a trial or a whole life: its steps while faults happened, and what happened how often."""
    home = Path(tempfile.mkdtemp(prefix="tierd-sim-", dir="/dev/shm"))
    try:
        return (Trial(seed, home) if seed < LIVES else RegionLife(seed - LIVES, home)).run()
    finally:
        shutil.rmtree(home, ignore_errors=True)
