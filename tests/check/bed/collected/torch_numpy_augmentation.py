# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/The-School-of-AI/LLM/pull/564 (generators of NumPy not saved), https://github.com/unit8co/darts/issues/2463
# EXPECTED: The NumPy generator that draws the augmentation noise is not saved, so after the resume it draws its first numbers again.
# KEYWORDS: generator|\brng\b|noise|numpy
# WRONG: sampler|position|scheduler|optimizer|weights|buffers
# CHECK: --steps 15 --kill-at 8

import numpy as np
import torch

import tierd


class Augment:
    """Adds noise to a batch of images."""

    def __init__(self, seed, strength):
        self.rng = np.random.default_rng(seed)
        self.strength = strength

    def __call__(self, batch):
        noise = self.rng.normal(size=tuple(batch.shape)).astype("float32")
        return batch + self.strength * torch.from_numpy(noise)


def batches(n, size, epoch):
    order = np.random.default_rng(1000 + epoch).permutation(n)
    return order.reshape(-1, size)


def main(spool):
    torch.manual_seed(1)
    images = torch.randn(40, 1, 6, 6)
    labels = torch.randint(0, 3, (40,))
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    augment = Augment(seed=3, strength=0.3)
    state = {"net": net, "opt": opt, "rng": tierd.RngState(), "step": 0}
    with tierd.Checkpointer(spool, run="aug", to=[]) as ckpt:
        ckpt.restore(state)
        while state["step"] < 15:
            epoch, at = divmod(state["step"], 5)
            ids = batches(40, 8, epoch)[at]
            x = augment(images[ids])
            loss = torch.nn.functional.cross_entropy(net(x), labels[ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
            if state["step"] % 4 == 0:
                ckpt.save(state["step"], state)
