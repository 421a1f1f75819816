# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/datasets/issues/5454, https://github.com/huggingface/datasets/pull/7056 (the shuffle buffer is not part of the state)
# EXPECTED: The samples that wait in the shuffle buffer are not saved, so after the resume they are lost and the buffer is filled with later ones.
# KEYWORDS: buffer(?!s\))|held|waiting|skipped
# WRONG: scheduler|\(optimizer\)|\(weights\)|\(buffers\)|\(epoch\)|\(prefetch\)
# CHECK: --steps 15 --kill-at 9

import random

import torch

import tierd


class Stream:
    """Reads a long file line by line and mixes it with a buffer."""

    def __init__(self, length, size, seed):
        self.length, self.size = length, size
        self.line = 0
        self.random = random.Random(seed)
        self.pool = []

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.pool) < self.size and self.line < self.length:
            self.pool.append(self.line)
            self.line += 1
        if not self.pool:
            raise StopIteration
        return self.pool.pop(self.random.randrange(len(self.pool)))

    def state_dict(self):
        version, numbers, gauss = self.random.getstate()
        return {"line": self.line, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        self.line = state["line"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))


def main(spool):
    torch.manual_seed(0)
    table = torch.randn(300, 4)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stream = Stream(300, size=16, seed=1)
    state = {"model": model, "optimizer": optimizer, "stream": stream, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="stream", to=[])
    ckpt.restore(state)
    while state["step"] < 15:
        ids = [next(stream) for _ in range(4)]
        loss = (model(table[ids]).squeeze(1) - table[ids].norm(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
