# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/ai2cm/ace/issues/349 (EMA data not saved during checkpoint), https://github.com/Vchitect/Latte/issues/55
# EXPECTED: The EMA copy of the weights is not in the checkpoint; after a resume it is made anew from the current weights.
# KEYWORDS: \bema\b|average|not in the checkpoint\): Sequential
# WRONG: sampler|position|scheduler|\(optimizer\)
# CHECK: --steps 16 --kill-at 11

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import tierd

STEPS, BATCH, N = 16, 4, 32


class Teacher:
    def __init__(self, model, decay=0.9):
        self.ema = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for a, b in zip(self.ema.parameters(), model.parameters()):
            a.mul_(self.decay).add_(b, alpha=1 - self.decay)


def main(spool):
    torch.manual_seed(0)
    data = torch.randn(N, 6)
    target = data.pow(2).sum(1, keepdim=True)
    student = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    checkpoint = {"student": student, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="mean-teacher", to=[])
    ckpt.restore(checkpoint)
    teacher = Teacher(student)
    for step in range(checkpoint["step"], STEPS):
        g = torch.Generator().manual_seed(step // (N // BATCH))
        ids = torch.randperm(N, generator=g)[(step % (N // BATCH)) * BATCH :][:BATCH]
        out = student(data[ids])
        with torch.no_grad():
            soft = teacher.ema(data[ids])
        loss = F.mse_loss(out, target[ids]) + 0.5 * F.mse_loss(out, soft)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        teacher.update(student)
        checkpoint["step"] = step + 1
        tierd.observe(step + 1, ids, loss)
        if (step + 1) % 5 == 0:
            ckpt.save(step + 1, checkpoint)
    ckpt.close()
