# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/mosaicml/composer/issues/1002 (done right), a scheduler made after the restore from the saved step
# EXPECTED: Nothing: what is frozen follows from the saved step, also after a resume; the closed-form schedule is made anew with last_epoch.
# CHECK: --steps 16 --kill-at 12

import torch

import tierd


def main(spool):
    torch.manual_seed(13)
    x = torch.randn(32, 4)
    backbone, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    net = torch.nn.ModuleList([backbone, head])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    state = {"net": net, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="unfreeze", to=[])
    ckpt.restore(state)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", 0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s, last_epoch=state["step"] - 1)
    while state["step"] < 16:
        backbone.requires_grad_(state["step"] >= 6)
        i = state["step"] * 4 % 32
        ids = torch.arange(i, i + 4)
        loss = (head(torch.tanh(backbone(x[ids]))).squeeze(1) - x[ids].prod(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
