# HALF: second
# FRAMEWORK: lightning
# SOURCE: https://github.com/ultralytics/ultralytics/pull/22189 (done right), Fabric with an own loop
# EXPECTED: Nothing: model, optimizer, scheduler, scaler and generators are all in the state.
# CHECK: --steps 16 --kill-at 11

import lightning as L
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd


def main(spool):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1)
    x = torch.randn(40, 7)
    model = torch.nn.Sequential(torch.nn.Linear(7, 14), torch.nn.Dropout(0.2), torch.nn.SiLU(), torch.nn.Linear(14, 7))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=4e-3))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    order = torch.Generator()
    loader = StatefulDataLoader(range(40), batch_size=4, shuffle=True, generator=order)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "loader": loader,
        "rng": tierd.RngState(),
        "step": 0,
        "epoch": 0,
    }
    ckpt = tierd.Checkpointer(spool, run="fabric", to=[])
    ckpt.restore(state)
    while state["step"] < 16:
        order.manual_seed(50 + state["epoch"])
        for ids in loader:
            loss = (model(x[ids]) - x[ids].sort(1).values).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
            if state["step"] % 3 == 0:
                ckpt.save(state["step"], state)
            if state["step"] == 16:
                break
        else:
            state["epoch"] += 1
    ckpt.close()
