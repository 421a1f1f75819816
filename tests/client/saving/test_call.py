"""What the call of `save` and the next `step()` do, and leave to others: counted, because times tell little."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.timed import timed_client
from support.training import fresh, train

from tierd.client.checkpointer import internals
from tierd.client.saving import save_jobs
from tierd.client.saving.save_jobs import short_switches
from tierd.client.saving.slots import Slot
from tierd.client.saving.snapshot import Snapshot
from tierd.core.manifest import TENSORS, TREE
from tierd.spool.spool import Spool
from tierd.state import single_values
from tierd.state.capture import Capture
from tierd.state.state_loading import unflatten


@pytest.fixture
def job(local):
    """A training under way, its optimizer attached, that saved once: buffers and generators beside what is late."""
    state = fresh()
    train(state, 2)
    local.attach(state["optimizer"])
    local.save(0, state).wait()
    return state


class Held:
    """A thread that is kept from going on."""

    def __init__(self) -> None:
        self._let_go = threading.Event()

    def wait(self) -> None:
        assert self._let_go.wait(60)

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def held():
    held = Held()
    yield held
    held.let_go()


def in_a_thread(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def kept(spool: Spool, step: int) -> dict[str, torch.Tensor]:
    (part,) = [part for part in spool.parts() if part.checkpoint.step == step]
    files = [bytearray((spool.path(part) / name).read_bytes()) for name in (TREE, TENSORS)]
    return unflatten(bytes(files[0]), files[1])


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trees(monkeypatch):
    """The threads in which trees were encoded."""
    threads, tree = [], Capture.tree

    def counted(*arguments):
        threads.append(threading.current_thread())
        return tree(*arguments)

    monkeypatch.setattr(Capture, "tree", counted)
    return threads


@pytest.mark.parametrize("attached", [False, True])
def test_the_tree_is_encoded_once(local, trees, attached):
    state = fresh()
    train(state)
    if attached:
        local.attach(state["optimizer"])
    for step in range(3):
        local.save(step, state).wait()
    assert len(trees) == 3


def test_a_blocking_save_encodes_beside_the_copy_and_the_copier_waits_for_it(local, trees, monkeypatch):
    image = Slot.image
    encoding = threading.Event()

    def slow(*arguments):
        assert encoding.wait(60)
        return image(*arguments)

    tree = Capture.tree

    def reported(*arguments):
        encoding.set()
        return tree(*arguments)

    monkeypatch.setattr(Slot, "image", slow)
    monkeypatch.setattr(Capture, "tree", reported)
    local.save(1, fresh()).wait()
    assert trees == [threading.current_thread()]


LONG = [None, *(n + 0.5 for n in range(50_000))]  # of two types, so that it is not packed
numbers = st.integers() | st.floats() | st.text(max_size=3) | st.none() | st.booleans()
runs = st.one_of(st.lists(kind, max_size=30) for kind in (numbers, st.floats(), st.integers(), st.integers(-9, 9)))


@given(runs, st.integers(1, 9))
def test_encoding_in_windows_equals_encoding_at_once(run, window):
    pauses: list = []
    text = single_values.encode(["[", "]"], [tuple(run)], lambda: pauses.append(1), window)
    assert text == single_values.encode(["[", "]"], [tuple(run)])
    assert len(pauses) == (-(-len(run) // window) if len(run) > window else 0)


# -- the step ---------------------------------------------------------------------------------------------------------


def test_a_step_does_not_wait_until_a_long_list_is_encoded(spool, local, job, held, monkeypatch):
    tree = Capture.tree
    monkeypatch.setattr(Capture, "tree", lambda *arguments: held.wait() or tree(*arguments))
    job["seen"]["samples"] = LONG.copy()
    weight = job["model"][0].weight.detach().clone()
    save = local.save(1, job)
    stepping = in_a_thread(lambda: train(job))
    stepping.join(60)
    assert not stepping.is_alive() and not torch.equal(job["model"][0].weight, weight)
    held.let_go()
    save.wait()
    found = kept(spool, 1)
    assert torch.equal(found["model"]["0.weight"], weight)
    assert found["seen"]["samples"] == LONG


def test_but_until_all_is_handed_over_where_that_is_soon(local, job, monkeypatch):
    """What dies in its step loses nothing then."""
    seen, tree = [], Capture.tree

    def slow(*arguments):
        threading.Event().wait(0.2)
        seen.append("encoded")
        return tree(*arguments)

    monkeypatch.setattr(Capture, "tree", slow)
    local.save(1, job)
    train(job)
    assert seen == ["encoded"]


# -- the call ---------------------------------------------------------------------------------------------------------


def test_save_waits_for_no_other_thread_where_little_is_to_be_copied_first(spool, local, job, held, monkeypatch):
    """Buffers and generators are copied by the thread that calls, so what changes them then does not get in."""
    timed_client(monkeypatch, overlapped_s=0.3)  # no step confirms the copy
    internals(local).pipeline.behind(held.wait)
    mean, weight = job["model"][1].running_mean, job["model"][0].weight
    expected = mean.clone(), weight.detach().clone(), torch.get_rng_state()
    saves: list = []
    saving = in_a_thread(lambda: saves.append(local.save(1, job)))
    saving.join(60)
    assert not saving.is_alive()
    mean.add_(1), torch.rand(5)
    held.let_go()
    saves[0].wait()
    found = kept(spool, 1)
    assert torch.equal(found["model"]["1.running_mean"], expected[0])
    assert torch.equal(found["model"]["0.weight"], expected[1])
    assert torch.equal(found["rng"]["torch"], expected[2])
    assert local.stats.waited_s < local.stats.blocked_s


@pytest.mark.parametrize("tensors", [[torch.zeros(1)] * 300, [torch.zeros(1 << 20)]], ids=["many", "large"])
def test_it_waits_where_more_is_to_be_copied(spool, local, held, monkeypatch, tensors):
    timed_client(monkeypatch, overlapped_s=0.3)  # no step confirms the copies
    state = fresh()
    train(state, 2)
    state["tensors"] = [tensor.clone() for tensor in tensors]
    local.attach(state["optimizer"])
    local.save(0, state).wait()
    internals(local).pipeline.behind(held.wait)
    saves: list = []
    saving = in_a_thread(lambda: saves.append(local.save(1, state)))
    saving.join(0.3)
    assert saving.is_alive()
    held.let_go()
    saving.join(60)
    saves[0].wait()


def test_an_arena_that_is_gone_meanwhile_and_cannot_be_had_again_fails_the_save(local, job, held, monkeypatch):
    """It is never streamed: training has gone on, and changes what would be read."""
    internals(local).pipeline.behind(held.wait)
    save = local.save(1, job)
    (slot,) = internals(local).pipeline.slots
    slot.arena.shared = True  # a daemon that fell silent may still read it
    monkeypatch.setattr("tierd.client.saving.slots.available", lambda: 0)
    held.let_go()
    with pytest.raises(Exception, match="no memory for a snapshot of"):
        save.wait()
    assert isinstance(save.error(), MemoryError)
    monkeypatch.undo()
    train(job)
    local.save(2, job).wait()


# -- turns at the interpreter's lock ----------------------------------------------------------------------------------


@pytest.fixture
def interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0042)
    yield pytest.approx(0.0042)
    sys.setswitchinterval(before)


def test_turns_are_short_inside_and_as_they_were_outside(interval):
    with pytest.raises(KeyError), short_switches:
        with short_switches:
            assert sys.getswitchinterval() == pytest.approx(save_jobs._SHORT_S, rel=0.02)
        assert sys.getswitchinterval() == pytest.approx(save_jobs._SHORT_S, rel=0.02)
        raise KeyError
    assert sys.getswitchinterval() == interval


def test_the_last_of_several_threads_restores_them(interval):
    inside, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def stay(until: threading.Event) -> None:
        with short_switches:
            inside.wait(60)
            assert until.wait(60)

    threads = [in_a_thread(lambda until=until: stay(until)) for until in leave]
    inside.wait(60)
    leave[0].set()
    threads[0].join(60)
    assert sys.getswitchinterval() == pytest.approx(save_jobs._SHORT_S, rel=0.02)
    leave[1].set()
    threads[1].join(60)
    assert sys.getswitchinterval() == interval


def test_switch_interval_that_a_process_set_itself_is_kept(interval):
    with short_switches:
        sys.setswitchinterval(0.001)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    sys.setswitchinterval(0.00005)
    with short_switches:
        assert sys.getswitchinterval() == pytest.approx(0.00005)
    assert sys.getswitchinterval() == pytest.approx(0.00005)


def test_save_and_step_take_short_turns(local, job, interval, monkeypatch):
    seen, begin = [], Snapshot.copy_if_few

    def little(snapshot):
        seen.append(sys.getswitchinterval())
        return begin(snapshot)

    monkeypatch.setattr(Snapshot, "copy_if_few", little)
    local.save(1, job)
    confirm = Snapshot.confirm

    def confirmed(snapshot):
        seen.append(sys.getswitchinterval())
        confirm(snapshot)

    monkeypatch.setattr(Snapshot, "confirm", confirmed)
    train(job)
    assert seen == [pytest.approx(save_jobs._SHORT_S, rel=0.02)] * 2 and sys.getswitchinterval() == interval
