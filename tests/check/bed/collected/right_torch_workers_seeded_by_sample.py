# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/accelerate/issues/1130 (resume from an exact step, done right), augmentation in workers
# EXPECTED: Nothing: the sampler skips to the saved position, and the workers' augmentation is seeded by epoch and index.
# CHECK: --steps 16 --kill-at 11

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import tierd


class Augmented(Dataset):
    def __init__(self):
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return 40

    def __getitem__(self, key):
        epoch, i = key
        noise = np.random.default_rng((epoch, i)).normal(size=6).astype("float32")
        return i, self.x[i] + 0.1 * torch.from_numpy(noise)


class FromStep(Sampler):
    def __init__(self, size, batch, step):
        self.size, self.batch, self.step = size, batch, step

    def __iter__(self):
        epoch, at = divmod(self.step * self.batch, self.size)
        while True:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
            for i in order[at:]:
                yield epoch, i
            epoch, at = epoch + 1, 0


def main(spool):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="workers", to=[])
    ckpt.restore(state)
    sampler = FromStep(40, 4, state["step"])
    loader = DataLoader(Augmented(), batch_size=4, sampler=sampler, num_workers=2, generator=torch.Generator())
    for ids, x in loader:
        loss = (model(x) - x).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 3 == 0:
            ckpt.save(state["step"], state)
        if state["step"] == 16:
            break
    ckpt.close()
