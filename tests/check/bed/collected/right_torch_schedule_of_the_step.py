# HALF: first
# FRAMEWORK: torch
# SOURCE: learning rate, momentum and dropout rate are functions of the saved step; there is no scheduler object
# EXPECTED: Nothing: everything that is not saved is computed anew from the step.
# CHECK: --steps 18 --kill-at 7,14

import math

import torch

import tierd


def rate(step):
    return 0.03 * min(1.0, (step + 1) / 6) * 0.5 * (1 + math.cos(math.pi * step / 24))


def main(spool):
    torch.manual_seed(1)
    x = torch.randn(60, 5)
    dropout = torch.nn.Dropout(0.5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 15), torch.nn.Tanh(), dropout, torch.nn.Linear(15, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="pure", to=[])
    ckpt.restore(state)
    while state["step"] < 18:
        step = state["step"]
        dropout.p = 0.5 * (1 - step / 24)
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = rate(step), 0.85 + 0.1 * step / 24
        epoch, at = divmod(step, 15)
        ids = torch.randperm(60, generator=torch.Generator().manual_seed(epoch))[at * 4 :][:4]
        loss = (model(x[ids]) - x[ids].sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step + 1
        tierd.observe(step + 1, ids, loss)
        if (step + 1) % 4 == 0:
            ckpt.save(step + 1, state)
    ckpt.close()
