"""A training script as tierd's users write one: restore, loop, save. Copy it and put your own model in.

Invariant: whatever decides the next step is in `state`. Then a killed run goes on bit for bit where a checkpoint was
taken: the same losses, from the same samples in the same order.

    tierd run --spool /nvme/tierd --to file:///mnt/tier            # once per node, beside the training
    python -m examples.demo.train --spool /nvme/tierd --run my-run --log run.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd
from examples.demo.model import ByteTransformer
from examples.demo.text import Windows, standard_library

SEED = 20_240_229
WARMUP = 10  # steps


def train(options: argparse.Namespace) -> None:
    """Train from the newest verified checkpoint, or from nothing, to the last step."""
    model = ByteTransformer(options.width, options.depth, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: warmup_then_cosine(step, options.steps))
    loader = make_loader(options)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": loader,
        "rng": tierd.RngState(),  # dropout draws from it
        "step": 0,
        "epoch": 0,
        "history": [],
        "best": {"loss": math.inf, "step": 0},
    }
    tiers: list[str] | None = [] if options.alone else None  # None: a daemon is there, or will be
    with tierd.Checkpointer(options.spool, run=options.run, to=tiers) as ckpt:
        found = ckpt.restore(state)
        write_start(options.log, found)
        while state["step"] < options.steps:
            for samples, inputs, targets in loader:
                state["step"] += 1
                rate = optimizer.param_groups[0]["lr"]
                loss = model.loss(inputs, targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                note(state, loss.item())
                write_step(options.log, state, rate, samples.tolist())
                if state["step"] % options.every == 0:
                    ckpt.save(state["step"], state, metrics={"loss": loss.item()})
                    write(options.log, saved=state["step"], attempt=ckpt.attempt, at=datetime.now(UTC).isoformat())
                if state["step"] == options.steps:
                    break
            else:
                state["epoch"] += 1
    write(options.log, final=digest(model, state["history"]), failed_saves=ckpt.stats.failed)
    print(f"{ckpt.stats.saves} saves took {ckpt.stats.blocked_s * 1000:.0f} ms from training in all")


def make_loader(options: argparse.Namespace) -> Any:
    """Shuffled batches from two workers, resumable at any step.

    What torchdata 0.11 resumes exactly, tried at every step of three epochs (tests/examples/test_demo.py): a loader
    with workers *and* a generator of its own. Without `generator=`, a new iterator draws its workers' seed from torch's
    global generator, after `RngState` has set it, and dropout goes another way. Without workers, a resumed loader
    leaves out that draw, and the shuffles of later epochs differ. A state taken after an epoch's last batch resumes as
    an epoch without any more batches, so the `else` of the loop above counts it, as it would have been.
    """
    windows = Windows(standard_library(), options.batch * options.epoch_steps, options.context)
    return StatefulDataLoader(
        windows,
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
    )


def warmup_then_cosine(step: int, steps: int) -> float:
    """The learning rate's factor: up to 1 within `WARMUP` steps, then down to 0.1 on a cosine."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def note(state: dict[str, Any], loss: float) -> None:
    """Keep what a person wants to know of the run; plain values are restored like everything else."""
    state["history"].append(loss)
    if loss < state["best"]["loss"]:
        state["best"].update(loss=loss, step=state["step"])


def digest(model: nn.Module, history: list[float]) -> str:
    """SHA-256 of every parameter's bytes and every loss: equal if and only if the runs were."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(name.encode() + tensor.contiguous().numpy().tobytes())
    whole.update(" ".join(loss.hex() for loss in history).encode())
    return whole.hexdigest()


# -- the log: one JSON object a line, each durable before the next step, so that SIGKILL takes none of them ------------


def write(log: Path, **values: object) -> None:
    """Append one line."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_step(log: Path, state: dict[str, Any], rate: float, samples: list[int]) -> None:
    """One step; floats in hexadecimal, which keeps every bit."""
    loss = state["history"][-1]
    write(log, step=state["step"], epoch=state["epoch"], loss=loss.hex(), lr=float(rate).hex(), samples=samples)


def write_start(log: Path, found: tierd.Restored | None) -> None:
    """Say where training begins, and what a restore passed over."""
    if found is None:
        print("no checkpoint anywhere: a fresh start")
        write(log, resumed=None)
        return
    for one in found.skipped:
        print(f"skipped {one}")
    print(f"resumed from step {found.step} (attempt {found.attempt}), every byte verified, from: {found.tier}")
    skipped = [{"step": one.step, "attempt": one.attempt, "reason": one.reason} for one in found.skipped]
    write(log, resumed={"step": found.step, "attempt": found.attempt, "tier": found.tier}, skipped=skipped)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="examples.demo.train", description="Train a byte-level transformer.")
    parser.add_argument("--spool", type=Path, required=True, help="tierd's spool on this node")
    parser.add_argument("--run", required=True, help="the run's name, the same in every launch")
    parser.add_argument("--log", type=Path, required=True, help="where every step is written, as JSON lines")
    parser.add_argument("--alone", action="store_true", help="there is no daemon: the spool is all there is")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--epoch-steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes a sample")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Set up what makes two runs comparable, then train."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # Sums are taken in an order that depends on the number of threads; one leaves the other core to workers and daemon.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    train(parse())


if __name__ == "__main__":
    main()
