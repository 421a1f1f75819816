"""Keras 3's `fit` on the torch backend."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

from pathlib import Path
from typing import Any

import keras
import torch
from loaders.loops_torch import BATCH, SAMPLES, Ids, Order
from loaders.parts import EVERY, features
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from tierd.adapters.keras import TierdCallback


class Observe(keras.callbacks.Callback):
    """`read` holds the batch that was read last."""

    def __init__(self, read: list[int]) -> None:
        super().__init__()
        self.read = read

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tierd.observe(int(self.model.optimizer.iterations) - 1, list(self.read), float(logs["loss"]))


class Net(keras.Sequential):
    """Notes which samples it is trained on: they are its first column."""

    read: list[int]

    def train_step(self, data: Any) -> Any:
        self.read[:] = [round(one) for one in data[0][:, 0].tolist()]
        return super().train_step(data)


def rows(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([ids[:, None].float(), features(ids)], 1), torch.cos(ids.float())[:, None]


def net() -> Net:
    torch.set_num_threads(1)
    keras.utils.set_random_seed(7)
    scale = keras.layers.Rescaling([0.01, 1, 1, 1, 1])
    model = Net([scale, keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.read = []
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def train(spool: Path) -> None:
    """A loader with a state: it goes on in the middle of an epoch."""
    model = net()
    loader = StatefulDataLoader(
        Ids(),
        BATCH,
        sampler=Order(SAMPLES, 5),
        generator=torch.Generator(),
        collate_fn=lambda ids: rows(torch.tensor(ids)),
    )
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_batches=EVERY, data=loader)
        model.fit(loader, epochs=100, verbose=0, callbacks=[Observe(model.read), saving])


def train_on_arrays(spool: Path) -> None:
    """Arrays, which Keras shuffles: it goes on at an epoch's beginning."""
    model = net()
    x, y = (one.numpy() for one in rows(torch.arange(SAMPLES)))
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt)
        model.fit(x, y, BATCH, epochs=100, verbose=0, callbacks=[Observe(model.read), saving])
