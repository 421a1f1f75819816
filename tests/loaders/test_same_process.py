"""Adapters that a process asks twice: to save a step again, or to train again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.waiting import wait_until

import tierd
from tierd.adapters.step_metrics import LastSave
from tierd.client.checkpointer import internals
from tierd.client.saving.save_jobs import Save
from tierd.client.saving.save_pipeline import SavePipeline
from tierd.core.errors import DaemonUnavailable, StepRefused
from tierd.spool.spool import Spool

pytestmark = pytest.mark.loaders


def checkpoints(spool: Path) -> list[tuple[str, int]]:
    """The attempt and the step of each checkpoint."""
    return sorted((part.checkpoint.attempt, part.checkpoint.step) for part in Spool(spool).parts("run"))


@pytest.fixture
def skipped_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Have the first save of a step find the slot busy; the list has the steps of all calls of `save`."""

    def arrange(step: int) -> list[int]:
        save, asked = tierd.Checkpointer.save, []

        def first_finds_it_busy(self: tierd.Checkpointer, at: int, *args: Any, **options: Any) -> Any:
            asked.append(at)
            with monkeypatch.context() as patch:
                if at == step and asked.count(at) == 1:
                    patch.setattr(SavePipeline, "busy", True)
                return save(self, at, *args, **options)

        monkeypatch.setattr(tierd.Checkpointer, "save", first_finds_it_busy)
        return asked

    return arrange


def test_lightning_saves_a_step_again_after_a_rollback(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tierd.adapters.lightning import TierdCheckpointIO

    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        for step in (1, 2):
            io.save_checkpoint({"global_step": step, "optimizer_states": []}, tmp_path / "any.ckpt")
        io.load_checkpoint("tierd:1")
        io.save_checkpoint({"global_step": 2, "optimizer_states": []}, tmp_path / "last.ckpt")
    named = json.loads((tmp_path / "last.ckpt").read_text())["tierd"]
    found = checkpoints(tmp_path / "spool")
    assert [step for _, step in found] == [1, 2, 2] and (named["attempt"], named["step"]) == found[-1]


def test_lightning_saves_a_step_whose_first_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]]
) -> None:
    pytest.importorskip("lightning")
    from tierd.adapters.lightning import TierdCheckpointIO

    asked = skipped_once(2)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when_busy="skip") as ckpt:
        io = TierdCheckpointIO(ckpt)
        for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
            io.save_checkpoint({"global_step": 2, "optimizer_states": []}, tmp_path / name)
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path / "spool")] == [2]
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == ["b.ckpt", "c.ckpt"]


def test_trainer_saves_at_its_end_a_step_whose_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]]
) -> None:
    pytest.importorskip("transformers")
    from loaders.test_best import Grows, Rows
    from transformers import Trainer, TrainingArguments

    from tierd.adapters.transformers import TierdCallback

    asked = skipped_once(2)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when_busy="skip") as ckpt:
        saving = TierdCallback(ckpt, every_steps=2)
        trainer = Trainer(model=Grows(), args=args, train_dataset=Rows(), callbacks=[saving])
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path / "spool")] == [2]


def test_keras_saves_at_an_epochs_end_a_step_whose_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from tierd.adapters.keras import TierdCallback

    asked = skipped_once(2)
    x = torch.ones(4, 1).numpy()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    with tierd.Checkpointer(tmp_path, "run", to=[], when_busy="skip") as ckpt:
        batches = ((x[:2], x[:2]) for _ in range(2))  # of a number that `fit` does not know, so that both moments save
        model.fit(batches, epochs=1, verbose=0, callbacks=[TierdCallback(ckpt, every_batches=2)])
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path)] == [2]


