"""`tierd restore`: killed at any point it goes on where it was, and what stands in the end was verified."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.doubles import damage, is_chunk
from support.world import RUN, commit, content, part

from tierd.cli import run
from tierd.core.manifest import MANIFEST_NAME
from tierd.daemon.transfer import restore_to_directory as export_module
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.local_files import locked_partial
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

CHUNKS = 6


def files(step: int, rank: int) -> dict[str, bytes]:
    return content(step, rank=rank, chunks=CHUNKS)


def flushed(tmp_path: Path, *steps: int) -> None:
    """Add checkpoints by two ranks to the tier."""
    home = Spool(tmp_path / "home")

    async def work() -> None:
        store = FileStore(tmp_path / "tier")
        for step in steps:
            for rank in (0, 1):
                which = part(step, rank=rank, world=2)
                commit(home, which, files(step, rank), metrics={"loss": 10.0 / step if rank == 0 else 0.0})
                await flush(home, which, TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())


@pytest.fixture
def tier(tmp_path) -> Path:
    (tmp_path / "tier").mkdir()
    flushed(tmp_path, 1)
    return tmp_path / "tier"


@pytest.fixture
def got(monkeypatch) -> list[str]:
    """Every chunk that is read from the tier in this process."""
    keys: list[str] = []
    real = FileStore.get

    async def get(self, key, into=None):
        if is_chunk(key):
            keys.append(key)
        return await real(self, key, into)

    monkeypatch.setattr(FileStore, "get", get)
    return keys


_STUCK = """
import asyncio, sys
from tierd.daemon.transfer import download
from tierd.stores.file_store import FileStore
from tierd.cli import run

real, left = FileStore.get, int(sys.argv[1])
download._HANDS = int(sys.argv[2])

async def get(self, key, into=None):
    global left
    if "/chunks/" in key:
        left -= 1
        if left < 0:
            await asyncio.sleep(0.2)  # let the others be written
            print("stuck", flush=True)
            await asyncio.sleep(1000)
    return await real(self, key, into)

