# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/1772, https://github.com/Lightning-AI/pytorch-lightning/issues/17543 (a schedule after a resume)
# EXPECTED: The scheduler is made by hand in on_train_start and Lightning does not save it, so its decay begins anew.
# KEYWORDS: schedul|decay|learning rate|\blr\b|last_epoch
# WRONG: sampler|position|\(generator\)|\(weights\)|buffers
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
    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)
        self.decay = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.8)

    def on_train_start(self):
        # stepped by hand, so Lightning need not know it
        self.decay = torch.optim.lr_scheduler.LambdaLR(self.optimizers().optimizer, lambda step: 0.85**step)

    def training_step(self, batch, batch_idx):
        ids, x = batch
        optimizer = self.optimizers()
        loss = (self.net(x) - x.amax(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.decay.step()
        self.last = ids.tolist(), loss.detach()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        tierd.observe(self.trainer.global_step, *self.last)


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
