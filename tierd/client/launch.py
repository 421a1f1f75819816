"""Who this process is among its launch's ranks, and the attempt that they share.

Law: ranks of one launch agree on one attempt or refuse to save; they agree through CPU collectives at start and after a
restore, never inside `save`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from tierd.core.errors import ConfigError
from tierd.core.ids import check_attempt, check_rank, next_attempt

T = TypeVar("T")


def new_attempt(seen: Iterable[str] = ()) -> str:
    """Name a launch, later than every attempt in `seen`. Give the same name to all its ranks."""
    return next_attempt(time.time_ns() // 1_000_000, seen, secrets.token_hex(4))


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """From the arguments, else an initialised process group, else torchrun's environment, else rank 0 of 1.

    Raises:
        ConfigError: only one of the two is given, or they do not fit each other.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither")
    if rank is not None:
        return check_rank(rank, world_size)
    group = _process_group()
    if group is not None:
        return check_rank(group.get_rank(), group.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            return check_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE in the environment are not numbers: {error}") from error
    return 0, 1


def agree(seen: Iterable[str], world_size: int) -> str:
    """The attempt that all ranks share: rank 0's clock and token, pushed past what any rank has seen.

    Raises:
        ConfigError: several ranks, and no process group to agree through.
    """
    if world_size == 1:
        return new_attempt(seen)
    gathered = exchange((time.time_ns() // 1_000_000, max(seen, default=None), secrets.token_hex(4)), world_size)
    if gathered is None:
        raise ConfigError(
            f"{world_size} ranks must share one attempt: initialise torch.distributed first, or pass attempt= "
            "(tierd.new_attempt() makes one; give every rank the same)"
        )
    now, _, token = gathered[0]
    return check_attempt(next_attempt(now, [latest for _, latest, _ in gathered if latest], token))


def exchange(value: T, world_size: int) -> list[T] | None:
    """What every rank gave, in order; None where several ranks have no process group to talk through."""
    if world_size == 1:
        return [value]
    group = _process_group()
    if group is None:
        return None
    gathered: list[Any] = [None] * world_size
    group.all_gather_object(gathered, value)
    return gathered


def _process_group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None
