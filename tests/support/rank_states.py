"""What tests of ranks save and compare."""

from __future__ import annotations

from support.doubles import flipped

import tierd
from tierd.core.errors import (
    StoreUnavailable,
)
from tierd.spool.spool import Spool


def rank(spool: Spool, number: int, name: str, world: int = 2) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", rank=number, world_size=world, attempt=name, to=[])


def value(step: int, number: int) -> int:
    """What rank `number` saves at `step`, and has to get back."""
    return step * 100 + number


def harm(spool: Spool, step: int, number: int, world: int = 3) -> None:
    path = next(spool.root.glob(f"run/{step:012}.*/{number:05}-of-{world:05}/tensors.safetensors"))
    path.write_bytes(flipped(path.read_bytes()))


def no_puts(operation: str, key: str) -> None:
    if operation == "put":
        raise StoreUnavailable("nothing is taken")
