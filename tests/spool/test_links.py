"""A run's directory that was moved and linked, one part's that is a link, and one that somebody removed."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.world import Daemon, hurry, part

import tierd
from tierd.cli import run
from tierd.core.errors import CheckpointNotFound, ManifestError, SaveFailed, SpoolUnusable, TierdError
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

RUN = "run"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A spool with the steps 1, 2 and 3."""
    with tierd.Checkpointer(tmp_path / "spool", RUN) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.full((10,), float(step))}).wait(timeout=60)
    return tmp_path / "spool"


def restored(home: Path, to: list[str] | None = ()) -> tierd.client.restoring.restorer.Restored | None:
    with tierd.Checkpointer(home, RUN, to=[] if to == () else to) as ckpt:
        state = {"w": torch.zeros(10)}
        found = ckpt.restore(state)
        assert found is None or bool((state["w"] == found.step).all())
        return found


def linked(home: Path, directory: Path) -> Path:
    """Move a directory out of the spool and put a link in its place."""
    (home.parent / "larger").mkdir(mode=0o755, exist_ok=True)
    target = home.parent / "larger" / directory.name
    directory.rename(target)
    directory.symlink_to(target)
    return target


def newest(home: Path, step: int = 3) -> Path:
    (found,) = (home / RUN).glob(f"{step:012}.*")
    return found


# -- a run's directory ------------------------------------------------------------------------------------------------


def test_a_runs_directory_that_was_moved_and_linked_is_followed(home: Path) -> None:
    target = linked(home, home / RUN)
    with tierd.Checkpointer(home, RUN, to=[]) as ckpt:
        state = {"w": torch.zeros(10)}
        found = ckpt.restore(state)
        assert found and (found.step, found.skipped) == (3, ())
        ckpt.save(4, state).wait(timeout=60)
    assert len(list(target.iterdir())) == 4
    assert (home / RUN).is_symlink()


def test_daemon_flushes_and_prunes_a_run_behind_a_link(home: Path, monkeypatch) -> None:
    hurry(monkeypatch)
    target = linked(home, home / RUN)
    (home.parent / "tier").mkdir()
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}, keep=1) as daemon:
        daemon.settle()
    assert [path.name[:12] for path in target.iterdir()] == [f"{3:012}"]
    assert [path.name[:12] for path in (home.parent / "tier" / RUN / "manifests").iterdir()] == [f"{3:012}"]
    assert (home / RUN).is_symlink()


def refused(home: Path, *words: str) -> None:
    with pytest.raises(SpoolUnusable) as caught:
        restored(home)
    for word in (str(home / RUN), "symbolic link", *words):
        assert word in str(caught.value), word
    assert Spool(home).parts() == []
    with pytest.raises(SpoolUnusable, match="symbolic link"):
        Spool(home).stage(part(4))
    with pytest.raises(SpoolUnusable, match="symbolic link"):
        Spool(home).pin(part(4).checkpoint, pinned=True)


def test_link_to_a_directory_that_others_may_write_to_is_refused(home: Path) -> None:
    linked(home, home / RUN).chmod(0o777)
    refused(home, "others may write there", "chmod 700", "Put the directory itself")


def test_link_through_a_directory_that_others_may_replace_is_refused(home: Path) -> None:
    linked(home, home / RUN).parent.chmod(0o777)
    refused(home, f"others may replace what is in {home.parent / 'larger'}")


def test_a_link_that_leads_nowhere_is_refused(home: Path) -> None:
    shutil.rmtree(linked(home, home / RUN))
    refused(home, "it leads nowhere", str(home.parent / "larger"))


def test_a_link_to_another_file_system_is_refused(home: Path) -> None:
    target = Path("/dev/shm", f"tierd-test-{os.getpid()}")
    if not target.parent.is_dir() or target.parent.stat().st_dev == home.stat().st_dev:
        pytest.skip("there is no second file system")
    shutil.move(home / RUN, target)
    try:
        (home / RUN).symlink_to(target)
        refused(home, "another file system", "move the whole spool")
    finally:
        shutil.rmtree(target)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users")
def test_a_link_of_another_user_is_refused(home: Path) -> None:
    linked(home, home / RUN)
    os.lchown(home / RUN, 12345, 12345)
    refused(home, f"{home / RUN} is uid 12345's")


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users")
def test_a_link_to_another_users_directory_is_refused(home: Path) -> None:
    target = linked(home, home / RUN)
    os.chown(target, 12345, 12345)
    refused(home, f"{target} is uid 12345's")


