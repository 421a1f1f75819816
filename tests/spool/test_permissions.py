"""Nobody but a spool's owner and root gets at it: not by its modes, its paths, or its sockets."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.doubles import Double
from support.users import NOBODY, as_root, by_nobody
from support.waiting import wait_until
from support.world import Daemon, commit, part

from tierd.core.errors import DaemonUnavailable, SpoolUnusable
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool import spool_access
from tierd.spool.arena import Arena
from tierd.spool.spool import Spool
from tierd.spool.stage import make_locked_directory, try_lock_stage


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- the directory ----------------------------------------------------------------------------------------------------


def test_new_spool_is_its_owners_alone_under_any_umask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        spool = Spool(tmp_path / "spool")
    finally:
        os.umask(mask)
    assert mode(spool.root) == 0o700


@pytest.mark.parametrize("wide", [0o755, 0o750, 0o711, 0o2750, 0o2770])
def test_spool_that_others_may_read_is_closed_to_them_with_a_single_warning(tmp_path: Path, wide: int, caplog) -> None:
    commit(Spool(tmp_path / "spool"), part(1))
    (tmp_path / "spool").chmod(wide)
    spool = Spool(tmp_path / "spool")
    assert mode(spool.root) == 0o700 and spool.parts() == [part(1)]
    Spool(tmp_path / "spool")
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"mode was {wide:o}" in said


@pytest.mark.parametrize("wide", [0o777, 0o707, 0o722, 0o1777])
def test_spool_that_others_may_write_to_is_refused_unless_it_is_empty(tmp_path: Path, wide: int) -> None:
    root = tmp_path / "spool"
    root.mkdir()
    root.chmod(wide)
    commit(Spool(root), part(1))
    assert mode(root) == 0o700
    root.chmod(wide)
    with pytest.raises(SpoolUnusable, match=f"others may write to it .*then chmod 700 {root}"):
        Spool(root)
    assert mode(root) == wide  # nothing was changed
    root.chmod(0o700)
    assert Spool(root).parts() == [part(1)]


@pytest.mark.parametrize("use", [Spool, lambda root: Spool(root, write=False).pin(part(1).checkpoint, pinned=True)])
def test_a_spool_of_another_user_is_refused(tmp_path: Path, monkeypatch, use) -> None:
    """Also by root, whom a link there could lead anywhere."""
    spool = Spool(tmp_path / "spool")
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    with pytest.raises(SpoolUnusable, match=r"belongs to uid .*, and this is uid 4711.*sudo -u"):
        use(spool.root)
    with pytest.raises(SpoolUnusable, match="4711"), spool.lock():
        pass
    assert not (spool.control / "lock").exists() and not list(spool.root.glob("run*"))


@pytest.mark.parametrize("room", ["trash", "recycle", "quarantine", "stage"])
def test_a_link_put_in_place_of_a_room_of_an_open_spool_leads_nowhere(tmp_path: Path, room: str) -> None:
    """Seed 1576 of `python -m faults hostile`: what lay behind such a link was taken for what a removal had left."""
    outside, spool = tmp_path / "outside", Spool(tmp_path / "spool")
    outside.mkdir()
    (outside / "mine").write_text("mine")
    commit(spool, part(1))
    (spool.control / room).rmdir()
    (spool.control / room).symlink_to(outside)
    for call in (
        lambda: [spool.discard(name) for name in spool.leftovers()],
        lambda: spool.quarantine(part(1)),
        lambda: spool.remove([part(1)], reuse=[part(1).writer]),
        lambda: spool.drop_recycled(keep=[]),
    ):
        with contextlib.suppress(SpoolUnusable):
            call()
    assert [path.name for path in outside.iterdir()] == ["mine"]


@pytest.mark.parametrize("room", [".tierd", ".tierd/stage", ".tierd/trash", ".tierd/recycle", ".tierd/quarantine"])
def test_a_link_in_place_of_a_room_is_refused_and_leads_nowhere(tmp_path: Path, room: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    Spool(tmp_path / "spool")
    path = tmp_path / "spool" / room
    path.rename(tmp_path / "aside")
    path.symlink_to(outside)
    with pytest.raises(SpoolUnusable, match=f"{room}: a link"):
        Spool(tmp_path / "spool")
    assert list(outside.iterdir()) == []


def test_directory_above_in_which_everybody_may_rename_is_warned_of(tmp_path: Path, caplog) -> None:
    (tmp_path / "scratch").mkdir()
    for bits, reported in ((0o777, 1), (0o1777, 0), (0o755, 0)):
        (tmp_path / "scratch").chmod(bits)
        caplog.clear()
        Spool(tmp_path / "scratch" / "spool")
        assert sum("so replace the spool" in record.getMessage() for record in caplog.records) == reported


# -- the sockets ------------------------------------------------------------------------------------------------------


def test_both_sockets_are_their_owners_alone_from_the_first_moment(tmp_path: Path, monkeypatch) -> None:
    seen: list[int] = []
    bind = socket.socket.bind

    class Watched(socket.socket):
        def bind(self, address):
            bind(self, address)
            seen.append(stat.S_IMODE(os.stat(address).st_mode))

    monkeypatch.setattr("tierd.spool.spool_access.socket.socket", Watched)
    mask = os.umask(0)
    try:
        with Daemon(tmp_path / "spool", {"tier": Double()}) as daemon:
            assert seen == [0o600, 0o600]
            assert {mode(daemon.spool.socket), mode(daemon.spool.handoff_socket)} == {0o600}
    finally:
        os.umask(mask)


def test_a_file_or_a_link_at_a_sockets_path_is_replaced_and_not_followed(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    (tmp_path / "outside").write_bytes(b"mine")
    spool.socket.symlink_to(tmp_path / "outside")
    spool.handoff_socket.write_bytes(b"in the way")
    with Daemon(spool.root, {"tier": Double()}), DaemonConnection(spool) as link:
        assert link.ask(messages.StatusRequest())["ok"]
        assert stat.S_ISSOCK(spool.socket.lstat().st_mode) and stat.S_ISSOCK(spool.handoff_socket.lstat().st_mode)
    assert (tmp_path / "outside").read_bytes() == b"mine"


def descriptors(fd: int) -> int:
    """How many descriptors of this process, in which the daemon runs too, are of the same file as `fd`."""
    found, number = os.fstat(fd), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed just now
            number += os.path.samestat(found, os.fstat(int(name)))
    return number


@as_root
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["control.sock", "handoff.sock"])
def test_the_daemon_turns_another_user_away_and_takes_no_descriptor(tmp_path: Path, name: str, caplog) -> None:
    """Even where every mode lets them in: a peer's uid is the second lock."""
    spool = Spool(tmp_path / "spool")
    arena = Arena(4096)
    lent = os.dup(arena.fd)  # an arena's own is not there after a fork
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        (spool.control / name).chmod(0o666)
        for directory in (spool.root, spool.control):
            directory.chmod(0o755)
        there = os.open(spool.control, os.O_RDONLY)
        known = descriptors(arena.fd)

        def visit() -> int:
            packets = name.startswith("hand")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if packets else socket.SOCK_STREAM) as peer:
                peer.settimeout(60)
                peer.connect(f"/proc/self/fd/{there}/{name}")
                try:
                    if packets:
                        socket.send_fds(peer, [b'{"op":"lend","slot":0}'], [lent])
                    else:
                        peer.sendall(b'{"op":"status"}\n')
                    return len(peer.recv(100))
                except (BrokenPipeError, ConnectionResetError):
                    return 0

        assert by_nobody(visit) == 0
        wait_until(lambda: any(f"turned away a peer of uid {NOBODY}" in one.getMessage() for one in caplog.records))
        wait_until(lambda: descriptors(arena.fd) == known)
        assert not daemon.handoff.connections and daemon.handoff.handed_over_bytes() == 0
        os.close(there)
        os.close(lent)


