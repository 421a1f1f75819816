"""What `doctor` observes of a spool and of this machine, and that it leaves both as they were."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from support.world import commit, part

from tierd.doctor import node_checks
from tierd.spool import direct_io
from tierd.spool.arena import MemoryGroup
from tierd.spool.spool import Spool
from tierd.stores.mounted_directories import mount_of, unmounted_point
from tierd.threads import call_in_thread, command_output


def names(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def found(root: Path, keep_last: int = 3) -> dict[str, str]:
    """Each check with its finding."""
    return {
        one.check: one.finding for one in node_checks.examine_spool(root, keep_last, node_checks.largest_state(root))
    }


def test_a_spool_with_checkpoints_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    for step in (1, 2):
        for rank in (0, 1):
            commit(spool, part(step, rank=rank, world=2))
    commit(spool, part(9, run="small"), {"a": b"1"})
    before, changed = names(tmp_path), (spool.root).stat().st_mtime_ns
    state = node_checks.largest_state(spool.root)
    size = sum(spool.manifest(part(2, rank=rank, world=2)).size for rank in (0, 1))
    assert state is not None and (state.run, state.size) == ("run", size)
    assert state.used == 2 * size
    checks = found(spool.root)
    assert set(checks) == {
        "file system",
        "owner and mode",
        "spool",
        "O_DIRECT",
        "rename",
        "fsync",
        "space",
        "stored once",
    }
    assert (checks["spool"], checks["rename"]) == ("spool found", "renames")
    assert checks["space"] == "room" and checks["owner and mode"] == "private"
    assert names(tmp_path) == before
    assert spool.root.stat().st_mtime_ns == changed  # nothing was made where a daemon lists runs


def test_doctor_notes_bytes_that_every_rank_stores(tmp_path: Path) -> None:
    spool, alike = Spool(tmp_path / "spool"), bytes(65 << 20)
    for rank in (0, 1):
        commit(spool, part(1, rank=rank, world=2), {"tensors.safetensors": alike, "state.json": b"%d" % rank})
    assert found(spool.root)["stored once"] == "stored by each"
    spool.remove(spool.parts())
    for rank in (0, 1):
        commit(
            spool, part(2, rank=rank, world=2), {"tensors.safetensors": bytes([rank]) * len(alike), "state.json": b"{}"}
        )
    assert found(spool.root)["stored once"] == "stored once"


def test_a_spool_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    checks = found(tmp_path / "no" / "spool")
    assert checks["spool"] == "spool absent" and checks["rename"] == "renames"
    assert "owner and mode" not in checks and checks["space"] == "state unknown"
    assert names(tmp_path) == []


def test_another_accounts_spool_is_an_error_although_nothing_in_it_can_be_read(tmp_path: Path, monkeypatch) -> None:
    """The command ended with 0, and a job's prolog let the job begin."""
    root, real = Spool(tmp_path / "spool").root, os.scandir

    def closed(path: object) -> object:
        if path == root:
            raise PermissionError(errno.EACCES, "Permission denied", str(root))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", closed)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert found(root)["owner and mode"] == "another's"

    def refuse(path: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(node_checks, "nearest_existing", refuse)
    assert found(root) == {"spool": "spool unusable"}


def test_a_spool_that_is_a_file_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("")
    assert found(tmp_path / "spool") == {"spool": "spool unusable"}


@pytest.mark.parametrize(
    ("name", "check", "finding"),
    [("rename", "rename", "rename fails"), ("fsync", "fsync", "sync fails"), ("mkdir", "spool", "spool unusable")],
)
def test_refused_disk_operation_is_a_finding_and_leaves_no_file(
    tmp_path: Path, monkeypatch, name, check, finding
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, name, refuse)
    assert found(tmp_path)[check] == finding
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_disk_that_refuses_direct_writes_is_a_finding(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(node_checks, "set_direct", lambda fd, on: False)
    assert found(tmp_path)["O_DIRECT"] == "not direct"
    monkeypatch.undo()
    assert node_checks.set_direct is direct_io.set_direct


def test_directory_of_a_killed_doctor_is_removed_and_a_running_doctors_is_not(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    old, young = (spool.control / f"doctor-{name}" for name in ("old", "young"))
    for one in (old, young):
        one.mkdir()
        (one / "x").write_text("")
    os.utime(old, (0, 0))
    found(tmp_path)
    assert [path.name for path in spool.control.glob("doctor-*")] == ["doctor-young"]


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/a\040b rw,relatime shared:9 - nfs4 nas:/x rw
31 22 0:41 / /mnt rw - tmpfs tmpfs ro
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "frozen"),
    [("/mnt/a b/spool", "nfs4", False), ("/mnt/a", "tmpfs", True), ("/mntx", "ext4", False), ("/", "ext4", False)],
)
def test_the_mount_of_a_path(path: str, kind: str, frozen: bool) -> None:
    mount = mount_of(Path(path), MOUNTS)
    assert mount is not None and (mount.kind, mount.read_only) == (kind, frozen)
    assert mount_of(Path(path), "nothing known") is None


def test_a_mount_that_is_lost_is_known_by_fstab(tmp_path: Path) -> None:
    fstab = f"# comment\nUUID=1 / ext4 defaults 0 1\nnas:/x {tmp_path}/a\\040b nfs4 defaults 0 0\n"
    assert unmounted_point(tmp_path / "a b" / "tier", fstab) == tmp_path / "a b"
    assert unmounted_point(tmp_path / "other", fstab) is None


def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [one.check for one in node_checks.examine_machine(None)] == ["memfd", "memory", "limits", "codec"]
    groups = [MemoryGroup(tmp_path, 4 << 30), MemoryGroup(tmp_path, 2 << 30)]
    monkeypatch.setattr(node_checks, "limited_groups", lambda: groups)
    assert "limit is 2.0 GiB" in next(one.found for one in node_checks.examine_machine(None) if one.check == "memory")


def test_a_daemon_that_never_ran_is_a_note(tmp_path: Path) -> None:
    assert node_checks.ask_daemon(tmp_path).finding.finding == "no daemon"
    Spool(tmp_path / "spool")
    asked = node_checks.ask_daemon(tmp_path / "spool")
    assert (asked.finding.finding, asked.finding.severity, asked.pid) == ("no daemon", "note", 0)


def test_the_unit_of_a_process_is_the_end_of_its_control_group() -> None:
    assert node_checks.unit_of(0, "0::/system.slice/system-tierd.slice/tierd@alice.service\n") == "tierd@alice.service"
    assert node_checks.unit_of(0, "0::/user.slice/session-3.scope\n") == node_checks.UNIT
    assert node_checks.unit_of(2**22 + 1) == node_checks.UNIT


def test_doctor_asks_systemd_and_slurm_for_the_time_to_stop(tmp_path: Path, monkeypatch) -> None:
    answers = {"systemctl": "LoadState=loaded\nTimeoutStopUSec=30s", "scontrol": "KillWait  = 300 sec"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", node_checks.GRACE):
        monkeypatch.delenv(name, raising=False)
    assert [one.finding for one in node_checks.examine_endings(0, 60)] == ["stopped too soon"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    for grace, name in (("120s", "pod ends in time"), ("30s", "pod ends too soon"), ("soon", "pod's grace unknown")):
        monkeypatch.setenv(node_checks.GRACE, grace)
        assert [one.finding for one in node_checks.examine_endings(0, 60)] == [
            "stopped too soon",
            "job ends in time",
            name,
        ]
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho LoadState=not-found\necho TimeoutStopUSec=30s\n")
    assert next(node_checks.examine_endings(0, 60)).finding == "no unit"


def test_a_call_that_hangs_is_left_alone() -> None:
    hung = threading.Event()
    with pytest.raises(TimeoutError):
        asyncio.run(call_in_thread(lambda: hung.wait(60), 0.05))
    hung.set()
    assert asyncio.run(call_in_thread(lambda: 7, 30.0)) == 7
    with pytest.raises(ValueError, match="no"):
        asyncio.run(call_in_thread(lambda: int("no"), 30.0))


def test_a_program_that_fails_or_hangs_says_nothing() -> None:
    assert command_output(["sh", "-c", "echo x"]) == "x\n"
    assert command_output(["sh", "-c", "echo x; exit 1"]) == command_output(["/no/such/program"]) == ""
    assert command_output(["sleep", "30"], 0.2) == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_nearly_full_is_a_finding(tmp_path: Path, monkeypatch, number: int) -> None:
    """The write has taken a piece, and fails with a slice of the memory in its frame."""
    written = os.pwrite

    def some(fd: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(number, os.strerror(number))
        return written(fd, data[: 4 << 20], offset)

    monkeypatch.setattr(os, "pwrite", some)
    checks = {(one.check, one.finding) for one in node_checks.examine_spool(tmp_path, 3, None)}
    wanted = ("O_DIRECT", "not direct") if number == errno.EIO else ("space", "room too small")
    assert wanted in checks and ("rename", "renames") in checks and ("fsync", "syncs") in checks
    monkeypatch.undo()
    assert names(tmp_path) == []
