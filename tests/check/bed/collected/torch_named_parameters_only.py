# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/open-mmlab/mmdetection/issues/7487 (loss is off after a resume), saving named_parameters() in place of state_dict()
# EXPECTED: Only the parameters are saved, not the buffers, so BatchNorm's running mean and variance are lost.
# KEYWORDS: buffer|running_(mean|var)|batch.?norm
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(buffer\)
# CHECK: --steps 15 --kill-at 9

import torch
from torch import nn

import tierd


def main(spool):
    torch.manual_seed(31)
    x = torch.randn(40, 6) * 3 + 2
    y = x[:, :1] * x[:, 1:2]
    backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-2)
    state = {"weights": dict(backbone.named_parameters()), "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="bn", to=[])
    ckpt.restore(state)
    while state["step"] < 15:
        ids = torch.arange(5) + state["step"] * 5 % 40
        backbone.train()
        loss = nn.functional.mse_loss(backbone(x[ids]), y[ids])
        # self-distillation: the model in evaluation mode is the teacher
        backbone.eval()
        with torch.no_grad():
            soft = backbone(x[ids])
        backbone.train()
        loss = loss + nn.functional.mse_loss(backbone(x[ids]), soft)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
