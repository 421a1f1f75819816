"""Others' training loops save and stop at the step after a notice, and go on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loaders.parts import trainer_arguments
from support.preemption_fixtures import usual  # noqa: F401

import tierd

pytestmark = [pytest.mark.loaders, pytest.mark.filterwarnings("ignore:'set_vital'")]
WHEN = tierd.When(steps=10_000, preemption=True)
STEP = 3  # after which the signal comes


def notify() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_hugging_faces_trainer_saves_and_stops(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from loaders.loops_transformers import BATCH, Net, Rows
    from transformers import Trainer, TrainerCallback

    from tierd.adapters.transformers import TierdCallback

    class Preempt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.global_step == STEP:
                notify()

    args = trainer_arguments(
        tmp_path,
        per_device_train_batch_size=BATCH,
        num_train_epochs=3,
    )

    def launch(*more: Any) -> tuple[int, str | None]:
        with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when=WHEN) as ckpt:
            saving = TierdCallback(ckpt, every_steps=10_000)
            trainer = Trainer(model=Net(), args=args, train_dataset=Rows(), callbacks=[*more, saving])
            trainer.train(resume_from_checkpoint=saving.resume(trainer))
            return trainer.state.global_step, ckpt.notice

    step, why = launch(Preempt())
    assert step == STEP and why is not None and why.startswith("SIGUSR1")
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == STEP
    assert launch()[0] == 36, "the next launch goes on to the end"


def test_keras_saves_and_stops(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from loaders.loops_keras import BATCH, SAMPLES, net, rows
    from torch import arange

    from tierd.adapters.keras import TierdCallback

    class Preempt(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == STEP - 1:
                notify()

    x, y = (one.numpy() for one in rows(arange(SAMPLES)))
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when=WHEN) as ckpt:
        net().fit(x, y, BATCH, epochs=3, verbose=0, callbacks=[Preempt(), TierdCallback(ckpt)])
        assert ckpt.notice is not None and ckpt.notice.startswith("SIGUSR1")
        found = ckpt.restore()
    assert found is not None and found.step == STEP


def test_lightning_saves_and_stops(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.loops_lightning import Module, quiet_trainer
    from loaders.loops_torch import BATCH, SAMPLES, Ids, Order
    from torchdata.stateful_dataloader import StatefulDataLoader

    from tierd.adapters.lightning import TierdCheckpointIO

    class Preempt(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == STEP:
                notify()

    def launch(steps: int, *more: Any) -> tuple[int, str | None]:
        loader = StatefulDataLoader(Ids(), BATCH, sampler=Order(SAMPLES, 5))
        with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when=WHEN) as ckpt:
            io = TierdCheckpointIO(ckpt)
            saving = ModelCheckpoint(dirpath=tmp_path / "l", every_n_train_steps=10_000)
            trainer = quiet_trainer(io, tmp_path, *more, saving, max_steps=steps)
            trainer.fit(Module(), loader, ckpt_path=io.latest())
            return trainer.global_step, ckpt.notice

    step, why = launch(20, Preempt())
    assert step == STEP and why is not None and why.startswith("SIGUSR1")
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        found = ckpt.restore()
    assert found is not None and found.step == STEP
    assert launch(STEP + 2)[0] == STEP + 2
