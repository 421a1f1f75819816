"""Several ranks: a checkpoint is all of them or none, and they resume from the same one or not at all."""

from __future__ import annotations

import threading

import pytest
from support.doubles import flipped
from support.training import same, tensors
from support.world import attempt

import tierd
from tierd.client import launch
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    StateMismatch,
    StoreUnavailable,
)
from tierd.spool import Spool


def rank(spool: Spool, number: int, name: str, world: int = 2) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", rank=number, world_size=world, attempt=name, to=[])


def test_a_checkpoint_is_complete_when_both_ranks_have_saved(spool):
    first, second = (rank(spool, number, attempt(1)) for number in (0, 1))
    first.save(1, tensors(1)).wait()
    with rank(spool, 0, attempt(2)) as asking:
        assert asking.restore(tensors(0)) is None
    second.save(1, tensors(10)).wait()
    first.save(2, tensors(2)).wait()
    for number, expected in ((0, 1), (1, 10)):
        state = tensors(0)
        with rank(spool, number, attempt(3)) as asking:
            found = asking.restore(state)
        assert found.step == 1 and same(state, expected)
        assert [(one.step, one.reason.split(":")[0]) for one in found.skipped] == [(2, "incomplete")]
    first.close(), second.close()


def _alone(spool: Spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        return checkpointer.restore(tensors(0))


def test_another_number_of_ranks_is_refused_and_both_numbers_are_named(spool):
    for number in (0, 1):
        with rank(spool, number, attempt(1)) as saving:
            saving.save(1, tensors(1))
    with pytest.raises(StateMismatch, match=r"by 2 ranks.*has 1"):
        _alone(spool)
    with pytest.raises(StateMismatch, match=r"by 2 ranks.*has 3"), rank(spool, 0, attempt(2), world=3) as asking:
        asking.restore(tensors(0))


def test_ranks_without_a_group_need_a_common_attempt(spool):
    with pytest.raises(ConfigError, match="share one attempt"):
        tierd.Checkpointer(spool.root, "run", rank=0, world_size=2, to=[])


class Group:
    """A process group of threads: what `torch.distributed` gives, as far as tierd uses it."""

    def __init__(self, world: int) -> None:
        self.world, self.me = world, threading.local()
        self._barrier, self._given = threading.Barrier(world, timeout=20), [None] * world

    def get_rank(self) -> int:
        return self.me.rank

    def get_world_size(self) -> int:
        return self.world

    def all_gather_object(self, gathered, value) -> None:
        self._given[self.me.rank] = value
        self._barrier.wait()
        gathered[:] = self._given
        self._barrier.wait()

    def run(self, work) -> list:
        """`work(rank)` in a thread for each rank; what each returned or raised."""
        results: list = [None] * self.world

        def one(number: int) -> None:
            self.me.rank = number
            try:
                results[number] = work(number)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


@pytest.fixture
def group(monkeypatch, spool):
    made = Group(3)
    monkeypatch.setattr(launch, "_process_group", lambda: made)

    def saving(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            for step in (1, 2, 3, 4):
                checkpointer.save(step, tensors(step * 100 + number)).wait()

    assert made.run(saving) == [None] * 3
    return made


def restoring(spool: Spool):
    def work(number: int):
        state = tensors(0)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            found = checkpointer.restore(state)
            assert same(state, found.step * 100 + number)
            return found, checkpointer.attempt

    return work


def harm(spool: Spool, step: int, number: int) -> None:
    path = next(spool.root.glob(f"run/{step:012}.*/{number:05}-of-00003/tensors.safetensors"))
    path.write_bytes(flipped(path.read_bytes()))


def test_ranks_of_a_group_share_one_attempt(spool, group):
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [4, 4, 4]
    assert len({name for _, name in found}) == 1 and found[0][1] > found[0][0].attempt


def test_all_ranks_step_back_together_when_one_rank_has_to(spool, group):
    """Each would find its own newest otherwise, and train on from different steps."""
    harm(spool, 4, 1)
    harm(spool, 3, 2)
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [2, 2, 2]
    assert all([one.step for one in restored.skipped] == [4, 3] for restored, _ in found)


def test_when_one_rank_cannot_restore_none_does_and_none_waits_for_ever(spool, group):
    for step in (1, 2, 3, 4):
        harm(spool, step, 1)
    found = group.run(restoring(spool))
    assert isinstance(found[1], CheckpointNotFound)
    for number in (0, 2):
        assert isinstance(found[number], StoreUnavailable | CheckpointNotFound)


def test_a_checkpoint_that_one_rank_cannot_load_is_loaded_by_none(spool, group):
    """Else the others have loaded it already, and wait in the next collective for the one that raised."""

    def work(number: int):
        state = tensors(0)
        if number == 1:
            name = next(iter(state))
            state[name] = state[name].new_zeros(7, 7)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            try:
                checkpointer.restore(state)
            except StateMismatch as error:
                return str(error), number == 1 or same(state, 0)
        return None

    found = group.run(work)
    assert all(untouched for _, untouched in found)
    assert "rank 1" in found[0][0] and "rank 1" in found[2][0]
