"""The hand-off: once `save` has returned, the snapshot needs its trainer no more; nor does it need the daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import textwrap
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.forked import run_script
from support.training import restored, same, tensors
from support.waiting import wait_until
from support.world import Daemon

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import snapshot_handoff as client
from tierd.client.saving.handoff_packets import close_fds, receive_packet
from tierd.core.errors import DaemonUnavailable, SaveFailed, SpoolFull, SpoolUnusable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import SPOOL
from tierd.daemon import handoff_socket
from tierd.ipc.daemon_connection import connect_to_daemon
from tierd.spool.arena import Arena
from tierd.stores.memory_store import MemoryStore

BIG = 1 << 20  # elements: large enough for direct I/O and recycling


pytestmark = pytest.mark.usefixtures("quick")


class Brake:
    """Holds the daemon's persisting until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = handoff_socket.write_part

        def write_part(*arguments):
            self.begun.set()
            assert self.go.wait(60)
            return real(*arguments)

        monkeypatch.setattr(handoff_socket, "write_part", write_part)


@pytest.fixture
def brake(daemon, monkeypatch):
    """Held from the beginning; and let go in the end in any case, so that a red test waits for nothing."""
    brake = Brake(monkeypatch)
    yield brake
    brake.go.set()


def trainer(spool, script: str) -> int:
    """Run a trainer in a process of its own, with `ckpt` open and `tensors` at hand; its exit code."""
    head = f"""
        import os, pathlib, signal, sys, torch, tierd
        from support.training import tensors
        from tierd.client.checkpointer import internals
        torch.set_num_threads(1)
        ckpt = tierd.Checkpointer({str(spool.root)!r}, "run")
        def die(): os.kill(os.getpid(), signal.SIGKILL)
    """
    return run_script(textwrap.dedent(head) + textwrap.dedent(script))


def steps(spool) -> list[int]:
    return [part.checkpoint.step for part in spool.parts()]


# -- the trainer dies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "fails"])
def test_a_part_that_is_observed_before_its_hand_off_is_reported_is_an_event_once(spool, daemon, monkeypatch, fails):
    """The observation reported it first, without its times, in one of eight saves under load."""
    real = handoff_socket.write_part

    def observe() -> None:
        daemon.call(daemon.reconciler.observe(SPOOL))

    def write_part(*arguments):
        written = real(*arguments)
        observe()
        if fails:
            raise OSError(errno.EIO, "the part is there, and may not be durable")
        return written

    observe()
    monkeypatch.setattr(handoff_socket, "write_part", write_part)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        save = ckpt.save(1, tensors(1))
        with pytest.raises(SaveFailed) if fails else contextlib.nullcontext():
            save.wait()
    observe()
    observe()
    (event,) = [one for one in daemon.reconciler.journal.events if one.what == "persisted"]
    assert ("found in the spool" in event.why) is fails
    assert (event.blocked_s is None) is fails and (event.seconds is None) is fails


def test_every_slot_is_handed_over(spool, daemon, brake):
    script = """
        ckpt = tierd.Checkpointer(internals(ckpt).spool.root, "run", slots=3)
        for step in (1, 2, 3): ckpt.save(step, tensors(step))
        die()
    """
    assert trainer(spool, script) == -signal.SIGKILL
    assert steps(spool) == []
    brake.go.set()
    wait_until(lambda: steps(spool) == [1, 2, 3])
    for step in (1, 2, 3):
        assert same(restored(spool, step)[1], step)


def test_handed_over_snapshot_is_read_though_the_dead_trainer_left_an_answer_unread(spool, daemon, monkeypatch):
    """Seeds 73 and 75 of `python -m faults kills`: the system then reports a reset before what was sent."""
    dead, send = threading.Event(), socket.send_fds

    def slow(connection, packets, *more):
        send(connection, packets, *more)
        assert b'"recycled"' not in packets[0] or dead.wait(60)  # the answer to a snapshot

    monkeypatch.setattr(handoff_socket, "socket", SimpleNamespace(**{**vars(socket), "send_fds": slow}))
    script = """
        import time
        from tierd.client.saving.snapshot_handoff import HandoffClient
        HandoffClient.answer = lambda *given: time.sleep(60)
        ckpt = tierd.Checkpointer(internals(ckpt).spool.root, "run", slots=2)
        ckpt.save(1, tensors(1))
        while not internals(ckpt).spool.parts(): time.sleep(0.01)
        ckpt.save(2, tensors(2))
        time.sleep(1)  # it answers, and nobody reads that
        die()
    """
    assert trainer(spool, script) == -signal.SIGKILL
    assert steps(spool) == [1]
    dead.set()
    wait_until(lambda: steps(spool) == [1, 2])
    assert same(restored(spool)[1], 2)


