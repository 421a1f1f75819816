"""Who this process is among its launch's ranks, as the launcher's environment says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from tierd.core.errors import ConfigError
from tierd.core.ids import MAX_WORLD, check_rank, next_attempt


def rank_and_world(
    rank: int | None, world_size: int | None, group: Callable[[], tuple[int, int] | None]
) -> tuple[int, int]:
    """As `ranks.Ranks` orders it; raises as it does.

    Args:
        group: what an initialised process group says of this process; None without one.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither")
    if rank is not None:
        return check_rank(rank, world_size)
    return group() or torchrun_ranks() or _slurm_ranks() or (0, 1)


def slurm_attempt(rank: int, world: int, origin: str = "") -> str | None:
    """The attempt that every rank of a SLURM step derives without talking; None outside one.

    Its time is the job's start (`SLURM_JOB_START_TIME`, seconds since 1970, which a requeue renews) plus the step's
    number in milliseconds; its token is a digest of job, restart count, step and `origin`, what was resumed from: ranks
    that resumed from different checkpoints never write parts of the same one.

    Raises:
        ConfigError: this Slurm does not tell when the job started.
    """
    if _slurm_ranks() != (rank, world):
        return None
    if "SLURM_JOB_START_TIME" not in os.environ:
        raise ConfigError(
            f"{world} ranks must share one attempt, and this Slurm sets no SLURM_JOB_START_TIME to derive it from: "
            "initialise torch.distributed first, or pass attempt= (tierd.new_attempt() makes one; give every rank the "
            "same)"
        )
    step = environ_number("SLURM_STEP_ID", 2**32 - 1)
    started = environ_number("SLURM_JOB_START_TIME", 2**37)
    names = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
    names.append(origin)
    return next_attempt(started * 1000 + step, (), hashlib.blake2b("/".join(names).encode(), digest_size=4).hexdigest())


def torchrun_ranks() -> tuple[int, int] | None:
    return _environment("RANK", "WORLD_SIZE")


def _slurm_ranks() -> tuple[int, int] | None:
    # SLURM_NTASKS is set in a batch script, too, where one process runs: only a step's own count tells of ranks.
    return _environment("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _environment(rank: str, world: str) -> tuple[int, int] | None:
    if rank not in os.environ or world not in os.environ:
        return None
    mine, size = environ_number(rank, MAX_WORLD), environ_number(world, MAX_WORLD)
    if mine >= size:
        raise ConfigError(f"{rank}={mine} and {world}={size} in the environment: ranks count from 0 to {world} - 1")
    return mine, size


def environ_number(name: str, limit: int) -> int:
    value = os.environ.get(name, "")
    if not value.isascii() or not value.isdecimal() or int(value) > limit:
        raise ConfigError(f"{name}={value!r} in the environment: a number from 0 to {limit} is expected there")
    return int(value)
