"""Slots: what a save does while the one before is still being persisted, and what it does without memory for it."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from support.training import fresh, restored, same, tensors, train
from support.waiting import wait_until

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import save_pipeline, slots
from tierd.client.saving.savers import SaveRecords
from tierd.core.errors import ConfigError, SaveFailed, SaveSkipped, SpoolFull
from tierd.spool import arena as arena_module
from tierd.spool.arena import Arena, available, limited_groups


class Brake:
    """Holds persisting until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.go = threading.Event()
        real = save_pipeline.write_part
        monkeypatch.setattr(save_pipeline, "write_part", lambda *a: self.go.wait(60) and real(*a))


@pytest.fixture
def brake(monkeypatch):
    return Brake(monkeypatch)


def opened(spool, **options):
    return tierd.Checkpointer(spool.root, "run", to=[], **options)


# -- backlog ----------------------------------------------------------------------------------------------------------


def test_save_waits_for_the_previous_save_by_default_and_counts_the_wait(spool, brake):
    with opened(spool) as ckpt:
        ckpt.save(1, tensors(1))
        threading.Timer(0.4, brake.go.set).start()
        ckpt.save(2, tensors(2)).wait()
        assert ckpt.stats.waited_s > 0.2 and ckpt.stats.blocked_s > ckpt.stats.waited_s
    assert same(restored(spool, 1)[1], 1) and same(restored(spool, 2)[1], 2)


def test_a_save_may_be_skipped_instead(spool, brake, caplog):
    with opened(spool, when_busy="skip") as ckpt:
        ckpt.save(1, tensors(1))
        skipped = ckpt.save(2, tensors(2))
        assert skipped.done() and isinstance(skipped.error(), SaveSkipped) and "skipped" in caplog.text
        with pytest.raises(SaveSkipped, match="step 2"):
            skipped.wait()
        assert (ckpt.stats.saves, ckpt.stats.skipped, ckpt.stats.failed) == (1, 1, 0)
        brake.go.set()
        internals(ckpt).pipeline.drain()
        ckpt.save(2, tensors(2)).wait()  # the step is still free
    assert same(restored(spool)[1], 2)


def test_a_save_may_fail_instead(spool, brake):
    with opened(spool, when_busy="fail") as ckpt:
        ckpt.save(1, tensors(1))
        with pytest.raises(SaveSkipped):
            ckpt.save(2, tensors(2))
        assert ckpt.stats.skipped == 1
        brake.go.set()
    assert restored(spool)[0].step == 1


@pytest.mark.parametrize("broken", [False, True])
def test_a_slot_is_free_once_its_save_has_ended_well_or_not(spool, monkeypatch, broken):
    """What follows the end, such as a word with the daemon, takes a while."""
    real = SaveRecords.record_end
    monkeypatch.setattr(SaveRecords, "record_end", lambda *a: real(*a) or time.sleep(0.3))
    if broken:
        monkeypatch.setattr(save_pipeline, "write_part", lambda *a: os.stat(spool.root / "none"))
    lost = pytest.raises(SaveFailed, match="in no place") if broken else nullcontext()
    with lost, opened(spool, when_busy="fail") as ckpt:
        for step in (1, 2, 3):
            save = ckpt.save(step, tensors(step))
            with pytest.raises(SaveFailed) if broken else nullcontext():
                save.wait()


@pytest.mark.parametrize("when_busy", ["wait", "skip", "fail"])
def test_with_more_slots_that_many_saves_follow_each_other(spool, brake, when_busy):
    with opened(spool, slots=3, when_busy=when_busy) as ckpt:
        for step in (1, 2, 3):
            assert ckpt.save(step, tensors(step)).error() is None
        assert ckpt.stats.skipped == 0
        if when_busy == "skip":
            assert isinstance(ckpt.save(4, tensors(4)).error(), SaveSkipped)
        brake.go.set()
    for step in (1, 2, 3):
        assert same(restored(spool, step)[1], step)