def test_a_link_by_way_of_another_is_followed_as_the_kernel_does(home: Path) -> None:
    target = linked(home, home / RUN)
    (home.parent / "elsewhere").mkdir(mode=0o700)
    (home.parent / "elsewhere" / "deep").mkdir(mode=0o700)
    (home.parent / "way").symlink_to(home.parent / "elsewhere" / "deep")
    (home / RUN).unlink()
    (home / RUN).symlink_to("../way/../../larger/run")  # not what a look at the text makes of it
    assert (home / RUN).resolve() == target
    found = restored(home)
    assert found and found.step == 3
    (home.parent / "elsewhere").chmod(0o777)
    refused(home, f"others may replace what is in {home.parent / 'elsewhere'}")


# -- what is inside ---------------------------------------------------------------------------------------------------


def placed(home: Path, depth: str, shape: str, step: int = 3) -> tuple[Path, Path]:
    """Put something else in place of a checkpoint's or a part's directory; return that path, and where it was moved."""
    directory = newest(home, step) if depth == "checkpoint" else next(newest(home, step).iterdir())
    target = linked(home, directory)
    if shape != "link":
        directory.unlink()
        if shape == "file":
            directory.write_text("not a directory")
        else:
            os.mkfifo(directory)
    return directory, target


SHAPES = ["link", "file", "fifo"]


@pytest.mark.parametrize("depth", ["checkpoint", "part"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("daemon", [False, True])
def test_odd_part_that_no_other_place_has_is_skipped_and_named(home, depth, shape, daemon, monkeypatch, caplog) -> None:
    hurry(monkeypatch)
    path, target = placed(home, depth, shape)
    (home.parent / "tier").mkdir()
    before = sorted(target.rglob("*"))
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}) if daemon else nullcontext() as running:
        if running is not None:
            running.settle()
            manifests = (home.parent / "tier" / RUN / "manifests").iterdir()
            assert {manifest.name[:12] for manifest in manifests} == {f"{step:012}" for step in (1, 2)}
        found = restored(home, None if daemon else ())
        assert found and found.step == 2
        assert [skipped.step for skipped in found.skipped] == [3]
        named = f"{path}: a symbolic link to {target}" if shape == "link" else f"{path}: not a directory"
        assert named in found.skipped[0].reason
        assert "Put the directory itself there" in found.skipped[0].reason
        assert any(record.levelname == "WARNING" and named in record.getMessage() for record in caplog.records)
        with tierd.Checkpointer(home, RUN, to=None if daemon else []) as ckpt:
            state = {"w": torch.zeros(10)}
            with pytest.raises(CheckpointNotFound) as caught:
                ckpt.restore(state, step=3)
            assert named in str(caught.value)
    assert os.path.lexists(path)
    assert sorted(target.rglob("*")) == before
    path.unlink()
    target.rename(path)
    found = restored(home)
    assert found and (found.step, found.skipped) == (3, ())


@pytest.mark.parametrize("depth", ["checkpoint", "part"])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_part_is_fetched_from_the_tier_that_has_it(home, depth, shape, monkeypatch) -> None:
    hurry(monkeypatch)
    (home.parent / "tier").mkdir()
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}) as daemon:
        daemon.settle()
        path, target = placed(home, depth, shape)
        before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
        found = restored(home, None)
        assert found and (found.step, found.tier, found.skipped) == (3, "tier", ())
        assert path.is_dir()
        assert not path.is_symlink()
    assert {file: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before
    found = restored(home)
    assert found and (found.step, found.tier) == (3, "local")


@pytest.mark.parametrize("depth", ["checkpoint", "part"])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_part_at_an_older_step_does_not_stop_the_newest(home, depth, shape) -> None:
    placed(home, depth, shape, step=2)
    found = restored(home)
    assert found and (found.step, found.skipped) == (3, ())


@pytest.mark.parametrize("depth", ["checkpoint", "part"])
def test_status_shows_an_odd_part_as_a_problem(home, depth, monkeypatch, capsys) -> None:
    hurry(monkeypatch)
    (home.parent / "tier").mkdir()
    path, _ = placed(home, depth, "link", step=2)
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}) as daemon:
        daemon.settle()
        assert run(["status", "--spool", str(home), "--check"]) == 10
        assert f"{path}: a symbolic link" in capsys.readouterr().out


def test_odd_newest_part_is_no_reason_to_fall_back_while_tiers_cannot_be_asked(home, monkeypatch) -> None:
    hurry(monkeypatch)
    placed(home, "part", "link")
    with tierd.Checkpointer(home, RUN) as ckpt, pytest.raises(TierdError, match="step=…"):
        ckpt.restore({"w": torch.zeros(10)})


# -- a library's stage ------------------------------------------------------------------------------------------------


def replaced_by(shape: str, path: Path, outside: Path) -> None:
    """Put something else in place of a stage's directory, as a library may do."""
    shutil.rmtree(path)
    if shape == "link":
        path.symlink_to(outside)
    elif shape == "directory":
        outside.rename(path)
    elif shape == "file":
        path.write_text("weights")
    elif shape == "fifo":
        os.mkfifo(path)


