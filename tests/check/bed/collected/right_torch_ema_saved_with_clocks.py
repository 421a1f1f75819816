# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/lightly-ai/lightly-train/pull/892 (done right); timers and logs beside the loop
# EXPECTED: Nothing: the EMA and its count of updates are saved; only clocks and a log differ, which training does not use.
# CHECK: --steps 16 --kill-at 11

import time

import torch

import tierd


class EMA:
    def __init__(self, module):
        self.weights = {k: v.detach().clone() for k, v in module.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        decay = min(0.95, (1 + self.updates) / (10 + self.updates))
        for name, p in module.named_parameters():
            self.weights[name].mul_(decay).add_(p, alpha=1 - decay)

    def state_dict(self):
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state):
        for name, value in state["weights"].items():
            self.weights[name].copy_(value)
        self.updates = state["updates"]


def main(spool):
    started = time.time()
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMA(model)
    state = {"model": model, "optimizer": optimizer, "ema": ema, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="ema", to=[])
    ckpt.restore(state)
    durations, seen_here = [], 0
    while state["step"] < 16:
        tick = time.perf_counter()
        ids = torch.randperm(48, generator=torch.Generator().manual_seed(state["step"]))[:4]
        loss = (model(x[ids]) - x[ids].flip(1)).square().mean()
        loss = loss + sum((p - ema.weights[n]).square().sum() for n, p in model.named_parameters()) * 0.01
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        state["step"] += 1
        seen_here += 4
        durations.append(time.perf_counter() - tick)
        throughput = seen_here / (time.time() - started)
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state, metrics={"throughput": throughput})
    ckpt.close()
