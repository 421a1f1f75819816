"""Trains on the pipeline, on any number of ranks; each saves, and gets back, the state of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import tierd
from examples.pipeline.stages import Piece, make_pipeline

SEED, LENGTH, BATCH, VOCABULARY = 7, 64, 2, 50
EVERY = 3  # steps from one checkpoint to the next


def train(spool: Path) -> None:
    """For ever, from wherever the last launch came to."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.init_process_group("gloo")
    torch.set_num_threads(1)  # sums are taken in an order that depends on it
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Dropout(0.1), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(SEED + 1 + rank)  # the same weights everywhere, and dropout each rank's own
    sequences = make_pipeline(rank, world, SEED, LENGTH)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    state["data"] = sequences

    ckpt = tierd.Checkpointer(spool, run="pipeline", to=[])
    ckpt.restore(state)
    while True:
        state["step"] += 1
        batch = [next(sequences) for _ in range(BATCH)]
        tokens = torch.tensor([read(pieces) for pieces in batch])
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            average(model, world)
        optimizer.step()
        tierd.observe(
            state["step"], [f"{document}:{start}-{end}" for one in batch for document, start, end in one], loss
        )
        if state["step"] % EVERY == 0:
            ckpt.save(state["step"], state, metrics={"loss": loss.item()})


def read(pieces: list[Piece]) -> list[int]:
    """The tokens of a sequence; here made up, elsewhere read from the documents' files."""
    return [(document * 31 + token * 7) % VOCABULARY for document, start, end in pieces for token in range(start, end)]


def average(model: nn.Module, world: int) -> None:
    """The mean of all ranks' gradients."""
    for weight in model.parameters():
        if weight.grad is not None:
            distributed.all_reduce(weight.grad)
            weight.grad /= world