@pytest.mark.parametrize("shape", ["link", "directory", "file", "fifo", "removed"])
def test_stage_whose_directory_was_replaced_is_refused_by_its_path(home: Path, shape: str) -> None:
    outside = home.parent / "outside"
    outside.mkdir()
    (outside / "weights").write_text("weights")
    with tierd.Checkpointer(home, RUN, to=[]) as ckpt:
        with pytest.raises(ManifestError, match=f"{home}/.tierd/stage/"), ckpt.stage(4) as path:
            replaced_by(shape, path, outside)
        assert not list((home / RUN).glob(f"{4:012}.*"))
        if shape == "link":
            assert not path.is_symlink()
            assert (outside / "weights").read_text() == "weights"
        with ckpt.stage(5) as path:
            (path / "weights").write_text("weights")
        state = {"w": torch.zeros(10)}
        assert (found := ckpt.restore(state, step=3)) and found.step == 3


@pytest.mark.parametrize("shape", ["fifo", "socket", "link", "directory link"])
def test_stage_that_holds_no_plain_file_is_refused_by_its_path(home: Path, shape: str) -> None:
    with (
        pytest.raises(SaveFailed, match=r"1 save \(step 4\) is in no place"),
        tierd.Checkpointer(home, RUN, to=[]) as ckpt,
    ):
        with pytest.raises(ManifestError, match="/odd: "), ckpt.stage(4) as path:
            if shape == "fifo":
                os.mkfifo(path / "odd")
            elif shape == "socket":
                os.mknod(path / "odd", stat.S_IFSOCK | 0o600)
            else:
                (path / "odd").symlink_to("/etc" if shape == "directory link" else "/etc/hosts")
        assert not list((home / RUN).glob(f"{4:012}.*"))


def test_stage_keeps_its_bytes_when_a_file_outside_of_which_it_is_a_hard_link_changes(home: Path) -> None:
    """The committed part changed with it, and was quarantined."""
    outside = home.parent / "outside"
    outside.write_bytes(b"as saved")
    with tierd.Checkpointer(home, RUN, to=[]) as ckpt:
        with ckpt.stage(4) as path:
            (path / "below").mkdir()
            os.link(outside, path / "below" / "weights")
            os.link(outside, path / "weights")
            (path / "own").write_bytes(b"own")
            os.link(path / "own", path / "again")
        with outside.open("r+b") as file:
            file.write(b"changed!")
        found = ckpt.restore()
        assert found and found.step == 4
        contents = {one.name: one.read_bytes() for one in found.directory.rglob("*") if one.is_file()}
    contents.pop("manifest.json", None)
    assert contents == {"weights": b"as saved", "own": b"own", "again": b"own"}
    assert outside.read_bytes() == b"changed!" and outside.stat().st_nlink == 1


# -- what is gone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["checkpoint", "part"])
def test_removed_checkpoint_is_among_the_skipped(home: Path, depth: str) -> None:
    directory = newest(home)
    shutil.rmtree(directory if depth == "checkpoint" else next(directory.iterdir()))
    found = restored(home)
    assert found and found.step == 2
    assert [(one.step, one.attempt) for one in found.skipped] == [(3, directory.name.partition(".")[2])]
    assert found.skipped[0].reason.startswith("gone: it was whole once, as this node or a tier remembers")


def test_the_daemon_knows_it_too(home: Path, monkeypatch) -> None:
    hurry(monkeypatch)
    shutil.rmtree(newest(home))
    (home.parent / "tier").mkdir()
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}):
        found = restored(home, None)
        assert found and found.step == 2
        assert [one.step for one in found.skipped] == [3]


def test_checkpoint_that_a_tier_has_is_not_gone(home: Path, monkeypatch) -> None:
    hurry(monkeypatch)
    (home.parent / "tier").mkdir()
    with Daemon(home, lambda: {"tier": FileStore(home.parent / "tier")}) as daemon:
        daemon.settle()
        shutil.rmtree(newest(home))
        found = restored(home, None)
        assert found and (found.step, found.tier, found.skipped) == (3, "tier", ())


def test_nothing_begins_anew_where_something_was_saved_unless_it_is_removed(home: Path) -> None:
    shutil.rmtree(home / RUN)
    with pytest.raises(CheckpointNotFound, match=rf"(?s)step 3 .*: gone.*tierd rm {RUN}"):
        restored(home)
    assert run(["rm", RUN, "--spool", str(home), "--yes"]) == 0
    assert restored(home) is None


def test_a_step_that_was_never_committed_is_not_missed(home: Path) -> None:
    spool = Spool(home)
    with pytest.raises(TierdError), spool.stage(part(9)):
        raise TierdError("its writer gave it up")
    found = restored(home)
    assert found and (found.step, found.skipped) == (3, ())
    assert stat.S_IMODE(next((home / ".tierd" / "saved" / RUN).glob("*.*")).stat().st_mode) == 0o600
