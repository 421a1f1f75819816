# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/transformers/issues/17032 (another way out: seed by the step)
# EXPECTED: Nothing: no generator is saved, but each step seeds the generators with its number.
# CHECK: --steps 15 --kill-at 8

import random

import numpy as np
import torch

import tierd


def main(spool):
    torch.manual_seed(7)
    x = torch.randn(40, 1, 8)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(1, 4, 3), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Flatten(), torch.nn.Linear(24, 8)
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    ckpt = tierd.Checkpointer(spool, run="seeded", to=[])
    ckpt.restore(state)
    while state["step"] < 15:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(4242 + state["step"])
        ids = random.sample(range(40), 5)
        batch = x[ids] * float(np.random.uniform(0.8, 1.2)) + 0.1 * torch.randn(5, 1, 8)
        loss = (model(batch) - x[ids].squeeze(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