def test_an_overlapped_save_is_handed_over_when_its_copy_is_done(spool, daemon, brake):
    script = """
        weight = torch.nn.Parameter(torch.ones(100_000))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        ckpt.attach(optimizer)
        ckpt.save(1, {"weight": weight})
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        die()
    """
    assert trainer(spool, script) == -signal.SIGKILL
    assert brake.begun.wait(60)
    brake.go.set()
    wait_until(lambda: steps(spool) == [1])
    state = {"weight": torch.zeros(100_000)}
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(state)
    assert torch.equal(state["weight"], torch.ones(100_000))


def test_trainer_killed_in_a_copy_leaves_only_complete_snapshots(spool, daemon):
    script = """
        from tierd.client.saving.snapshot import Snapshot
        ckpt.save(1, tensors(1)).wait()
        real = Snapshot._copy_tensors
        def half(self, into, names):
            real(self, into, list(names)[:2])
            die()
        Snapshot._copy_tensors = half
        ckpt.save(2, tensors(2))
    """
    assert trainer(spool, script) == -signal.SIGKILL
    wait_until(lambda: not daemon.handoff.connections)
    state = tensors(0)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        found = checkpointer.restore(state)
        assert (found.step, found.tier, found.skipped) == (1, "local", ()) and same(state, 1)
    assert steps(spool) == [1]


def test_restart_restores_from_memory_and_saves_into_it(spool, daemon):
    assert trainer(spool, "ckpt.save(1, tensors(1)); die()") == -signal.SIGKILL
    wait_until(lambda: steps(spool) == [1] and daemon.handoff.orphans)
    memory = os.fstat(next(iter(daemon.handoff.orphans.values())).arenas[0].fd).st_ino
    daemon.settle()  # or the flush may meet what is damaged now, and set the part aside
    path = next(spool.root.glob("run/*/*/tensors.safetensors"))
    path.write_bytes(bytes(path.stat().st_size))  # the disk's copy is not what is read
    state = tensors(0)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        found = checkpointer.restore(state)
        assert (found.step, found.tier) == (1, "memory") and same(state, 1)
        checkpointer.save(2, tensors(2)).wait()
        assert checkpointer.stats.handed_over == 1
        assert os.fstat(internals(checkpointer).pipeline.slots[0].arena.fd).st_ino == memory
        assert same(state, 1), "what was restored has memory of its own"
    assert same(restored(spool, 2)[1], 2)


def test_restart_waits_for_a_snapshot_that_is_still_being_persisted(spool, daemon, monkeypatch):
    assert trainer(spool, "ckpt.save(1, tensors(1)).wait(); ckpt.close()") == 0
    brake = Brake(monkeypatch)
    assert trainer(spool, "ckpt.restore(tensors(0)); ckpt.save(2, tensors(2)); die()") == -signal.SIGKILL
    assert brake.begun.wait(60)
    real = daemon.handoff.settled

    async def settled():
        threading.Timer(0.5, brake.go.set).start()
        await real()

    monkeypatch.setattr(daemon.handoff, "settled", settled)
    state = tensors(0)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        found = checkpointer.restore(state)
        brake.go.set()  # also where nobody waited: so this fails at once
        assert found.step == 2 and same(state, 2)


def test_memory_of_the_dead_is_freed_in_the_end(spool, daemon, monkeypatch):
    daemon.handoff.timings = replace(daemon.handoff.timings, orphan_s=0.5)
    assert trainer(spool, "ckpt.save(1, tensors(1)); die()") == -signal.SIGKILL
    wait_until(lambda: daemon.handoff.orphans)
    assert daemon.handoff.handed_over_bytes() > 0 and daemon.handoff.writers() == {"run.00000-of-00001"}
    wait_until(lambda: not daemon.handoff.busy)
    assert daemon.handoff.handed_over_bytes() == 0 and not daemon.handoff.writers()


def test_an_end_in_order_leaves_no_memory_behind(spool, daemon):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait()
        assert daemon.handoff.handed_over_bytes() > 0
    wait_until(lambda: not daemon.handoff.busy)
    assert daemon.handoff.handed_over_bytes() == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_hides_no_death(spool, daemon):
    """A DataLoader's worker outlives its killed trainer for a moment, or for ever."""
    pid = spool.root.with_name("child")
    script = f"""
        ckpt.save(1, tensors(1)).wait()
        if (child := os.fork()) == 0:
            import time; time.sleep(600); os._exit(0)
        pathlib.Path({str(pid)!r}).write_text(str(child))
        die()
    """
    assert trainer(spool, script) == -signal.SIGKILL
    wait_until(lambda: not daemon.handoff.connections)
    os.kill(int(pid.read_text()), signal.SIGKILL)


# -- the daemon dies, hangs, refuses, comes late ----------------------------------------------------------------------


