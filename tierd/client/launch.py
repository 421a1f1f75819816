"""Who this process is among its launch's ranks, and the attempt that they share.

Law: ranks of one launch agree on one attempt or refuse to save; they agree through CPU collectives at start and after a
restore, never inside `save`. An attempt has one origin, and writes a step once.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from tierd import __version__
from tierd.core.errors import ConfigError, StepRefused
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_rank, check_step, next_attempt
from tierd.core.manifest import VERSION, Manifest, Origin, metrics_to_json
from tierd.spool import Spool

T = TypeVar("T")


class Launch:
    """One rank of one launch: its names, what it resumed from, and the steps that it has saved.

    Args:
        attempt: the launch's name, when it was given one.
        seen: tells every attempt that was there before.
    """

    def __init__(
        self, spool: Spool, run: str, rank: int, world: int, attempt: str | None, seen: Callable[[], set[str]]
    ) -> None:
        self.run, self.rank, self.world = run, rank, world
        self.steps: set[int] = set()
        self.shared = False  # whether another process may save for this launch: what it saved shows in the spool alone
        self._spool, self._given, self._seen = spool, attempt, seen
        self._origin: CheckpointId | None = None
        self._attempt: str | None = None
        if world > 1 and attempt is None:
            self._attempt = agree(seen(), world)

    @property
    def attempt(self) -> str:
        if self._attempt is None:
            self._attempt = self._given or agree(self._seen(), self.world)
        return self._attempt

    def part(self, step: int) -> PartId:
        """What this rank writes at `step`.

        Raises:
            StepRefused: no int, negative, or already committed by this attempt.
        """
        number = check_step(step)
        part = PartId(CheckpointId(self.run, self.attempt, number), self.rank, self.world)
        # What a launch named itself nobody else writes; a given name may have been used before.
        if number in self.steps or ((self.shared or self._given is not None) and self._spool.has(part)):
            raise StepRefused(f"{part} is already committed by this attempt; a checkpoint is never overwritten")
        return part

    def manifest(self, part: PartId, metrics: Mapping[str, float]) -> Manifest:
        """The manifest of `part`, still without files."""
        origin = self._origin
        return Manifest(
            version=VERSION,
            run=self.run,
            step=part.checkpoint.step,
            attempt=part.checkpoint.attempt,
            resumed_from=Origin(step=origin.step, attempt=origin.attempt) if origin else None,
            rank=self.rank,
            world_size=self.world,
            created=datetime.now(UTC).isoformat(),
            writer=f"tierd {__version__}",
            metrics=metrics_to_json(metrics),
            files=(),
        )

    def check_given(self, origin: CheckpointId, attempts: Iterable[str]) -> None:
        """Raises `ConfigError` where a given attempt cannot go on from `origin`."""
        if self._given is None:
            return
        latest = max(attempts)
        if self.steps or self._given < latest or self._given == origin.attempt:
            raise ConfigError(
                f"attempt {self._given} cannot go on from attempt {latest}: an attempt has one origin, and is later "
                "than what it resumes from; make a new Checkpointer with a new attempt="
            )

    def go_on_from(self, origin: CheckpointId, attempts: Iterable[str], name: str | None = None) -> None:
        """An attempt has one origin: restoring after a save begins another one.

        Args:
            name: what the ranks agreed on to call it (`next_name`); agreed on now when not given.
        """
        name = name or self.next_name(origin, attempts)
        self._origin = origin
        self.steps.clear()
        self._attempt = name

    def next_name(self, origin: CheckpointId, attempts: Iterable[str]) -> str:
        """The attempt that would go on from `origin`: a collective, unless this launch was given its name."""
        if self._given is not None:
            return self._given
        own = [self._attempt] if self._attempt else []
        return agree({*attempts, origin.attempt, *own}, self.world)


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
