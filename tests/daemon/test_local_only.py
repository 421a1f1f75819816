"""A launch with `to=[]`: a daemon that lives, or comes later, neither sends nor deletes what it saves (own-loop.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from support.doubles import Double, contents
from support.training import tensors
from support.waiting import wait_until
from support.world import RUN, Daemon, commit, converge, part, steps_in, steps_on

import tierd
from tierd.core.errors import ConfigError, DaemonUnavailable
from tierd.core.planning.eviction import evictable_copies
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import PreemptionNotice, RemoveRun, ReportRequest
from tierd.spool.spool import Spool


def save(spool: Spool, steps: Sequence[int], to: list[str] | None) -> None:
    with tierd.Checkpointer(spool.root, RUN, to=to) as ckpt:
        ckpt.restore(tensors(0))
        for step in steps:
            ckpt.save(step, tensors(step)).wait()


def steps_of(tier) -> list[int]:
    return sorted({int(path.name[:12]) for path in tier.glob(f"{RUN}/manifests/*") if any(path.iterdir())})


def on(tier: Double) -> list[int]:
    return steps_on(asyncio.run(contents(tier.inner)))


def ended(spool: Spool) -> bool:
    with contextlib.suppress(DaemonUnavailable):
        DaemonConnection(spool).close()
        return False
    return True


def test_daemon_of_earlier_launch_leaves_launch_without_tiers_alone(spool, tmp_path):
    tier, away = tmp_path / "tier", tmp_path / "away"
    tier.mkdir()
    with tierd.Checkpointer(spool.root, RUN, to=[f"file://{tier}"]) as ckpt:
        tier.rename(away)
        ckpt.save(1, tensors(1)).wait()
        ckpt.close(wait="local")
    assert not ended(spool)
    save(spool, range(2, 9), [])
    away.rename(tier)
    with DaemonConnection(spool) as link:
        link.ask(
            PreemptionNotice(part=spool.parts()[0], why="the tier is back"), 60
        )  # the tier is tried at once, and not after its backoff
    wait_until(lambda: steps_of(tier) and ended(spool))  # it ends once the tier has what it wants
    assert steps_of(tier) == [1], "the earlier launch's own checkpoint arrives"
    assert steps_in(spool) == list(range(1, 9))


def test_later_daemon_leaves_it_alone_until_launch_names_tiers(spool):
    tier = Double()
    save(spool, range(1, 7), [])
    asyncio.run(converge(spool, {"tier": tier}, keep=2))
    assert on(tier) == [] and steps_in(spool) == [1, 2, 3, 4, 5, 6]
    with Daemon(spool.root, {"tier": tier}, keep=2) as daemon:
        save(spool, [7], None)  # with the tiers of the daemon
        daemon.settle()
    assert on(tier) == steps_in(spool) == [6, 7]


def test_launch_that_names_tiers_has_earlier_saves_sent_without_saving(spool):
    tier = Double()
    save(spool, [1, 2], [])
    with Daemon(spool.root, {"tier": tier}) as daemon:
        daemon.settle()
        tierd.Checkpointer(spool.root, RUN).close()
        daemon.settle()
    assert on(tier) == [1, 2]


def test_launch_that_names_tiers_restores_checkpoint_saved_without_tiers(spool):
    save(spool, [1, 2], [])
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        daemon.settle()
        with tierd.Checkpointer(spool.root, RUN) as ckpt:
            assert ckpt.restore(tensors(0)).step == 2


def test_launch_without_tiers_that_only_restores_changes_nothing(spool):
    tier = Double()
    commit(spool, part(1))
    commit(spool, part(2))
    with tierd.Checkpointer(spool.root, RUN, to=[]) as ckpt:
        ckpt.restore()
    asyncio.run(converge(spool, {"tier": tier}, keep=1))
    assert on(tier) == steps_in(spool) == [2]


def test_launch_with_unusable_tier_does_not_release_local_only_checkpoints(spool):
    tier = Double()
    save(spool, [1, 2], [])
    with pytest.raises(ConfigError):
        tierd.Checkpointer(spool.root, RUN, to=["file://relative"])
    asyncio.run(converge(spool, {"tier": tier}, keep=1))
    assert on(tier) == [] and steps_in(spool) == [1, 2]


def test_finished_run_without_tiers_is_kept_in_spool(spool):
    tier = Double()
    with tierd.Checkpointer(spool.root, RUN) as ckpt:
        ckpt.save(1, tensors(1)).wait()
    save(spool, [2, 3], [])
    asyncio.run(converge(spool, {"tier": tier}, finished="0s"))
    assert steps_in(spool) == [1, 2, 3] and on(tier) == [1]


def test_full_disk_evicts_nothing_of_run_without_tiers(spool):
    tier = Double()
    commit(spool, part(1))
    commit(spool, part(2))

    async def work() -> tuple:
        daemon = await converge(spool, {"tier": tier})
        assert evictable_copies(daemon.inventory(), daemon.config)
        with tierd.Checkpointer(spool.root, RUN, to=[]) as ckpt:
            await asyncio.to_thread(lambda: ckpt.save(3, tensors(3)).wait())
        await daemon.observe("local")
        return evictable_copies(daemon.inventory(), daemon.config)

    assert asyncio.run(work()) == ()


def test_list_of_daemon_shows_checkpoints_of_launch_without_tiers_as_kept(spool):
    save(spool, [1, 2, 3], [])
    with Daemon(spool.root, {"tier": Double()}, keep=1) as daemon:
        daemon.settle()
        with DaemonConnection(spool) as link:
            found = link.ask(ReportRequest(run=RUN), 60.0)["report"]["checkpoints"]
    assert [one["step"] for one in found] == [3, 2, 1]
    assert all(copy["keep"] and "no tier" in copy["reasons"][0] for one in found for copy in one["copies"])


@pytest.mark.parametrize("text", ["", "[]", '{"attempt": 7}', "\x00"])
def test_record_that_cannot_be_read_has_whole_run_left_alone(spool, text):
    tier = Double()
    save(spool, [1, 2, 3], [])
    (spool.control / "local-only" / f"{RUN}.json").write_text(text)
    asyncio.run(converge(spool, {"tier": tier}, keep=1))
    assert on(tier) == [] and steps_in(spool) == [1, 2, 3]


def test_removed_run_leaves_no_record(spool):
    save(spool, [1], [])
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        daemon.settle()
        with DaemonConnection(spool) as link:
            link.ask(RemoveRun(run=RUN), 60.0)
    assert not (spool.control / "local-only" / f"{RUN}.json").exists()
