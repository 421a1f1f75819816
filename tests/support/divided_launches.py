"""Launches of changing numbers of ranks and nodes that divide replicated tensors, kills, and what must be true of them.

The judge knows the pages (docs/howto/ranks.md) and the digests that the ranks noted, and nothing of tierd's files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from support import by_hand
from support.divided_ranks import FILLING, PLACES, RUN, SENDING, Harm, Plan, launch
from support.launchers import end_all

import tierd

# What happens in a restore on new nodes, and where.
RESTORE_HARMS = (
    *(("kill", SENDING), ("disconnect", SENDING)),
    *((kind, FILLING) for kind in ("kill", "daemon-kill", "daemon-stop")),
)
_KEPT = 3  # checkpoints that the default policy keeps
_LONGEST = 60.0  # seconds for which tierd may keep a rank waiting

Event = dict[str, Any]


class Point(NamedTuple):
    """A checkpoint."""

    attempt: str
    step: int


class Told:
    """What the ranks of a cycle noted."""

    def __init__(self, log: Path) -> None:
        self.events: list[Event] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        self.saved: dict[Point, dict[int, Event]] = defaultdict(dict)  # by rank
        self.durable: dict[str, dict[Point, dict[int, Event]]] = {"local": {}, "file": {}}
        for event in self.events:
            if event["event"] == "saves":
                self.saved[_point(event)][event["rank"]] = event
            elif event["event"] == "durable":
                self.durable[event["place"]].setdefault(_point(event), {})[event["rank"]] = event

    def of(self, number: int, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["launch"] == number and event["event"] in kinds]

    def whole(self, place: str) -> list[Point]:
        """The checkpoints that every rank was told are durable at a place, or beyond, in order."""
        tiers = self.durable["file"]
        told = {point: ranks | tiers.get(point, {}) for point, ranks in self.durable[place].items()} | {
            point: ranks | self.durable[place].get(point, {}) for point, ranks in tiers.items()
        }
        return sorted(point for point, ranks in told.items() if len(ranks) == len(self.saved[point]) == _world(ranks))


def _point(event: Event) -> Point:
    return Point(event["attempt"], event["step"])


def _world(ranks: dict[int, Event]) -> int:
    world: int = next(iter(ranks.values()))["world"]
    return world


class Cycle:
    """A seed's launches, and its nodes: a node is a spool, and has a daemon while one lives."""

    def __init__(self, seed: int, home: Path) -> None:
        self.chance, self.seed, self.home = random.Random(seed), seed, home
        self.kind = ("plain", "hsdp", "plain", "ddp")[seed % 4]
        self.attached = seed % 5 == 1
        self.nodes: list[int] = []
        self.placed: tuple[int, ...] = ()
        self.number = self.fresh_nodes = 0
        self.lost: set[int] = set()
        self.notes: list[str] = [f"kind, {self.kind}"]
        self.tier = home / "tier"
        self.tier.mkdir()
        self.spoils = random.Random(f"spoil {seed}").random() < 0.6
        self.spoiled_keys: set[str] = set()  # of chunks on the tier, below the run
        self.spoiled: set[Point] = set()  # checkpoints that need one of these chunks

    def run(self) -> tuple[list[str], float]:
        chance = self.chance
        for _ in range(chance.choice((2, 3, 3, 4))):
            self.launch(self._placing(), harmed=True)
            if self.told().whole("file") and chance.random() < 0.6:
                self._harm_restore()
        self.launch(self._placing(chance.choice(("same", "fresh"))), harmed=False)
        self.lose(range(self.fresh_nodes))  # nothing is flushed or pruned while the tier is listed
        kept = self._kept()
        if kept and chance.random() < 0.5:
            self.launch(self._placing("fresh"), harmed=False, steps=kept)
        return self.notes, max(event["seconds"] for event in self.told().events if event["event"] == "took")

    def told(self) -> Told:
        return Told(self.home / "log")

    # -- what is harmed between launches

    def spoil(self) -> None:
        """Change a byte of a chunk on the tier that the newest checkpoint there needs, and not the one before it.

        So a restore of the newest one has to find the bytes elsewhere, or to pass it over for the one before.
        """
        needed = self._tier_keys()
        if len(needed) < 2:
            return
        *_, before, newest = sorted(needed)
        keys = needed[newest] - needed[before]
        chance = random.Random(f"spoil {self.seed}, {self.number}")
        paths = [path for key in sorted(keys) if (path := self.tier / RUN / key).exists() and path.stat().st_size]
        if not paths:
            return
        path = chance.choice(paths)
        with path.open("r+b") as file:
            file.seek(chance.randrange(path.stat().st_size))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        self.spoiled_keys.add(str(path.relative_to(self.tier / RUN)))
        self.notes.append("spoiled, a chunk on the tier")
        self._note_spoiled()

    def _tier_keys(self) -> dict[Point, set[str]]:
        """The keys that each complete checkpoint on the tier needs."""
        keys: dict[Point, set[str]] = defaultdict(set)
        missing: dict[Point, int] = {}
        for path in by_hand.files_below(self.tier / RUN / "manifests"):
            for step, attempt, _, world in by_hand.parts_named([path.relative_to(self.tier).as_posix()], RUN):
                with suppress(FileNotFoundError):  # a prune runs meanwhile
                    if manifest := by_hand.sealed(path.read_bytes()):
                        point = Point(attempt, step)
                        keys[point] |= by_hand.keys(manifest)
                        missing[point] = missing.get(point, world) - 1
        return {point: keys[point] for point, parts in missing.items() if not parts}

    def _note_spoiled(self) -> None:
        if self.spoiled_keys:
            self.spoiled |= {point for point, keys in self._tier_keys().items() if keys & self.spoiled_keys}

    # -- what is launched

    def _placing(self, where: str = "") -> tuple[int, ...]:
        """The node of each rank of the next launch: nodes of the last one, also in another order, or new ones."""
        chance = self.chance
        where = where or chance.choice(("same", "same", "permuted", "fresh", "lost"))
        world = chance.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
        if self.placed and chance.random() < 0.35:
            world = len(self.placed)
        count = min(world, chance.choice((1, 1, 2, 2, 3, 4)))
        if where == "same" and len(self.placed) == world:
            return self.placed
        if where == "lost":
            self.lose(self.nodes)
        if where in ("lost", "fresh") or not self.nodes:
            self.nodes = [self.fresh_nodes + number for number in range(count)]
            self.fresh_nodes += count
        while len(self.nodes) < count:
            self.nodes.append(self.fresh_nodes)
            self.fresh_nodes += 1
        nodes = self.nodes if where == "permuted" else self.nodes[:count]
        placed = sorted(nodes[rank % len(nodes)] for rank in range(world))
        if where == "permuted":
            chance.shuffle(placed)
        self.notes.append(f"nodes, {where}")
        return tuple(placed)

    def lose(self, nodes: Iterable[int]) -> None:
        """Kill the daemons of nodes, and delete their spools."""
        self.lost.update(nodes)
        for node in nodes:
            spool = self.home / f"spool-{node}"
            lock = spool / ".tierd" / "lock"
            if lock.exists() and (text := lock.read_text().strip()):
                with suppress(ProcessLookupError):
                    os.kill(int(text), signal.SIGKILL)
            shutil.rmtree(spool, ignore_errors=True)

    def _harms(self, world: int, saves: int) -> tuple[Harm, ...]:
        chance = self.chance
        made = []
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            place = chance.choice(PLACES)
            after_s = chance.choice((0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.3), chance.uniform(0, 2.0)))
            save = 0 if place.startswith("rest") else chance.randint(1, saves)
            kind = "daemon-kill" if chance.random() < 0.4 else "kill"
            made.append(Harm(chance.randrange(world), place, save, after_s, kind))
            self.notes.append(f"{kind}, {place}")
        return tuple(made)

    def _harm_restore(self) -> None:
        """Launch as many ranks on new nodes, and harm their restore where chunks come, or are sent between them."""
        chance, world = self.chance, len(self.placed)
        count = min(world, chance.choice((2, 3)))
        placed = tuple(sorted(self.fresh_nodes + rank % count for rank in range(world)))
        self.fresh_nodes += count
        kind, place = chance.choice(RESTORE_HARMS)
        after_s = chance.choice((0.0, 0.0, chance.uniform(0, 0.02)))
        harm = Harm(chance.randrange(world), place, 0, after_s, kind, chance.choice((0.5, 3.0, 20.0)))
        self.launch(placed, harmed=True, harms=(harm,))
        for event in self.told().of(self.number - 1, "harmed"):
            self.notes.append(f"{event['kind']}, {event['place']}")

    def launch(
        self, placed: tuple[int, ...], *, harmed: bool, steps: tuple[Point, ...] = (), harms: tuple[Harm, ...] = ()
    ) -> None:
        if self.spoils and not self.spoiled_keys and not steps:
            self.spoil()
        chance, before = self.chance, self.told()
        waits = tuple(chance.choice(("", "local", "local", "file")) for _ in range(chance.randint(1, 6)))
        plan = Plan(
            home=str(self.home),
            number=self.number,
            seed=self.seed,
            nodes=placed,
            kind=self.kind,
            waits=waits,
            harms=harms or (self._harms(len(placed), len(waits)) if harmed else ()),
            refuses=chance.random() < 0.3,
            steps=steps,
            patience_s=chance.choice((0.0, 0.2, 2.0, 30.0)),
            attached=self.attached,
            flushes=not harmed,
            frozen_elements=1_500_000 if self.seed % 3 == 0 else 3000,
            shards=chance.choice([count for count in range(1, len(placed) + 1) if len(placed) % count == 0]),
        )
        failed = launch(plan)
        told = self.told()
        where = f"seed {self.seed}, launch {self.number}, {plan}"
        self._judge(told, before, plan, where)
        is_deadly = harmed and any(harm.kind != "disconnect" for harm in plan.harms)
        assert is_deadly or not failed, f"{where}: {told.of(self.number, 'raised')}"
        if told.of(self.number, "sends"):
            self.notes.append("replicated chunks were sent between ranks")
        self.placed, self.number = placed, self.number + 1

    # -- what must be true

    def _judge(self, told: Told, before: Told, plan: Plan, where: str) -> None:
        self._note_spoiled()
        assert not told.of(plan.number, "hung"), f"{where}: {told.of(plan.number, 'hung')}"
        calls = [event for event in told.of(plan.number, "took") if event["call"] not in ("wait", "close")]
        slow = [event for event in calls if event["seconds"] > _LONGEST]
        assert not slow, f"{where}: {slow}"
        for event in told.of(plan.number, "refused"):
            assert event["untouched"], f"{where}: loaded something and refused: {event}"
        allowed = ("StoreUnavailable", "DaemonUnavailable", "RuntimeError", "ConnectionError", "DistBackendError")
        for event in told.of(plan.number, "raised"):
            assert plan.harms and event["kind"] in allowed, f"{where}: {event}"
        for event in told.of(plan.number, "not durable"):
            assert plan.harms, f"{where}: {event}"
        for number, wanted in enumerate(plan.steps or (None,)):
            per_rank: dict[int, list[tuple[Event, Event]]] = defaultdict(list)
            has = {}
            for event in told.of(plan.number, "resumed", "has"):
                if event["event"] == "resumed":
                    has[event["rank"]] = event
                else:
                    per_rank[event["rank"]].append((has[event["rank"]], event))
            together = {rank: restores[number] for rank, restores in per_rank.items() if len(restores) > number}
            self._judge_restore(told, before, plan, together, wanted, where)
        for point, ranks in told.saved.items():
            assert len({event["common"] for event in ranks.values()}) == 1, f"{where}: {point}: replicas differ"

    def _judge_restore(
        self,
        told: Told,
        before: Told,
        plan: Plan,
        together: dict[int, tuple[Event, Event]],
        wanted: Point | None,
        where: str,
    ) -> None:
        origins = {Point(*event["origin"]) if event["origin"] else None for event, _ in together.values()}
        assert len(origins) <= 1, f"{where}: ranks restored different checkpoints: {origins}"
        attempts = {event["attempt"] for event, _ in together.values()}
        assert len(attempts) <= 1, f"{where}: ranks share no attempt: {attempts}"
        if not together:
            return
        origin = origins.pop()
        required = before.whole("file")
        for point in before.whole("local"):
            if {event["node"] for event in before.saved[point].values()} <= set(plan.nodes) - self.lost:
                required = sorted({*required, point})
        required = [point for point in required if point not in self.spoiled]
        if wanted is not None:
            assert origin == wanted, f"{where}: {origin} was restored, {wanted} was asked for"
        elif required:
            assert origin is not None and origin >= required[-1], (
                f"{where}: {origin} was restored, and {required[-1]} was durable: "
                f"{[event['skipped'] for event, _ in together.values()]}"
            )
        for rank, (event, has) in together.items():
            if origin is None:
                assert all(has[name] == event["before"][name] for name in event["before"]), f"{where}: rank {rank}"
                continue
            saved = before.saved.get(origin, {})
            assert saved and len(saved) == _world(saved), f"{where}: {origin} was saved by {sorted(saved)} alone"
            self_saved = saved.get(rank)
            assert has["common"] == saved[0]["common"], f"{where}: rank {rank}: replicated entries of {origin} differ"
            assert event["epoch"] == origin.step, f"{where}: rank {rank}: the epoch is {event['epoch']}"
            own = self_saved["own"] if self_saved and not event["common alone"] else event["before"]["own"]
            assert has["own"] == own, f"{where}: rank {rank}: own entries of {origin} are not the rank's"
            buffers = {self_saved["buffers"]} if self_saved else {one["buffers"] for one in saved.values()}
            if len(saved) == len(plan.nodes) or self_saved:
                assert has["buffers"] in buffers, f"{where}: rank {rank}: buffers of {origin} are not the rank's"
            elif has["buffers"] not in buffers:
                raise AssertionError(f"{where}: rank {rank}: buffers of {origin} are nobody's")

    def _kept(self) -> tuple[Point, ...]:
        """The checkpoints on the tier that retention keeps, newest first, each of which was told durable there."""
        whole = self.told().whole("file")
        with tierd.open(f"file://{self.tier}", RUN) as reader:
            listed = sorted(Point(one.attempt, one.step) for one in reader.checkpoints() if one.complete)
        newest = sorted({*whole, *listed})[-_KEPT:]
        self._note_spoiled()
        lost = [point for point in newest if point in whole and point not in listed and point not in self.spoiled]
        assert not lost, f"seed {self.seed}: the tier lost {lost} of {whole}; it has {listed}"
        return tuple(point for point in reversed(newest) if point in whole and point not in self.spoiled)


def cycle(seed: int, home: Path) -> tuple[list[str], float]:
    """Launch three to six times on changing numbers of ranks and nodes, kill ranks and daemons, and judge each restore.

    Returns:
        What was done, and the longest wait in seconds.

    Raises:
        AssertionError: a restore was not what the pages promise. It names the seed.
    """
    try:
        return Cycle(seed, home).run()
    finally:
        end_all(home)
