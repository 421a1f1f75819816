# HALF: first
# FRAMEWORK: keras
# SOURCE: https://github.com/keras-team/keras/issues/2378, https://github.com/Lightning-AI/pytorch-lightning/issues/1463 (the patience of a callback after a resume)
# EXPECTED: nothing: it was a mistake until the adapter for Keras saved the states of ReduceLROnPlateau and the like.
# CHECK: --steps 24 --kill-at 15 --ignore 'state["metrics"]'

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
import tierd.adapters.keras


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.cat([self.x[i], torch.tensor([float(i)])]), self.x[i].sum().reshape(1)


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.out(self.hidden(x[:, :5]))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), training=True)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        self.seen = x[:, 5].int().tolist(), loss.detach()
        return {"loss": loss}


class Report(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        tierd.observe(int(self.model.optimizer.iterations), *self.model.seen)


def main(spool):
    keras.utils.set_random_seed(0)
    sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=1, rank=0, seed=3)
    loader = StatefulDataLoader(Rows(), batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(2))
    model = Network()
    model(torch.zeros(1, 6))
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse", run_eagerly=True)
    ckpt = tierd.Checkpointer(spool, run="k", to=[])
    saving = tierd.adapters.keras.TierdCallback(ckpt, every_batches=100, data=loader)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.1, patience=2, min_delta=100.0, min_lr=1e-6)
    model.fit(loader, epochs=4, callbacks=[Report(), plateau, saving], verbose=0)
    ckpt.close()
