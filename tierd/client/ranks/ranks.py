"""This process's rank in its launch, and the communication between the launch's ranks.

Invariant: ranks talk over the store of their process group or of torchrun's agent, through a shared spool, or through a
tier. They never talk by training's collectives, because another thread may run these, and never inside `save`. A
message is JSON with a schema. Ranks that cannot talk never wait for each other.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tierd.client.ranks.boards import Board, DirectoryBoard, StoreBoard
from tierd.client.ranks.launchers import (
    environ_number,
    environment_ranks,
    is_single_node,
    launch_name,
    rank_and_world,
    torchrun_ranks,
)
from tierd.client.ranks.note_exchange import NoteExchange
from tierd.client.ranks.peer_group import PeerGroup, can_exchange
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.ids import check_rank

S = TypeVar("S", bound=msgspec.Struct)

_TAG = "tierd"

START_S = 600.0  # how long to wait for a rank that has not made its `Checkpointer` yet
_BEATS = 3  # missed signs of life on a tier after which a rank counts as gone
SILENT_S = 30.0  # how long to wait for a rank that gives no sign of life, or does not call `restore`

# Number of meetings over each default store.
_exchange_counts: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
# Meetings over the agent's store and in the spool; every rank makes the same ones in the same order.
_boards = count()


class Ranks:
    """This process's rank, the number of ranks, and `gather`, if the ranks can talk.

    Making a `Ranks` is collective if ranks can talk: all of them make one.

    Args:
        rank, world_size: both or neither. If not given, `launchers.rank_and_world` finds them.
        spool: the spool's `.tierd/`, where ranks of one node meet that have no process group; None: not there.
        run: used if the launch has no name.
        silent_s: seconds to wait for a rank that gives no sign of life, or does not call `restore`.
        first_s: seconds to wait for a rank that has not begun. A process group's own timeout applies if it is shorter.
        tier: makes a board on a tier from a launch's name and its number of ranks; returns None without a tier. Called
            if the ranks are on several nodes and cannot talk otherwise.

    Raises:
        ConfigError: as `launchers.rank_and_world`; or some rank makes no `Ranks`.
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        spool: Path | None = None,
        run: str = "",
        silent_s: float = SILENT_S,
        tier: Callable[[str, int], Board | None] | None = None,
        first_s: float = START_S,
    ) -> None:
        self._is_explicit = rank is not None
        self.rank, self.world = rank_and_world(rank, world_size, _group_ranks)
        self._silent_s, self._first_s = silent_s, first_s
        board = self._board(spool, run, tier) if self.world > 1 else None
        self._notes = NoteExchange(board, self.rank, self.world, self._silent_s) if board else None
        if self._notes:
            try:
                self._notes.begin(self._first_s)
            except StoreUnavailable as error:
                raise ConfigError(
                    f"the ranks do not find each other, says rank {self.rank} of {self.world}: {error}. Every rank "
                    "makes a Checkpointer (for one alone: rank=0, world_size=1); where they have no such way to talk, "
                    "give every rank the same attempt= (tierd.new_attempt() makes one), with rank= and world_size="
                ) from error

    def _board(self, spool: Path | None, run: str, tier: Callable[[str, int], Board | None] | None) -> Board | None:
        """Choose where these ranks talk; None if they cannot."""
        me = self.rank, self.world
        if (group := _process_group()) is not None:
            if _group_ranks() != me:
                return None
            store = _default_store(group)
            self._first_s = min(self._first_s, store.timeout.total_seconds())
            self._silent_s = min(self._silent_s, self._first_s)
            number = next(_exchange_counts.setdefault(store, count()))
            label = "the process group's store, which rank 0 hosts"
            return StoreBoard(store, f"{_TAG}/{number}", label, exclusive=not _shares_agent_store())
        if _shares_agent_store() and torchrun_ranks() == me:
            return StoreBoard(_agent_store(), f"{_TAG}/{next(_boards)}", "the store of torchrun's agent")
        if spool is None or _launched() != me:
            return None
        name = launch_name()
        if is_single_node():
            return DirectoryBoard(spool, f"{name or run}/{next(_boards)}")
        # Without a name that all ranks share, this process would wait for ranks that never arrive.
        board = tier(f"{name}/{next(_boards)}", self.world) if tier is not None and name is not None else None
        if board is not None:
            self._silent_s = max(self._silent_s, _BEATS * board.beat_s)
        return board

    @property
    def can_communicate(self) -> bool:
        """Whether `gather` returns every rank's value."""
        return self.world == 1 or self._notes is not None

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Give signs of life during the block, so that other ranks wait for this one however long the block takes.

        If an interrupt such as KeyboardInterrupt ends the block, the others' next `gather` fails, because this rank may
        never call it. An `Exception` is the caller's to report.
        """
        if self._notes is None:
            yield
            return
        with self._notes.attending():
            try:
                yield
            except Exception:
                raise
            except BaseException as error:
                kind = f"an interrupt ({type(error).__name__})"
                self._notes.tell(msgspec.json.encode(_TaggedValue(kind, msgspec.Raw(b"null"))), f"is at {kind}")
                raise

    def gather(self, value: S, *, first: bool = False) -> list[S]:
        """Return every rank's value, in order of rank. A rank that cannot talk gets only its own value.

        With `first`, a rank that is busy is waited for as long as one that has not begun. Raises `StoreUnavailable` if
        another rank is gone, makes another call, or did not answer in time; the message names it.
        """
        if self._notes is None:
            return [value]
        kind = type(value).__name__
        message = msgspec.json.encode(_TaggedValue(kind, msgspec.Raw(msgspec.json.encode(value))))
        try:
            heard = self._notes.exchange(message, self._first_s if first else self._silent_s)
            answers = [msgspec.json.decode(answer, type=_TaggedValue) for answer in heard]
            strays = [f"rank {rank} is at {answer.kind}" for rank, answer in enumerate(answers) if answer.kind != kind]
            if strays:
                raise StoreUnavailable(f"this rank is at {kind}, and {', '.join(strays[:3])}: all make the same calls")
            return [msgspec.json.decode(answer.value, type=type(value)) for answer in answers]
        except (StoreUnavailable, msgspec.MsgspecError) as error:  # the other rank runs another version of tierd
            raise StoreUnavailable(
                f"rank {self.rank} of {self.world}: the other ranks cannot be heard: {error}"
            ) from error

    def notes(self) -> tuple[Board | None, str]:
        """Return a board for another thread, and what the keys of this launch's notes begin with.

        The board is None if there is one rank, or if the ranks cannot talk.
        """
        return (None, "") if self._notes is None else self._notes.notes()

    @property
    def can_exchange(self) -> bool:
        """Whether these ranks can send each other bytes, as far as this one knows."""
        group = _process_group()
        if self._notes is None or group is None or _group_ranks() != (self.rank, self.world):
            return False
        return can_exchange(_default_store(group))

    def peer_group(self, members: Sequence[int]) -> PeerGroup:
        """Return these ranks as a group in which bytes are sent. All of them call this after the same `gather`."""
        assert self._notes is not None
        name = f"{_TAG}/{self._notes.notes()[1]}{self.turn}/{members[0]}"
        return PeerGroup(_default_store(_process_group()), name, members, self.rank)

    @property
    def turn(self) -> int:
        """How many messages this rank has given. It is the same on every rank when a `gather` has succeeded."""
        return 0 if self._notes is None else self._notes.turn

    def close(self) -> None:
        """End the thread by which ranks talk. A later `gather` starts it again."""
        if self._notes is not None:
            self._notes.close()

    def check_group(self) -> None:
        """Raise `ConfigError` if a process group that was initialised later gives this process another rank."""
        if self._is_explicit or (group_ranks := _group_ranks()) in (None, (self.rank, self.world)):
            return
        raise ConfigError(
            f"this Checkpointer was made as rank {self.rank} of {self.world}, and the process group that exists now "
            f"says rank {group_ranks[0]} of {group_ranks[1]}: make it after init_process_group, or give it rank= "
            "and world_size="
        )


def _shares_agent_store() -> bool:
    """Whether torchrun's agent offers its store, which it keeps when it restarts the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _TaggedValue(msgspec.Struct, frozen=True):
    """A rank's value and its type's name, so that ranks in different calls get an error that says so."""

    kind: str
    value: msgspec.Raw


def _group_ranks() -> tuple[int, int] | None:
    group = _process_group()
    return check_rank(group.get_rank(), group.get_world_size()) if group is not None else None


def _process_group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _launched() -> tuple[int, int] | None:
    """Return the environment's numbers; None if they make no sense, because given ones may replace them."""
    try:
        return environment_ranks()
    except ConfigError:
        return None


def _default_store(group: Any) -> Any:
    """Return the store of the default process group; it takes small values by key from any rank.

    Not public. In torch 2.6 to 2.13 it is the store that `init_process_group` was given, or made.
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
