"""A disk that returns wrong bytes at some reads makes no unit of a program's directory damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import layouts
from support.bad_readers import BadDisk
from support.watched_run import RUN, flush, take

from tierd.cli import run
from tierd.spool.spool import Spool
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units
from tierd.watching.unit_inspection import inspect_unit


def statuses(root: Path) -> list[str]:
    """What is found of every unit; `OSError` where reads differ from each other."""
    with DirectoryTree(root) as tree:
        listing = tree.listing()
        found = units(listing)
        sizes = {path: entry.size for path, entry in listing.entries.items()}
        return [
            inspect_unit(unit, sizes, lambda path: tree.opened(path, listing.entries[path])).status for unit in found
        ]


@pytest.mark.parametrize("write", [layouts.pt, layouts.hf_model, layouts.plain_dcp], ids=lambda one: one.__name__)
@pytest.mark.parametrize("one_in", [3, 20])
def test_a_sound_unit_on_a_bad_disk_is_not_damaged(tmp_path, monkeypatch, write: Callable, one_in):
    root = tmp_path / "home"
    root.mkdir()
    write(root / "a-1.pt" if write is layouts.pt else root)
    assert set(statuses(root)) == {"sound"}
    flips = 0
    for seed in range(10):
        with monkeypatch.context() as patched:
            disk = BadDisk(patched, root, seed, one_in)
            assert not {"damaged", "incomplete"}.intersection(statuses(root))
        flips += disk.flips
    assert flips
    assert set(statuses(root)) == {"sound"}


def test_unit_that_is_wrong_in_the_page_cache_only_is_sound(tmp_path, monkeypatch):
    layouts.pt(tmp_path / "a-1.pt")
    disk, dropped = BadDisk(monkeypatch, tmp_path, 1, 1), []
    monkeypatch.setattr(disk, "is_bad", lambda: not dropped)
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: dropped.append(call))
    assert statuses(tmp_path) == ["sound"] and disk.flips and dropped


def test_a_unit_whose_stored_bytes_are_wrong_is_damaged_on_a_bad_disk(tmp_path, monkeypatch):
    root = tmp_path / "home"
    root.mkdir()
    layouts.pt(root / "a-1.pt")
    data = bytearray((root / "a-1.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (root / "a-1.pt").write_bytes(data)
    found = []
    for seed in range(10):
        with monkeypatch.context() as patched:
            BadDisk(patched, root, seed, 20)
            found += statuses(root)
    assert "damaged" in found and set(found) <= {"damaged", "unreadable"}


@pytest.mark.parametrize("is_taken", [True, False])
def test_prepare_moves_no_right_unit_because_of_a_bad_disk(tmp_path, monkeypatch, capsys, is_taken):
    """A unit that was taken is compared with its digests, another one is checked by its structure."""
    root, spool, tier = tmp_path / "home", Spool(tmp_path / "spool"), tmp_path / "tier"
    root.mkdir()
    layouts.pt(root / "a-1.pt")
    if is_taken:
        assert take(spool, root).parts
        flush(spool, tier)
    else:
        tier.mkdir()
    before = (root / "a-1.pt").read_bytes()
    codes = []
    for seed in range(10):
        with monkeypatch.context() as patched:
            BadDisk(patched, root, seed, 20)
            codes.append(run(["prepare", str(root), "--run", RUN, "--to", str(tier), "--json"]))
        shown = capsys.readouterr()
        assert (root / "a-1.pt").read_bytes() == before and not (root / ".tierd-quarantine").exists(), shown
    assert 0 in codes
