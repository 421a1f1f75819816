"""Loops that save with `torch.save` and load by hand, unseen by tierd: a right one, and three mistakes."""

from __future__ import annotations

from pathlib import Path

import torch

import tierd


def right(spool: Path, *, forget: str = "") -> None:
    """A model and a margin that rises with each step, saved every third step, and exactly resumed."""
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    path, start, margin = spool / "last.pt", 0, 0.2
    model(x[:1]).sum()  # a pass for the shapes, before anything is loaded
    if path.exists():
        saved = torch.load(path, weights_only=True)
        if forget == "model":  # keys with another prefix
            saved["model"] = {f"module.{key}": value for key, value in saved["model"].items()}
        model.load_state_dict(saved["model"], strict=False)
        if forget != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
        margin = margin if forget == "margin" else saved["margin"]
    for step in range(start + 1, 13):
        ids = [(5 * step + k) % 30 for k in range(5)]
        loss = (margin - model(x[ids])[:, 0]).clamp(min=0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        margin = margin * 1.1
        tierd.observe(step, ids, loss)
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "margin": margin}
            torch.save(state, spool / "last.part")
            (spool / "last.part").replace(path)


def without_weights(spool: Path) -> None:
    right(spool, forget="model")


def without_moments(spool: Path) -> None:
    right(spool, forget="optimizer")


def without_margin(spool: Path) -> None:
    right(spool, forget="margin")
