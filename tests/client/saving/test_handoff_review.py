"""Defects that a sceptical reading of the hand-off found, each as the sequence of events that showed it."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch
from support.state_files import copy_into, plan_layout
from support.training import restored, same, tensors
from support.waiting import wait_until

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import slots
from tierd.client.saving import snapshot_handoff as client
from tierd.client.saving.slots import Slot
from tierd.daemon import handoff_socket
from tierd.spool.arena import Arena

pytestmark = pytest.mark.usefixtures("quick")


def pages(arena: Arena) -> int:
    """Bytes of memory behind an arena."""
    return os.fstat(arena.fd).st_blocks * 512


def inode(ckpt: tierd.Checkpointer) -> int:
    return os.fstat(internals(ckpt).pipeline.slots[0].arena.fd).st_ino


def test_no_descriptor_for_a_connection_costs_no_slot(spool, monkeypatch):
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        assert ckpt.attempt
        with monkeypatch.context() as patch:
            patch.setattr(client.socket, "socket", lambda *_: (_ for _ in ()).throw(OSError(24, "too many open files")))
            for step in (1, 2, 3):
                ckpt.save(step, tensors(step)).wait(timeout=60)
        ckpt.save(4, tensors(4)).wait(timeout=60)
    assert len(spool.parts()) == 4


def test_error_after_a_save_costs_no_slot(spool, monkeypatch):
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(internals(ckpt).daemon, "renew_soon", lambda: 1 // 0)
            ckpt.save(1, tensors(1)).wait(timeout=60)
            ckpt.save(2, tensors(2)).wait(timeout=60)
        ckpt.save(3, tensors(3)).wait(timeout=60)
    assert len(spool.parts()) == 3


def test_a_daemon_that_only_listens_gets_nothing_and_blocks_nobody(spool):
    """Stopped as a whole: the system still accepts for it, until the backlog is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(os.fspath(spool.handoff_socket))
        hung.listen(1)
        begun = time.monotonic()
        for step in range(8):
            with tierd.Checkpointer(spool.root, "run") as ckpt:
                ckpt.save(step, tensors(step)).wait(timeout=60)
                ckpt.save(step + 100, tensors(step)).wait(timeout=60)
                assert ckpt.stats.handed_over == 0 and ckpt.stats.failed == 0
        assert time.monotonic() - begun < 60, "one greeting is waited for by each, and no more"
    assert len(spool.parts()) == 16


def test_memory_that_a_device_writes_to_keeps_its_pages(spool, fake):
    slot, layout = Slot(0), plan_layout({"x": torch.zeros(1000)})
    slot.reserve(8 << 20)
    slot.pin(torch.device("cuda", 0))
    for _ in range(3):
        slot.lay_out(layout)
    assert pages(slot.arena) == 8 << 20
    slot._unpin()
    slot.lay_out(layout)
    assert pages(slot.arena) < 1 << 20
    assert slot.reserve(8 << 20) and pages(slot.arena) == 8 << 20, "what is promised is there"


def test_an_arena_of_a_living_trainer_is_nobody_elses(spool, daemon):
    """Its line breaks on its own side: the daemon takes it for dead, and a second launch may recall what it left."""
    with tierd.Checkpointer(spool.root, "run") as first:
        first.save(1, tensors(1)).wait(timeout=60)
        shared = inode(first)
        internals(first).handoff._drop(internals(first).handoff.line.connection, gone=False)
        wait_until(lambda: daemon.handoff.orphans)
        state = tensors(0)
        with tierd.Checkpointer(spool.root, "run") as second:
            assert second.restore(state).tier == "memory" and inode(second) == shared
            second.save(2, tensors(2))
            first.save(3, tensors(3)).wait(timeout=60)
            assert inode(first) != shared
            second.save(4, tensors(4)).wait(timeout=60)
    for step in (1, 2, 4):
        assert same(restored(spool, step)[1], step)


