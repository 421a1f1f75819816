"""Daemons of two nodes compare what should be the same on all ranks, and report each difference once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.doubles import Double, flipped
from support.waiting import until
from support.world import RUN, commit, config, part, reconciler, running, settle

from tierd.cli.commands.status_lines import problem_texts
from tierd.core.errors import StoreUnavailable
from tierd.core.event_kinds import Event
from tierd.core.ids import PartId
from tierd.core.replicas.replica_comparison import TensorDifference
from tierd.daemon.daemon_status import make_status
from tierd.daemon.http.openmetrics import EventCounters
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.status_problems import status_problems
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

WORLD, TENSORS = 4, 32
NODES = {"A": (0, 1), "B": (2, 3)}
KIND = "replicas differ"


def fingerprints(step: int, function: str = "xxh3") -> dict[str, str]:
    """What each rank should have: two tensors a step, all of them at every 16th."""
    numbers = [number for number in range(TENSORS) if step % 16 in (0, number % 16)]
    return {f"layer.{number}.weight": f"{function}:{step << 32 | number:032x}" for number in numbers}


class Cluster:
    """Two spools and a tier. `lines` are the nodes' ways to the tier, which note each request."""

    def __init__(self, home: Path) -> None:
        self.tier = MemoryStore()
        self.spools = {name: Spool(home / name) for name in NODES}
        self.lines = {name: Double(self.tier) for name in NODES}
        self.events: list[Event] = []

    def save(
        self,
        step: int,
        changed: Mapping[int, str] | None = None,
        nodes: Iterable[str] = "AB",
        maps: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Commit a checkpoint. `changed`: by rank, a tensor that differs there; `maps`: other fingerprints, by rank."""
        for node in nodes:
            for rank in NODES[node]:
                replicas = dict((maps or {}).get(rank, fingerprints(step)))
                if changed and rank in changed:
                    replicas[changed[rank]] = f"xxh3:{rank + 1 << 64:032x}"
                commit(self.spools[node], part(step, rank=rank, world=WORLD), {"w": b"%d" % rank}, replicas=replicas)

    def daemon(self, node: str, **options: object) -> Reconciler:
        settings = config(self.spools[node], "tier", **{"keep": 300, **options})
        return Reconciler(settings, self.spools[node], {"tier": self.lines[node]}, self.events.append)

    @contextlib.asynccontextmanager
    async def daemons(self, **options: object) -> AsyncIterator[dict[str, Reconciler]]:
        """Both daemons, at work."""
        async with running(self.daemon("A", **options)) as first, running(self.daemon("B", **options)) as second:
            yield {"A": first, "B": second}

    def manifest_reads(self, node: str, ranks: Iterable[int]) -> list[str]:
        """The manifests of these ranks that a node read from the tier."""
        names = {PartId(part(1).checkpoint, rank, WORLD).name for rank in ranks}
        keys = [key for operation, key in self.lines[node].calls if operation == "get" and "/manifests/" in key]
        return [key for key in keys if key.rpartition("/")[2].removesuffix(".json") in names]


def reports(daemon: Reconciler, step: int | None = None, place: str | None = None) -> list[Event]:
    return [
        event
        for event in daemon.journal.events
        if event.what == KIND and step in (None, event.step) and place in (None, event.place)
    ]


def alerts(daemon: Reconciler) -> list[str]:
    return [problem.why for problem in make_status(daemon, 0, 0).problems if problem.severity == "alert"]


async def all_settled(daemons: Mapping[str, Reconciler]) -> None:
    """Until nothing is left to do, and both daemons have compared what they observed."""
    for _ in range(2):  # the first flushes, the second sees what the other one flushed
        for daemon in daemons.values():
            await settle(daemon, timeout=200)
        for daemon in daemons.values():
            await daemon.observe("tier")
            await daemon.replicas.compare()
            await asyncio.sleep(daemon.timings.parts_arrive_s)
            await daemon.replicas.compare()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def expected(tensor: str, rank: int, ranks: Iterable[int] = range(WORLD)) -> TensorDifference:
    agree = tuple(other for other in ranks if other != rank)
    return TensorDifference(tensor=tensor, agree=agree, agree_count=len(agree), differ=(rank,), differ_count=1)


async def test_each_of_100_planted_differences_is_reported_with_its_tensor_and_rank(cluster: Cluster) -> None:
    dice, planted = random.Random(5), {}
    for step in range(1, 101):
        planted[step] = dice.choice(sorted(fingerprints(step))), dice.randrange(WORLD)
        cluster.save(step, {planted[step][1]: planted[step][0]})
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
    reported = [event for event in cluster.events if event.what == KIND]
    for step, (tensor, rank) in planted.items():
        events = [event for event in reported if event.step == step]
        assert 1 <= len(events) <= 4, "once for each place and node"
        assert {difference.tensor for event in events for difference in event.differences} == {tensor}
        assert (expected(tensor, rank),) in [event.differences for event in events], (step, tensor, rank, events)
        assert all(event.tensors == 1 and event.world_size == WORLD and event.run == RUN for event in events)
        named = [event for event in events if event.place == "tier"]
        assert all(event.differences == (expected(tensor, rank),) for event in named)
        assert all(f"{tensor!r} on rank {rank} differs" in event.why for event in named)
    counts = [daemon.journal.counters["replicas_differ"] for daemon in daemons.values()]
    assert sum(counts) == len(reported)


async def test_100_equal_checkpoints_cause_no_alarm_and_no_request(cluster: Cluster) -> None:
    for step in range(1, 101):
        cluster.save(step)
    async with running(cluster.daemon("A")) as first:  # first, so that the lowest listed rank is always rank 0
        await settle(first)
        async with running(cluster.daemon("B")) as second:
            await all_settled({"A": first, "B": second})
            assert not any(reports(daemon) or alerts(daemon) for daemon in (first, second))
    assert not cluster.manifest_reads("A", NODES["B"])
    assert not cluster.manifest_reads("B", [1]), "rank 0's manifest and those of the own ranks are read anyway"


async def test_difference_is_reported_once_a_daemon_life_and_place(cluster: Cluster) -> None:
    cluster.save(1, {3: "layer.1.weight"})
    for _ in range(2):
        async with running(cluster.daemon("B")) as second:
            await until(lambda: reports(second))
            async with running(cluster.daemon("A")) as first:
                for _ in range(3):
                    await all_settled({"A": first, "B": second})
                assert not reports(first) and not alerts(first), "its ranks agree with each other"
                *local, tier = reports(second)
                assert [event.differences[0].differ for event in local] in ([(2, 3)], []), "a tie of two ranks"
                assert (tier.place, tier.differences) == ("tier", (expected("layer.1.weight", 3),))
                (alert,) = alerts(second)
                assert "step 1" in alert and "rank 3 (on this node)" in alert and "restore(step=N)" in alert
                assert second.journal.counters["alerts"] == 1


async def test_status_metrics_and_command_show_the_difference(cluster: Cluster) -> None:
    cluster.save(1, {2: "layer.1.weight"})
    cluster.save(2, {3: "layer.2.weight"})
    counters = EventCounters()
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
        status = make_status(daemons["B"], 0, 0)
    for event in reports(daemons["B"]):
        counters.add(event)
    counted = counters.counts["tierd_replicas_differ_total"][RUN,]
    assert counted == len(reports(daemons["B"])) == daemons["B"].journal.counters["replicas_differ"] >= 2
    (alert,) = status.alerts
    assert (alert.doing, alert.subject) == ("compare", RUN) and "step 2" in alert.why, "one of the run, the newest"
    lines = [text for _, text in problem_texts(msgspec.to_builtins(status))]
    assert len(lines) == 1 and f": replicas of run {RUN} differ: " in lines[0] and "rank 3" in lines[0]
    tier = replace(status.tiers[0], failures=1, last_error="no route")
    problems = status_problems(replace(status, tiers=(tier,), alerts=(msgspec.structs.replace(alert, place="tier"),)))
    assert [problem.severity for problem in problems] == ["alert", "warning"], "it hides no failure of the tier"


async def test_restarted_daemon_reports_a_difference_that_only_the_tier_has(cluster: Cluster) -> None:
    cluster.save(1, {2: "layer.17.weight"})
    cluster.save(2)
    async with cluster.daemons(keep_local=1) as daemons:
        await all_settled(daemons)
    assert {which.checkpoint.step for which in cluster.spools["B"].parts()} == {2}
    async with cluster.daemons(keep_local=1) as daemons:
        await all_settled(daemons)
        assert [event.differences for event in reports(daemons["B"])] == [(expected("layer.17.weight", 2),)]
        assert alerts(daemons["B"])


async def test_corruption_of_rank_0_is_reported_by_every_other_node(cluster: Cluster) -> None:
    cluster.save(16, {0: "layer.9.weight"})
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
        for daemon in daemons.values():
            assert reports(daemon, place="tier")[0].differences == (expected("layer.9.weight", 0),)
        assert "memory of rank 0, replace" in alerts(daemons["B"])[0]
        assert "memory of rank 0 (on this node), replace" in alerts(daemons["A"])[0]


async def test_alert_lasts_until_each_tensor_was_compared_again(cluster: Cluster) -> None:
    cluster.save(3, {1: "layer.3.weight"})
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
        assert alerts(daemons["A"])
        for step in range(4, 19):  # without a fingerprint of the tensor
            cluster.save(step, maps={rank: fingerprints(15 if step == 16 else step) for rank in range(WORLD)})
        await all_settled(daemons)
        assert alerts(daemons["A"])
        cluster.save(19, nodes="A")
        await settle(daemons["A"])
        await daemons["A"].replicas.compare()
        assert alerts(daemons["A"]), "an incomplete checkpoint proves nothing"
        cluster.save(19, nodes="B")
        await all_settled(daemons)
        assert not alerts(daemons["A"])
        (ended,) = [event for event in daemons["A"].journal.events if event.what == "works again"]
        assert (ended.run, ended.doing) == (RUN, "compare")
        cluster.save(20, {1: "layer.4.weight"})
        await all_settled(daemons)
        assert "step 20" in alerts(daemons["A"])[0]
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
        assert {event.step for event in reports(daemons["A"])} == {3, 20}
        (alert,) = alerts(daemons["A"])
        assert "step 20" in alert, "the newest difference"


async def test_alert_ends_after_64_equal_checkpoints_that_lack_the_tensor(spool: Spool) -> None:
    """Both ranks are on one node, which has no tier."""

    def save(step: int, *values: str) -> None:
        for rank, value in enumerate(values):
            commit(
                spool, part(step, rank=rank, world=2), {"w": b"1"}, replicas={f"tensor.{step}": f"xxh3:{value * 32}"}
            )

    save(1, "1", "2")
    async with running(reconciler(spool, {}, keep=300)) as daemon:
        await until(lambda: alerts(daemon))
        for step in range(2, 10):
            save(step, "1", "1")
        await settle(daemon)
        await daemon.replicas.compare()
        save(10, "1", "2")
        await until(lambda: daemon.wake() or len(reports(daemon)) == 2)
        for step in range(11, 74):  # those before step 10 count no more
            save(step, "1", "1")
        await settle(daemon)
        await daemon.replicas.compare()
        assert alerts(daemon)
        save(74, "1", "1")
        await until(lambda: daemon.wake() or not alerts(daemon))
        assert [event.step for event in reports(daemon)] == [1, 10]


async def test_alert_ends_with_the_run(cluster: Cluster) -> None:
    cluster.save(1, {1: "layer.1.weight"})
    async with cluster.daemons() as daemons:
        await all_settled(daemons)
        assert alerts(daemons["A"])
    async with running(reconciler(cluster.spools["A"], {})) as daemon:
        await until(lambda: alerts(daemon))
        for which in list(cluster.spools["A"].parts()):
            cluster.spools["A"].remove([which])
        await settle(daemon)
        await until(lambda: not alerts(daemon))


@pytest.mark.parametrize("harm", ["missing", "corrupt"])
async def test_unusable_manifest_is_compared_to_nothing(cluster: Cluster, harm: str) -> None:
    """Rank 0's: the other ranks are compared with each other."""
    cluster.save(1, {0: "layer.1.weight"})
    cluster.save(2, {2: "layer.2.weight"})
    async with running(cluster.daemon("A")) as first:
        await settle(first)
    for step in (1, 2):
        key = part(step, rank=0, world=WORLD).manifest_key
        if harm == "corrupt":
            await cluster.tier.put(key, flipped(bytes(await cluster.tier.get(key))))
        else:
            await cluster.tier.delete([key])
    async with running(cluster.daemon("B")) as second:
        await settle(second)
        await until(lambda: reports(second, 2))
        await all_settled({"B": second})
        assert not reports(second, 1)
        seen_there = [event.differences for event in reports(second, 2, "tier")]
        assert seen_there == ([(expected("layer.2.weight", 2, (1, 2, 3)),)] if harm == "corrupt" else [])


async def test_manifests_of_earlier_versions_and_other_functions_cause_no_alarm(cluster: Cluster) -> None:
    """Of fingerprints of another function or of other tensors, rank 0's are read once and no further ones."""
    cluster.save(1, maps={rank: {} for rank in range(WORLD)})
    cluster.save(2, maps={0: {}, 2: {}})
    cluster.save(3, maps={0: fingerprints(3, "sum")})
    cluster.save(4, maps={3: {"another.weight": "xxh3:" + "1" * 32}})
    async with running(cluster.daemon("A")) as first:
        await settle(first)
        async with running(cluster.daemon("B")) as second:
            await all_settled({"A": first, "B": second})
            assert not any(reports(daemon) or alerts(daemon) for daemon in (first, second))
            before = len(cluster.lines["B"].calls)
            for _ in range(3):
                await second.observe("tier")
                await second.replicas.compare()
            assert all(operation == "scan" for operation, _ in cluster.lines["B"].calls[before:])
    assert not cluster.manifest_reads("A", NODES["B"]) and not cluster.manifest_reads("B", [1])


async def test_tier_that_fails_while_ranks_are_read_delays_the_report(cluster: Cluster) -> None:
    cluster.save(1, {2: "layer.1.weight"})
    line, failed = cluster.lines["B"], []

    def refuse(operation: str, key: str) -> None:
        if (operation, key) == ("get", part(1, rank=1, world=WORLD).manifest_key):
            failed.append(key)
            raise StoreUnavailable("no route")

    line.before = refuse
    async with cluster.daemons() as daemons:
        await settle(daemons["A"])
        await all_settled({"B": daemons["B"]})
        assert failed and not reports(daemons["B"], place="tier")
        line.before = None
        await all_settled(daemons)
        (event,) = reports(daemons["B"], place="tier")
        assert event.differences == (expected("layer.1.weight", 2),)


async def test_monitor_reads_few_of_many_ranks_of_a_tier(spool: Spool, tmp_path: Path) -> None:
    """Of 64 ranks, the node of one that differs reads rank 0 and 16 further ones."""
    world, line, own = 64, Double(), Spool(tmp_path / "own")
    for rank in range(world):
        replicas = {"w": "xxh3:" + "f0"[rank == 40] * 32}
        commit(own if rank == 40 else spool, part(1, rank=rank, world=world), {"w": b"1"}, replicas=replicas)
    async with running(reconciler(spool, {"tier": line})) as daemon:
        await settle(daemon)
    line.calls.clear()
    async with running(reconciler(own, {"tier": line})) as daemon:
        await until(lambda: daemon.wake() or reports(daemon))
        (event,) = reports(daemon)
        assert event.differences[0].differ == (40,) and event.differences[0].agree_count == 17
    reads = [key for operation, key in line.calls if operation == "get" and "/manifests/" in key]
    assert len(set(reads) - {part(1, rank=40, world=world).manifest_key}) == 17
