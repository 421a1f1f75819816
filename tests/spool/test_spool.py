"""The local tier: a part is there whole or not at all, whatever happens to its writer; removing is as sudden."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.world import described, read

from tierd.core.errors import (
    CorruptChunk,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    SpoolFull,
    SpoolUnusable,
    StepRefused,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.manifest_codec import encode, seal
from tierd.spool import leftovers
from tierd.spool import stage as stage_module
from tierd.spool.file_io import write_file
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.spool.spool_directory import directories_in
from tierd.spool.stage import describe_directory

ATTEMPT = "0123456789ab-01234567"


def part(step=100, rank=0, world=1, run="r") -> PartId:
    return PartId(CheckpointId(run, ATTEMPT, step), rank, world)


def fill(stage, owner: PartId) -> Manifest:
    """Two files, one of them in a directory, as any writer would stage them."""
    (stage.path / "deep").mkdir()
    for name in ("one", "deep/two"):
        write_file(stage.path / name, name, f"{name} of {owner}".encode() * 50, 64)
    return msgspec.structs.replace(described(owner), files=describe_directory(stage.path))


def commit(spool: Spool, owner: PartId) -> Manifest:
    with spool.stage(owner) as stage:
        manifest = fill(stage, owner)
        stage.commit(manifest)
    return manifest


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


def is_whole(spool: Spool, owner: PartId) -> bool:
    return read(spool, owner) == {name: f"{name} of {owner}".encode() * 50 for name in ("one", "deep/two")}


# -- commit -----------------------------------------------------------------------------------------------------------


def test_a_committed_part_is_listed_and_read_back(spool):
    manifest = commit(spool, part())
    assert spool.parts() == [part()]
    assert spool.manifest(part()) == manifest
    assert is_whole(spool, part())
    assert spool.path(part()) == spool.root / "r" / f"000000000100.{ATTEMPT}" / "00000-of-00001"
    assert spool.leftovers() == []
    assert spool.attempts("r") == {ATTEMPT}
    assert spool.attempts("other") == set()


def test_nothing_is_visible_before_commit_or_after_abandon(spool):
    stage = spool.stage(part())
    fill(stage, part())
    assert spool.parts() == []
    stage.abandon()
    stage.abandon()
    assert spool.parts() == spool.leftovers() == []
    assert list((spool.control / "stage").iterdir()) == []


def test_a_stage_that_a_failing_disk_keeps_is_a_leftover(spool, monkeypatch):
    """Seed 167 of `python -m faults disk`: it stayed locked, and so for as long as its process lived."""

    def fails(path, ignore_errors):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(stage_module.shutil, "rmtree", fails)
    with pytest.raises(KeyError), spool.stage(part()):
        raise KeyError
    monkeypatch.undo()
    (left,) = spool.leftovers()
    spool.discard(left)
    assert spool.leftovers() == []


def test_a_part_is_never_committed_twice(spool):
    late = spool.stage(part())  # begun before the other was committed
    commit(spool, part())
    with pytest.raises(StepRefused, match="already committed"):
        spool.stage(part())
    with pytest.raises(StepRefused, match="already committed"), late:
        late.commit(fill(late, part()))
    assert is_whole(spool, part())
    assert spool.leftovers() == []


def test_other_ranks_steps_and_attempts_do_not_collide(spool):
    others = [part(rank=0, world=2), part(rank=1, world=2), part(200), part(run="r2")]
    for owner in others:
        commit(spool, owner)
    assert spool.parts() == sorted(others)


def test_every_directory_of_a_part_is_synced_and_the_manifest_is_written_last(spool, monkeypatch):
    """P1, as an order of system calls: content, manifest, directories, the rename, then the directories around it."""
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd):
        calls.append("sync " + os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(spool.root)))
        real_fsync(fd)

    def rename(*args, **kwargs):
        calls.append("rename")
        real_rename(*args, **kwargs)

    stage = spool.stage(part())
    manifest = fill(stage, part())
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    stage.commit(manifest)
    here = str(stage.path).removeprefix(str(spool.root))
    checkpoint = f"/r/{part().checkpoint.name}"
    assert calls == [
        f"sync {here}/manifest.json",
        f"sync {here}/deep",
        f"sync {here}",
        "sync ",
        "sync /r",
        "rename",
        f"sync {checkpoint}",
        "sync /.tierd/stage",
    ]
    calls.clear()
    commit(spool, part(rank=0, world=2))  # another rank made the directories, and may not have synced them yet
    assert {"sync ", "sync /r", f"sync {checkpoint}"} <= set(calls)


def test_new_spool_survives_a_power_cut(tmp_path, monkeypatch):
    """Else all that is committed there later is lost with its entry (simulation, seed 2)."""
    calls: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    spool = Spool(tmp_path / "a" / "b" / "spool")
    record = [f"{spool.control}/node.new", str(spool.control)]  # of the node's id
    assert calls == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b"), *record]
    calls.clear()
    Spool(tmp_path / "a" / "b" / "spool")  # its creator may have been killed before it was synced
    assert calls == [str(tmp_path / "a" / "b")]


# -- cut off anywhere -------------------------------------------------------------------------------------------------

_CALLS = ("open", "fsync", "pwrite", "mkdir", "rename", "close")


def _fail_at(monkeypatch, number: int, happen) -> list[str]:
    """Let the `number`-th of the calls that `commit` makes to the system do `happen` instead."""
    made: list[str] = []
    for name in _CALLS:
        real = getattr(os, name)

        def call(*args, _name=name, _real=real, **kwargs):
            made.append(_name)
            if len(made) == number:
                happen()
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    return made


def test_whichever_system_call_fails_the_part_is_whole_or_not_there(tmp_path, monkeypatch):
    """P2 and P6 by exhaustion: every call in turn reports EIO."""

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    outcomes = []
    for number in range(1, 100):
        spool = Spool(tmp_path / str(number))
        with spool.stage(part()) as stage:
            manifest = fill(stage, part())
            with monkeypatch.context() as patch:
                made = _fail_at(patch, number, fail)
                try:
                    stage.commit(manifest)
                    failed = False
                except OSError:
                    failed = True
        if len(made) < number:
            assert spool.parts() == [part()]
            break
        assert spool.parts() in ([], [part()])
        if spool.parts():
            assert is_whole(spool, part())
        else:
            assert failed  # a commit that returned is visible
            commit(spool, part())
            assert is_whole(spool, part())
        for name in spool.leftovers():
            spool.discard(name)
        assert spool.leftovers() == []
        outcomes.append(made[number - 1])
    assert {"fsync", "rename", "pwrite", "mkdir"} <= set(outcomes)


_WRITER = """
import os, signal, sys
sys.path[:0] = {path!r}
from spool.test_spool import Spool, _fail_at, fill, part