FileStore.get = get
run(sys.argv[3:])
"""


def test_the_best_is_copied_out(tier, tmp_path, capsys):
    flushed(tmp_path, 2, 3)
    common = ["restore", str(tier), "--run", RUN, "--json", "--best"]
    for number, (options, step) in enumerate([(["loss"], 3), (["loss", "--mode", "max"], 1)]):
        assert run([*common, *options, "--to", str(tmp_path / f"out-{number}")]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == step
    assert run([*common, "f1", "--to", str(tmp_path / "none")]) == 4
    assert "metric 'f1'; there are: loss" in capsys.readouterr().err
    assert run([*common, "loss", "--step", "1", "--to", str(tmp_path / "none")]) == 3


def killed(tier: Path, target: Path, after: int, hands: int = 1) -> None:
    """A restore that is killed when it has got `after` chunks."""
    command = [sys.executable, "-c", _STUCK, str(after), str(hands)]
    process = subprocess.Popen(
        [*command, "restore", str(tier), "--run", RUN, "--to", str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    process.kill()
    process.wait()
    process.stdout.close()


def found(target: Path, step: int) -> bool:
    for rank in (0, 1):
        home = target / part(step, rank=rank, world=2).name
        there = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}
        del there[MANIFEST_NAME]
        if there != files(step, rank):
            return False
    return sorted(path.name for path in target.iterdir()) == [part(step, rank=r, world=2).name for r in (0, 1)]


@pytest.mark.parametrize(("after", "hands"), [(0, 1), (1, 1), (6, 1), (9, 1), (13, 1), (3, 8)])
def test_killed_restore_continues_where_it_was_and_says_so(tmp_path, tier, got, capsys, after, hands):
    target = tmp_path / "out"
    killed(tier, target, after, hands)
    assert not target.exists() and (tmp_path / ".out.partial").is_dir()
    assert run(["restore", str(tier), "--run", RUN, "--to", str(target)]) == 0
    assert found(target, 1) and not (tmp_path / ".out.partial").exists()
    assert len(got) == 2 * (CHUNKS + 1) - after
    assert ("had been fetched before" in capsys.readouterr().out) == bool(after)


def test_restore_after_a_kill_fetches_the_newer_checkpoint(tmp_path, tier, got):
    target = tmp_path / "out"
    killed(tier, target, 10)
    flushed(tmp_path, 2)
    got.clear()
    assert run(["restore", str(tier), "--run", RUN, "--to", str(target)]) == 0
    assert found(target, 2) and len(got) == 2 * (CHUNKS + 1)


@pytest.mark.parametrize("harm", ["flip", "truncate", "lengthen", "symlink", "directory"])
def test_restore_after_a_kill_rejects_damaged_partial_files(tmp_path, tier, harm):
    target = tmp_path / "out"
    killed(tier, target, 13)
    damage(tmp_path / ".out.partial" / part(1, world=2).name / "weights.bin", harm)
    (tmp_path / ".out.partial" / "stray").mkdir()
    assert run(["restore", str(tier), "--run", RUN, "--to", str(target)]) == 0
    assert found(target, 1)


def test_two_at_once_to_one_place_the_second_is_refused(tmp_path, tier, capsys):
    quarantined = tmp_path / ".out.partial"
    with locked_partial(quarantined):
        assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
        assert "another restore" in capsys.readouterr().err
    assert not quarantined.exists()


@pytest.mark.parametrize("kind", ["link", "directory"])
@pytest.mark.parametrize("at", [1, 7, 14])
def test_restore_writes_nothing_into_a_directory_put_in_place_of_its_own_and_reports_it(
    tmp_path, tier, capsys, monkeypatch, kind, at
):
    """By somebody who may write to the directory above, after the `at`-th chunk."""
    quarantined, outside, real = tmp_path / ".out.partial", tmp_path / "outside", FileStore.get
    outside.mkdir()
    (outside / part(1, world=2).name).mkdir()
    (outside / part(1, world=2).name / "mine").write_bytes(b"mine")
    before = sorted(outside.rglob("*"))
    chunks = 0

    async def get(self, key, into=None):
        nonlocal chunks
        chunks += is_chunk(key)
        if chunks == at and not (tmp_path / "stolen").exists():
            assert stat.S_IMODE(quarantined.stat().st_mode) == 0o700
            quarantined.rename(tmp_path / "stolen")
            quarantined.symlink_to(outside) if kind == "link" else quarantined.mkdir()
        return await real(self, key, into)

    monkeypatch.setattr(FileStore, "get", get)
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
    assert "put another directory in its place" in capsys.readouterr().err
    assert sorted(outside.rglob("*")) == before
    assert not (tmp_path / "out").is_dir() or kind == "link" or not any((tmp_path / "out").iterdir())


def test_restore_refuses_a_partial_directory_that_others_may_write_to(tmp_path, tier, capsys):
    quarantined = tmp_path / ".out.partial"
    quarantined.mkdir()
    quarantined.chmod(0o777)
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
    assert "others may write to it" in capsys.readouterr().err


def test_restored_files_have_the_modes_of_the_umask(tmp_path, tier):
    mask = os.umask(0o027)
    try:
        assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_restore_keeps_the_mode_of_a_directory_and_gives_a_new_directory_its_group(tmp_path, tier):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    (shared / "old").mkdir()
    (shared / "old").chmod(0o2710)
    for name in ("old", "new"):
        assert run(["restore", str(tier), "--run", RUN, "--to", str(shared / name)]) == 0
    (shared / "like").mkdir()
    assert stat.S_IMODE((shared / "old").stat().st_mode) == 0o2710
    assert (shared / "new").stat().st_mode == (shared / "like").stat().st_mode
    assert all(path.stat().st_mode & stat.S_ISGID for path in shared.glob("*/0*"))


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_restore_uses_nothing_that_another_account_put_in_its_place(tmp_path, tier, capsys, kind):
    quarantined = tmp_path / ".out.partial"
    (tmp_path / "outside").mkdir()
    if kind == "link":
        quarantined.symlink_to(tmp_path / "outside")
    elif kind == "file":
        quarantined.write_bytes(b"mine")
    elif os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    else:
        quarantined.mkdir()
        os.chown(quarantined, 65534, 65534)
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
    assert "in the way" in capsys.readouterr().err
    assert not list((tmp_path / "outside").iterdir()) and not (tmp_path / "out").exists()


def test_restore_refuses_a_full_disk_before_it_fetches(tmp_path, tier, got, capsys, monkeypatch):
    real = os.statvfs

    def full(path):
        found = list(real(path))
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
    assert "free" in capsys.readouterr().err
    assert not got and not (tmp_path / ".out.partial").exists()


def test_restore_leaves_no_file_when_no_copy_can_be_verified(tmp_path, tier):
    for path in (tier / RUN / "chunks").rglob("*.*"):
        if path.is_file():
            damage(path, "flip")
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 4
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_the_answer_keeps_its_form(tmp_path, tier, capsys):
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "deep" / "er" / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 1 and len(answer["directories"]) == 2 and answer["tiers"] == ["file"]


def test_a_link_to_an_empty_directory_is_followed(tmp_path, tier):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 0
    assert found(tmp_path / "real", 1) and (tmp_path / "out").is_symlink()


def test_restore_refuses_a_mount_point_before_it_fetches(tmp_path, tier, got, capsys, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "out")
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 3
    assert "mount point" in capsys.readouterr().err
    assert not got and not (tmp_path / ".out.partial").exists()


def test_where_all_was_there_no_source_is_named(tmp_path, tier, capsys, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(export_module, "publish_directory", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")])
    assert run(["restore", str(tier), "--run", RUN, "--to", str(tmp_path / "out")]) == 0
    assert "verified, in:" in capsys.readouterr().out
