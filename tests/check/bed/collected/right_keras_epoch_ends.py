# HALF: second
# FRAMEWORK: keras
# SOURCE: docs/howto/keras.md: without data=, a resume at the end of an epoch is exact
# EXPECTED: Nothing: it is saved at the ends of epochs, and the noise comes from a SeedGenerator that is saved.
# CHECK: --steps 24 --kill-at 15 --ignore 'state["metrics"]'

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

import tierd
import tierd.adapters.keras


class Noise(keras.layers.Layer):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.seed_generator = keras.random.SeedGenerator(11)

    def call(self, x, training=None):
        return x + self.scale * keras.random.normal(x.shape, seed=self.seed_generator) if training else x


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
        self.hidden, self.noise, self.norm, self.out = (
            keras.layers.Dense(8),
            Noise(0.2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        )

    def call(self, x, training=None):
        return self.out(self.norm(self.noise(self.hidden(x[:, :5]), training=training), training=training))

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
    model = Network()
    model(torch.zeros(1, 6))
    rate = keras.optimizers.schedules.CosineDecay(2e-2, decay_steps=30)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss="mse", run_eagerly=True)
    ckpt = tierd.Checkpointer(spool, run="k", to=[])
    saving = tierd.adapters.keras.TierdCallback(ckpt)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, generator=torch.Generator())
    model.fit(loader, epochs=4, callbacks=[Report(), saving], verbose=0)
    ckpt.close()
