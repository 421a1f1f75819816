# HALF: first
# FRAMEWORK: lightning
# SOURCE: docs/howto/lightning.md
# EXPECTED: Nothing: the order of a seeded StatefulDataLoader, dropout and the scheduler all come back.
# CHECK: --steps 16 --kill-at 11 --ignore 'state["lightning"]["loops"]' --ignore '_*'

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
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(12, 1)
        )

    def training_step(self, batch, batch_idx):
        ids, x = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.last = ids.tolist(), loss.detach()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tierd.observe(self.trainer.global_step, *self.last)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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
