# HALF: first
# FRAMEWORK: keras
# SOURCE: docs/howto/keras.md
# EXPECTED: Nothing: the callback saves weights, optimizer, seed generators, and the position of the loader.
# CHECK: --steps 18 --kill-at 11 --ignore 'state["metrics"]'

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
        self.hidden, self.drop, self.out = (
            keras.layers.Dense(8, "relu"),
            keras.layers.Dropout(0.3, seed=4),
            keras.layers.Dense(1),
        )

    def call(self, x, training=None):
        return self.out(self.drop(self.hidden(x[:, :5]), training=training))

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
    saving = tierd.adapters.keras.TierdCallback(ckpt, every_batches=4, data=loader)
    model.fit(loader, epochs=3, callbacks=[Report(), saving], verbose=0)
    ckpt.close()
