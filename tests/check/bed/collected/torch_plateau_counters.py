# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/1463 (patience begins anew), https://github.com/cnstark/easytorch/pull/58 (best metrics when resuming)
# EXPECTED: The best loss and the count of bad evaluations are not saved, so the patience starts over after a resume and the learning rate falls later.
# KEYWORDS: patience|best|\bbad\b|plateau|wait
# WRONG: sampler|position|\(optimizer\)|\(generator\)|\(weights\)|buffers
# CHECK: --steps 24 --kill-at 15

import torch

import tierd


class Plateau:
    def __init__(self, optimizer, patience, factor):
        self.optimizer, self.patience, self.factor = optimizer, patience, factor
        self.best, self.bad = float("inf"), 0

    def evaluate(self, loss):
        if loss < 0.9 * self.best:
            self.best, self.bad = loss, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            self.bad = 0
            for group in self.optimizer.param_groups:
                group["lr"] *= self.factor


def main(spool):
    torch.manual_seed(7)
    x, held_out = torch.randn(40, 5), torch.randn(10, 5)
    weights, noise = torch.randn(5, 1), torch.randn(10, 1)
    model = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = Plateau(optimizer, patience=3, factor=0.3)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="plateau", to=[])
    ckpt.restore(state)
    while state["step"] < 24:
        ids = [(state["step"] * 4 + k) % 40 for k in range(4)]
        loss = (model(x[ids]) - x[ids] @ weights).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        with torch.no_grad():
            plateau.evaluate((model(held_out) - held_out @ weights - noise).square().mean().item())
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