def test_keras_warns_of_the_progress_that_a_second_fit_discards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from tierd.adapters.keras import TierdCallback

    x = torch.ones(4, 1).numpy()

    def begin(ckpt: tierd.Checkpointer) -> tuple[TierdCallback, Callable[[int], str]]:
        """A callback, and a `fit` up to an epoch, which returns its warning."""
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(2.0), loss="mse")  # each epoch is worse than the one before
        saving = TierdCallback(ckpt)

        def fit(epochs: int) -> str:
            caplog.clear()
            model.fit(x, x, 2, epochs=epochs, verbose=0, callbacks=[saving])
            return "".join(one.getMessage() for one in caplog.records if "discards" in one.getMessage())

        return saving, fit

    with tierd.Checkpointer(tmp_path, "all", to=[]) as ckpt:
        saving, fit = begin(ckpt)
        assert not fit(1) and not fit(2), "nothing was lost"
        assert (found := saving.load_best("loss")) and found.step == 2
        assert "from step 4, " in (text := fit(3)) and "weights of step 2 that load_best" in text
        assert "new run name" in text and not fit(4), "said once"
    with tierd.Checkpointer(tmp_path, "best", to=[], when=tierd.When(best="loss", best_only=True)) as ckpt:
        saving, fit = begin(ckpt)
        assert not fit(3)
        assert "from step 2, " in (text := fit(3)) and "what this callback trained up to step 6" in text
        assert saving.load_best("loss") and not fit(3), "the same weights"
    with tierd.Checkpointer(tmp_path, "tuned", to=[]) as ckpt:
        assert not begin(ckpt)[1](1), "the way out"


@pytest.mark.parametrize(
    ("source", "steps", "warning"),
    [
        ("arrays", None, None),
        ("arrays", 2, "no resume .* steps_per_epoch=2 .* leave steps_per_epoch out"),
        ("loader", None, None),
        ("loader", 2, "no resume .* steps_per_epoch=2 .* leave steps_per_epoch out"),
        ("loader", 3, "no resume .* steps_per_epoch=3 .* leave steps_per_epoch out"),  # as many as batches
        ("generator", 2, "no resume .* steps_per_epoch=2 "),
        ("loader without a length", None, None),
        ("loader without a length", 2, "within an epoch .* steps_per_epoch=2 more batches"),
    ],
)
def test_keras_warns_of_steps_per_epoch(
    source: str,
    steps: int | None,
    warning: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tierd.adapters.keras import TierdCallback

    x = torch.ones(6, 1)
    pairs = torch.utils.data.TensorDataset(x, x)
    options: dict[str, Any] = {"x": StatefulDataLoader(pairs if source == "loader" else Endless(), 2)}
    data = options["x"] if "loader" in source else None
    if source == "arrays":
        options = {"x": x.numpy(), "y": x.numpy(), "batch_size": 2}
    if source == "generator":
        options = {"x": ((x.numpy(), x.numpy()) for _ in range(9))}
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, data=data)
        model.fit(**options, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[saving])
    warnings = [record.getMessage() for record in caplog.records if "exact" in record.getMessage()]
    assert len(warnings) == (warning is not None)
    assert not warning or re.search(warning, warnings[0])


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Data without a length; it ends after 6 samples, so that tests do."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter([(torch.full((1,), float(number)), torch.ones(1)) for number in range(6)])


def test_keras_reads_whole_epochs_after_an_epoch_that_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tierd.adapters.keras import TierdCallback

    class Stops(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == stop:
                raise KeyboardInterrupt

    def fit() -> int:
        loader = StatefulDataLoader(Endless(), 2)  # three batches
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
            callbacks = [Stops(), TierdCallback(ckpt, every_batches=2, data=loader)]
            model.fit(loader, epochs=5, verbose=0, callbacks=callbacks)
        return int(model.optimizer.iterations)

    stop = 6  # saved at 5, after two batches of the second epoch
    with pytest.raises(KeyboardInterrupt):
        fit()
    stop = 0
    assert fit() == 15


def test_a_save_that_failed_after_it_was_committed_ends_no_training(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As where the daemon committed it, and was stopped before it said so. Only under a given attempt is that seen."""
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], attempt=tierd.new_attempt()) as ckpt:
        last = LastSave(0)
        last.save(ckpt, 1, {"x": torch.ones(1)}, None)
        wait_until(lambda: checkpoints(tmp_path / "spool") != [])
        with monkeypatch.context() as patch:
            patch.setattr(Save, "error", lambda self: DaemonUnavailable("it said nothing"))
            internals(ckpt).launch.steps.clear()
            assert last.needs_save(1)
            last.save(ckpt, 1, {"x": torch.zeros(1)}, None)
        assert last.is_of_step(1) and not last.needs_save(1)
        last.save(ckpt, 2, {"x": torch.ones(1)}, None)
        with pytest.raises(StepRefused):
            last.save(ckpt, 1, {"x": torch.zeros(1)}, None)
    assert [step for _, step in checkpoints(tmp_path / "spool")] == [1, 2]
