# HALF: first
# FRAMEWORK: lightning
# SOURCE: https://github.com/keras-team/keras/issues/12891, https://github.com/david8862/keras-YOLOv3-model-set/issues/91 (only weights are saved, not the optimizer)
# EXPECTED: The optimizer's state (Adam's moments) is not in the checkpoint.
# KEYWORDS: optimizer|exp_avg|moment
# WRONG: sampler|position|scheduler|\(generator\)|\(weights\)|buffers
# CHECK: --steps 16 --kill-at 11

import lightning as L
import torch

import tierd

STEPS = 16


def main(spool):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(1)
    x = torch.randn(48, 7)
    with fabric.init_module():
        model = torch.nn.Sequential(torch.nn.Linear(7, 14), torch.nn.SiLU(), torch.nn.Linear(14, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="fabric", to=[])
    ckpt.restore(state)
    for step in range(state["step"] + 1, STEPS + 1):
        order = torch.randperm(48, generator=torch.Generator().manual_seed((step - 1) // 12))
        ids = order.view(12, 4)[(step - 1) % 12]
        loss = (model(x[ids]) - x[ids].sort(1).values).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        state["step"] = step
        tierd.observe(step, ids, loss)
        if step % 4 == 0:
            ckpt.save(step, state)
    ckpt.close()