@pytest.mark.parametrize("options", [{"slots": 0}, {"slots": 1.5}, {"slots": True}, {"slots": 17}, {"when_busy": "no"}])
def test_an_option_that_means_nothing_is_refused(spool, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        opened(spool, **options)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 48 << 20])
def test_a_state_that_memory_does_not_hold_is_streamed(spool, monkeypatch, caplog, spare):
    monkeypatch.setattr(slots, "available", lambda: spare)
    state = {"big": torch.arange(5_000_000 + 3), "turned": torch.randn(900, 700).t(), **tensors(7)}
    with opened(spool) as ckpt:
        save = ckpt.save(7, state)
        saved = {name: value.clone() for name, value in state.items()}
        for value in state.values():
            value.zero_()
        save.wait()
        assert internals(ckpt).pipeline.slots[0].arena.size <= (16 << 20 if not spare else 48 << 20)
        assert ("streams it" in caplog.text) == (spare == 0)
        ckpt.restore(state)
    assert all(torch.equal(state[name], saved[name]) for name in state)


def test_overlapped_state_that_memory_does_not_hold_is_streamed_before_training_continues(spool, monkeypatch):
    monkeypatch.setattr(slots, "available", lambda: 0)
    state = {**fresh(), "big": torch.arange(5_000_000)}  # more than the arena through which it is streamed
    train(state)
    with opened(spool) as ckpt:
        ckpt.attach(state["optimizer"])
        ckpt.save(1, state)
        expected = train(state, 3)
        ckpt.restore(state)
        assert train(state, 3) == expected


