"""A node dies with parts half sent or in its spool alone, and another one fills a tier with `backfill`, at random.

Judged by docs/howto/tiers.md, "Add a tier": the tier gets every checkpoint that its `retention` wants and that
another tier holds complete; a run of which the dead node has recorded a policy there is left to it, and a warning names
the node and its record; after the record's deletion this node copies the run; nothing is deleted for it, on any tier.
And by docs/explanation/failures.md: a checkpoint whose parts died with the node is never offered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import pytest
from support.doubles import Double, contents
from support.seeds import seeds
from support.waiting import until
from support.world import attempt, commit, config, converge, hurry, part, running, settle

from tierd.core.config import TierConfig
from tierd.core.ids import CheckpointId
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.daemon_status import make_status
from tierd.daemon.reconciler import Reconciler
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id

KEEP_LAST, KEEP_EVERY_STEPS = 2, 5
FILL = RetentionPolicy(keep_last=KEEP_LAST, keep_every_steps=KEEP_EVERY_STEPS)


def taker(spool: Spool, stores: dict[str, Double]) -> Reconciler:
    """The daemon of the node that fills the tier `new`."""
    tiers = tuple(
        TierConfig(name=name, url=f"file:///{name}", retention=FILL, backfill=name == "new") for name in stores
    )
    return Reconciler(msgspec.structs.replace(config(spool, *stores), tier=tiers), spool, stores)


async def objects(store: Double) -> dict[str, bytes]:
    return await contents(store.inner, policies=True)


def complete(keys: dict[str, bytes]) -> set[int]:
    """The steps of which every rank's manifest is there, by the names of objects alone (tierd/FORMAT.md)."""
    ranks: dict[int, set[str]] = defaultdict(set)
    for key in keys:
        if "/manifests/" in key:
            ranks[int(Path(key).parent.name[:12])].add(Path(key).name)
    return {step for step, names in ranks.items() if len(names) == int(min(names).split("-of-")[1][:5])}


def wanted(steps: set[int]) -> set[int]:
    return set(sorted(steps)[-KEEP_LAST:]) | {step for step in steps if step % KEEP_EVERY_STEPS == 0}


async def die(home: Path, rng: random.Random, stores: dict[str, Double]) -> str:
    """Let a node save a run, lose the end of it, and die; return its id."""
    spool, world, step = Spool(home / "dead"), rng.randint(1, 2), 0
    for launch in range(1, rng.randint(2, 5)):
        origin = CheckpointId("run", attempt(launch - 1), step) if step else None
        for _ in range(rng.randint(1, 6)):
            step += 1
            for rank in range(world):
                commit(spool, part(step, launch, rank, world), origin=origin)
        named = rng.choice((["old"], ["old", "new"]))
        await converge(spool, {name: stores[name] for name in named}, keep=rng.choice((1, 3, 20)))
    for _ in range(rng.randint(0, 2)):  # saved, and never sent
        step += 1
        for rank in range(world):
            commit(spool, part(step, launch, rank, world), origin=origin)
    for store in stores.values():  # half sent: chunks without their manifest, which is put last
        manifests = sorted(key for key in await contents(store.inner) if "/manifests/" in key)
        for key in manifests[len(manifests) - rng.choice((0, 1, world)) :] if len(manifests) > world else ():
            await store.inner.delete([key])
    return node_id(spool.root)


async def fill(spool: Spool, stores: dict[str, Double]) -> tuple[list[str], tuple[str, ...]]:
    """Run the taker until it has nothing to do; return the problems of `new`, and what it leaves to other nodes."""
    async with running(taker(spool, stores)) as daemon:
        await until(lambda: daemon.is_backfilled)
        await settle(daemon)
        problems = [one.why for one in make_status(daemon, 0, 0).problems if one.place == "new"]
        return problems, daemon.backlog.summary().left_to_nodes


def check_kept(before: dict[str, dict[str, bytes]], after: dict[str, dict[str, bytes]]) -> None:
    for name, keys in before.items():
        copies = [key for key in keys if "/manifests/" in key or "/chunks/" in key]
        assert not [key for key in copies if keys[key] != after[name].get(key)], name


async def history(home: Path, seed: int) -> Counter[str]:
    rng, count = random.Random(seed), Counter[str]()
    stores = {"old": Double(), "new": Double()}
    dead = await die(home, rng, stores)
    spool = Spool(home / "taker")
    before = {name: await objects(store) for name, store in stores.items()}
    records = [key for key in before["new"] if "/retention/" in key]
    held = complete(before["old"])
    for _ in range(2):
        problems, left = await fill(spool, stores)
        after = {name: await objects(store) for name, store in stores.items()}
        check_kept(before, after)
        have = complete(after["new"])
        assert have <= complete(before["new"]) | held, "a checkpoint that died with the node is offered"
        if not records:
            assert wanted(held) <= have and not problems and not left
            count["filled"] += 1
            break
        assert have == complete(before["new"]), "the run is left to the other node"
        if max(held, default=0) not in {0, *have}:
            assert any(dead in why and records[0] in why for why in problems), problems
            assert any(records[0] in text for text in left)
            count["left"] += 1
        if wanted(held | have) <= have:
            assert not problems and not left
        for key in records:  # the way out that the warning names
            await stores["new"].inner.delete([key])
        records = []
        before = {name: await objects(store) for name, store in stores.items()}
    return count


@pytest.mark.parametrize("seed", seeds(first=8))
def test_tier_is_filled_or_waiting_is_said_after_node_died(tmp_path, monkeypatch, seed):
    hurry(monkeypatch)
    asyncio.run(history(tmp_path, seed))


def test_histories_have_tiers_that_are_filled_and_runs_that_are_left(tmp_path, monkeypatch):
    hurry(monkeypatch)
    count = Counter[str]()
    for seed in range(8):
        (tmp_path / str(seed)).mkdir()
        count += asyncio.run(history(tmp_path / str(seed), seed))
        if count["filled"] and count["left"]:
            break
    assert count["filled"] and count["left"], count
