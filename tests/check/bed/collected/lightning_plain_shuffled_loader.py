# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/18780, https://github.com/Lightning-AI/pytorch-lightning/issues/5325 (resume in the middle of an epoch)
# EXPECTED: A plain DataLoader with shuffle=True has no state: after a resume in the middle of an epoch it shuffles anew and begins an epoch from its start.
# KEYWORDS: position|shuffle|order|read again|begin
# WRONG: scheduler|\(optimizer\)|\(weights\)|\(buffers\)
# CHECK: --steps 16 --kill-at 11 --ignore 'state["lightning"]["loops"]' --ignore '_*'

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import tierd
import tierd.adapters.lightning


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True)


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
    trainer = L.Trainer(
        max_steps=16,
        plugins=[io],
        callbacks=[io.callback, ModelCheckpoint(f"{spool}-out", every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(), datamodule=Data(), ckpt_path=io.latest())
    ckpt.close()
