"""The metrics of a checkpoint are what a framework logged at its step, and nothing that is logged ends a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierd
from tierd.spool.spool import Spool

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(600)]


def steps(spool: Path) -> list[int]:
    return sorted(part.checkpoint.step for part in Spool(spool).parts("run"))


def metrics_of(ckpt: tierd.Checkpointer, step: int) -> dict[str, float]:
    found = ckpt.restore(step=step)
    assert found is not None
    return dict(found.metrics)


def metrics(spool: Path, step: int) -> dict[str, float]:
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        return metrics_of(ckpt, step)


# -- Trainer ----------------------------------------------------------------------------------------------------------


def trained(
    home: Path, every: int | None, evaluated: Callable[[Any], dict[str, Any]] | None = None, **options: Any
) -> Any:
    """A `Trainer` that has trained for two epochs of 12 steps; tierd saves if `every` is given."""
    from loaders.loops_transformers import Net, Rows
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    from tierd.adapters.transformers import TierdCallback

    class Counting(Trainer):  # type: ignore[misc]
        def floating_point_ops(self, inputs: Any) -> int:
            return 100

        def evaluate(self, *args: Any, **options: Any) -> Any:
            if evaluated is not None:
                self.log(evaluated(self.model))
            return super().evaluate(*args, **options)

    args = TrainingArguments(
        output_dir=str(home / "out"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=0.05,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="loss",
        prediction_loss_only=True,
        label_names=["ids"],
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=3,
        **options,
    )
    callbacks = [EarlyStoppingCallback(20)]
    if every is None:
        trainer = Counting(model=Net(), args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
        trainer.train()
        return trainer
    with tierd.Checkpointer(home / "spool", "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every)
        callbacks = [saving, *callbacks]  # saves before the other one counts, if it saved when it is called
        trainer = Counting(model=Net(), args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
    return trainer


def trainer_state(text: str) -> dict[str, Any]:
    """A `TrainerState` without what differs between two runs, and without how it was decided to save."""
    state: dict[str, Any] = json.loads(text)
    for entry in state["log_history"]:
        for name in [name for name in entry if name.endswith(("runtime", "per_second"))]:
            del entry[name]
    for name in ("save_steps", "best_model_checkpoint", "best_global_step"):
        state.pop(name, None)
    state["stateful_callbacks"]["TrainerControl"] = None
    return state


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_state_of_trainer_equals_trainers_own_file(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = {"logging_steps": 3, "eval_steps": 6, "eval_strategy": strategy}
    step = 6 if strategy == "steps" else 12
    trained(tmp_path / "own", None, save_strategy="steps" if step == 6 else "epoch", save_steps=6, **options)
    trained(tmp_path / "tierd", 3, save_strategy="no", **options)
    own = (tmp_path / "own" / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text()
    state: dict[str, Any] = {"trainer_state": None}
    with tierd.Checkpointer(tmp_path / "tierd" / "spool", "run", to=[]) as ckpt:
        found = ckpt.restore(state, step, only="trainer_state")
        assert found is not None
    assert trainer_state(state["trainer_state"]) == trainer_state(own)
    entries = [entry for entry in trainer_state(own)["log_history"] if entry["step"] == step]
    assert len(entries) == 2, "a loss and an evaluation"
    measured = {name: value for entry in entries for name, value in entry.items() if name != "step"}
    assert {name: found.metrics[name] for name in measured} == pytest.approx(measured)
    assert "eval_loss" not in metrics(tmp_path / "tierd" / "spool", 3)


def test_numbers_that_trainer_logs_end_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    import numpy as np
    import torch

    def evaluated(model: Any) -> dict[str, Any]:
        numbers: dict[str, Any] = {f"eval_class_{number}": np.float32(number) for number in range(1206)}
        numbers |= {"eval_confusion": np.eye(2), "eval_tensor": torch.ones(()), "eval_table": object()}
        return numbers | {"eval_text": "good"}

    trainer = trained(tmp_path, 6, evaluated, save_strategy="no", logging_steps=6, eval_strategy="steps", eval_steps=6)
    assert trainer.state.global_step == 24
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(warnings) == 2 and "at most 1000" in "".join(warnings) and "'eval_table'" in "".join(warnings)
    found = metrics(tmp_path / "spool", 12)
    assert len(found) == 1000 and {"eval_loss", "loss", "eval_class_7"} <= found.keys()
    trainer = trained(tmp_path, 6, save_strategy="no", max_steps=30, eval_strategy="steps", eval_steps=6)
    history = [entry for entry in trainer.state.log_history if "eval_tensor" in entry]
    assert len(history) == 4 and history[0]["eval_tensor"] == 1 and history[0]["eval_confusion"] == [[1, 0], [0, 1]]


def test_trainer_that_resumes_without_states_of_callbacks_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    options = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 6}
    trained(tmp_path, 6, max_steps=6, **options)
    assert "without the saved states" not in caplog.text
    trained(tmp_path, 6, max_steps=12, **options)
    assert "without the saved states of EarlyStoppingCallback" in caplog.text


# -- Keras ------------------------------------------------------------------------------------------------------------


def fit(spool: Path, epochs: int, when: tierd.When | None, *callbacks: Any, **options: Any) -> None:
    """Train a model with epochs of four batches."""
    import keras
    import torch

    from tierd.adapters.keras import TierdCallback

    keras.utils.set_random_seed(7)
    x = torch.linspace(-1, 1, 8)[:, None].numpy()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    with tierd.Checkpointer(spool, "run", to=[], when=when) as ckpt:
        saving = TierdCallback(ckpt, None if when else 2)
        model.fit(x, x, 2, epochs, verbose=0, validation_data=(x, x), callbacks=[saving, *callbacks], **options)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")


@pytest.mark.usefixtures("on_torch")
def test_last_batch_of_an_epoch_has_the_metrics_of_its_validation(tmp_path: Path) -> None:
    fit(tmp_path, 2, None)
    assert "val_loss" in metrics(tmp_path, 4) and "val_loss" not in metrics(tmp_path, 6)


@pytest.mark.usefixtures("on_torch")
def test_epochs_of_keras_without_the_deciding_metric_end_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import keras

    class Logs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs |= {"text": "good", "by_class": {"a": 1.0}}

    fit(tmp_path, 4, tierd.When(best="val_loss", best_only=True), Logs(), validation_freq=2)
    assert "val_loss" in metrics(tmp_path, 8)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("no metric 'val_loss' was logged" in message for message in messages) == 1
    assert sum("left out of the checkpoints" in message and "'text'" in message for message in messages) == 1


@pytest.mark.usefixtures("on_torch")
def test_callback_whose_state_is_not_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import keras

    class Counts(keras.callbacks.Callback):  # type: ignore[misc]
        epochs = patience = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epochs += 1

    fit(tmp_path, 3, None, Counts(), keras.callbacks.EarlyStopping(), keras.callbacks.TerminateOnNaN())
    messages = [record.getMessage() for record in caplog.records if "begins anew" in record.getMessage()]
    assert len(messages) == 1 and "Counts" in messages[0] and "epochs" in messages[0]


@pytest.mark.usefixtures("on_torch")
def test_run_that_early_stopping_ended_trains_on_only_with_more_patience(tmp_path: Path) -> None:
    import keras

    def stopping(patience: int) -> Any:
        return keras.callbacks.EarlyStopping("val_loss", min_delta=100, patience=patience)

    for patience, last in ((2, 12), (2, 12), (4, 20)):
        fit(tmp_path, 9, None, stopping(patience))
        assert steps(tmp_path)[-1] == last


# -- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best_first", [False, True])
@pytest.mark.parametrize("sanity_batches", [0, 2])
def test_checkpoints_of_two_model_checkpoints_have_the_metric_of_their_own_step(
    best_first: bool, sanity_batches: int, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.loops_lightning import quiet_trainer

    from tierd.adapters.lightning import TierdCheckpointIO

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.measured: dict[int, float] = {}

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = (self.weight - batch.sum()).square().sum()  # it swings
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.measured[self.global_step] = (self.weight - 1).square().sum().item()
            self.log("val_loss", self.measured[self.global_step])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.4)

    often = ModelCheckpoint(tmp_path / "often", every_n_train_steps=3, save_top_k=-1)
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1, filename="{step}")
    both = [best, often] if best_first else [often, best]
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], retention=tierd.Retention(keep_last=99)) as ckpt:
        io, module = TierdCheckpointIO(ckpt), Module()
        options = {"max_epochs": 2, "val_check_interval": 4, "num_sanity_val_steps": sanity_batches}
        trainer = quiet_trainer(io, tmp_path, *both, **options)
        data = torch.utils.data.DataLoader(torch.tensor([3.0, -1, 2, 0.5, 1.5, 0.9, 4, -2, 1, 0, 3, 1.2])[:, None], 1)
        trainer.fit(module, data, torch.utils.data.DataLoader(torch.ones(2, 1), 1))
        with io.file(best.best_model_path) as file:
            weight = torch.load(file, weights_only=False)["state_dict"]["weight"]
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        saved = {step: metrics_of(ckpt, step) for step in steps(tmp_path / "spool")}
    assert {3, 6, 9, 12, 15, 18, 21, 24} <= saved.keys()
    measured = {step: found["val_loss"] for step, found in saved.items() if "val_loss" in found}
    assert measured == pytest.approx({step: module.measured[step] for step in saved if step % 4 == 0})
    assert {12, 24} <= measured.keys() and saved[12]["train_loss_step"] and "train_loss_epoch" not in saved[9]
    assert (weight - 1).square().item() == pytest.approx(min(module.measured[step] for step in module.measured if step))
    assert min(measured, key=measured.__getitem__) == int(best.best_model_path.rpartition("=")[2].removesuffix(".ckpt"))


def test_numbers_that_lightning_logs_end_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lightning = pytest.importorskip("lightning")
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    from loaders.loops_lightning import quiet_trainer

    from tierd.adapters.lightning import TierdCheckpointIO

    class Module(BoringModel):  # type: ignore[misc]
        def validation_step(self, batch: Any, number: int) -> None:
            self.log_dict({f"class_{number}": float(number) for number in range(1200)} | {"val_loss": torch.ones(())})

    assert lightning.__version__
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        saving = ModelCheckpoint(tmp_path / "out", monitor="val_loss")
        trainer = quiet_trainer(io, tmp_path, saving, max_epochs=1, limit_train_batches=2, limit_val_batches=1)
        trainer.fit(Module())
    found = metrics(tmp_path / "spool", 2)
    assert len(found) == 1000 and found["val_loss"] == 1
    assert sum("left out of the checkpoints" in record.getMessage() for record in caplog.records) == 1
