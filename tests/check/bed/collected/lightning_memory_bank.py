# HALF: second
# FRAMEWORK: lightning
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/18098; a queue of negatives that is no buffer
# EXPECTED: The memory bank of negatives is a plain deque of the module and is not saved, so it is empty after the resume.
# KEYWORDS: bank|negatives|queue
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)|\(buffers\)|\(prefetch\)
# CHECK: --steps 16 --kill-at 11 --ignore 'state["lightning"]["loops"]' --ignore '_*'

from collections import deque

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
        self.net = torch.nn.Linear(5, 4)
        self.bank = deque(maxlen=24)  # negatives of earlier batches

    def training_step(self, batch, batch_idx):
        ids, x = batch
        z = torch.nn.functional.normalize(self.net(x), dim=1)
        positive = (z * torch.nn.functional.normalize(self.net(x + 0.1 * x.flip(1)), dim=1)).sum(1)
        negatives = torch.stack(list(self.bank)) if self.bank else torch.zeros(1, 4)
        loss = (torch.logsumexp(z @ negatives.T, dim=1) - positive).mean()
        self.bank.extend(z.detach())
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
