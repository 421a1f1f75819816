"""A disk or a network that returns other wrong bytes at each read is an error: nothing is quarantined or lost."""

from __future__ import annotations

import random

import pytest
from support.bad_readers import BadDisk, BadNetwork
from support.doubles import Double, is_chunk, is_manifest
from support.seeds import seeds
from support.timed import timed
from support.waiting import until
from support.world import RUN, commit, content, converge, part, read, reconciler, running

from tierd.client.restoring.part_source import NodeSource
from tierd.core.errors import StoreUnavailable
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.planning.place import SPOOL
from tierd.core.storage_faults import UnstableRead
from tierd.daemon.daemon_status import make_status
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.spool.spool import Spool

PART = part(7)


@pytest.mark.parametrize("one_in", [3, 10])
@pytest.mark.parametrize("seed", seeds(weight=2))
def test_a_restore_from_a_disk_that_flips_bits_quarantines_nothing(tmp_path, monkeypatch, seed, one_in):
    spool = Spool(tmp_path)
    data = commit(spool, PART, {"weights.bin": random.Random(seed).randbytes(3 << 20), **content(7)})
    with monkeypatch.context() as patched:
        BadDisk(patched, spool.path(PART), seed, one_in)
        try:
            _, files, _ = NodeSource(spool, RUN, tiers=False, line=None, keep=True).obtain(PART)
            assert {name: bytes(view) for name, view in files.items()} == data
        except StoreUnavailable as error:
            assert "different wrong bytes" in str(error)
    assert spool.has(PART) and not spool.quarantined() and read(spool, PART) == data


@pytest.mark.parametrize("tiers", [0, 1])
@pytest.mark.parametrize("one_in", [1, 2, 10])
async def test_a_scrub_of_a_disk_that_flips_bits_changes_nothing(tmp_path, monkeypatch, one_in, tiers):
    spool, stores = Spool(tmp_path), {"tier": Double()} if tiers else {}
    data = commit(spool, PART)
    await converge(spool, stores)
    daemon = reconciler(spool, stores, scrub="30d")
    await daemon.observe(SPOOL)
    with monkeypatch.context() as patched:
        disk = BadDisk(patched, spool.path(PART), 1, one_in)
        for _ in range(3):
            try:
                await daemon.scrubber.scrub(ScrubbedCopy(SPOOL, PART))
            except UnstableRead as error:
                assert "weights.bin" in str(error) or "state.json" in str(error)
            else:
                assert one_in > 1
    assert disk.flips or one_in > 2
    assert spool.has(PART) and not spool.quarantined() and read(spool, PART) == data
    counters = daemon.journal.counters
    assert not counters["quarantined"] and not counters["corruptions"] and not counters["healed_chunks"]


@pytest.mark.parametrize("of", [is_chunk, is_manifest])
@pytest.mark.parametrize("left", [2, 5, 10**9])
async def test_a_tier_whose_answers_differ_is_not_corrupt(tmp_path, of, left):
    spool, tier = Spool(tmp_path), Double()
    commit(spool, PART)
    await converge(spool, {"tier": tier})
    keys = [info.key async for info in tier.scan("")]
    network = BadNetwork(tier, of, left)
    daemon = reconciler(spool, {"tier": network}, scrub="30d")
    try:
        await daemon.scrubber.scrub(ScrubbedCopy("tier", PART))
    except UnstableRead:
        assert left > 5
    else:
        assert left <= 5
    network.left = left
    try:
        assert (await verify_part(network, PART, lambda size: None))[1] == []
    except UnstableRead:
        assert left > 5
    assert [info.key async for info in tier.scan("")] == keys
    assert not daemon.journal.counters["corruptions"]


def alerts(daemon) -> list[str]:
    return [event.what for event in daemon.journal.events if event.doing == "read"]


async def scrub(daemon, *copies: ScrubbedCopy) -> None:
    for copy in copies:
        try:
            await daemon.scrubber.scrub(copy)
        except UnstableRead:
            pass


async def test_a_disk_that_flips_bits_is_an_alert_until_every_copy_can_be_read(tmp_path, monkeypatch):
    spool = Spool(tmp_path)
    for step in (1, 2):
        commit(spool, part(step))
    daemon = reconciler(spool, {}, scrub="30d")
    await daemon.observe(SPOOL)
    first, second = (ScrubbedCopy(SPOOL, part(step)) for step in (1, 2))
    with monkeypatch.context() as patched:
        BadDisk(patched, tmp_path / RUN, 1, 1)
        await scrub(daemon, first, second)
    (problem,) = (one for one in make_status(daemon, 0, 0).problems if one.severity == "alert")
    assert problem.place == SPOOL and str(tmp_path / RUN) in problem.why and "smartctl" in problem.why
    await scrub(daemon, first)
    assert alerts(daemon) == ["failing"] and daemon.journal.alerts()
    await scrub(daemon, second)
    assert alerts(daemon) == ["failing", "works again"] and not daemon.journal.alerts()


async def test_scrub_continues_beside_a_copy_whose_reads_differ_until_it_is_deleted(tmp_path, monkeypatch):
    timed(monkeypatch, scrub_rest_s=0.01)
    spool = Spool(tmp_path)
    for step in (1, 2):
        commit(spool, part(step))
    BadDisk(monkeypatch, spool.path(part(1)), 1, 1)
    async with running(reconciler(spool, {})) as daemon:
        daemon.scrubber.suspect(SPOOL, part(1))
        await until(lambda: daemon.journal.alerts())
        daemon.scrubber.suspect(SPOOL, part(2))
        await until(lambda: daemon.journal.counters["scrubbed"])
        assert daemon.journal.alerts()
        spool.remove([part(1)])
        await daemon.observe(SPOOL)
        await until(lambda: not daemon.journal.alerts())
