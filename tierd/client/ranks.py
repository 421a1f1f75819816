"""Who this process is among its launch's ranks, and how they tell each other small things.

Law: ranks talk over the store of their process group or of torchrun's agent, or through the spool that they share;
never by collectives, which another thread may run, and never inside `save`. What they say is JSON with a schema. Where
they cannot talk, nothing waits for another rank.
"""

from __future__ import annotations

import functools
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
from tierd.client.launchers import (
    all_here,
    environ_number,
    environment_ranks,
    launch_name,
    rank_and_world,
    torchrun_ranks,
)
from tierd.client.meeting import Meeting
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.ids import check_rank

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
        rank, world_size: both or neither. Not given: as `launchers.rank_and_world` finds them.
        spool: the spool's `.tierd/`, where ranks meet that are all on this node and have no group; None: not there.
        run: which run's ranks they are, where nothing names their launch.
        silent_s: seconds that a rank is waited for which gives no sign of life, or does not come to a restore.

    Raises:
        ConfigError: only one of the two is given, they do not fit each other, or the environment's cannot be used; or
            not every rank makes one.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        spool: Path | None = None,
        run: str = "",
        silent_s: float = SILENT_S,
    ) -> None:
        self._given = rank is not None
        self.rank, self.world = rank_and_world(rank, world_size, _group_ranks)
        self._silent_s, self._first_s = silent_s, _FIRST_S
        board = self._board(spool, run) if self.world > 1 else None
        self._meeting = Meeting(board, self.rank, self.world, self._silent_s) if board else None
        if self._meeting:
            try:
                self._meeting.meet(self._first_s)
            except StoreUnavailable as error:
                raise ConfigError(
                    f"the ranks do not find each other, says rank {self.rank} of {self.world}: {error}. Every rank "
                    "makes a Checkpointer (for one alone: rank=0, world_size=1); where they have no such way to talk, "
                    "give every rank the same attempt= (tierd.new_attempt() makes one), with rank= and world_size="
                ) from error

    def _board(self, spool: Path | None, run: str) -> Board | None:
        """Where these ranks can talk; None if nowhere."""
        me = self.rank, self.world
        if (group := _process_group()) is not None:
            if _group_ranks() != me:
                return None
            store = _default_store(group)
            self._first_s = min(_FIRST_S, store.timeout.total_seconds())
            self._silent_s = min(self._silent_s, self._first_s)
            number = next(_made.setdefault(store, count()))
            return StoreBoard(store, f"{_TAG}/{number}", "the process group's store, which rank 0 hosts")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and torchrun_ranks() == me:
            return StoreBoard(_agent_store(), f"{_TAG}/{next(_meetings)}", "the store of torchrun's agent")
        if spool is not None and _launched() == me and all_here():
            return DirectoryBoard(spool, f"{launch_name() or run}/{next(_meetings)}")
        return None

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

    def close(self) -> None:
        """End the thread by which ranks talk; they still can."""
        if self._meeting is not None:
            self._meeting.close()

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


def _group_ranks() -> tuple[int, int] | None:
    group = _process_group()
    return check_rank(group.get_rank(), group.get_world_size()) if group is not None else None


def _process_group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _launched() -> tuple[int, int] | None:
    """What the environment says, for ranks that may have been given: then it need not make sense."""
    try:
        return environment_ranks()
    except ConfigError:
        return None


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
        return _agent(os.environ.get("MASTER_ADDR", ""), environ_number("MASTER_PORT", 2**16 - 1))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: the store of torchrun's agent cannot be reached: {error}; initialise "
            "torch.distributed first, or pass attempt= (tierd.new_attempt() makes one; give every rank the same)"
        ) from error
