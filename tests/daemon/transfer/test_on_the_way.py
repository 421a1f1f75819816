"""A bit that flips on its way from a tier is no corruption: it is read again; nothing is quarantined or given up."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from support.doubles import Double, flipped, is_manifest
from support.world import commit, converge, part, reconciler, running, settle, steps_on

from tierd.daemon.tiers.tier_probes import is_part_held
from tierd.daemon.tiers.tier_prune import prune
from tierd.spool.spool import Spool


class FlipsOnTheWay(Double):
    """Every manifest's first answers have a bit flipped, `times` of them."""

    def __init__(self, inner, times=1):
        super().__init__(inner)
        self.times, self.spoilt = times, Counter()

    async def get(self, key, into=None):
        data = await super().get(key, into)
        if is_manifest(key) and self.spoilt[key] < self.times:
            self.spoilt[key] += 1
            return flipped(bytes(data))
        return data


@pytest.fixture
def tier(spool):
    """A tier with the steps 1 to 3, of which the spool has gone."""
    store = Double()
    for step in (1, 2, 3):
        commit(spool, part(step))
    asyncio.run(converge(spool, {"tier": store}))
    return store.inner


async def test_observation_that_reads_a_manifest_wrong_quarantines_nothing(tier, tmp_path):
    store = FlipsOnTheWay(tier)
    fresh = Spool(tmp_path / "fresh")
    daemon = reconciler(fresh, {"tier": store})
    daemon.requests.requested_runs.add(part(1).checkpoint.run)
    async with running(daemon):
        await settle(daemon)
        assert len(store.spoilt) == 3
        assert all(daemon.tiers.observed.has(part(step), "tier") for step in (1, 2, 3))
    assert not daemon.journal.counters["quarantined"] and not daemon.journal.counters["corruptions"]
    assert steps_on([info.key async for info in tier.scan("")]) == [1, 2, 3]
    assert not [info.key async for info in tier.scan("run/quarantine/")]


async def test_tier_with_flips_on_the_way_still_holds_its_parts(tier, spool):
    assert await is_part_held(FlipsOnTheWay(tier), part(2), spool.manifest(part(2))) is True


async def test_manifest_that_read_wrong_for_a_while_is_not_flushed_for_ever(tier, spool):
    """The same bytes, put anew, have the same token on S3, which is by content."""

    class ByContent(FlipsOnTheWay):
        async def scan(self, prefix, after=""):
            async for info in super().scan(prefix, after):
                yield replace(info, token="etag")

    store = ByContent(tier, times=4)
    await converge(spool, {"tier": store})
    assert len(store.puts(is_manifest)) <= 6


async def test_a_prune_is_not_held_up(tier):
    assert (await prune(FlipsOnTheWay(tier), [part(1).checkpoint])).deleted
    assert steps_on([info.key async for info in tier.scan("")]) == [2, 3]
