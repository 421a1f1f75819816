"""Keras's `fit` with callbacks that have state, killed at moments of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loaders.loops_keras import Net, net, rows  # isort: skip - it sets the backend

import keras
import torch
from loaders.loops_torch import BATCH, SAMPLES, Ids, Order
from support.killed import Moment
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.adapters.keras import TierdCallback

STEPS = SAMPLES // BATCH
EPOCHS = 7


class Watch(keras.callbacks.Callback):
    """Records each step and each epoch, and kills."""

    def __init__(self, moment: Moment, every: int, watched: list[Any]) -> None:
        super().__init__()
        self.moment, self.every, self.watched = moment, every, watched

    def step(self) -> int:
        return int(self.model.optimizer.iterations)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self.step()
        self.moment.reached("step", step, step // self.every * self.every)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        self.moment.record(f"step {self.step()}", [list(self.model.read), float(logs["loss"]), rate])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        step = self.step()
        self.moment.record("resumed", step) if not hasattr(self, "begun") else None
        self.begun = True
        self.moment.reached("epoch", step, step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        states = [
            {name: value for name, value in vars(each).items() if name in ("best", "wait")} for each in self.watched
        ]
        self.moment.record(f"epoch {epoch}", [states, float(logs["val_loss"])])

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = self.step()
        self.moment.reached("evaluation", step, (step - 1) // self.every * self.every)

    def on_train_end(self, logs: Any = None) -> None:
        self.moment.record("end", [float(value.sum()) for value in self.model.get_weights()])


class Counts(keras.callbacks.Callback):
    """A callback of a user's own, which changes the learning rate at every third epoch that it sees."""

    epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if self.epochs % 3 == 0:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.5

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epochs = state_dict["epochs"]


def _fit(home: Path, moment: Moment, model: Net, every: int | None, x: Any, **options: Any) -> None:
    torch.set_num_threads(1)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.6, patience=1, min_delta=0.2, cooldown=1)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=0.2, restore_best_weights=True)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.95)
    with tierd.Checkpointer(home / "spool", "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every, data=options.pop("loader", None))
        callbacks = [saving, decay, plateau, stopping, Counts(), Watch(moment, every or STEPS, [plateau, stopping])]
        held_out = tuple(part.numpy() for part in rows(torch.arange(200, 216)))
        model.fit(x, **options, epochs=EPOCHS, verbose=0, callbacks=callbacks, validation_data=held_out)


def by_batches(home: Path, moment: Moment) -> None:
    """A loader with a state, saved every 5 batches; an epoch has 12."""
    loader = StatefulDataLoader(
        Ids(),
        BATCH,
        sampler=Order(SAMPLES, 5),
        generator=torch.Generator(),
        collate_fn=lambda ids: rows(torch.tensor(ids)),
    )
    _fit(home, moment, net(), 5, loader, loader=loader)


def by_epochs(home: Path, moment: Moment) -> None:
    """Arrays, which Keras shuffles, saved at each epoch's end."""
    x, y = (part.numpy() for part in rows(torch.arange(SAMPLES)))
    _fit(home, moment, net(), None, x, y=y, batch_size=BATCH)
