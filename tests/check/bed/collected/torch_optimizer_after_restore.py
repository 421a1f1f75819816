# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/mosaicml/composer/pull/1376 (made after the checkpoint was loaded, which wipes its state), https://github.com/facebookresearch/detectron2/issues/898
# EXPECTED: The optimizer is made anew, with groups for weight decay, after the restore, so the restored moments are gone.
# KEYWORDS: optimizer|exp_avg|moment
# WRONG: sampler|position|scheduler|\(generator\)|\(weights\)|buffers
# CHECK: --steps 15 --kill-at 10

import torch

import tierd


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def main(spool):
    torch.manual_seed(36)
    x = torch.randn(45, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 9), torch.nn.Mish(), torch.nn.Linear(9, 3))
    state = {"model": model, "optimizer": torch.optim.AdamW(groups(model), lr=8e-3), "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="groups", to=[])
    ckpt.restore(state)
    optimizer = state["optimizer"] = torch.optim.AdamW(groups(model), lr=8e-3)
    while state["step"] < 15:
        ids = [(state["step"] * 3 + k) % 45 for k in range(3)]
        loss = (model(x[ids]) - x[ids].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
