"""A training in mixed precision on one device, as a program: `device_trainer SPOOL TIER LOG STEPS DEVICE`.

It saves every third step, and writes a line to LOG for each step's loss and for the digest of what it ends with.
"""

from __future__ import annotations

import sys

import torch
from support.state_digests import state_digest
from torch import nn

import tierd

EVERY = 3


def learn(model: nn.Module, device: str, order: torch.Generator, width: int) -> torch.Tensor:
    batch = torch.randn(64, width, generator=order).to(device, non_blocking=True)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        return (model(batch) - batch).square().mean()


def main(spool: str, tier: str, log: str, steps: int, device: str) -> None:
    torch.use_deterministic_algorithms(True)  # a resume can have the same bits only where a step has
    torch.manual_seed(7)
    width = 1024 if device == "cuda" else 128
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)).to(
        device
    )
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    order = torch.Generator().manual_seed(3)
    state = {"model": model, "mean": mean, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    state |= {"order": order, "rng": tierd.RngState(), "step": 0}
    with tierd.Checkpointer(spool, "run", to=[f"file://{tier}"]) as checkpointer, open(log, "a", buffering=1) as out:
        checkpointer.attach(optimizer)
        checkpointer.restore(state)
        print("resumed", state["step"], file=out)
        for step in range(state["step"] + 1, steps + 1):
            loss = learn(model, device, order, width)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            mean.update_parameters(model)
            state["step"] = step
            if step % EVERY == 0:
                checkpointer.save(step, state)
            print(step, loss.item().hex(), file=out)
        print("end", state_digest([state[name].state_dict() for name in ("model", "mean", "optimizer")]), file=out)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
