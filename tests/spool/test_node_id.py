"""node_id: stable for one spool, and never shared by two."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
import xxhash

from tierd.core.ids import CheckpointId, PartId
from tierd.spool.run_records import mark_saved
from tierd.spool.spool import Spool
from tierd.spool.spool_directory import node_id

PART = PartId(CheckpointId("r", "0198c0000000-00000001", 1), 0, 1)


def recorded(spool: Spool) -> Path:
    return spool.control / "node"


def test_a_spool_keeps_its_id(tmp_path):
    identity = node_id(Spool(tmp_path / "spool").root)
    assert len(identity) == 8 and int(identity, 16) >= 0
    mark_saved(Spool(tmp_path / "spool").control, PART)
    assert node_id(Spool(tmp_path / "spool").root) == identity


def test_two_spools_of_one_host_name_path_and_inode_have_two_ids(tmp_path, monkeypatch):
    """Fresh volumes of one size, mounted at one path by pod `trainer-0` of two clusters, had one id."""
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-0")
    real, inode = Path.stat, 2
    root = tmp_path / "spool"

    def stat(self, **options):
        found = real(self, **options)
        return os.stat_result((found[0], inode, *found[2:])) if self == root else found

    monkeypatch.setattr(Path, "stat", stat)
    ids = set()
    for _ in range(20):
        ids.add(node_id(Spool(root).root))
        shutil.rmtree(root)
    assert len(ids) == 20


def test_a_copied_spool_has_an_id_of_its_own(tmp_path):
    spool = Spool(tmp_path / "spool")
    identity = node_id(spool.root)
    shutil.copytree(spool.root, tmp_path / "copy")
    copied = node_id(tmp_path / "copy")
    assert copied != identity and node_id(tmp_path / "copy") == copied and node_id(spool.root) == identity


def test_a_spool_of_another_host_name_has_another_id(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool")
    identity = node_id(spool.root)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert node_id(spool.root) != identity


def test_a_spool_that_an_earlier_version_used_keeps_its_id(tmp_path):
    """Its records on the tiers have that id, and another node's records delete less."""
    spool = Spool(tmp_path / "spool")
    mark_saved(spool.control, PART)
    recorded(spool).unlink()
    digest = xxhash.xxh3_128_hexdigest(f"{socket.gethostname()} {spool.root} {spool.root.stat().st_ino}".encode())
    assert node_id(Spool(spool.root).root) == digest[:8] == recorded(spool).read_text()[:8]
    assert node_id(spool.root) == digest[:8]


def test_a_fresh_spool_has_its_id_before_its_first_save(tmp_path):
    """A trainer saves before a daemon starts, and its spool must not pass for one of an earlier version."""
    spool = Spool(tmp_path / "spool")
    identity = recorded(spool).read_text()[:8]
    mark_saved(spool.control, PART)
    assert node_id(Spool(spool.root).root) == identity


@pytest.mark.parametrize("damage", ["", "garbage", "link", "directory"])
def test_a_damaged_record_is_no_id(tmp_path, damage):
    spool = Spool(tmp_path / "spool")
    node_id(spool.root)
    recorded(spool).unlink()
    if damage == "link":
        (tmp_path / "target").write_text("secret")
        recorded(spool).symlink_to(tmp_path / "target")
    elif damage == "directory":
        recorded(spool).mkdir()
    else:
        recorded(spool).write_text(damage)
    identity = node_id(spool.root)
    assert len(identity) == 8 and node_id(spool.root) == identity
    assert damage != "link" or (tmp_path / "target").read_text() == "secret"


def test_threads_that_ask_first_get_one_id(tmp_path):
    spool, ids, barrier = Spool(tmp_path / "spool"), [], threading.Barrier(8)

    def ask():
        barrier.wait()
        ids.append(node_id(spool.root))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8 and len(set(ids)) == 1
    assert [path.name for path in spool.control.iterdir() if "node" in path.name] == ["node"]
