"""Two nodes with one id, because one's spool is a copied volume: neither harms the other, and one says so.

Judged by docs/howto/tiers.md: of two daemons that live, one takes a new id, with a warning, and records its policies
again; until then the other one keeps what the former record keeps.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.seeds import seeds
from support.timed import timed
from support.waiting import BOUND_S
from support.world import RUN, commit, hurry, part, reconciler, running, settle, steps_on

from tierd.core.ids import parse_retention
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.node_records import NodeIdentity
from tierd.spool.run_records import mark_saved
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import may_be_copied_volume, node_id
from tierd.stores.memory_store import MemoryStore


def cloned(spool: Spool, root: Path) -> Spool:
    """A copy of the spool's volume, mounted on another host of the same name, at the same path, as far as ids go."""
    shutil.copytree(spool.root, root, ignore=shutil.ignore_patterns("lock", "*.sock"))
    copy = Spool(root)
    identity = (spool.control / "node").read_text()[:8]
    (copy.control / "node").write_text(identity + (copy.control / "node").read_text()[8:])
    (copy.control / "boot").write_text("0" * 32)
    return copy


def save(spool: Spool, step: int, launch: int) -> None:
    commit(spool, part(step, launch))
    mark_saved(spool.control, part(step, launch))


async def listed(store: MemoryStore) -> list[int]:
    return steps_on([info.key async for info in store.scan(f"{RUN}/manifests/")])


async def recorded_by(store: MemoryStore) -> set[str]:
    found = [parse_retention(RUN, info.key) async for info in store.scan(f"{RUN}/retention/")]
    return {name[0] for name in found if name}


async def until_apart(daemons: Mapping[str, Reconciler]) -> None:
    end_s = time.monotonic() + BOUND_S
    while len({daemon.tiers.who for daemon in daemons.values()}) < len(daemons):
        assert time.monotonic() < end_s, "both nodes still have one id"
        for daemon in daemons.values():
            daemon.wake()
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


async def test_clone_that_prunes_more_deletes_nothing_that_the_living_node_keeps(tmp_path, monkeypatch, caplog):
    """The clone replaced the other node's record by its own, and deleted what that node keeps."""
    timed(monkeypatch, shared_id_s=1.0)
    store, first = MemoryStore(), Spool(tmp_path / "first")
    for step in range(1, 6):
        save(first, step, 1)
    async with running(reconciler(first, {"tier": store}, keep=5, keep_local=100)) as a:
        await settle(a)
        second = cloned(first, tmp_path / "second")
        assert node_id(second.root) == a.tiers.who
        save(second, 6, 2)
        async with running(reconciler(second, {"tier": store}, keep=1, keep_local=100)) as b:
            await settle(b)
            assert await listed(store) == [1, 2, 3, 4, 5, 6] or await listed(store) == [2, 3, 4, 5, 6]
            await until_apart({"a": a, "b": b})
            assert any("another node has the id" in why for why in a.journal.warnings.values())
            await settle(a)
            await asyncio.sleep(1.5)  # until the clone's hold is over
            b.wake()
            await settle(b)
            assert await listed(store) == [2, 3, 4, 5, 6]
            assert await recorded_by(store) == {a.tiers.who, b.tiers.who}
    assert "another node has the id" in caplog.text


async def test_node_that_was_restarted_elsewhere_keeps_its_id_and_prunes_after_the_hold(tmp_path, monkeypatch):
    timed(monkeypatch, shared_id_s=0.5)
    store, spool = MemoryStore(), Spool(tmp_path / "spool")
    for step in range(1, 6):
        save(spool, step, 1)
    async with running(reconciler(spool, {"tier": store}, keep=5, keep_local=100)) as before:
        await settle(before)
    (spool.control / "boot").write_text("0" * 32)  # as after a reboot
    async with running(reconciler(spool, {"tier": store}, keep=1, keep_local=100)) as daemon:
        await settle(daemon)
        assert await listed(store) == [1, 2, 3, 4, 5]
        end_s = time.monotonic() + BOUND_S
        while await listed(store) != [5]:
            assert time.monotonic() < end_s
            daemon.wake()
            await asyncio.sleep(0.1)
        assert daemon.tiers.who == before.tiers.who and await recorded_by(store) == {daemon.tiers.who}
    assert not may_be_copied_volume(spool.root)


