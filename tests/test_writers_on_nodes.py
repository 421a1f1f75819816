"""Who can write where: each cell of its tables, by a rank of the job that lies, and another user.

A test is named after its cell: `rank/world` is `test_rank_world…`. `tests/test_writers_table.py` compares.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.doubles import Double
from support.ranks import Group
from support.users import as_root, by_nobody
from support.waiting import wait_until
from support.world import RUN, Daemon, attempt, hurry, part
from support.writers import daemon_until, forge, kinds, lie, restored, state

import tierd
from tierd.core.errors import CheckpointNotFound, SaveFailed, StateMismatch
from tierd.core.ids import CheckpointId, PartId
from tierd.core.timeline.restore_order import RestoreOrder, restore_order
from tierd.core.timeline.run_view import RunView
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Pause, StatusRequest
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore

FAR = "0690ffffffff-00000000"  # a launch of the year 2198
HONEST = part(2).checkpoint


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """Of a node with both ranks of a job, which saved the steps 1 and 2."""
    spool = Spool(tmp_path / "spool")
    for step in (1, 2):
        for rank in (0, 1):
            lie(spool, part(step, rank=rank, world=2), 100 * step + rank)  # the truth
    return spool


Both = Callable[..., list]


@pytest.fixture
def both(spool: Spool, monkeypatch) -> Both:
    """What each rank's restore gives or raises."""
    group = Group(2)
    group.install(monkeypatch)

    def restore(then: int | None = None, **asked: object) -> list:
        def work(number: int) -> object:
            into = state(0)
            with tierd.Checkpointer(spool.root, RUN, to=[]) as ckpt:
                found = ckpt.restore(into, **asked)
                if then is not None:
                    ckpt.save(then, state(100 * then + number)).wait(timeout=60)
            return found and (found.step, into["w"][0].item(), [(one.step, one.reason) for one in found.skipped])

        return group.run(work)

    return restore


# -- a rank that lies -------------------------------------------------------------------------------------------------


def test_rank_bytes(spool, both, monkeypatch):
    """It saves in another's name, first. The other one's save fails, and says so; what the liar saved comes back."""
    group = Group(2)

    def work(number: int) -> None:
        with tierd.Checkpointer(spool.root, RUN, to=[]) as ckpt:
            other = PartId(CheckpointId(RUN, ckpt.attempt, 3), 0, 2)
            if number == 1:
                lie(spool, other)
                lie(spool, PartId(other.checkpoint, 1, 2), 301)
            else:
                wait_until(lambda: spool.has(PartId(other.checkpoint, 1, 2)))
                with pytest.raises(SaveFailed, match="is already committed; a checkpoint is never overwritten"):
                    ckpt.save(3, state(300)).wait(timeout=60)

    with monkeypatch.context() as patch:
        group.install(patch)
        assert group.run(work) == [None, None]
    assert both() == [(3, 666.0, []), (3, 301.0, [])]


def test_rank_bytes_on_another_node_the_first_that_is_flushed_stands_until_the_other_frees_its_own(tmp_path):
    store, liar, honest = MemoryStore(), Spool(tmp_path / "liar"), Spool(tmp_path / "honest")
    forge(store, liar, part(1))
    for step in (1, 2, 3):
        lie(honest, part(step), step)
    daemon_until(store, honest, lambda daemon: daemon.tiers.observed.has(part(3), "tier"), keep=100)
    assert restored(store, step=1)[:2] == (1, 666.0)
    for step in (4, 5):
        lie(honest, part(step), step)
    daemon = daemon_until(store, honest, lambda daemon: "corrupt" in kinds(daemon), keep=100)
    assert [event.step for event in daemon.journal.events if event.what == "corrupt"] == [1]
    daemon_until(store, honest, lambda daemon: not honest.has(part(1)), keep=100)
    assert restored(store, step=1)[:2] == (1, 1.0)


@pytest.mark.parametrize("step", [2, 3])
def test_rank_world(spool, both, step):
    """It says that it was alone: what it saved is complete, and no two ranks load it."""
    lie(spool, part(step, rank=0, world=1))
    for error in both():
        assert isinstance(error, StateMismatch)
        assert f"step {step} " in str(error) and "by 1 ranks, and this launch has 2" in str(error)
    assert [found[:2] for found in both(step=1)] == [(1, 100.0), (1, 101.0)]


def test_rank_world_that_is_larger_is_never_complete(spool, both):
    lie(spool, part(3, rank=1, world=3))
    for found in both():
        assert found[0] == 2 and [(one, why[:10]) for one, why in found[2]] == [(3, "incomplete")]


@pytest.mark.parametrize(("liar", "origin", "given"), [(0, None, None), (0, part(1), 1), (1, None, 2), (1, part(1), 2)])
def test_rank_origin(spool, both, liar, origin, given):
    """The lowest rank speaks for the launch: where it lies, so goes the timeline."""
    for rank in (0, 1):
        said = HONEST if rank != liar else origin.checkpoint if origin else None
        lie(spool, part(5, 2, rank, 2), origin=said)
    for found in both():
        if given is None:
            assert isinstance(found, CheckpointNotFound) and "off the timeline: step 2" in str(found)
        else:
            assert found[0] == given
            assert [(step, "do not belong together" in why) for step, why in found[2]] == [(5, True)]
    assert [found[:2] for found in both(step=2)] == [(2, 200.0), (2, 201.0)]


