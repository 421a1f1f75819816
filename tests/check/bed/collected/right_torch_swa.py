# HALF: second
# FRAMEWORK: torch
# SOURCE: torch.optim.swa_utils, with its schedule and its averaged model in the state
# EXPECTED: Nothing: the averaged model, its count and both schedulers are saved.
# CHECK: --steps 18 --kill-at 8,15

import torch
from torch.optim.swa_utils import SWALR, AveragedModel

import tierd


def main(spool):
    torch.manual_seed(9)
    x = torch.randn(54, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.BatchNorm1d(9), torch.nn.ReLU(), torch.nn.Linear(9, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=18)
    swa, swa_rate = AveragedModel(model, use_buffers=True), SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
    state = {
        "model": model,
        "swa": swa,
        "optimizer": optimizer,
        "cosine": cosine,
        "swa_rate": swa_rate,
        "rng": tierd.RngState(),
        "step": 0,
    }
    ckpt = tierd.Checkpointer(spool, run="swa", to=[])
    ckpt.restore(state)
    while state["step"] < 18:
        ids = torch.randperm(54, generator=torch.Generator().manual_seed(state["step"] // 9))[state["step"] % 9 * 6 :][
            :6
        ]
        loss = (model(x[ids]) - x[ids].prod(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] > 9:
            swa.update_parameters(model)
            swa_rate.step()
        else:
            cosine.step()
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
