# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/transformers/issues/11323, https://github.com/open-mmlab/mmdetection/issues/7487
# EXPECTED: The loop seeds the global generators after the restore, so a resumed launch draws the dropout masks of the run's beginning again.
# KEYWORDS: generator|\brng\b|seed|dropout|random
# WRONG: sampler|position|scheduler|\(optimizer\)|\(weights\)|buffers
# CHECK: --steps 14 --kill-at 9

import random

import numpy
import torch
from torch import nn

import tierd


def set_seed(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def train(model, optimizer, data, state, ckpt, steps):
    model.train()
    while state["step"] < steps:
        start = (state["step"] * 5) % len(data)
        ids = list(range(start, start + 5))
        batch = data[ids]
        loss = nn.functional.smooth_l1_loss(model(batch), batch.flip(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 3 == 0:
            ckpt.save(state["step"], state)


def main(spool):
    set_seed(0)
    data = torch.randn(30, 8)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="seeds", to=[])
    ckpt.restore(state)
    set_seed(42)  # reproducible training
    train(model, optimizer, data, state, ckpt, 14)
    ckpt.close()
