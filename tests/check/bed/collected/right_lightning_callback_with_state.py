# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/2631 (done right: the callback has a state_dict)
# EXPECTED: Nothing: the callback's counter has a state, the average is a submodule, and the loss weight is a buffer.
# CHECK: --steps 16 --kill-at 11 --ignore 'state["lightning"]["loops"]' --ignore '_*'

import copy

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
import tierd.adapters.lightning


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("magnitude", torch.ones(()))

    def training_step(self, batch, batch_idx):
        ids, x = batch
        out = self.net(x)
        far = (out - self.average(x)).square().mean()
        self.magnitude.lerp_(out.detach().abs().mean(), 0.1)
        loss = (out - x.sum(1, keepdim=True)).square().mean() / self.magnitude + far
        self.last = ids.tolist(), loss.detach()
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.net.parameters()):
                slow.lerp_(fast, 0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tierd.observe(self.trainer.global_step, *self.last)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Warmup(L.Callback):
    def __init__(self, steps, lr):
        self.steps, self.lr, self.count = steps, lr, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.count += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.lr * min(1.0, self.count / self.steps)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def main(spool):
    L.seed_everything(0)
    ckpt = tierd.Checkpointer(spool, run="l", rank=0, world_size=1, to=[])
    io = tierd.adapters.lightning.TierdCheckpointIO(ckpt)
    sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=1, rank=0, seed=3)
    loader = StatefulDataLoader(Rows(), batch_size=4, sampler=sampler)
    trainer = L.Trainer(
        max_steps=16,
        plugins=[io],
        callbacks=[Warmup(14, 0.02), io.callback, ModelCheckpoint(f"{spool}-out", every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(), loader, ckpt_path=io.latest())
    ckpt.close()