async def test_restart_on_the_same_boot_obeys_a_poorer_policy_at_once(tmp_path):
    store, spool = MemoryStore(), Spool(tmp_path / "spool")
    for step in range(1, 6):
        save(spool, step, 1)
    for keep in (5, 1):
        async with running(reconciler(spool, {"tier": store}, keep=keep, keep_local=100)) as daemon:
            await settle(daemon)
    assert await listed(store) == [5]


def test_new_id_is_kept_and_that_of_an_earlier_version_may_be_a_copy(tmp_path):
    spool = Spool(tmp_path / "spool")
    assert not may_be_copied_volume(spool.root)
    (spool.control / "boot").unlink()
    assert may_be_copied_volume(spool.root)
    assert NodeIdentity(spool.root).id == node_id(spool.root)


class Place(MemoryStore):
    """A tier that knows which steps some node keeps now, and which of them were deleted all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted, self.lost = set[int](), set[int]()

    async def delete(self, keys):
        self.lost |= self.wanted.intersection(steps_on(keys))
        await super().delete(keys)


class Two:
    """Two nodes of one run over one tier, whose daemons live at the same time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.place, self.step, self.launch = rng, Place(), 0, 0
        self.spools: dict[str, Spool] = {}
        self.keeps: dict[str, int] = {}
        self.recorded: dict[str, int] = {}  # the smaller one of a node's policies before and after it recorded anew
        self.daemons: dict[str, Reconciler] = {}
        self.stacks: dict[str, AsyncExitStack] = {}

    async def start(self, name: str) -> None:
        daemon = reconciler(self.spools[name], {"tier": self.place}, keep=self.keeps[name], keep_local=1000)
        self.stacks[name] = AsyncExitStack()
        self.daemons[name] = await self.stacks[name].enter_async_context(running(daemon))

    async def stop(self, name: str) -> None:
        await self.stacks.pop(name).aclose()
        del self.daemons[name]

    def save(self, name: str) -> None:
        self.launch += 1
        for _ in range(self.rng.randint(1, 3)):
            self.step += 1
            save(self.spools[name], self.step, self.launch)

    def want(self) -> None:
        keep = max(self.recorded.values(), default=0)
        self.place.wanted = set(range(1, self.step + 1)[-keep:]) if keep else set()

    async def work(self, name: str, *, apart: bool = False) -> None:
        """Let the daemons work until the tier has what the nodes keep. The one that saved last records its policy."""
        self.want()
        for daemon in self.daemons.values():
            daemon.wake()
        await asyncio.sleep(self.rng.choice((0.0, 0.05)))
        if apart:
            await until_apart(self.daemons)
        end_s = time.monotonic() + BOUND_S
        while not self.place.wanted <= set(await listed(self.place)):
            assert time.monotonic() < end_s, (
                f"a node keeps {self.place.wanted}; the tier has {await listed(self.place)}"
            )
            for daemon in self.daemons.values():
                daemon.wake()
            await asyncio.sleep(0.05)
        for daemon in self.daemons.values():
            daemon.wake()
            await settle(daemon)
        assert self.place.lost == set()
        self.recorded[name] = self.keeps[name]

    async def close(self) -> None:
        for name in list(self.stacks):
            await self.stop(name)


async def history(home: Path, seed: int) -> bool:
    """Play a history; return whether the nodes had one id at first."""
    two = Two(random.Random(seed))
    rng = two.rng
    two.spools["a"], two.keeps["a"] = Spool(home / "a"), rng.randint(1, 5)
    try:
        two.save("a")
        await two.start("a")
        await two.work("a")
        is_clone = rng.random() < 0.8
        two.spools["b"] = cloned(two.spools["a"], home / "b") if is_clone else Spool(home / "b")
        two.keeps["b"] = rng.randint(1, 5)
        if rng.random() < 0.5:
            two.save("a")
        two.save("b")
        await two.start("b")
        await two.work("b", apart=True)
        for _ in range(4):
            name = rng.choice("ab")
            if rng.random() < 0.5:
                await two.stop(name)
                two.place.wanted = set()
                two.keeps[name] = rng.randint(1, 5)
                two.recorded[name] = min(two.recorded[name], two.keeps[name])
                two.want()
                await two.start(name)
            two.save(name)
            await two.work(name)
            assert two.daemons["a"].tiers.who != two.daemons["b"].tiers.who
        return is_clone
    finally:
        await two.close()


@pytest.mark.parametrize("seed", seeds())
def test_two_nodes_with_the_same_id_do_not_delete_each_others_checkpoints(tmp_path, monkeypatch, seed):
    timed(monkeypatch, shared_id_s=1.0)
    asyncio.run(history(tmp_path, seed))
