"""Leakage: the verdict over epochs and ranks by hand, and the live watch in a process."""

from __future__ import annotations

import logging

import pytest

from tierd.check.launch_records import CheckedRun, Observation, RankRecord
from tierd.check.sample_comparison import find_leaks, leak_line

SIZE = 4  # steps of an epoch; two samples a step


def samples(step: int) -> tuple[int, ...]:
    at = (step - 1) % SIZE
    return (2 * at, 2 * at + 1)


def rank(first: int, last: int, read=samples, validation: tuple[int, ...] = (), epochs: bool = True) -> RankRecord:
    seen = RankRecord()
    for step in range(first, last + 1):
        epoch = (step - 1) // SIZE if epochs else None
        seen.observations[step] = Observation(step, tuple(read(step)), epoch=epoch, validation=validation)
    return seen


def one(*launches: RankRecord) -> CheckedRun:
    return CheckedRun([[launch] for launch in launches])


WHOLE = one(rank(1, 12))


def found(killed: CheckedRun, whole: CheckedRun = WHOLE, ranks: int = 1) -> list[tuple[str, int | None, int]]:
    return [(leak.kind, leak.epoch, leak.count) for leak in find_leaks(whole, killed, ranks, 12)]


def test_an_exact_resume_leaks_nothing():
    assert found(one(rank(1, 7), rank(5, 12))) == []


def test_leaks_count_samples_read_again_and_skipped_in_an_epoch():
    back = one(rank(1, 5), rank(4, 12, lambda step: samples(step - 1)))
    assert found(back) == [("twice", 0, 2), ("skipped", 0, 2)]
    assert "epoch 0: rank 0 trained on 2 samples more than once: 4, 5" in [
        leak_line(leak) for leak in find_leaks(WHOLE, back, 1, 12)
    ]


def test_the_last_epoch_may_only_be_behind():
    late = one(rank(1, 9), rank(10, 12, lambda step: samples(step - 1) if step > 10 else ()))
    assert found(late) == []


def test_repetition_that_an_uninterrupted_run_has_too_is_no_leak():
    with_replacement = one(rank(1, 12, lambda step: (0, 0)))
    assert found(one(rank(1, 7, lambda step: (0, 0)), rank(5, 12, lambda step: (0, 0))), with_replacement) == []


def test_samples_on_two_ranks():
    def mine(number: int):
        return lambda step: tuple(sample + 100 * number for sample in samples(step))

    whole = CheckedRun([[rank(1, 12, mine(0)), rank(1, 12, mine(1))]])
    mixed = CheckedRun([[rank(1, 7, mine(0)), rank(1, 7, mine(1))], [rank(5, 12, mine(0)), rank(5, 12, mine(0))]])
    assert ("two ranks", 1, 8) in found(mixed, whole, 2)
    assert found(whole, whole, 2) == []


def test_the_validation_split_is_a_leak_in_any_run():
    whole = one(rank(1, 12, validation=(3,)))
    assert found(whole, whole) == [("validation", epoch, 1) for epoch in (0, 1, 2)]


def test_without_epochs_a_sample_counts_as_often_as_uninterrupted():
    whole = one(rank(1, 12, epochs=False))
    assert found(whole, whole) == []
    assert found(one(rank(1, 5, epochs=False), rank(4, 12, lambda step: samples(step - 1), epochs=False)), whole)


# -- live -------------------------------------------------------------------------------------------------------------


def watch(**given):
    pytest.importorskip("torch")
    from tierd import SampleWatch

    return SampleWatch(**given)


class Reports:
    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []

    def report_leaked(self, step: int, why: str) -> None:
        self.said.append((step, why))


def test_repetition_is_reported_once_an_epoch_and_counted_each_time(caplog: pytest.LogCaptureFixture):
    import torch

    reported = Reports()
    one = watch(checkpointer=reported, validation=["kept"])
    assert [one.see(1, [1, 2], 0), one.see(2, torch.tensor([3, 4]), 0)] == [0, 0]
    with caplog.at_level(logging.ERROR, "tierd"):
        assert one.see(3, [4, 5], 0) == 1 and one.see(4, [5, 6, 6], 0) == 2
    assert (one.repeated, one.leaked) == (3, 0)
    assert reported.said == [(3, "1 samples of step 3 came twice in epoch 0: 4")]
    assert "came twice in epoch 0" in caplog.text
    assert one.see(5, [1, 2], 1) == 0  # another epoch
    assert one.see(6, ["kept"], 1) == 1 and one.leaked == 1
    assert "validation split" in reported.said[-1][1]


def test_a_resume_that_repeats_samples_is_noticed():
    """The set travels with the checkpoint."""
    first, second = watch(), watch()
    first.see(1, range(10), 3)
    second.load_state_dict(first.state_dict())
    assert second.see(2, [9, 10], 3) == 1


def test_sample_watch_survives_a_checkpoint(tmp_path):
    import tierd

    one = watch()
    one.see(1, [1, "a", ("b", 2)], 0)
    with tierd.Checkpointer(tmp_path / "spool", "r", to=[]) as ckpt:
        ckpt.save(1, {"watch": one}).wait()
    two = watch()
    with tierd.Checkpointer(tmp_path / "spool", "r", to=[]) as ckpt:
        assert ckpt.restore({"watch": two}) is not None
    assert two.see(2, ["a", ("b", 2), 2], 0) == 2
