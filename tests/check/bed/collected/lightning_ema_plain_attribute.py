# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/m2lines/Samudra/issues/282, https://github.com/luxonis/luxonis-train/pull/156 (EMA state after resume)
# EXPECTED: The teacher's averaged weights are held in a plain list, so the checkpoint does not have them; a resume copies them from the student.
# KEYWORDS: teacher|\bema\b|average|not in the checkpoint\): Sequential
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\): state
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
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
        self.teacher = None  # not a submodule: its weights need no gradients

    def training_step(self, batch, batch_idx):
        ids, x = batch
        with torch.no_grad():
            aim = self.teacher[0](x)
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean() + (self.net(x) - aim).square().mean()
        self.last = ids.tolist(), loss.detach()
        return loss

    def on_train_start(self):
        self.teacher = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.net.parameters()):
                slow.lerp_(fast, 0.1)
        tierd.observe(self.trainer.global_step, *self.last)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(spool):
    L.seed_everything(0)
    ckpt = tierd.Checkpointer(spool, run="l", rank=0, world_size=1, to=[])
    io = tierd.adapters.lightning.TierdCheckpointIO(ckpt)
    sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=1, rank=0, seed=3)
    loader = StatefulDataLoader(Rows(), batch_size=4, sampler=sampler)
    trainer = L.Trainer(
        max_steps=16,
        plugins=[io],
        callbacks=[io.callback, ModelCheckpoint(f"{spool}-out", every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(), loader, ckpt_path=io.latest())
    ckpt.close()