def test_rank_future(spool, both):
    """Nobody follows a name of more than fifty years ahead: what is saved after it is older than it."""
    lie(spool, PartId(CheckpointId(RUN, FAR, 1), 1, 2))
    for error in both():
        assert isinstance(error, CheckpointNotFound) and f"attempt {FAR}" in str(error)
    assert [found[0] for found in both(step=2, then=3)] == [2, 2]
    for error in both():
        assert isinstance(error, CheckpointNotFound)
    spool.remove([PartId(CheckpointId(RUN, FAR, 1), 1, 2)])
    assert [found[:2] for found in both()] == [(3, 300.0), (3, 301.0)]


def test_rank_future_within_fifty_years_chosen_checkpoint_is_continued(spool, both):
    lie(spool, PartId(CheckpointId(RUN, "01ffffffffff-00000000", 1), 1, 2))  # 2039
    assert all(isinstance(error, CheckpointNotFound) for error in both())
    assert [found[0] for found in both(step=2, then=3)] == [2, 2]
    assert [found[:2] for found in both()] == [(3, 300.0), (3, 301.0)]


@pytest.mark.parametrize("liar", [0, 1])
def test_rank_metrics(spool, both, liar):
    """Rank 0's count, and no other's."""
    for step, loss in ((3, 1.0), (4, 2.0)):
        for rank in (0, 1):
            said = -loss if rank == liar else loss
            lie(spool, part(step, rank=rank, world=2), 100 * step + rank, metrics={"loss": said})
    assert [found[0] for found in both(best="loss")] == [4, 4] if liar == 0 else [3, 3]


WHOLE = RunView(whole={2: {attempt(1): [1, 2]}}, origins={attempt(1): None})


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize(
    ("view", "lost"),
    [
        (RunView(whole={2: {attempt(1): [1, 2, 3]}}, origins={attempt(1): None}), "lacking"),
        (RunView(origins={attempt(1): None, attempt(5): None}), "nothing"),
        (RunView(aside={attempt(1): [9]}, gone={attempt(4): [9]}, unreached=("tier",)), "said"),
    ],
)
def test_rank_says(view, lost, liar):
    """What one rank says of what it sees: the others never take for theirs what they do not see themselves."""
    views = [view, WHOLE] if liar == 0 else [WHOLE, view]
    found: RestoreOrder = restore_order(views, RUN, world=2)
    first = found.candidates[0] if found.candidates else None
    if lost == "lacking":  # what it made up is waited for, and the restore says that no copy is seen
        assert first and first.checkpoint.step == 3 and 1 - liar in first.lacking
    elif lost == "nothing":
        assert first is None and found.branches  # which raises, and names what there is
    else:
        assert first and first.checkpoint.step == 2 and found.unreached == ("tier",) and found.missing


def test_rank_account(tmp_path):
    """Each process of the same user may ask the daemon as a person does, and it shows."""
    spool = Spool(tmp_path / "spool")
    with Daemon(spool.root, {"tier": Double()}), DaemonConnection(spool) as link:
        assert link.ask(StatusRequest())["status"]["paused"] is None
        link.ask(Pause())
        assert link.ask(StatusRequest())["status"]["paused"] is not None


# -- another user of the node -----------------------------------------------------------------------------------------


@as_root
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_user_spool(tmp_path):
    """Where every directory above lets them pass: they get at nothing in a spool, nor on a tier's directory."""
    spool, tier = Spool(tmp_path / "spool"), tmp_path / "tier"
    tier.mkdir()
    lie(spool, part(1), 1)
    with Daemon(spool.root, lambda: {"tier": FileStore(tier)}) as daemon:
        daemon.settle()
        (manifest,) = (path for path in tier.rglob("*.json") if "manifests" in path.parts)
        own = spool.path(part(1))
        inside = [*own.iterdir(), spool.control / "lock", manifest, *manifest.parents[:2]]
        names = [str(path.relative_to(tmp_path)) for path in inside]
        tmp_path.chmod(0o755)
        there = os.open(tmp_path, os.O_RDONLY)

        def visit() -> int:
            os.fchdir(there)
            got = 0
            for name in names:
                for act in (os.listdir, os.unlink, os.rmdir, lambda one: os.open(one, os.O_RDONLY)):
                    got += _does(act, name)
                got += _does(lambda one: os.rename(one, "mine"), name)
                got += _does(lambda one: os.open(one + ".new", os.O_CREAT | os.O_WRONLY), name)
            for name in ("control.sock", "handoff.sock"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                    got += _does(peer.connect, f"spool/.tierd/{name}")
            got += _does(lambda one: os.rename(one, "other"), "spool")
            return got

        assert by_nobody(visit) == 0
        os.close(there)
    assert spool.parts() == [part(1)] and manifest.exists()
    assert asyncio.run(_one(tier))


def _does(act: Callable[[str], object], name: str) -> int:
    """Whether it can be done."""
    try:
        act(name)
    except PermissionError:
        return 0
    return 1


async def _one(tier: Path) -> bool:
    store = FileStore(tier)
    try:
        return bool(await store.get(part(1).manifest_key))
    finally:
        await store.aclose()