@as_root
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_trusts_no_daemon_of_another_user(tmp_path: Path) -> None:
    """Who listens where a daemon should, is asked nothing and given nothing."""
    from tierd.client.saving.snapshot_handoff import HandoffClient

    spool = Spool(tmp_path / "spool")
    sockets = []
    for path, kind in ((spool.socket, socket.SOCK_STREAM), (spool.handoff_socket, socket.SOCK_SEQPACKET)):
        sockets.append(socket.socket(socket.AF_UNIX, kind))
        sockets[-1].bind(str(path))

    def take_over() -> int:
        for one in sockets:  # the kernel notes who listens, not who bound
            one.listen()
        return 0

    assert by_nobody(take_over) == 0
    with pytest.raises(DaemonUnavailable, match=f"what listens there is another user's, uid {NOBODY}"):
        DaemonConnection(spool)
    assert not HandoffClient(spool).renew()
    os.chown(spool.control, NOBODY, NOBODY)  # but root may look at a user's spool, whose daemon is the user's
    DaemonConnection(spool).close()
    for one in sockets:
        one.close()


def test_daemon_of_a_deleted_spool_leaves_the_sockets_of_the_new_spools_daemon(tmp_path: Path):
    """It took them away when it ended, seconds after the other's start: "none is running" while that one flushed."""
    before, after = Daemon(tmp_path / "spool", {}), None
    try:
        before.__enter__()
        shutil.rmtree(tmp_path / "spool")
        after = Daemon(tmp_path / "spool", {})
        after.__enter__()
        before.stop()
        with DaemonConnection(after.spool) as link:
            assert link.ask(messages.StatusRequest(), 60)
        assert after.spool.handoff_socket.exists()
    finally:
        for daemon in (before, after):
            if daemon is not None:
                daemon.stop()
    assert not after.spool.socket.exists() and not after.spool.handoff_socket.exists()


# -- the daemon's memory ----------------------------------------------------------------------------------------------


def test_a_daemon_leaves_no_core_and_is_no_open_book(tmp_path: Path) -> None:
    code = (
        "import ctypes, os, resource\n"
        "try: resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\n"
        "except ValueError: pass\n"
        "from tierd.spool.spool_access import forbid_core_dumps\n"
        "forbid_core_dumps()\n"
        "assert ctypes.CDLL(None).prctl(3) == 0\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0\n"
        "os.abort()"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(spool_access.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.returncode == -6, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_who_is_no_stranger() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert spool_access.foreign_peer_uid(one) is None


def test_a_directory_that_is_locked_is_no_link(tmp_path: Path) -> None:
    """A stage's and a fetch's names can be told in advance."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    assert try_lock_stage(tmp_path / "link") is None
    with pytest.raises(OSError):
        make_locked_directory(tmp_path / "link")
    os.close(make_locked_directory(tmp_path / "outside"))


# -- memory that a trainer hands over ---------------------------------------------------------------------------------

SEALS = {name: getattr(fcntl, name) for name in ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")}


def test_an_arena_is_cut_short_by_nobody() -> None:
    """Or its reader would be killed by SIGBUS."""
    arena = Arena(8192)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


@pytest.mark.parametrize("missing", SEALS)
def test_memory_that_could_be_cut_short_is_not_taken(missing: str) -> None:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(bit for name, bit in SEALS.items() if name != missing))
    with pytest.raises(ValueError, match="no sealed memfd"):
        Arena.received(fd)
    with pytest.raises(OSError):
        os.fstat(fd)  # and is let go of
