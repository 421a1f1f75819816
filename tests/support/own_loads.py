"""Loops that save with `torch.save` and load by hand, unseen by tierd: a right one, and one mistake each.

`python -m support.own_loads` checks all of them in launches that are forks of it, and prints their reports as JSON.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

import tierd

PEAKS: dict[str, torch.Tensor] = {}


class Average:
    """An average of the weights that is no module, as many write it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, one in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(one.detach(), alpha=0.1)


def right(spool: Path, *, forget: str = "") -> None:
    """A loop that is exactly resumed: it updates after every second batch, and saves in the middle of an update."""
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8, momentum=0.01), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    path, start, margin, chance = spool / "last.pt", 0, 0.2, random.Random(3)
    average, hard, losses, total = Average(model), numpy.zeros(30), [], torch.zeros(())
    PEAKS["weight"] = torch.zeros(8, 4)
    model(x[:2]).sum()  # a pass for the shapes, before anything is loaded
    if path.exists():
        saved: dict[str, Any] = torch.load(path, weights_only=False)
        if forget == "model":  # keys with another prefix
            saved["model"] = {f"module.{key}": value for key, value in saved["model"].items()}
        if forget == "buffers":
            saved["model"] = {key: one for key, one in saved["model"].items() if "running" not in key}
        model.load_state_dict(saved["model"], strict=False)
        if forget != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"] - (forget == "step")
        margin = margin if forget == "margin" else saved["margin"]
        hard = hard if forget == "hard" else saved["hard"]
        if forget != "average":
            average.shadow = saved["average"]
        if forget != "peaks":
            PEAKS.update(saved["peaks"])
        if forget != "gradients":
            for weight, gradient in zip(model.parameters(), saved["gradients"], strict=True):
                weight.grad = gradient
        if forget != "chance":
            chance.setstate(saved["chance"])
        if forget == "mode":
            model.eval()
            model(x[:2]).sum()
        torch.set_rng_state(saved["rng"])
    for step in range(start + 1, 13):
        ids = [(5 * step + k) % 30 for k in range(5)]
        loss = (margin - model(x[ids] + 0.1 * chance.random())[:, 0]).square().mean()
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        average.update(model)
        torch.maximum(PEAKS["weight"], model[0].weight.detach().abs(), out=PEAKS["weight"])
        hard[ids] += loss.item()
        margin = margin * 1.1
        losses.append(loss.detach())
        total += loss.detach()
        print(step, torch.stack(losses).mean().item(), total.item())
        tierd.observe(step, ids, loss)
        if step % 3 == 0:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "margin": margin,
                "hard": hard, "average": average.shadow, "peaks": PEAKS, "chance": chance.getstate(),
                "gradients": [weight.grad for weight in model.parameters()], "rng": torch.get_rng_state(),
            }  # fmt: skip
            torch.save(state, spool / "last.part")
            (spool / "last.part").replace(path)


# what is forgotten -> the kind and the path that are named
FORGOTTEN = {
    "model": ("weights", '["0.weight"]'),
    "buffers": ("buffers", '["1.running_mean"]'),
    "optimizer": ("optimizer", '["state"]'),
    "margin": ("state", "right() margin"),
    "hard": ("state", "right() hard"),
    "average": ("state", 'Average.shadow["0.weight"]'),
    "peaks": ("unknown", 'own_loads.PEAKS["weight"]'),
    "gradients": ("gradients", '["0.weight"]'),
    "chance": ("generator", "right() chance"),
    "mode": ("mode", ".2.training"),
    "step": ("steps", "after that step"),
}
without = SimpleNamespace(**{name: partial(right, forget=name) for name in FORGOTTEN})


def main() -> None:
    import torch._dynamo  # what an optimizer loads when the first one is made
    from check.bed import forked

    import tierd.client.checkpointer  # noqa: F401
    from tierd.check import check_resume

    torch.set_num_threads(1)
    forked.install()
    for loop in ("right", *(f"without.{name}" for name in FORGOTTEN)):
        print(check_resume(f"support.own_loads:{loop}", steps=12, kill_at=(8,)).to_json(), flush=True)


if __name__ == "__main__":
    main()