def test_a_daemon_that_dies_over_it_is_no_loss(spool, daemon, brake):
    """Its connection ends in the middle; what it would still write, it writes from memory that nobody changes."""
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        save = checkpointer.save(1, tensors(1))
        assert brake.begun.wait(60)
        daemon.handoff.connections[0].socket.shutdown(socket.SHUT_RDWR)
        save.wait(timeout=60)
        assert steps(spool) == [1] and checkpointer.stats.handed_over == 0
        checkpointer.save(2, tensors(2))
        brake.go.set()  # it lives after all, and writes step 1: it is there already
        checkpointer.save(3, tensors(3)).wait(timeout=60)
        assert checkpointer.stats.failed == 0 and checkpointer.stats.handed_over >= 1
    for step in (1, 2, 3):
        assert same(restored(spool, step)[1], step)


def test_a_late_daemon_commits_the_right_bytes_where_the_trainer_could_not(spool, daemon, monkeypatch, brake):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(
                "tierd.client.saving.save_pipeline.write_part",
                lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "no")),
            )
            save = checkpointer.save(1, tensors(1))
            assert brake.begun.wait(60)
            daemon.handoff.connections[0].socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(SaveFailed):
                save.wait(timeout=60)
        checkpointer.save(2, tensors(2)).wait(timeout=60) if brake.go.is_set() else brake.go.set()
        checkpointer.save(3, tensors(3)).wait(timeout=60)
        wait_until(lambda: 1 in steps(spool))
    assert same(restored(spool, 1)[1], 1) and same(restored(spool, 3)[1], 3)


def test_commit_of_a_daemon_that_died_before_its_answer_counts(spool, daemon, monkeypatch):
    real = handoff_socket.write_part

    def write_part(*arguments):
        real(*arguments)
        daemon.handoff.connections[0].socket.shutdown(socket.SHUT_RDWR)
        raise OSError(errno.EPIPE, "killed before it could say so")

    monkeypatch.setattr(handoff_socket, "write_part", write_part)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait(timeout=60)
        assert checkpointer.stats.failed == 0
    assert same(restored(spool, 1)[1], 1)


