"""Saving: what was true when `save` returned is what is kept, and nothing that fails behind it reaches training."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
from support.training import fresh, restored, same, tensors, train
from support.world import listing

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import save_pipeline
from tierd.core.errors import ConfigError, ManifestError, StateRefused, StepRefused


def test_training_continues_exactly_where_it_was_saved(spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        state = fresh()
        assert checkpointer.restore(state) is None
        train(state, 3)
        checkpointer.save(2, state, {"loss": 0.5, "nan": float("nan")})
        expected = train(state, 4)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        state = fresh(seed=1)
        train(state, 1)
        found = checkpointer.restore(state)
        assert (found.step, found.tier, found.skipped, found.unreached) == (2, "local", (), ())
        assert found.metrics["loss"] == 0.5 and found.metrics["nan"] != found.metrics["nan"]
        assert state["epoch"] == 3 and len(state["seen"]["samples"]) == 3
        assert train(state, 4) == expected


def test_a_save_says_how_it_stands(spool, monkeypatch):
    go = threading.Event()

    def refused(*arguments, **options):
        assert go.wait(60)
        raise OSError("no")

    with (
        pytest.raises(tierd.SaveFailed, match="in no place"),
        tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer,
    ):
        save = checkpointer.save(1, {"x": torch.ones(3)})
        save.wait()
        assert repr(save) == f"<Save of {save.part}: durable>"
        monkeypatch.setattr(save_pipeline, "write_part", refused)
        save = checkpointer.save(2, {"x": torch.ones(3)})
        assert repr(save) == f"<Save of {save.part}: running>"
        go.set()
        with pytest.raises(tierd.SaveFailed):
            save.wait()
        assert repr(save) == f"<Save of {save.part}: failed: SpoolUnusable>"


def test_nothing_that_training_changes_after_save_gets_into_the_checkpoint(spool, monkeypatch):
    """50 saves; every tensor is overwritten in place the moment save has returned, while the writer is still at it."""
    real = save_pipeline.write_part

    def slow(*arguments, **options):
        time.sleep(0.004)
        return real(*arguments, **options)

    monkeypatch.setattr(save_pipeline, "write_part", slow)
    noise = torch.Generator().manual_seed(7)
    state = {
        "float": torch.randn(40_000, generator=noise),
        "half": torch.randn(999, generator=noise).half(),
        "bfloat": torch.randn(12_345, generator=noise).bfloat16(),
        "long": torch.randint(0, 1 << 40, (3000,), generator=noise),
        "bool": torch.rand(501, generator=noise) > 0.5,
        "view": torch.randn(64, 64, generator=noise).t()[3:40],
        "scalar": torch.tensor(1.5),
        "array": np.arange(100.0),
    }
    kept = []
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for step in range(50):
            kept.append(
                {name: value.clone() if torch.is_tensor(value) else value.copy() for name, value in state.items()}
            )
            checkpointer.save(step, state)
            for value in state.values():
                if not torch.is_tensor(value):
                    value += 1
                elif value.dtype == torch.bool:
                    value.logical_not_()
                else:
                    value.add_(1)
        assert checkpointer.stats.saves == 50 and checkpointer.stats.failed == 0
    for step, expected in enumerate(kept):
        found = dict.fromkeys(state)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            checkpointer.restore(found, step=step)
        for name, value in expected.items():
            if torch.is_tensor(value):
                same_bits = torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
                assert same_bits and found[name].dtype == value.dtype, f"step {step}: {name}"
            else:
                assert np.array_equal(found[name], value), f"step {step}: {name}"


# -- what is refused, is refused at once and leaves nothing -----------------------------------------------------------


@pytest.mark.parametrize("step", [1.0, True, "1", None, -1, 10**12, torch.tensor(1.5), np.float64(2), [1]], ids=repr)
def test_a_step_that_is_no_step_is_refused(local, spool, step):
    before = listing(spool)
    with pytest.raises(StepRefused):
        local.save(step, tensors(1))
    with pytest.raises(StepRefused), local.stage(step):
        pass
    assert listing(spool) == before and local.stats.saves == 0


@pytest.mark.parametrize("step", [np.int64(7), np.uint8(7), torch.tensor(7)], ids=repr)
def test_an_integer_of_another_library_is_a_step(local, spool, step):
    assert local.save(step, tensors(7)).step == 7
    local.close()
    assert type(restored(spool)[0].step) is int


def test_a_step_is_saved_once(local, spool):
    local.save(5, tensors(5))
    with pytest.raises(StepRefused, match="already"):  # while it is being persisted
        local.save(5, tensors(6))
    internals(local).pipeline.drain()
    with pytest.raises(StepRefused, match="already"), local.stage(5):
        pass
    local.save(3, tensors(3)).wait()  # an older step that is not there yet is none of these
    local.close()
    assert same(restored(spool, step=5)[1], 5)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"deep": {"er": [1, object()]}}, r"deep.*er.*1"),
        ({"deep": lambda: None}, "deep"),
        ({"deep": {"er": torch.nn.functional.relu}}, "er"),
        ({"deep": threading.Lock()}, "deep"),
    ],
)
def test_a_value_without_a_safe_form_is_refused_by_its_path(local, spool, value, path):
    before = listing(spool)
    with pytest.raises(StateRefused, match=path):
        local.save(1, {"good": torch.ones(3), **value})
    internals(local).pipeline.drain()
    assert listing(spool) == before
    local.save(1, tensors(1)).wait()  # the step is still free


@pytest.mark.parametrize(
    "metric", ["much", None, [1.0], 1j, torch.ones(2), 10**400, object()], ids=lambda m: type(m).__name__
)
def test_a_metric_that_is_no_number_is_refused(local, spool, metric):
    before = listing(spool)
    with pytest.raises(ConfigError, match="loss"):
        local.save(1, tensors(1), {"loss": metric})
    assert listing(spool) == before


@pytest.mark.parametrize("metrics", [[1], 5, "loss"])
def test_metrics_that_are_no_dict_are_refused(local, metrics):
    with pytest.raises(ConfigError, match=r"metrics=.*: a dict of names and numbers"):
        local.save(1, tensors(1), metrics)


def test_metrics_of_other_libraries_are_numbers(local, spool):
    metrics = {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": True, "d": 3, "e": float("inf"), "f": np.array(1.5)}
    local.save(1, tensors(1), metrics).wait()
    local.close()
    assert restored(spool)[0].metrics == {"a": 0.5, "b": 2.0, "c": 1.0, "d": 3.0, "e": float("inf"), "f": 1.5}


def test_too_many_metrics_are_refused(local):
    with pytest.raises(ConfigError, match="1001 metrics"):
        local.save(1, tensors(1), {str(number): 0.0 for number in range(1001)})


def test_after_close_nothing_is_accepted_and_everything_is_durable(spool):
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
    save = checkpointer.save(1, tensors(1))
    checkpointer.close()
    checkpointer.close()
    assert save.done() and save.error() is None
    save.wait()
    for call in (
        lambda: checkpointer.save(2, tensors(2)),
        lambda: checkpointer.restore(),
        lambda: checkpointer.restore({}),
    ):
        with pytest.raises(ConfigError, match="closed"):
            call()
    with pytest.raises(ConfigError, match="closed"), checkpointer.stage(2):
        pass
    assert same(restored(spool)[1], 1)


# -- stage ------------------------------------------------------------------------------------------------------------


def test_a_stage_is_committed_whole_and_given_back_as_a_directory(local, spool):
    with local.stage(4, {"loss": 1}) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "weights.bin").write_bytes(b"w" * 70_000)
        (directory / "empty").touch()
        assert restored(spool)[0] is None, "nothing is visible before the block has ended"
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        found = checkpointer.restore()
        assert (found.step, found.metrics) == (4, {"loss": 1.0})
        assert (found.directory / "sub" / "weights.bin").read_bytes() == b"w" * 70_000
        assert (found.directory / "empty").read_bytes() == b""
        with pytest.raises(tierd.core.errors.StateMismatch, match="stage"):
            checkpointer.restore(tensors(0))


def test_a_stage_left_by_an_exception_leaves_nothing(local, spool):
    before = listing(spool)
    with pytest.raises(ZeroDivisionError), local.stage(4) as directory:
        (directory / "half").write_bytes(b"half")
        raise ZeroDivisionError
    assert listing(spool) == before
    local.save(4, tensors(4)).wait()


@pytest.mark.parametrize("kind", ["symlink", "directory symlink", "fifo", "manifest", "bad name"])
def test_stage_refuses_files_that_a_checkpoint_cannot_hold_by_name(local, spool, kind):
    before = listing(spool)
    with pytest.raises(ManifestError), local.stage(4) as directory:
        (directory / "good").write_bytes(b"good")
        match kind:
            case "symlink":
                (directory / "link").symlink_to("good")
            case "directory symlink":
                (directory / "link").symlink_to("/etc")
            case "fifo":
                os.mkfifo(directory / "pipe")
            case "manifest":
                (directory / "manifest.json").write_text("{}")
            case "bad name":
                (directory / "new\nline").touch()
    assert listing(spool) == before
