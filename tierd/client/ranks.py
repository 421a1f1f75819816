"""Who this process is among its launch's ranks, and how they tell each other small things.

Law: ranks talk over the store of their process group or of torchrun's agent, or through the spool that they share; never
by collectives, which another thread may run, and never inside `save`. What they say is JSON with a schema. Where they
cannot talk, nothing waits for another rank.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tierd.client.board import Board, DirectoryBoard, StoreBoard
from tierd.client.meeting import Meeting
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.ids import MAX_WORLD, check_rank, next_attempt

S = TypeVar("S", bound=msgspec.Struct)

_TAG = "tierd"

_FIRST_S = 600.0  # how much later than the first rank another one may begin, where no group says so
SILENT_S = 30.0  # that a rank is waited for which gives no sign of life, or does not come to restore

_made: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()  # meetings over each default store
_meetings = count()  # at the agent's store, and in the spool: every rank makes the same ones, in the same order


class Ranks:
    """This rank, how many there are, and `gather`, if there is a way to talk.

    Making one is collective where ranks can talk: all of them make one.

    Args:
        rank, world_size: both or neither. Not given: those of the initialised default process group, else torchrun's
            environment (`RANK`, `WORLD_SIZE`), else that of a SLURM step (`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`),
            else rank 0 of 1.
        control: the spool's `.tierd/`, where the ranks of a launch meet that are all on this node and have no other way.
        silent_s: seconds that a rank is waited for which gives no sign of life, or does not come to a restore.

    Raises:
        ConfigError: only one of the two is given, they do not fit each other, or the environment's cannot be used; or
            not every rank makes one.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        control: Path | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self._given = rank is not None
        self.rank, self.world = rank_and_world(rank, world_size)
        self._silent_s, self._first_s = silent_s, _FIRST_S
        board = self._board(control) if self.world > 1 else None
        self._meeting = Meeting(board, self.rank, self.world, silent_s) if board else None
        if self._meeting:
            try:
                self._meeting.meet(self._first_s)
            except StoreUnavailable as error:
                raise ConfigError(
                    f"rank {self.rank} of {self.world}: the ranks do not find each other: {error}. Every rank makes a "
                    "Checkpointer (for one alone: rank=0, world_size=1); where they have no such way to talk, give "
                    "every rank the same attempt= (tierd.new_attempt() makes one), with rank= and world_size="
                ) from error

    def _board(self, control: Path | None) -> Board | None:
        """Where these ranks can talk; None if nowhere."""
        me = self.rank, self.world
        if (group := _process_group()) is not None:
            if _group_ranks() != me:
                return None
            store, address = _default_store(group), "the process group's store"
            self._first_s = min(_FIRST_S, store.timeout.total_seconds())
            self._silent_s = min(self._silent_s, self._first_s)
            meeting = next(_made.setdefault(store, count()))
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _torchrun_ranks() == me:
            store, address = _agent_store(), "the store of torchrun's agent"
            meeting = next(_meetings)
        else:
            return None
        return StoreBoard(_prefixed(f"{_TAG}/{meeting}", store), address)

    @property
    def talk(self) -> bool:
        """Whether `gather` gives what every rank said."""
        return self.world == 1 or self._meeting is not None

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Have the others wait for this rank, however long what it does within takes: it gives signs of life."""
        if self._meeting is None:
            yield
            return
        with self._meeting.attending():
            yield

    def gather(self, value: S, *, first: bool = False) -> list[S]:
        """What every rank said, in order; a rank that has no way to talk hears only itself.

        Args:
            first: a rank that works on something else is waited for as long as for one that has not begun yet.

        Raises:
            StoreUnavailable: another rank is gone, does something else, or was waited for in vain; names it.
        """
        if self._meeting is None:
            return [value]
        kind = type(value).__name__
        said = msgspec.json.encode(_Said(kind, msgspec.Raw(msgspec.json.encode(value))))
        try:
            told = self._meeting.exchange(said, self._first_s if first else self._silent_s)
            answers = [msgspec.json.decode(one, type=_Said) for one in told]
            others = [f"rank {rank} is at {one.kind}" for rank, one in enumerate(answers) if one.kind != kind]
            if others:
                raise StoreUnavailable(f"this rank is at {kind}, and {', '.join(others[:3])}: all make the same calls")
            return [msgspec.json.decode(one.value, type=type(value)) for one in answers]
        except (StoreUnavailable, msgspec.MsgspecError) as error:  # another tierd
            raise StoreUnavailable(
                f"rank {self.rank} of {self.world}: the other ranks cannot be heard: {error}"
            ) from error

    def check_group(self) -> None:
        """Raise `ConfigError` where a process group that came later makes this another rank."""
        if self._given or (found := _group_ranks()) in (None, (self.rank, self.world)):
            return
        raise ConfigError(
            f"this Checkpointer was made as rank {self.rank} of {self.world}, and the process group that exists now "
            f"says rank {found[0]} of {found[1]}: make it after init_process_group, or give it rank= and world_size="
        )


class _Said(msgspec.Struct, frozen=True):
    """What a rank says, and what kind of thing that is: ranks that are at different calls are told so."""

    kind: str
    value: msgspec.Raw


def rank_and_world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """As `Ranks` orders it; raises as it does."""
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither")
    if rank is not None:
        return check_rank(rank, world_size)
    return _group_ranks() or _torchrun_ranks() or _slurm_ranks() or (0, 1)


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
    step = _number("SLURM_STEP_ID", 2**32 - 1)
    started = _number("SLURM_JOB_START_TIME", 2**37)
    names = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
    names.append(origin)
    return next_attempt(started * 1000 + step, (), hashlib.blake2b("/".join(names).encode(), digest_size=4).hexdigest())


def _group_ranks() -> tuple[int, int] | None:
    group = _process_group()
    return check_rank(group.get_rank(), group.get_world_size()) if group is not None else None


def _torchrun_ranks() -> tuple[int, int] | None:
    return _environment("RANK", "WORLD_SIZE")


def _slurm_ranks() -> tuple[int, int] | None:
    # SLURM_NTASKS is set in a batch script, too, where one process runs: only a step's own count tells of ranks.
    return _environment("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _environment(rank: str, world: str) -> tuple[int, int] | None:
    if rank not in os.environ or world not in os.environ:
        return None
    number, size = _number(rank, MAX_WORLD), _number(world, MAX_WORLD)
    if number >= size:
        raise ConfigError(f"{rank}={number} and {world}={size} in the environment: ranks count from 0 to {world} - 1")
    return number, size


def _number(name: str, limit: int) -> int:
    value = os.environ.get(name, "")
    if not value.isascii() or not value.isdecimal() or int(value) > limit:
        raise ConfigError(f"{name}={value!r} in the environment: a number from 0 to {limit} is expected there")
    return int(value)


def _process_group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _default_store(group: Any) -> Any:
    """The store that the default process group was made with; it takes small values by key from any rank.

    Not public; in torch 2.6 to 2.13 it is what `init_process_group` was given, or made.
    """
    try:
        return group.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "the process group has no store over which ranks can talk: give rank, world_size and attempt "
            "(tierd.new_attempt() makes one; give every rank the same)"
        ) from error


@functools.lru_cache
def _agent(address: str, port: int) -> Any:
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    wait = timedelta(seconds=SILENT_S)
    return distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)


def _agent_store() -> Any:
    try:
        return _agent(os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 2**16 - 1))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: the store of torchrun's agent cannot be reached: {error}; initialise "
            "torch.distributed first, or pass attempt= (tierd.new_attempt() makes one; give every rank the same)"
        ) from error


def _prefixed(prefix: str, store: Any) -> Any:
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    return distributed.PrefixStore(prefix, store)
