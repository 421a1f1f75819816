"""A daemon that is stopped: it costs training a second at most, once, and nothing is lost, doubled or kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.smalldisk import SmallDisk
from support.stopped import MOST_BLOCKED_S, check_nothing_failed, hand_over, held_bytes, running, save_all
from support.timed import timed_client
from support.training import restored, same, tensors
from support.waiting import wait_until

import tierd
from tierd.client import daemon_attachment
from tierd.client.checkpointer import internals
from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.saving import handoff_packets, save_pipeline
from tierd.client.saving import snapshot_handoff as client
from tierd.core.errors import DaemonUnavailable, SaveFailed
from tierd.daemon import handoff_socket
from tierd.daemon.reconciling.client_requests import FreedSpace
from tierd.ipc import messages
from tierd.ipc.message_codec import LendArena
from tierd.spool.arena import Arena

pytestmark = pytest.mark.usefixtures("quick", "prompt")


@pytest.fixture
def prompt(quick, monkeypatch) -> None:
    """What a save waits for is as short as ever."""
    timed_client(monkeypatch, greeting_s=USUAL_TIMINGS.greeting_s)


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """How long the client was ready to wait for a packet, each time in seconds."""
    found, real = [], handoff_packets.receive_packet

    def receive(connection, silence_s, most_fds=0):
        found.append(silence_s)
        return real(connection, silence_s, most_fds)

    monkeypatch.setattr(client, "receive_packet", receive)
    return found


class Hold:
    """Holds what the daemon does in one place until it is let go."""

    def __init__(self, monkeypatch, name: str, owner: object = handoff_socket) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def held(*arguments):
            self.begun.set()
            assert self.go.wait(60)
            return real(*arguments)

        monkeypatch.setattr(owner, name, held)


# -- a process that is stopped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2])
def test_a_stopped_daemon_is_met_once_and_nothing_is_lost(spool, tmp_path, caplog, slots):
    """Row 3: SIGSTOP, and save after save. One of them blocked for 28 s."""
    with running(spool, tmp_path / "tier") as process:
        with tierd.Checkpointer(spool.root, "run", slots=slots) as ckpt:
            first = hand_over(ckpt, 0)
            process.send_signal(signal.SIGSTOP)
            assert save_all(ckpt, range(first, first + 40)) < MOST_BLOCKED_S
            assert caplog.text.count("the daemon was silent") == 1
            process.send_signal(signal.SIGCONT)
            internals(ckpt).handoff.not_before = 0.0  # as after half a minute
            last = hand_over(ckpt, first + 40)
            assert ckpt.stats.failed == 0
        check_nothing_failed(spool)
        assert [one.checkpoint.step for one in spool.parts()] == list(range(last))
        # 44 flushes, which took 2.5 s each where others wrote to the disk.
        wait_until(lambda: len(list((tmp_path / "tier").glob("run/manifests/*/*.json"))) == last)
        check_nothing_failed(spool)
    for step in (first - 1, first, first + 1, first + 39, last - 1):
        assert same(restored(spool, step)[1], step)


def test_an_optimizers_step_waits_for_no_stopped_daemon(spool, tmp_path, caplog):
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = -torch.ones_like(weight)
    with running(spool, tmp_path / "tier") as process, tierd.Checkpointer(spool.root, "run", slots=2) as ckpt:
        hand_over(ckpt, 100)
        ckpt.attach(optimizer)
        process.send_signal(signal.SIGSTOP)
        longest, saves = 0.0, []
        for step in range(1, 21):
            begun = time.monotonic()
            optimizer.step()
            saves.append(ckpt.save(200 + step, {"weight": weight}))
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.05)
        for save in saves:
            save.wait(timeout=60)
        assert longest < MOST_BLOCKED_S and ckpt.stats.failed == 0
        assert caplog.text.count("the daemon was silent") == 1
    state = {"weight": torch.zeros(100_000)}
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        for step in (1, 20):
            ckpt.restore(state, step=200 + step)
            assert bool((state["weight"] == step).all())


def test_memory_that_a_stopped_daemon_holds_is_bounded_and_released_when_it_wakes(spool, tmp_path, monkeypatch):
    timed_client(monkeypatch, alone_s=0.05)
    handed_over: list[LendArena] = []
    real = handoff_packets.send_packet

    def send(connection, message, *fds):
        handed_over.extend([message] if isinstance(message, LendArena) else [])
        real(connection, message, *fds)

    monkeypatch.setattr(client, "send_packet", send)
    state = {"x": torch.zeros(1 << 20)}  # 4 MiB
    slots = 2
    with running(spool, tmp_path / "tier") as process, tierd.Checkpointer(spool.root, "run", slots=slots) as ckpt:
        step = 0
        for _ in range(4):
            for _ in range(slots):
                step = hand_over(ckpt, step, state)
            arena = max(slot.arena.size for slot in internals(ckpt).pipeline.slots if slot.arena)
            process.send_signal(signal.SIGSTOP)
            handed_over.clear()
            assert save_all(ckpt, range(step, step + 10), state) < MOST_BLOCKED_S
            step += 10
            assert len(handed_over) <= slots, "nothing is lent to a daemon that has not greeted"
            assert held_bytes(process) < (2 * slots + 1) * arena
            before = internals(ckpt).handoff.line
            process.send_signal(signal.SIGCONT)
            assert before is None, "it is used again only after its greeting"
        internals(ckpt).handoff.not_before = time.monotonic() + 3600
        wait_until(lambda: held_bytes(process) == 0)
        check_nothing_failed(spool)
        assert ckpt.stats.failed == 0
    assert len(spool.parts()) == step


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_daemon_that_is_stopped_before_its_first_snapshot_holds_no_memory(spool, tmp_path, monkeypatch, waits, end):
    timed_client(monkeypatch, hello_s=0.5)  # that making a Checkpointer waits
    with running(spool, tmp_path / "tier") as process, contextlib.ExitStack() as stack:
        process.send_signal(signal.SIGSTOP)
        with tierd.Checkpointer(spool.root, "run", attempt=tierd.new_attempt()) as ckpt:
            waits.clear()
            assert save_all(ckpt, range(20)) < MOST_BLOCKED_S
            assert max(waits) == 0.0, "a greeting is looked for, and not waited for"
            assert (ckpt.stats.failed, ckpt.stats.handed_over) == (0, 0)
            process.send_signal(end)  # the connection waits for a greeting, or finds out that none will come
            if end == signal.SIGKILL:
                process.wait()
                stack.enter_context(running(spool, tmp_path / "other"))
            hand_over(ckpt, 20)
            assert internals(ckpt).handoff.not_before == 0.0
        check_nothing_failed(spool)


# -- a daemon that is slow in one place -------------------------------------------------------------------------------


def test_greeting_that_arrives_late_holds_up_no_save(spool, daemon, monkeypatch, waits):
    late = Hold(monkeypatch, "greeting", handoff_socket.message_codec)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        for step in range(10):
            ckpt.save(step, tensors(step)).wait(timeout=60)
        assert sum(waits) <= client.CALM_GREETING, "one connection, whose greeting nobody waits for a second time"
        assert ckpt.stats.handed_over == 0
        late.go.set()
        assert hand_over(ckpt, 10) >= 11
    assert len(daemon.handoff.connections) <= 1


def test_a_daemon_that_reads_a_packet_a_second_is_met_once(spool, daemon, monkeypatch, caplog):
    slow = {"recv_fds": lambda *arguments: time.sleep(1.0) or socket.recv_fds(*arguments)}
    monkeypatch.setattr(handoff_socket, "socket", SimpleNamespace(**{**vars(socket), **slow}))
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        assert save_all(ckpt, range(20)) < MOST_BLOCKED_S
        assert caplog.text.count("the daemon was silent") == 1
        assert (ckpt.stats.failed, ckpt.stats.handed_over) == (0, 0)
    wait_until(lambda: not daemon.handoff.busy)
    assert daemon.handoff.handed_over_bytes() == 0
    check_nothing_failed(spool)


def test_a_full_socket_is_waited_for_by_nobody(spool, daemon, monkeypatch, waits):
    monkeypatch.setattr(handoff_socket, "socket", SimpleNamespace(**vars(socket)))
    reading = Hold(monkeypatch, "recv_fds", handoff_socket.socket)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        connection = internals(ckpt).handoff.line.connection
        with pytest.raises(BlockingIOError):
            for _ in range(100_000):
                handoff_packets.send_packet(connection, client.HELLO)
        waits.clear()
        for step in range(5):
            ckpt.save(step, tensors(step)).wait(timeout=60)
        assert waits == [] and ckpt.stats.failed == 0 and ckpt.stats.handed_over == 0
        reading.go.set()
        internals(ckpt).handoff.not_before = 0.0
        hand_over(ckpt, 5)
    wait_until(lambda: not daemon.handoff.busy)


def test_who_falls_silent_again_and_again_is_left_alone_ever_longer(spool):
    line, alone = client.HandoffClient(spool), []
    for _ in range(10):
        line._leave_alone()
        alone.append(round(line.not_before - time.monotonic(), -1))
    assert alone == [30, 60, 120, 240, 480, 960, 1920, 3840, 3840, 3840]


def test_a_daemon_that_answers_is_trusted_again(spool, daemon):
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        internals(ckpt).handoff.silences = 5
        hand_over(ckpt, 0)
        assert internals(ckpt).handoff.silences == 0


# -- a daemon that works, for however long ----------------------------------------------------------------------------


def test_a_daemon_that_works_for_long_is_not_called_silent(spool, daemon, monkeypatch, caplog):
    timed_client(monkeypatch, silence_s=1.5)
    working = Hold(monkeypatch, "write_part")
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        save = ckpt.save(1, tensors(1))
        assert working.begun.wait(60)
        time.sleep(4.5)
        assert not save.done() and "silent" not in caplog.text
        working.go.set()
        save.wait(timeout=60)
        assert ckpt.stats.handed_over == 1


def test_a_trainer_that_reads_nothing_does_not_hold_up_the_daemon(spool, daemon, monkeypatch):
    """A beat is left out where the socket holds hundreds already."""
    monkeypatch.setattr(messages, "BEAT", 0.001)
    working, reads, real = Hold(monkeypatch, "write_part"), threading.Event(), client.HandoffClient.answer
    monkeypatch.setattr(client.HandoffClient, "answer", lambda self, given: reads.wait(60) and real(self, given))
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        save = ckpt.save(1, tensors(1))
        assert working.begun.wait(60)
        time.sleep(2.0)
        working.go.set()
        wait_until(lambda: daemon.reconciler.journal.counters["persisted"] == 1)
        reads.set()
        save.wait(timeout=60)


# -- it wakes, and finds what its trainer has done meanwhile ----------------------------------------------------------


@pytest.fixture
def mapped(monkeypatch) -> Iterator[list[weakref.ref]]:
    """The memory that a daemon in this process mapped, while nobody collects cycles."""
    found, real = [], Arena.received

    def received(fd):
        arena = real(fd)
        found.append(weakref.ref(arena._memory))
        return arena

    monkeypatch.setattr(Arena, "received", received)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("why", ["it is there", "the disk is full"])
def test_a_snapshot_that_its_trainer_wrote_meanwhile_did_not_fail(spool, daemon, monkeypatch, mapped, why):
    monkeypatch.setattr(messages, "BEAT", 60.0)
    timed_client(monkeypatch, silence_s=0.2)
    daemon.handoff.room = None
    if why == "the disk is full":
        monkeypatch.setattr(
            handoff_socket, "write_part", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
    working = Hold(monkeypatch, "write_part")
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        ckpt.save(1, tensors(1)).wait(timeout=60)
        assert working.begun.is_set() and ckpt.stats.failed == 0
        assert daemon.handoff.handed_over_bytes() > 0 and [one() for one in mapped] != []
        working.go.set()
        wait_until(lambda: not daemon.handoff.busy)
        assert daemon.handoff.handed_over_bytes() == 0, "its trainer lives, so nobody will recall what it lent"
        wait_until(lambda: not any(one() for one in mapped))
    daemon.settle()
    check_nothing_failed(spool)
    events = [(one.what, one.step) for one in daemon.reconciler.journal.events]
    assert events.count(("persisted", 1)) == 1
    assert same(restored(spool)[1], 1)


def test_a_snapshot_that_a_waking_daemon_commits_first_is_there_once(spool, daemon, monkeypatch):
    monkeypatch.setattr(messages, "BEAT", 60.0)
    timed_client(monkeypatch, silence_s=0.2)
    theirs, ours = Hold(monkeypatch, "write_part"), Hold(monkeypatch, "write_part", save_pipeline)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        save = ckpt.save(1, tensors(1))
        assert ours.begun.wait(60)
        theirs.go.set()
        wait_until(lambda: not daemon.handoff.busy)
        assert daemon.handoff.handed_over_bytes() == 0, "its trainer lives, so nobody will recall what it lent"
        assert len(spool.parts()) == 1 and not save.done()
        ours.go.set()
        save.wait(timeout=60)
        assert ckpt.stats.failed == 0
    daemon.settle()
    check_nothing_failed(spool)
    events = [(one.what, one.step) for one in daemon.reconciler.journal.events]
    assert events.count(("persisted", 1)) == 1
    assert same(restored(spool)[1], 1)


class Unsynced:
    """Holds the daemon between its rename and the fsync behind it, which fails then."""

    def __init__(self, spool, monkeypatch) -> None:
        monkeypatch.setattr(messages, "BEAT", 60.0)
        timed_client(monkeypatch, silence_s=0.2)
        begun, self.go, real = threading.Event(), threading.Event(), os.fsync

        def fsync(fd):
            if spool.parts() and not begun.is_set():
                begun.set()
                assert self.go.wait(60)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)


def test_a_part_that_a_waking_daemon_takes_back_is_written_by_its_trainer(spool, daemon, monkeypatch):
    daemon.handoff.room = None
    hold = Unsynced(spool, monkeypatch)
    asked, real = [], save_pipeline.wait_for_writer

    def is_settled(target, wait_s):
        asked.append(target)
        hold.go.set()  # the trainer has seen the part; now the daemon takes it back
        return real(target, wait_s)

    monkeypatch.setattr(save_pipeline, "wait_for_writer", is_settled)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        ckpt.save(1, tensors(1)).wait(timeout=60)
        assert asked == [spool.path(spool.parts()[0])] and ckpt.stats.failed == 0
        wait_until(lambda: not daemon.handoff.busy)
    assert same(restored(spool)[1], 1)


def test_part_that_a_stopped_daemon_may_take_back_is_not_saved(spool, daemon, monkeypatch):
    daemon.handoff.room = None
    hold = Unsynced(spool, monkeypatch)
    timed_client(monkeypatch, settled_s=0.1)
    with pytest.raises(SaveFailed, match="in no place"), tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        save = ckpt.save(1, tensors(1))
        with pytest.raises(SaveFailed) as failed:
            save.wait(timeout=60)
        assert isinstance(failed.value.__cause__, DaemonUnavailable)
        hold.go.set()
        wait_until(lambda: not daemon.handoff.busy)
    assert spool.parts() == []


def test_memory_is_touched_anew_before_training_needs_it(spool, daemon, monkeypatch):
    monkeypatch.setattr(messages, "BEAT", 60.0)
    timed_client(monkeypatch, silence_s=0.2)
    working = Hold(monkeypatch, "write_part")
    with tierd.Checkpointer(spool.root, "run", slots=2) as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        internals(ckpt).handoff.timings = replace(internals(ckpt).handoff.timings, silence_s=60.0)
        state = {"x": torch.zeros(1 << 18)}
        working.go.set()
        for step in (1, 2):  # then both slots are handed over, and idle
            ckpt.save(step, state).wait(timeout=60)
        handed_over = [slot.arena for slot in internals(ckpt).pipeline.slots]
        assert all(handed_over) and ckpt.stats.handed_over == 2
        working.go.clear()
        internals(ckpt).handoff.line = client.HandoffConnection(
            internals(ckpt).handoff.line.connection, internals(ckpt).handoff.line.handed_over, 0.2
        )
        ckpt.save(3, state).wait(timeout=60)
        wait_until(lambda: internals(ckpt).pipeline.free.qsize() == 2)
        now = [slot.arena for slot in internals(ckpt).pipeline.slots]
        assert not {id(one) for one in now} & {id(one) for one in handed_over}, "a daemon may still read those"
        assert all(os.fstat(one.fd).st_blocks * 512 >= 1 << 20 for one in now), "touched"
        working.go.set()


# -- what else a save asks a daemon -----------------------------------------------------------------------------------


def test_a_full_disk_and_a_stopped_daemon_cost_one_wait(spool, monkeypatch):
    """Naming the attempt and making room ask the control socket, where a save waits for the answer."""
    timed_client(monkeypatch, room_silence_s=0.1, hello_s=0.2)
    asked, real = [], daemon_attachment.DaemonConnection

    def link(spool, **more):
        asked.extend([more["silence_s"]] if "silence_s" in more else [])
        return real(spool, **more)

    monkeypatch.setattr(daemon_attachment, "DaemonConnection", link)
    SmallDisk(monkeypatch, spool.root, 100_000)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(spool.socket))
        mute.listen(100)
        with pytest.raises(SaveFailed, match="in no place"), tierd.Checkpointer(spool.root, "run") as ckpt:
            for step in range(3):
                with pytest.raises(SaveFailed):
                    ckpt.save(step, {"x": torch.zeros(1 << 18)}).wait(timeout=60)
            assert asked == [], "it was found stopped when the launch began"
            later = {"monotonic": lambda: time.monotonic() + 3600}
            monkeypatch.setattr(daemon_attachment, "time", SimpleNamespace(**{**vars(time), **later}))
            with pytest.raises(SaveFailed):
                ckpt.save(4, {"x": torch.zeros(1 << 18)}).wait(timeout=60)
            assert asked == [0.1], "asked again after half a minute"
            internals(ckpt).records.saved.clear()  # closing would wait for the answer


def test_trainer_does_not_ask_a_silent_daemon_for_room(spool, daemon, monkeypatch):
    monkeypatch.setattr(messages, "BEAT", 60.0)
    timed_client(monkeypatch, silence_s=0.2)
    working, asked = Hold(monkeypatch, "write_part"), []
    monkeypatch.setattr(daemon_attachment.Attachment, "make_room", lambda *_: asked.append(1) or False)
    with pytest.raises(SaveFailed, match="in no place"), tierd.Checkpointer(spool.root, "run") as ckpt:
        wait_until(internals(ckpt).handoff.renew)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(save_pipeline, "write_part", lambda *_: (_ for _ in ()).throw(full))
        save = ckpt.save(1, tensors(1))
        with pytest.raises(SaveFailed):
            save.wait(timeout=60)
        assert asked == []
    working.go.set()  # not before the end, because the daemon may persist the save then


def test_a_daemon_that_makes_room_for_long_shows_so(spool, daemon, monkeypatch):
    async def make(*_, **__):
        await asyncio.sleep(3.0)
        return FreedSpace(1, True)

    monkeypatch.setattr(daemon.reconciler.room, "make", make)
    timed_client(monkeypatch, room_silence_s=1.5)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        assert internals(ckpt).daemon.make_room(internals(ckpt).launch.part(1), 1000, quota=False)
