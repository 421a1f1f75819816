# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/catalyst-team/catalyst/issues/764 (resuming repeats the last epoch), https://github.com/facebookresearch/FFCV-SSL/pull/3 (offset of a checkpoint)
# EXPECTED: The saved step is the index of the last step done, and the resumed loop starts with it, so this step is trained a second time.
# KEYWORDS: \(steps?\)|position|went back|read again|off by one|repeat|again
# WRONG: scheduler|\(optimizer\)|\(generator\)|\(weights\)|buffers|\(shuffle\)
# CHECK: --steps 16 --kill-at 12

import numpy as np
import torch

import tierd


def batch_of(step, size=4, n=36):
    epoch, at = divmod(step, n // size)
    return np.random.default_rng(epoch).permutation(n)[at * size :][:size]


def main(spool):
    torch.manual_seed(34)
    x = torch.randn(36, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "last": 0}
    ckpt = tierd.Checkpointer(spool, run="offset", to=[])
    ckpt.restore(state)
    for step in range(state["last"], 16):
        ids = batch_of(step)
        loss = (model(x[ids]) - x[ids].cumsum(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["last"] = step
        tierd.observe(step + 1, ids, loss)
        if step % 5 == 4:
            ckpt.save(step, state)
    ckpt.close()