class Patch:
    def setattr(self, target, name, value):
        setattr(target, name, value)

spool = Spool(sys.argv[1])
stage = spool.stage(part())
manifest = fill(stage, part())
_fail_at(Patch(), int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
stage.commit(manifest)
os._exit(0)
"""


def _writer(root: Path, number: int) -> subprocess.Popen[bytes]:
    code = _WRITER.format(path=[str(Path(__file__).parents[1])])
    return subprocess.Popen([sys.executable, "-c", code, str(root), str(number)])


def test_killed_at_any_system_call_the_part_is_whole_or_not_there(tmp_path):
    """SIGKILL instead of an error: nobody abandons the stage, so the next start has to find and discard it."""
    seen = set()
    numbers = range(1, 40, 3)
    for some in (numbers[:7], numbers[7:]):
        writers = {number: _writer(tmp_path / str(number), number) for number in some}
        for number, writer in writers.items():
            status = writer.wait(60)
            assert status in (0, -signal.SIGKILL)
            spool = Spool(tmp_path / str(number))
            visible = spool.parts() == [part()]
            seen.add((status, visible))
            assert spool.parts() in ([], [part()])
            assert not visible or is_whole(spool, part())
            for name in spool.leftovers():
                spool.discard(name)
            assert list((spool.control / "stage").iterdir()) == []
            if not visible:
                commit(spool, part())
                assert is_whole(spool, part())
    assert {(-signal.SIGKILL, False), (0, True)} <= seen


# -- leftovers --------------------------------------------------------------------------------------------------------


def test_stage_of_a_live_writer_is_no_leftover_and_of_a_dead_writer_is(spool):
    stage = spool.stage(part())
    fill(stage, part())
    other = Spool(spool.root)
    assert other.leftovers() == []
    other.discard(f"stage/{stage.path.name}")  # not even when it is asked for
    assert stage.path.is_dir()
    with open(os.devnull) as null:
        os.dup2(null.fileno(), stage._fd)  # which closes it, as a death does
    assert other.leftovers() == [f"stage/{stage.path.name}"]
    other.discard(other.leftovers()[0])
    assert other.leftovers() == []
    assert not stage.path.exists()


def test_a_stage_that_was_swept_before_its_lock_was_taken_is_made_anew(spool, monkeypatch):
    """Between mkdir and flock a sweep may take the directory away."""
    real, swept = os.open, []

    def open_after_a_sweep(path, *args, **kwargs):
        fd = real(path, *args, **kwargs)
        if Path(path).parent.name == "stage" and not swept:
            swept.append(path)
            Path(path).rename(spool.control / "trash" / "swept")
        return fd

    monkeypatch.setattr(os, "open", open_after_a_sweep)
    stage = spool.stage(part())
    monkeypatch.undo()
    assert swept
    stage.commit(fill(stage, part()))
    assert is_whole(spool, part())


def test_interrupted_removal_is_a_leftover(spool, monkeypatch):
    commit(spool, part())
    monkeypatch.setattr(leftovers, "remove", lambda *args, **kwargs: None)
    spool.remove([part()])
    monkeypatch.undo()
    assert spool.parts() == []
    (name,) = spool.leftovers()
    assert name.startswith("trash/")
    spool.discard(name)
    assert spool.leftovers() == []
    assert list((spool.control / "trash").iterdir()) == []


# -- remove and quarantine --------------------------------------------------------------------------------------------


def test_remove_takes_the_given_parts_and_nothing_else(spool):
    first, second = part(100, 0, 2), part(100, 1, 2)
    for owner in (first, second, part(200)):
        commit(spool, owner)
    spool.remove([first])
    assert spool.parts() == [second, part(200)] and is_whole(spool, second)
    spool.remove([first, second])  # the one gone before: no error
    assert spool.parts() == [part(200)] and not spool.path(second).parent.exists()
    assert is_whole(spool, part(200))


@pytest.mark.parametrize(
    "plant", [os.mkfifo, lambda path: os.symlink("/etc", path), Path.touch], ids=["fifo", "link", "file"]
)
def test_file_in_the_place_of_a_part_is_removed_like_a_directory(spool, plant):
    """Seed 4211 of `python -m faults hostile`: a FIFO was opened, which waits for a writer."""
    for owner in (part(100), part(200)):
        spool.path(owner).parent.mkdir(parents=True)
        plant(spool.path(owner))
    spool.remove([part(100)])
    spool.path(part(200)).rename(spool.control / "trash" / "x")
    spool.discard("trash/x")
    assert not os.path.lexists(spool.path(part(100))) and not list((spool.control / "trash").iterdir())


def test_part_is_committed_while_the_last_other_part_of_its_checkpoint_is_removed(spool, monkeypatch):
    first, second = part(100, 0, 2), part(100, 1, 2)
    commit(spool, first)
    real = os.rename

    def racing(source, target, **kwargs):
        if target == second.name and spool.has(first):
            spool.remove([first])
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", racing)
    commit(spool, second)
    assert spool.parts() == [second] and is_whole(spool, second)


@pytest.mark.parametrize("going", ["remove", "quarantine"])
def test_part_is_removed_while_the_last_other_part_of_its_checkpoint_is_removed(spool, monkeypatch, going):
    first, second = part(100, 0, 2), part(100, 1, 2)
    commit(spool, first)
    commit(spool, second)
    real = leftovers.sync_directory

    def racing(path):
        if path == spool.path(second).parent and spool.has(second):
            spool.quarantine(second)
        return real(path)

    monkeypatch.setattr(leftovers, "sync_directory", racing)
    spool.remove([first]) if going == "remove" else spool.quarantine(first)
    assert spool.parts() == [] and not spool.path(first).parent.exists()


def test_a_removed_part_is_missing_rather_than_corrupt(spool):
    commit(spool, part())
    spool.remove([part()])
    with pytest.raises(ObjectNotFound):
        spool.manifest(part())
    assert spool.manifest_stamp(part()) == 0


def test_quarantined_part_is_not_listed_but_its_manifest_is_still_readable(spool):
    manifest = commit(spool, part(100, 0, 2))
    commit(spool, part(100, 1, 2))
    spool.quarantine(part(100, 0, 2))
    assert spool.parts() == [part(100, 1, 2)]
    assert spool.quarantined() == {part(100, 0, 2): manifest}
    assert spool.attempts("r") == {ATTEMPT}
    spool.quarantine(part(100, 1, 2))
    assert spool.attempts("r") == {ATTEMPT}  # so that a new launch still sorts after it
    assert not spool.path(part(100, 1, 2)).parent.exists()


def test_a_quarantined_part_whose_manifest_is_damaged_is_listed_without_it(spool):
    commit(spool, part())
    (spool.path(part()) / "manifest.json").write_bytes(b"x")
    spool.quarantine(part())
    assert spool.quarantined() == {part(): None}


def test_quarantine_twice_keeps_the_quarantined_part(spool):
    """The trainer and the daemon may both find the same part bad; the second finds nothing left to move."""
    manifest = commit(spool, part())
    spool.quarantine(part())
    spool.quarantine(part())
    assert spool.quarantined() == {part(): manifest}


def test_part_that_is_bad_again_after_a_fetch_replaces_the_quarantined_part(spool):
    commit(spool, part())
    spool.quarantine(part())
    commit(spool, part())
    (spool.path(part()) / "one").write_bytes(b"bad again")
    spool.quarantine(part())
    quarantined = spool.control / "quarantine" / part().path
    assert (quarantined / "one").read_bytes() == b"bad again"
    assert spool.leftovers() == []
    spool.discard(f"quarantine/{part().path}")
    assert spool.quarantined() == {}


@pytest.mark.parametrize("cut", ["rename", "rmdir"])
def test_a_directory_that_a_cut_off_commit_or_removal_left_is_a_leftover(spool, monkeypatch, cut):
    """SIGKILL behind the commit's mkdir, or before the removal's rmdir. Seed 102 of `python -m faults kills`."""

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    if cut == "rmdir":
        commit(spool, part(1))
    monkeypatch.setattr(os, cut, killed)
    if cut == "rename":
        with pytest.raises(KeyboardInterrupt):
            commit(spool, part(1))
    else:
        with pytest.raises(KeyboardInterrupt):
            spool.remove([part(1)])
    monkeypatch.undo()
    commit(spool, part(2))
    left = f"empty/{part(1).checkpoint.run}/{part(1).checkpoint.name}"
    assert left in spool.leftovers()
    spool.discard(f"empty/{part(2).checkpoint.run}/{part(2).checkpoint.name}")
    assert spool.parts() == [part(2)], "what holds a part stays"
    for name in spool.leftovers():
        spool.discard(name)
    assert spool.leftovers() == [] and not (spool.root / part(1).path).parent.exists()
    assert spool.parts() == [part(2)]


def test_the_empty_directory_of_a_commit_whose_disk_is_slow_is_no_leftover(spool, monkeypatch):
    """Behind the commit's mkdir, for as long as its fsync takes."""
    seen, real = [], stage_module.sync_directory

    def slow(path):
        real(path)
        if spool.path(part()).parent.exists() and not spool.path(part()).exists():
            seen.append(Spool(spool.root).leftovers())

    monkeypatch.setattr(stage_module, "sync_directory", slow)
    commit(spool, part())
    assert seen and not any(seen)
    assert is_whole(spool, part())


# -- blocks for the next save -----------------------------------------------------------------------------------------

LARGE = 1 << 20


def commit_large(spool: Spool, owner: PartId, sizes=(LARGE, LARGE + 5)) -> None:
    with spool.stage(owner) as stage:
        (stage.path / "deep").mkdir()
        names = ("deep/large", "small", "third")[: len(sizes)]
        files = [write_file(stage.path / n, n, bytes([65 + i]) * sizes[i]) for i, n in enumerate(names)]
        stage.commit(msgspec.structs.replace(described(owner), files=tuple(files)))


def test_the_largest_file_of_a_lane_is_kept_for_its_next_writer(spool):
    commit_large(spool, part(1), (LARGE, LARGE + 5, 10))
    assert spool.recycled(part(2)) is None
    spool.remove([part(1)], reuse=frozenset({part(1).writer}))
    kept = spool.recycled(part(2))
    assert kept == spool.control / "recycle" / "r.00000-of-00001"
    assert kept.read_bytes() == b"B" * (LARGE + 5)
    assert spool.parts() == spool.leftovers() == []
    assert spool.recycled(part(2, run="other")) is None


def test_nothing_is_kept_unless_it_is_asked_for(spool):
    for reuse in ((), {"r"}, {"r.00001-of-00002"}, {"other.00000-of-00001"}):
        commit_large(spool, part(1))
        spool.remove([part(1)], reuse)
        assert list((spool.control / "recycle").iterdir()) == []
        assert list((spool.control / "trash").iterdir()) == []


def test_of_several_ranks_those_asked_for_are_kept(spool):
    ranks = [part(1, rank, 3) for rank in range(3)]
    for one in ranks:
        commit_large(spool, one)
    spool.remove(ranks, reuse={part(1, 0, 3).writer, part(1, 2, 3).writer})
    found = [spool.recycled(part(2, rank, 3)) is not None for rank in range(3)]
    assert found == [True, False, True]


def test_small_files_and_linked_files_are_not_kept(spool, tmp_path):
    writers = {part().writer}
    commit_large(spool, part(1), (LARGE - 1,))
    spool.remove([part(1)], writers)
    assert spool.recycled(part()) is None
    commit_large(spool, part(2))
    (tmp_path / "users").hardlink_to(spool.path(part(2)) / "small")
    spool.remove([part(2)], writers)
    assert spool.recycled(part()) is None
    assert (tmp_path / "users").read_bytes() == b"B" * (LARGE + 5)
    commit_large(spool, part(3))
    (spool.path(part(3)) / "link").symlink_to(tmp_path / "users")
    spool.remove([part(3)], writers)
    assert not spool.recycled(part()).is_symlink()


def test_one_file_is_kept_for_a_writer(spool):
    for step in (1, 2):
        commit_large(spool, part(step), (LARGE + step,))
        spool.remove([part(step)], {part().writer})
    assert spool.recycled(part()).stat().st_size == LARGE + 1
    assert list((spool.control / "trash").iterdir()) == []


def test_recycled_files_are_dropped_by_writer(spool):
    for run in ("a", "b"):
        commit_large(spool, part(1, run=run))
        spool.remove([part(1, run=run)], {part(run=run).writer})
    spool.drop_recycled({"b.00000-of-00001"})
    assert spool.recycled(part(run="a")) is None
    assert spool.recycled(part(run="b")) is not None
    spool.drop_recycled(())
    assert spool.recycled(part(run="b")) is None


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_recycled_path_that_is_no_plain_file_is_not_offered_and_can_be_dropped(spool, plant):
    plant(spool.control / "recycle" / part().writer)
    assert spool.recycled(part()) is None
    spool.drop_recycled(())
    assert list((spool.control / "recycle").iterdir()) == []


def test_a_spool_that_is_only_looked_at_offers_nothing(tmp_path):
    assert Spool(tmp_path, write=False).recycled(part()) is None


def test_a_checkpoint_is_out_of_sight_for_good_before_a_file_of_it_is_moved(spool, monkeypatch):
    """Else a power cut could bring a checkpoint back whose file a save has overwritten."""
    calls: list[str] = []
    real_rename, real_sync = Path.rename, leftovers.sync_directory
    commit_large(spool, part())

    def rename(self, target):
        calls.append(f"rename {self.name} {Path(target).parent.name}")
        return real_rename(self, target)

    def sync(path):
        calls.append(f"sync {path.name}")
        real_sync(path)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(leftovers, "sync_directory", sync)
    spool.remove([part()], {part().writer})
    assert calls == [f"rename {part().name} trash", f"sync {part().checkpoint.name}", "rename small recycle"]


@pytest.mark.parametrize("call", ["rename", "lstat", "exists"])
def test_a_file_that_cannot_be_kept_is_deleted_like_the_rest(spool, monkeypatch, call):
    commit_large(spool, part())
    real = getattr(Path, call)

    def fail(self, *args):
        if "recycle" in str((self, *args)) or (call == "lstat" and self.name == "small"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        spool.remove([part()], {part().writer})
    assert spool.recycled(part()) is None
    assert spool.parts() == spool.leftovers() == []


# -- what is not right ------------------------------------------------------------------------------------------------


def _manifest_path(spool: Spool) -> Path:
    return spool.path(part()) / "manifest.json"


def _truncate(path: Path) -> None:
    os.truncate(path, 10)


def _link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _of_another(path: Path) -> None:
    path.write_bytes(encode(described(part(999))))


def _huge(path: Path) -> None:
    os.truncate(path, 33 << 20)


@pytest.mark.timeout(20)  # a FIFO must not be waited for
@pytest.mark.parametrize("damage", [Path.unlink, _truncate, _link, _fifo, _directory, _of_another, _huge])
def test_a_manifest_that_is_not_right_is_a_manifest_error(spool, damage):
    commit(spool, part())
    damage(_manifest_path(spool))
    with pytest.raises(ManifestError):
        spool.manifest(part())
    assert spool.parts() == [part()]  # by name it is still there, for the plan to repair


def test_a_newer_format_is_too_new(spool):
    commit(spool, part())
    _manifest_path(spool).write_bytes(seal(msgspec.structs.replace(described(part()), version=2)))
    with pytest.raises(FormatTooNew):
        spool.manifest(part())


def test_a_damaged_file_is_a_corrupt_chunk_that_names_it(spool):
    commit(spool, part())
    (spool.path(part()) / "deep" / "two").unlink()
    with pytest.raises(CorruptChunk, match="deep/two: the file is missing"):
        read(spool, part())


def test_names_that_are_no_parts_are_passed_over(spool):
    commit(spool, part())
    for name in ("r/notes", "r/pins/x", "lost+found", "r/000000000100.x/00000-of-00001", ".hidden/a/b"):
        (spool.root / name).mkdir(parents=True)
    (spool.root / "r" / part().checkpoint.name / "00001-of-00001").mkdir()
    (spool.root / "r" / "file").write_bytes(b"")
    (spool.root / "link").symlink_to(spool.root / "r")
    assert spool.parts() == [part()]
    assert spool.pins() == set()


# -- pins, lock, and places that cannot be spools ---------------------------------------------------------------------


def test_runs_directory_with_nothing_but_an_empty_pins_directory_is_a_leftover(spool):
    for run, inside in (("bare", ""), ("unpinned", "pins"), ("pinned", "pins/x"), ("used", "one"), ("fuller", "one")):
        (spool.root / run / inside).mkdir(parents=True)
    for name in ("pins", "two"):
        (spool.root / "fuller" / name).mkdir()
    assert spool.leftovers([]) == ["empty/bare", "empty/unpinned"]


def test_known_and_new_directories_are_listed_and_nothing_else(tmp_path):
    for name in ("known", "new", ".hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("new")
    for known in ((), {"known"}, {"known", "new", "gone"}):
        assert sorted(directories_in(tmp_path, known)) == ["known", "new"]
    assert directories_in(tmp_path / "absent", {"known"}) == []


def test_pins_are_set_and_removed_and_need_no_checkpoint(spool):
    owner = part().checkpoint
    spool.pin(owner, pinned=False)
    spool.pin(owner, pinned=True)
    spool.pin(owner, pinned=True)
    spool.pin(part(run="other").checkpoint, pinned=True)
    assert Spool(spool.root).pins() == {owner, part(run="other").checkpoint}
    spool.pin(owner, pinned=False)
    assert spool.pins() == {part(run="other").checkpoint}
    assert spool.parts() == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_pins_that_cannot_be_listed_are_not_none(spool, monkeypatch, number):
    """A pinned copy would be pruned. `Path.glob` hides some errors, or all of them, by the version of Python."""
    spool.pin(part().checkpoint, pinned=True)

    def failing(real):
        def fail(path):
            if os.fspath(path).endswith("/pins"):
                raise OSError(number, os.strerror(number))
            return real(path)

        return fail

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(OSError, match=os.strerror(number)):
        spool.pins()


def test_newest_checkpoint_is_not_passed_over_when_the_disk_fails_to_stat_it(spool, monkeypatch):
    """A restore would take an older one. `Path.is_dir` hides any error, by the version of Python."""
    for step in (1, 2):
        commit(spool, part(step))
    real, name = Path.lstat, part(2).checkpoint.name

    def fail(path):
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(Path, "lstat", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        spool.newest(part().checkpoint.run, 1)


def test_second_daemon_is_refused_and_names_the_holder_of_the_spool(spool):
    """P10, between processes."""
    held = "with Spool(sys.argv[1]).lock(): print('in', flush=True); input()"
    code = f"import sys; from tierd.spool.spool import Spool\n{held}"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(spool.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"in\n"
    with pytest.raises(SpoolUnusable, match=rf"pid {holder.pid}\)"), spool.lock():
        pass
    holder.kill()
    holder.communicate()
    with spool.lock():  # a dead holder holds nothing
        pass
    with spool.lock():
        pass


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_is_no_spool(tmp_path, below):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(SpoolUnusable, match=str(tmp_path / "file")):
        Spool(f"{tmp_path}/file{below}")
    assert (tmp_path / "file").read_bytes() == b"mine"


def _as_nobody(root: Path) -> str:
    """What opening a spool says to a user without rights; root has every right."""
    code = (
        "import os, sys\nfrom tierd.spool.spool import Spool\n"  # before the rights to read it are gone
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: Spool(sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)"
    )
    return subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give rights up")
def test_directory_without_rights_is_no_spool_and_the_message_has_a_remedy(tmp_path_factory):
    base = Path("/tmp") / f"tierd-test-{os.getpid()}"  # below a directory that everybody may enter
    base.mkdir()
    try:
        spool = Spool(base / "spool")
        private = _as_nobody(spool.root)  # as it was made
        assert "SpoolUnusable" in private and "sudo -u root" in private
        spool.root.chmod(0o755)
        assert "belongs to uid 0 (root), and this is uid 65534" in _as_nobody(spool.root)
        base.chmod(0o700)
        assert _as_nobody(base / "spool").startswith("SpoolUnusable")  # cannot even be looked at
        assert _as_nobody(base / "new").startswith("SpoolUnusable")
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, SpoolFull),
        (errno.EDQUOT, SpoolFull),
        (errno.EIO, SpoolUnusable),
        (errno.EROFS, SpoolUnusable),
        (errno.EACCES, SpoolUnusable),
    ],
)
def test_an_error_of_the_file_system_is_the_condition_that_it_states(code, kind):
    with pytest.raises(kind, match=f"spool /s: {os.strerror(code)}") as caught, spool_errors("spool /s"):
        raise OSError(code, os.strerror(code))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.system
def test_a_full_disk_is_said_so_and_leaves_nothing_behind(tmp_path):
    """A real ENOSPC: 1 MB of tmpfs. What was committed before stays whole; the next save fits once there is room."""
    home = tmp_path / "disk"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(home)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"SKIPPED WITHOUT PROOF: no tmpfs could be mounted: {mounted.stderr.decode().strip()}")
    try:
        spool = Spool(home / "spool")
        commit(spool, part(1))
        with pytest.raises(SpoolFull, match="No space left"), spool.stage(part(2)) as stage, spool_errors("spool"):
            write_file(stage.path / "big", "big", bytes(2 << 20))
        assert spool.parts() == [part(1)]
        assert spool.leftovers() == []
        assert is_whole(spool, part(1))
        commit(spool, part(3))
        assert is_whole(spool, part(3))
        free, total = spool.free()
        assert 0 < free < total == 1 << 20
    finally:
        subprocess.run(["umount", str(home)], check=True)


# -- directories that other libraries wrote ---------------------------------------------------------------------------


def test_a_directory_is_described_file_by_file_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "empty directory").mkdir()
    for name, size in (("z", 3), (".metadata", 0), ("b/c", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    assert [(file.path, file.size) for file in describe_directory(tmp_path)] == [(".metadata", 0), ("b/c", 5), ("z", 3)]


def _dangling(home):
    (home / "link").symlink_to("nowhere")


def _to_a_file(home):
    (home / "link").symlink_to("file")


def _to_a_directory(home):
    (home / "link").symlink_to("/etc")


def _a_fifo(home):
    os.mkfifo(home / "fifo")


def _a_reserved_name(home):
    (home / "manifest.json").write_bytes(b"{}")


def _not_unicode(home):
    Path(os.fsdecode(os.fsencode(home) + b"/\xff")).write_bytes(b"")


def _a_newline(home):
    (home / "a\nb").write_bytes(b"")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "spoil", [_dangling, _to_a_file, _to_a_directory, _a_fifo, _a_reserved_name, _not_unicode, _a_newline]
)
def test_directory_that_no_checkpoint_can_hold_is_refused(tmp_path, spoil):
    (tmp_path / "file").write_bytes(b"x")
    spoil(tmp_path)
    with pytest.raises(ManifestError):
        describe_directory(tmp_path)


def test_directory_that_cannot_be_listed_is_an_error_and_not_empty(tmp_path, monkeypatch):
    """os.walk passes over what it cannot read; a checkpoint that lacks those files would be committed as complete."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights").write_bytes(b"x")
    real = os.scandir

    def fail(path):
        if str(path).endswith("sub"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        describe_directory(tmp_path)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_directory_of_the_spool_that_cannot_be_listed_is_not_empty(spool, monkeypatch, depth):
    """A restore would find no checkpoint, and training would begin anew."""
    commit(spool, part())
    broken = spool.path(part()).parents[2 - depth]

    def failing(real):
        def fail(path):
            if Path(path) == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path)

        return fail

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    with pytest.raises(OSError, match="Input/output error"):
        spool.parts()


@pytest.mark.parametrize("call", ["flock", "fstat"])
def test_a_stage_that_could_not_be_locked_is_left_to_be_discarded(spool, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl if call == "flock" else os, call, fail)
        with pytest.raises(OSError, match="Input/output error"):
            spool.stage(part())
    (left,) = spool.leftovers()
    spool.discard(left)
    assert spool.leftovers() == []


def test_spool_that_vanished_is_not_empty(spool):
    commit(spool, part())
    spool.root.rename(spool.root.with_name("away"))
    with pytest.raises(FileNotFoundError, match="mounted"):
        spool.parts()
    spool.root.mkdir()  # the mount point
    with pytest.raises(FileNotFoundError, match="mounted"):
        spool.parts()
    assert Spool(spool.root, write=False).parts() == []


def test_empty_directory_that_cannot_be_removed_is_reported(spool, monkeypatch):
    """Or a tier worker would try again at once, for ever."""
    (spool.root / "run" / part(1).checkpoint.name).mkdir(parents=True)
    [name] = spool.leftovers()

    def refuse(self):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rmdir", refuse)
    with pytest.raises(OSError, match="Read-only"):
        spool.discard(name)
    monkeypatch.undo()
    spool.discard(name)
    spool.discard(name)
    assert spool.leftovers() == []
