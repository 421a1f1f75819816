"""A tier that one node cannot reach: who restores is told where, by whose node, why, and the way out."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.ranks import Group
from support.training import tensors
from support.world import Daemon

import tierd
from tierd.core.errors import StoreUnavailable
from tierd.core.timeline.restore_order import describe_silent, restore_order
from tierd.core.timeline.run_view import RunView
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def launch(tmp_path, monkeypatch, quick):
    """Two nodes with a rank each, whose tier is a directory that only the first one has; restores, saves step 1."""
    tier, group = tmp_path / "tier", Group(2)
    tier.mkdir()
    group.install(monkeypatch)
    homes = [tmp_path / name for name in "ab"]

    def restore(rank: int) -> int | None:
        with tierd.Checkpointer(homes[rank], "run") as ckpt:
            found = ckpt.restore(tensors(0))
            return found.step if found else None

    def save(rank: int) -> None:
        with tierd.Checkpointer(homes[rank], "run", to=[]) as ckpt:
            ckpt.save(1, tensors(rank)).wait(timeout=60)

    stores = [FileStore(tier), FileStore(tmp_path / "missing")]
    with Daemon(homes[0], {"tier": stores[0]}), Daemon(homes[1], {"tier": stores[1]}):
        yield lambda saved=False: group.run(save) if saved else group.run(restore)


def check_names(message: str, missing: Path) -> None:
    for text in (
        "rank 1 on ",
        f"node {socket.gethostname()}",
        f"{missing} does not exist: mount it; mkdir only for a new tier",
    ):
        assert text in message, message
    assert "rank 0" not in message.replace("rank 0 could not", ""), "its node's tier answers"


def test_a_directory_that_is_missing_on_one_node_is_named_to_all_ranks_with_its_rank_node_and_path(launch, tmp_path):
    """`file did not answer`, said the message, and no more."""
    for error in launch():
        assert isinstance(error, StoreUnavailable) and "tier did not answer" in str(error)
        check_names(str(error), tmp_path / "missing")


def test_restore_without_a_missing_tier_names_it_in_the_log(launch, tmp_path, caplog):
    launch(saved=True)
    assert launch() == [1, 1]
    reported = [one.getMessage() for one in caplog.records if "not asked for newer ones" in one.getMessage()]
    assert reported
    for one in reported:
        check_names(one, tmp_path / "missing")


def test_checkpoint_that_only_a_missing_tier_has_is_an_error_that_names_the_node(tmp_path, quick):
    tier, away, spool = tmp_path / "tier", tmp_path / "away", Spool(tmp_path / "spool")
    tier.mkdir()
    with Daemon(spool.root, {"tier": FileStore(tier)}) as daemon:
        with tierd.Checkpointer(spool.root, "run") as ckpt:
            ckpt.save(1, tensors(1)).wait(timeout=60)
            daemon.settle()
            bad = next(spool.path(spool.parts()[0]).glob("tensors*"))
            bad.write_bytes(b"\0" * bad.stat().st_size)
            tier.rename(away)
            with pytest.raises(StoreUnavailable) as raised:
                ckpt.restore(tensors(0))
        away.rename(tier)
    assert f"node {socket.gethostname()}" in str(raised.value) and str(tier) in str(raised.value)


def test_many_ranks_make_no_endless_message():
    views = [
        RunView(unreached=("s3",), silent={"s3": f"node n{rank // 8}: s3://bucket/prefix: down"})
        for rank in range(1000)
    ]
    reported = describe_silent(restore_order(views, "run", world=1000), 1000)
    assert reported.startswith(" (ranks 0, 1, 2, 3, 4 and 3 more on node n0: s3://bucket/prefix: down; ranks 8, 9,")
    assert reported.endswith("; and 120 more)") and len(reported) < 1000


def test_isolated_rank_names_itself_and_a_lone_rank_names_nobody():
    resume = restore_order([RunView(unreached=("tier",), silent={"tier": "node a: file:///t: gone"})], "run", world=4)
    assert describe_silent(resume, 4, isolated=3) == " (rank 3 on node a: file:///t: gone)"
    assert describe_silent(resume) == " (node a: file:///t: gone)"
    assert describe_silent(restore_order([RunView(unreached=("tier",))], "run", world=1)) == "", (
        "a daemon of before says no more"
    )
