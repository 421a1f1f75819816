# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/Red-Hat-AI-Innovation-Team/mini_trainer/pull/79 (off by one in the skipping of batches)
# EXPECTED: The resume skips one batch too few, so the last batch before the checkpoint is read once more.
# KEYWORDS: position|read again|off by one|went back
# WRONG: scheduler|\(optimizer\)|\(weights\)|\(generator\)|\(shuffle\)
# CHECK: --steps 16 --kill-at 11

import lightning as L
import torch

import tierd


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = torch.tensor([i / 32, (i * 7 % 32) / 32, 1.0])
        return i, x, x.sum()


def main(spool):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sampler = torch.utils.data.DistributedSampler(Pairs(), num_replicas=1, rank=0, seed=9)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(Pairs(), batch_size=4, sampler=sampler, generator=torch.Generator())
    )
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="fabric", to=[])
    ckpt.restore(state)
    first_epoch, batches_done = divmod(state["step"], len(loader))
    for epoch in range(first_epoch, 2):
        sampler.set_epoch(epoch)
        for number, (ids, x, y) in enumerate(loader, start=1):
            if epoch == first_epoch and number < batches_done:
                continue
            loss = (model(x).squeeze(1) - y).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
            if state["step"] % 3 == 0:
                ckpt.save(state["step"], state)
            if state["step"] == 16:
                break
    ckpt.close()