def test_a_streamed_save_that_fails_is_a_value_all_the_same(spool, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(slots, "available", lambda: 0)
    with opened(spool) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(save_pipeline, "write_part", full)
            save = ckpt.save(1, tensors(1))
        with pytest.raises(SaveFailed) as failed:
            save.wait()
        assert isinstance(failed.value.__cause__, SpoolFull) and ckpt.stats.failed == 1
        ckpt.save(1, tensors(1)).wait()
    assert same(restored(spool)[1], 1)


def test_the_system_that_says_no_is_believed(spool, monkeypatch):
    monkeypatch.setattr(Arena, "prefault", refused)
    with opened(spool) as ckpt:
        ckpt.save(1, tensors(1)).wait()
    assert same(restored(spool)[1], 1)


@pytest.mark.parametrize(
    ("size", "spare", "small"),
    [(64, 0, 16), (64, 8192, 64), (90, 80, 20), (4096, 3072, 256), (1, 0, 16)],
)
def test_small_arena_is_no_larger_than_the_state_and_a_share_of_free_memory(monkeypatch, size, spare, small):
    monkeypatch.setattr(slots, "available", lambda: spare << 20)
    monkeypatch.setattr(Arena, "prefault", refused)
    slot = slots.Slot(0)
    assert not slot.reserve(size << 20) and slot.arena.size == small << 20


def refused(self, size=None, begin=0):
    raise MemoryError("cannot allocate")


def test_slot_tries_a_smaller_arena_where_the_system_refuses_a_larger(monkeypatch, caplog):
    real, asked = slots.Arena, []

    def allocate(size):
        asked.append(size >> 20)
        if size > 20 << 20:
            raise MemoryError("cannot allocate")
        return real(size)

    monkeypatch.setattr(slots, "available", lambda: 1 << 30)
    monkeypatch.setattr(slots, "Arena", allocate)
    slot = slots.Slot(0)
    assert not slot.reserve(96 << 20) and asked == [96, 96, 48, 24, 16]
    assert "finds no memory although" in caplog.text and "through 16777216 bytes" in caplog.text
    monkeypatch.setattr(slots, "Arena", refused)
    with pytest.raises(MemoryError):
        slot.reserve(96 << 20)


def test_streamed_state_is_warned_of_once_until_a_state_fits_again(monkeypatch, caplog):
    slot, warned = slots.Slot(0), []
    for spare in (0, 0, 1 << 30, 0, 0):
        monkeypatch.setattr(slots, "available", lambda spare=spare: spare)
        slot.drop()
        assert slot.reserve(1 << 20) == bool(spare)
        warned.append(caplog.text.count("streams it"))
    assert warned == [1, 1, 1, 2, 2]


# -- the arena is ready before it is needed ---------------------------------------------------------------------------


def test_attach_makes_the_arena_ready_before_the_first_save(spool):
    state = fresh()
    with opened(spool) as ckpt:
        pipeline = internals(ckpt).pipeline
        ckpt.attach(state["optimizer"])
        wait_until(lambda: pipeline.slots[0].has_room(slots.estimate({"optimizer": state["optimizer"]})))
        arena = pipeline.slots[0].arena
        train(state, 2)
        ckpt.save(1, state).wait()
        assert pipeline.slots[0].arena is arena, "the state's buffers and header had room as well"


@pytest.mark.parametrize("free_sizes", [0, 1, 2])
def test_attach_leaves_memory_for_a_restore(monkeypatch, free_sizes):
    """Of memory for one state, and for another one that a restore reads, nothing is touched unless both fit."""
    size = 8 << 20
    monkeypatch.setattr(slots, "available", lambda: free_sizes * size)
    slot = slots.Slot(0)
    slot.prefault_slice(size, None)
    assert slot.has_room(size) == (free_sizes == 2)
    slot.drop()


def test_restore_ends_the_touching_that_attach_began(spool, monkeypatch):
    big, touched = torch.nn.Parameter(torch.zeros(30 << 20)), []
    state = {"big": big, "optimizer": torch.optim.Adam([big])}
    with opened(spool) as ckpt:
        pipeline = internals(ckpt).pipeline

        def prefault(arena, size=None, begin=0):
            if not touched:
                pipeline.drain(0)  # as a restore in the training thread does, which begins now
            touched.append(size)

        monkeypatch.setattr(Arena, "prefault", prefault)
        ckpt.attach(state["optimizer"])
        for _ in range(3):  # a job may give one more
            done = threading.Event()
            pipeline.behind(done.set)
            assert done.wait(60)
        assert len(touched) == 1 and touched[0] < 3 * big.nbytes
        ckpt.restore(state)
        pipeline.drain()
        assert len(touched) == 2, "the restore knows what the state needs"


def test_slot_touches_the_memory_that_no_attached_optimizer_showed(monkeypatch):
    slot, size = slots.Slot(0), 8 << 20
    while slot.prefault_slice(size, None):
        pass
    arena = slot.arena
    assert slot.reserve(size + size // 32) and slot.arena is arena and slot.has_room(size + size // 32)
    assert not slot.has_room(arena.size), "no more is touched than is needed"
    assert slot.reserve(2 * size) and slot.arena is not arena
    slot.drop()


def test_several_threads_touch_one_arena(monkeypatch):
    both, ranges = threading.Barrier(2, timeout=60), []

    def populate(memory, begin, length):
        both.wait()  # no thread gets further alone
        ranges.append(range(begin, begin + length))
        return 0

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(arena_module, "populate", populate)
    arena = Arena(256 << 20)
    arena.prefault()
    assert sum(map(len, ranges)) == arena.size and len(set(ranges)) == len(ranges)


def test_an_error_in_any_touching_thread_raises(monkeypatch):
    def populate(memory, begin, length):
        return errno.EFAULT if begin == 128 << 20 else 0

    monkeypatch.setattr(arena_module, "populate", populate)
    with pytest.raises(MemoryError, match="Bad address"):
        Arena(256 << 20).prefault()


def test_restoring_makes_the_arena_ready_before_an_optimizer_has_any_state(spool):
    state = fresh()
    with opened(spool) as ckpt:
        assert ckpt.restore(state) is None
        internals(ckpt).pipeline.drain()
        arena = internals(ckpt).pipeline.slots[0].arena
        train(state, 2)
        ckpt.save(1, state).wait()
        assert internals(ckpt).pipeline.slots[0].arena is arena, "it was large enough for what training has by then"
    with opened(spool) as ckpt:
        assert ckpt.restore(state).step == 1
        internals(ckpt).pipeline.drain()
        arena = internals(ckpt).pipeline.slots[0].arena
        ckpt.save(2, state).wait()
        assert internals(ckpt).pipeline.slots[0].arena is arena


@pytest.mark.parametrize(
    ("kind", "options", "times"),
    [
        (torch.optim.AdamW, {}, 3),
        (torch.optim.Adam, {"amsgrad": True}, 4),
        (torch.optim.SGD, {}, 1),
        (torch.optim.SGD, {"momentum": 0.9}, 2),
    ],
)
def test_size_of_a_state_is_estimated_before_the_first_step(kind, options, times):
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = slots.estimate({"model": model, "nested": [{"optimizer": optimizer}], "text": "x"})
    assert before == times * 4_000_000 + slots._HEADER
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    after = slots.estimate({"model": model, "nested": [{"optimizer": optimizer}]})
    assert before <= after <= before + 100


def test_memory_that_was_made_ready_for_nothing_is_given_back(spool):
    with opened(spool) as ckpt:
        internals(ckpt).pipeline.reserve(64 << 20)
        ckpt.save(1, tensors(1)).wait()
        ckpt.save(2, tensors(2)).wait()
        arena = internals(ckpt).pipeline.slots[0].arena
        assert arena.size == 64 << 20

        assert os.fstat(arena.fd).st_blocks * 512 < 1 << 20
    assert same(restored(spool, 1)[1], 1) and same(restored(spool, 2)[1], 2)


# -- how much memory is left ------------------------------------------------------------------------------------------


def test_the_system_is_asked_for_its_memory(monkeypatch, tmp_path):
    assert 0 < available() < 1 << 50


def group(directory, limit, used, cache=0, *, first=False):
    """A memory control group with these bytes, of version 2 or of the first."""
    limit_name, used_name = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"memory.{limit_name}").write_text(f"{limit}\n")
    (directory / f"memory.{used_name}").write_text(f"{used}\n")
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n" if first else f"anon 5\ninactive_file {cache}\n"
    (directory / "memory.stat").write_text(stat)


NONE = 9_223_372_036_854_771_712  # "no limit", in version 1
HYBRID = "9:cpu:/\n4:hugetlb,memory:/job/one\n1:name=systemd:/job\n0::/session\n"


@pytest.mark.parametrize(
    ("groups", "made", "left"),
    [
        ("0::/job/one\n", [("job/one", 100, 60, 10)], [50]),
        ("0::/job/one\n", [("job/one", "max", 60), ("job", 70, 60)], [10]),
        ("0::/of/the/host\n", [("", 100, 60)], [40]),
        ("0::/../../beside\n", [("", 100, 60)], [40]),
        ("4:memory:/job/one\n", [("memory/job/one", 100, 60, 10)], [50]),
        ("4:memory:/job/one\n", [("memory/job/one", NONE, 60), ("memory/job", 70, 60), ("memory", NONE, 9)], [10]),
        ("4:memory:/docker/1\n", [("memory", 100, 60)], [40]),
        (HYBRID, [("memory/job/one", 100, 60)], [40]),
        (HYBRID, [("memory/job/one", 100, 60), ("session", 90, 60)], [40, 30]),
        ("9:cpu:/job/one\n\nbroken\n", [("job/one", 100, 60), ("memory/job/one", 100, 60)], []),
    ],
)
def test_every_control_group_above_reports_its_free_memory(tmp_path, groups, made, left):
    for path, *numbers in made:
        group(tmp_path / path, *numbers, first=path.startswith("memory"))
    assert [one.left_bytes() for one in limited_groups(groups, tmp_path)] == left


def test_a_group_throttles_its_processes_above_its_high_limit(tmp_path):
    group(tmp_path / "job", "max", 60)
    (tmp_path / "job" / "memory.high").write_text("100\n")
    assert [(one.limit, one.left_bytes()) for one in limited_groups("0::/job\n", tmp_path)] == [(100, 40)]


def test_the_tightest_control_group_bounds_an_arena(monkeypatch, tmp_path):
    group(tmp_path / "memory" / "a" / "b", 400 << 20, 100 << 20, first=True)
    group(tmp_path / "memory" / "a", 320 << 20, 240 << 20, first=True)
    monkeypatch.setattr("tierd.spool.arena.limited_groups", partial(limited_groups, "4:memory:/a/b\n0::/\n", tmp_path))
    assert available() == 64 << 20  # a twentieth of that group's limit is left to others, and not one of the machine
    (tmp_path / "memory" / "a" / "memory.stat").unlink()
    assert available() == 280 << 20  # what a group does not say hides no other


def test_the_limit_of_the_address_space_bounds_an_arena(monkeypatch):
    before, mapped = available(), int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit = (mapped + (100 << 20)) * 20 // 19
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limit, limit) if number == resource.RLIMIT_AS else None)
    assert available() == pytest.approx(100 << 20, abs=32 << 20) and available() < before
