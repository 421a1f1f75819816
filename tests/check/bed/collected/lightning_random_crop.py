# HALF: second
# FRAMEWORK: lightning
# SOURCE: https://github.com/unit8co/darts/issues/2463, https://github.com/The-School-of-AI/LLM/pull/564
# EXPECTED: The dataset draws its crops from a generator of its own that is not saved and starts with its seed again.
# KEYWORDS: generator|random|\brng\b|crop
# WRONG: sampler|position|scheduler|\(optimizer\)|\(weights\)|\(buffers\)
# CHECK: --steps 16 --kill-at 11 --ignore 'state["lightning"]["loops"]' --ignore '_*'

import random

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
import tierd.adapters.lightning


class Crops(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
        self.random = random.Random(17)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        start = self.random.randrange(5)
        return i, self.x[i, start : start + 5]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        ids, x = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.last = ids.tolist(), loss.detach()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tierd.observe(self.trainer.global_step, *self.last)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(spool):
    L.seed_everything(0)
    ckpt = tierd.Checkpointer(spool, run="l", rank=0, world_size=1, to=[])
    io = tierd.adapters.lightning.TierdCheckpointIO(ckpt)
    sampler = torch.utils.data.DistributedSampler(Crops(), num_replicas=1, rank=0, seed=3)
    loader = StatefulDataLoader(Crops(), batch_size=4, sampler=sampler)
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
