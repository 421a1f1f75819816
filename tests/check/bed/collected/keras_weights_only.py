# HALF: first
# FRAMEWORK: keras
# SOURCE: https://github.com/keras-team/keras/issues/12891, https://github.com/david8862/keras-YOLOv3-model-set/issues/91 (save_weights_only loses the optimizer)
# EXPECTED: Only weights are saved; Adam's moments and its count of iterations start anew after the resume.
# KEYWORDS: optimizer|Adam|moment|iterations
# WRONG: sampler|position|scheduler|\(generator\)|buffers|\(weights\)
# CHECK: --steps 24 --kill-at 15

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch

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


class WeightsOnly(keras.callbacks.Callback):
    """Saves the weights at the end of each epoch."""

    def __init__(self, ckpt):
        super().__init__()
        self.ckpt, self.state = ckpt, {"step": 0, "epoch": 0, "weights": {}}

    def load(self, model):
        self.state["weights"] = {str(i): w for i, w in enumerate(model.get_weights())}
        if self.ckpt.restore(self.state):
            model.set_weights([self.state["weights"][str(i)] for i in range(len(self.state["weights"]))])
        return self.state["epoch"]

    def on_train_batch_end(self, batch, logs=None):
        self.state["step"] += 1
        tierd.observe(self.state["step"], *self.model.seen)

    def on_epoch_end(self, epoch, logs=None):
        self.state["epoch"] = epoch + 1
        self.state["weights"] = {str(i): w for i, w in enumerate(self.model.get_weights())}
        self.ckpt.save(self.state["step"], self.state)


def main(spool):
    keras.utils.set_random_seed(0)
    model = Network()
    model(torch.zeros(1, 6))
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse", run_eagerly=True)
    ckpt = tierd.Checkpointer(spool, run="k", to=[])
    saving = WeightsOnly(ckpt)
    epoch = saving.load(model)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, generator=torch.Generator())
    model.fit(loader, initial_epoch=epoch, epochs=4, callbacks=[saving], verbose=0)
    ckpt.close()
