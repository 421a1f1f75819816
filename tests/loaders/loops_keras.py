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
    """`batches` holds what was read and not yet trained on."""

    def __init__(self, batches: list[list[int]]) -> None:
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tierd.observe(int(self.model.optimizer.iterations) - 1, self.batches.pop(), float(logs["loss"]))


def train(spool: Path) -> None:
    torch.set_num_threads(1)
    keras.utils.set_random_seed(7)
    batches: list[list[int]] = []

    def collate(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batches[:] = [ids]
        return features(torch.tensor(ids)), torch.cos(torch.tensor(ids).float())[:, None]

    loader = StatefulDataLoader(
        Ids(), BATCH, sampler=Order(SAMPLES, 5), generator=torch.Generator(), collate_fn=collate
    )
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    with tierd.Checkpointer(spool, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_batches=EVERY, data=loader)
        model.fit(loader, epochs=100, verbose=0, callbacks=[Observe(batches), saving])