def test_request_on_a_closed_connection_fails_as_daemon_unavailable(spool):
    """Of two that wait for one daemon's answers, the first finds it ended, and closes the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    line = client.HandoffClient(spool)
    for _ in range(2):
        with pytest.raises(DaemonUnavailable, match="the daemon closed the connection"):
            line.answer(client.PendingHandoff(ours, 0, 1.0))
    assert line.not_before == 0.0, "nor does it count as one that hangs"


def test_daemon_reports_a_full_spool_to_the_trainer(spool, daemon, monkeypatch, caplog):
    def write_part(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(handoff_socket, "write_part", write_part)
            save = checkpointer.save(1, tensors(1))
            with pytest.raises(SaveFailed) as failed:
                save.wait(timeout=60)
            assert isinstance(failed.value.__cause__, SpoolFull)
        checkpointer.save(1, tensors(1)).wait(timeout=60)
        assert (checkpointer.stats.failed, checkpointer.stats.handed_over) == (1, 1)
    wait_until(lambda: daemon.reconciler.journal.counters["persist_failures"] == 1)
    assert same(restored(spool, 1)[1], 1)


def test_trainer_writes_the_part_that_the_daemon_may_not_write(spool, daemon, monkeypatch):
    """A unit file that forgot the spool among its ReadWritePaths."""

    def write_part(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(handoff_socket, "write_part", write_part)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait(timeout=60)
        assert (checkpointer.stats.failed, checkpointer.stats.handed_over) == (0, 0)
    assert same(restored(spool, 1)[1], 1)


def test_save_that_the_daemon_could_not_make_durable_fails_for_that_reason(spool, daemon, monkeypatch):
    """It was renamed into place, and the file system turned read-only before that was synced: seed 5 of
    `python -m faults host`. The save failed because "a checkpoint is never overwritten"."""
    real = handoff_socket.write_part

    def write_part(*arguments):
        real(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(handoff_socket, "write_part", write_part)
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        save = checkpointer.save(1, tensors(1))
        with pytest.raises(SaveFailed) as failed:
            save.wait(timeout=60)
    assert isinstance(failed.value.__cause__, SpoolUnusable) and os.strerror(errno.EIO) in str(failed.value.__cause__)


def test_daemon_that_starts_later_is_used_from_then_on(spool):
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait()
        assert checkpointer.stats.handed_over == 0
        with Daemon(spool.root, {"tier": MemoryStore()}, keep=10, keep_local=10):
            checkpointer.save(2, tensors(2)).wait()
            checkpointer.save(3, tensors(3)).wait()
            assert checkpointer.stats.handed_over == 2
        checkpointer.save(4, tensors(4)).wait()
    for step in (1, 2, 3, 4):
        assert same(restored(spool, step)[1], step)


def test_pruned_files_are_written_over(spool):
    state = {"x": torch.zeros(BIG)}
    with Daemon(spool.root, {"tier": MemoryStore()}, keep=1, keep_local=1) as daemon:
        with tierd.Checkpointer(spool.root, "run") as checkpointer:
            for step in range(1, 7):
                state["x"].fill_(step)
                checkpointer.save(step, state).wait("tier", timeout=60)
                daemon.settle()
            assert checkpointer.stats.recycled >= 3
            assert checkpointer.restore(state).step == 6 and bool((state["x"] == 6).all())
        wait_until(lambda: not daemon.handoff.busy)
        wait_until(lambda: not list((spool.control / "recycle").iterdir()))


# -- what a peer may send ---------------------------------------------------------------------------------------------


def packets():
    lend = b'{"op":"lend","slot":0}'
    part = '{"checkpoint":{"run":"run","attempt":"000000000001-00000001","step":1},"rank":0,"world":1}'
    persist = '{"op":"persist","part":%s,"slot":%d,"tensors":%d,"manifest":%d,"tree":%d}'
    huge = 1 << 40
    return {
        "nothing like it": (b"hello", []),
        "no descriptor": (lend, []),
        "nothing": (b"", []),
        "nothing but memory": (b"", ["arena", "arena"]),
        "more descriptors than a packet may have": (lend, ["arena"] * 12),
        "more bytes than a packet may have": (lend[:-1] + b" " * (1 << 15) + b"}", ["arena"]),
        "an open file": (lend, ["file"]),
        "a memfd that can be cut short": (lend, ["unsealed"]),
        "too many descriptors": (lend, ["arena", "arena"]),
        "a slot that was never lent": ((persist % (part, 3, 10, 10, 10)).encode(), ["arena"]),
        "a tensor file beyond the arena": ((persist % (part, 0, huge, 10, 10)).encode(), ["arena"]),
        "a tree beyond its box": ((persist % (part, 0, 10, 10, huge)).encode(), ["arena"]),
        "no manifest": ((persist % (part, 0, 10, 10, 10)).encode(), ["arena"]),
        "a run that climbs": (
            (persist % (part.replace('"run":"run"', '"run":"../x"'), 0, 1, 1, 1)).encode(),
            ["arena"],
        ),
        "a recall with a gift": (b'{"op":"recall","part":%s}' % part.encode(), ["arena"]),
        "a slot out of bounds": (b'{"op":"lend","slot":64}', ["arena"]),
    }


@pytest.mark.parametrize("what", packets())
def test_a_bad_message_ends_its_connection_and_nothing_else(spool, daemon, tmp_path, what):
    packet, kinds = packets()[what]
    arena = Arena(4096)
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 4096)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    fds = {"arena": arena.fd, "unsealed": unsealed, "file": file}
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        connect_to_daemon(peer, spool.handoff_socket)
        peer.settimeout(60)
        assert b'"ok":true' in peer.recv(1 << 16)
        if "beyond" in what or "no manifest" in what:
            socket.send_fds(peer, [b'{"op":"lend","slot":0}'], [arena.fd])
        socket.send_fds(peer, [packet], [fds[kind] for kind in kinds])
        assert peer.recv(1 << 16) == b""
    wait_until(lambda: not daemon.handoff.busy)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    os.close(unsealed)
    os.close(file)
    assert steps(spool) == []
    with tierd.Checkpointer(spool.root, "run") as checkpointer:
        checkpointer.save(1, tensors(1)).wait(timeout=60)
        assert checkpointer.stats.handed_over == 1


@pytest.mark.parametrize("packet", [b"", b"x", b'{"working":true}', b'{"ok":false}', b'{"ok":true}'])
def test_a_client_keeps_no_descriptor_that_it_did_not_ask_for(packet):
    ours, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, daemons:
        before = len(os.listdir("/proc/self/fd"))
        for most in (0, 2):
            socket.send_fds(daemons, [packet], [daemons.fileno()] * 2)
            with contextlib.suppress(DaemonUnavailable):
                _, fds = receive_packet(ours, 0.2, most)
                assert len(fds) == most and packet == b'{"ok":true}'
                close_fds(fds)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_recall_that_brings_the_wrong_memory_leaves_no_descriptor(spool, monkeypatch):
    ours, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, before = client.HandoffClient(spool), len(os.listdir("/proc/self/fd"))
    line.line = client.HandoffConnection(ours, {}, 5.0)
    socket.send_fds(daemons, [b'{"ok":true,"tensors":1,"manifest":1,"tree":1}'], [daemons.fileno()] * 2)
    assert line.recall(PartId(CheckpointId("run", "000000000001-00000001", 1), 0, 1)) is None
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    daemons.close()
