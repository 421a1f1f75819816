# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/datasets/issues/5454 (done right: the buffer and its generator are saved)
# EXPECTED: Nothing: line, buffer and the generator of the shuffle buffer are saved.
# CHECK: --steps 15 --kill-at 9

import random

import torch

import tierd


class Stream:
    def __init__(self, length, size, seed):
        self.length, self.size, self.line = length, size, 0
        self.random, self.pool = random.Random(seed), []

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
        return {"line": self.line, "pool": list(self.pool), "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        self.line, self.pool = state["line"], list(state["pool"])
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