def test_a_line_that_the_daemon_ends_leaves_no_orphan(spool, daemon):
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(1, tensors(1)).wait(timeout=60)
        socket.send_fds(internals(ckpt).handoff.line.connection, [b"no message"], [])
        wait_until(lambda: not daemon.handoff.connections)
        assert not daemon.handoff.orphans
        ckpt.save(2, tensors(2)).wait(timeout=60)
        assert ckpt.stats.handed_over == 2, "and the next save finds a new one at once"


def test_a_restore_waits_for_no_living_trainer(spool, daemon, monkeypatch):
    go, real = threading.Event(), handoff_socket.write_part
    monkeypatch.setattr(handoff_socket, "write_part", lambda *a: go.wait(60) and real(*a))
    with tierd.Checkpointer(spool.root, "other") as busy:
        save = busy.save(1, tensors(1))
        with tierd.Checkpointer(spool.root, "run") as ckpt:
            assert ckpt.restore(tensors(0)) is None
        assert not save.done()
        go.set()
        save.wait(timeout=60)


def test_an_arena_that_was_outgrown_gives_its_memory_back(spool, daemon):
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        ckpt.save(1, {"x": torch.zeros(1 << 20)}).wait(timeout=60)
        old = Arena.received(os.dup(internals(ckpt).pipeline.slots[0].arena.fd))
        assert pages(old) >= 4 << 20
        ckpt.save(2, {"x": torch.ones(2 << 20)}).wait(timeout=60)
        assert pages(old) == 0
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        for step, size in ((1, 1 << 20), (2, 2 << 20)):
            state = {"x": None}
            ckpt.restore(state, step=step)
            assert torch.equal(state["x"], torch.full((size,), float(step - 1)))


def test_a_state_that_grows_within_its_arena_finds_its_memory_touched(spool, monkeypatch):
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        internals(ckpt).pipeline.reserve(16 << 20)
        for step in (1, 2):
            ckpt.save(step, {"x": torch.zeros(1 << 20)}).wait()
        arena = internals(ckpt).pipeline.slots[0].arena
        assert pages(arena) < 5 << 20
        monkeypatch.setattr(slots, "available", lambda: 0)
        ckpt.save(3, {"x": torch.ones(3 << 20)}).wait()  # no memory for it now: it is streamed, not killed
        assert internals(ckpt).pipeline.slots[0].arena is not arena
        monkeypatch.undo()
        ckpt.save(4, {"x": torch.ones(3 << 20)}).wait()
    state = {"x": None}
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        ckpt.restore(state, step=3)
        assert bool((state["x"] == 1).all())


class Keeper(torch.nn.Module):
    """A module that keeps what it is given as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.extra = torch.nn.Parameter(torch.ones(5000)), torch.ones(5000)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_from_memory_is_not_overwritten_by_the_next_save(spool):
    from tierd.state.capturer import Capturer
    from tierd.state.state_loading import load_restored, unflatten

    capture = Capturer().capture({"model": Keeper()})
    arena = Arena(capture.layout.size)
    copy_into(capture.layout, capture.tensors, arena.view)
    state = {"model": Keeper()}
    image = arena.view[: capture.layout.size]
    load_restored(state, unflatten(capture.tree(), image), handed_over=True, files=[image])
    arena.view[len(capture.layout.header) : capture.layout.size] = bytes(
        capture.layout.size - len(capture.layout.header)
    )
    assert torch.equal(state["model"].extra, torch.ones(5000)) and torch.equal(state["model"].weight, torch.ones(5000))


def test_gate_forgets_saves_that_nobody_waits_for(spool):
    weight = torch.nn.Parameter(torch.ones(1000))
    with tierd.Checkpointer(spool.root, "run", to=[]) as ckpt:
        ckpt.attach(torch.optim.SGD([weight], lr=0.1))
        for step in range(20):
            ckpt.save(step, {"w": weight}).wait(timeout=60)
        assert len(internals(ckpt).gate._pending) <= 2
