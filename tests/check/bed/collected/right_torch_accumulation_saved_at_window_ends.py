# HALF: first
# FRAMEWORK: torch
# SOURCE: gradient accumulation, saved only after an optimizer step; counters of the launch are not saved
# EXPECTED: Nothing: gradients are zero where it is saved, and the counters that are lost only count this launch.
# CHECK: --steps 18 --kill-at 11

import torch

import tierd


def main(spool):
    torch.manual_seed(5)
    x = torch.randn(72, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Sigmoid(), torch.nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": tierd.RngState(), "micro": 0}
    ckpt = tierd.Checkpointer(spool, run="windows", to=[])
    ckpt.restore(state)
    in_window = updates_of_this_launch = 0
    while state["micro"] < 18:
        ids = torch.arange(4) + 4 * state["micro"]
        loss = (model(x[ids]) - x[ids].amax(1, keepdim=True)).square().mean()
        (loss / 4).backward()
        state["micro"] += 1
        in_window += 1
        tierd.observe(state["micro"], ids, loss)
        if in_window == 4:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            in_window, updates_of_this_launch = 0, updates_of_this_launch + 1
            ckpt.save(state["micro"], state)
    ckpt.close()
