"""The processes that are a launch's ranks: who they are, how they find each other, and how long they are waited for.

They find each other by `hello`, `welcome` and `here` on the board (`note_exchange.py`), and give signs of life.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tierd.client.ranks.boards import Board
from tierd.client.ranks.launchers import environment_ranks, is_single_node, launch_variables
from tierd.core.errors import ConfigError
from tierd.core.units import list_few

if TYPE_CHECKING:
    from tierd.client.ranks.note_exchange import NoteExchange


class RankProcess(msgspec.Struct, frozen=True):
    """A process that joined as a rank."""

    token: str  # a random name that this process made for this meeting
    host: str
    scope: str  # boot id and pid namespace. A process with the same scope can see this process
    pid: int
    born: int | None  # in clock ticks since boot (proc(5), field 22 of `stat`); None if unknown

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_ended(self, scope: str) -> bool:
        if not self.scope or self.scope != scope:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process belongs to another user
            return False
        return _born(self.pid) not in (self.born, None)


def this_process() -> RankProcess:
    pid, scope = os.getpid(), ""
    with suppress(OSError):
        scope = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return RankProcess(secrets.token_hex(8), socket.gethostname(), scope, pid, _born(pid))


class NodeSiblings:
    """The processes of a launch's ranks on this node, also of ranks that have not made their `Checkpointer` yet.

    The kernel shows the environment with which a process was started (proc(5), `environ`), and a launcher writes the
    rank there. So a rank that still imports its modules differs from a rank that has ended. Child processes of a rank
    inherit its environment, so a rank counts as running while one of them runs.

    Invariant: a rank does not count as ended because this process cannot see it, as on another node, or in another
    container. It counts as ended if it was seen before, or if the launcher started all ranks in this process's view.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._name, self._shared = b"", frozenset[bytes]()
        self._expected: set[int] = set()
        self._last: dict[int, tuple[int, int | None]] = {}  # by rank: the last process seen, and when it started
        with suppress(ConfigError):  # the rank was given, and the environment's makes no sense
            variables = launch_variables() if environment_ranks() == (rank, world) else None
            if variables is not None:
                self._name = f"{variables[0]}=".encode()
                self._shared = frozenset(f"{key}={os.environ[key]}".encode() for key in variables[1])
            if is_single_node() and self._launcher_is_visible(rank):
                self._expected = set(range(world))
        # A process may have written its title over its environment; then this launch's processes cannot be recognised.
        if self._rank(os.getpid()) != rank:
            self._expected, self._name = set(), b""

    def ended_ranks(self) -> set[int]:
        if not self._name:
            return set()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        running = {rank: (pid, _born(pid)) for pid in pids if (rank := self._rank(pid)) is not None}
        for rank, (pid, born) in self._last.items():  # it may have written a title over its environment
            if born is not None and _born(pid) == born:
                running.setdefault(rank, (pid, born))
        self._last |= running
        self._expected |= running.keys()
        return self._expected - running.keys()

    def _rank(self, pid: int) -> int | None:
        """Return the rank of a process; None if it has ended, cannot be seen, or is none of this launch's."""
        try:
            fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if not self._name or not self._shared <= set(fields):
            return None
        values = [field.removeprefix(self._name) for field in fields if field.startswith(self._name)]
        return int(values[0]) if values and values[0].isdigit() and len(values[0]) < 8 else None

    def _launcher_is_visible(self, rank: int) -> bool:
        """Whether the process that started this rank is in this process's pid namespace, and so are the other ranks."""
        pid = os.getpid()
        while pid and self._rank(pid) == rank:
            pid = _parent(pid)
        return pid > 0


def _born(pid: int) -> int | None:
    """Return when a process started; -1 if it has ended, None if that cannot be seen."""
    fields = _stat(pid)
    return None if fields is None else -1 if fields[0] in "ZX" else int(fields[19])


def _parent(pid: int) -> int:
    """Return the process that started a process; 0 if it is in another pid namespace, or cannot be seen."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/<pid>/stat` from the third on (proc(5)): state, parent, …"""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return fields if len(fields) > 19 else None


log = logging.getLogger("tierd")

QUICK_S = 0.002  # the first pause between two reads of a note


class RanksAbsent(Exception):
    """Some ranks did not arrive in time."""


class Rendezvous:
    """One rank's search for the other ranks.

    After `silent_s` a warning names the ranks that are missing. It is also how long a rank may have no process on this
    node, because something may start it again. `pause` sleeps, and returns the length of the next pause.
    """

    def __init__(
        self, board: Board, me: RankProcess, rank: int, world: int, silent_s: float, pause: Callable[[float], float]
    ) -> None:
        self._board, self._me, self._rank, self._world = board, me, rank, world
        self._silent_s, self._pause = silent_s, pause
        self._siblings = NodeSiblings(rank, world)
        self._ended_since: dict[int, float] = {}  # by rank: when it was first seen to have no process any more

    def find(self, late_s: float) -> list[RankProcess]:
        """Return the processes that are this launch's ranks now, in order of rank.

        Raises `RanksAbsent` if some ranks did not arrive within `late_s`, or ended before; the message names them.
        """
        board, start_s, pause_s, warned = self._board, time.monotonic(), QUICK_S, False
        hello_s = -math.inf
        while True:
            # Repeated, because a process of an earlier launch that is about to end may overwrite it.
            if time.monotonic() - hello_s > board.beat_s:
                board.put(f"hello/{self._rank}", msgspec.json.encode(self._me))
                hello_s = time.monotonic()
                self._check_ended()
            mates = self._hellos() if self._rank == 0 else self._welcome()
            if mates and None not in mates and mates[self._rank] == self._me and self._have_all_arrived(mates):
                return mates
            waited_s = time.monotonic() - start_s
            if waited_s > late_s:
                raise RanksAbsent(f"{self._missing(mates)} within {late_s:g} s ({board.description})")
            if waited_s > self._silent_s and not warned:
                warned = True
                log.warning("rank %d waits for the others: %s", self._rank, self._missing(mates))
            pause_s = self._pause(pause_s)

    def _check_ended(self) -> None:
        """Raise `RanksAbsent` if some rank has ended. The other nodes' ranks find the reason on the board."""
        board, now = self._board, time.monotonic()
        reason = board.get("gone") if board.exclusive else None
        if reason is not None:
            raise RanksAbsent(reason.decode())
        self._ended_since = {rank: self._ended_since.get(rank, now) for rank in self._siblings.ended_ranks()}
        ended_ranks = sorted(rank for rank, since in self._ended_since.items() if now - since > self._silent_s)
        if not ended_ranks:
            return
        why = (
            f"{_listed(ended_ranks)} of {self._world} ended before all had begun: no such process is left on "
            f"{self._me.host}"
        )
        if board.exclusive:
            board.put("gone", why.encode())
            if self._rank == 0:  # this process may end now, and the store with it
                time.sleep(2 * board.beat_s)
        raise RanksAbsent(why)

    def _missing(self, mates: list[Any]) -> str:
        """Describe the missing ranks. `mates` are the known ranks; empty if rank 0 was not found."""
        if not mates:
            return "rank 0 did not come"
        departed = [
            f"rank {rank} ({mate}) has ended"
            for rank, mate in enumerate(mates)
            if mate and mate.has_ended(self._me.scope)
        ]
        absent = [rank for rank, mate in enumerate(mates) if mate is None]
        if not absent and not departed and self._rank == 0:
            present = self._read_arrived(mates[0].token)
            absent = [rank for rank in range(1, self._world) if rank not in present]
        absent_text = [f"{_listed(absent)} of {self._world} did not come"] if absent else []
        return "; ".join(departed + absent_text) or "not all saw each other"

    def _hellos(self) -> list[Any]:
        """On rank 0: read which ranks are there, and publish them once all are."""
        notes = self._board.read([f"hello/{rank}" for rank in range(self._world)])
        hellos = [notes.get(f"hello/{rank}") for rank in range(self._world)]
        mates = [None if hello is None else msgspec.json.decode(hello, type=RankProcess) for hello in hellos]
        # At each read, because a rank 0 of an earlier launch that is about to end may overwrite it.
        if None not in mates:
            self._board.put("welcome", msgspec.json.encode(mates))
        return mates

    def _welcome(self) -> list[Any]:
        note = self._board.get("welcome")
        mates = [] if note is None else msgspec.json.decode(note, type=list[RankProcess])
        return mates if len(mates) == self._world else []

    def _have_all_arrived(self, mates: list[RankProcess]) -> bool:
        """Whether every rank has seen itself among `mates`. A rank other than 0 notes this for itself."""
        token = mates[0].token
        if self._rank:
            self._board.put(f"{token}/here/{self._rank}", b"1")
            return True
        return len(self._read_arrived(token)) == self._world - 1

    def _read_arrived(self, token: str) -> set[int]:
        keys = {f"{token}/here/{rank}": rank for rank in range(1, self._world)}
        return {keys[key] for key in self._board.read(keys.keys())}


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {list_few(ranks, 10)}"


_PATIENT_S = 1.0  # how long a rank is waited for before its signs of life are read


class LifeSign(msgspec.Struct, frozen=True, array_like=True):
    number: int = 0
    inside: bool = False  # whether the rank is in an `attending` block, where others wait for it
    said: int = 0  # the number of exchanges for which the rank has put its message
    ended: int = 0  # the number of exchanges whose end rank 0 has published


class RankWatch:
    """Decide how long to wait for some ranks.

    `arrived` says whether a rank's sign shows that it has put the awaited note. If that is missing then, another
    process has removed it.
    """

    def __init__(self, exchange: NoteExchange, late_s: float, arrived: Callable[[LifeSign], bool]) -> None:
        self._exchange, self._late_s, self._has_arrived = exchange, late_s, arrived
        self._start_s = self._read = time.monotonic()
        self._signs: dict[int, tuple[LifeSign, float]] = {}  # by rank: the last sign, and when it was first read
        # By rank: when its note was first seen to be missing although the rank had put it.
        self._missing_since: dict[int, float] = {}

    def describe_given_up(self, ranks: Collection[int]) -> str:
        """Describe which of `ranks` are not waited for any longer, and why; empty if all may still arrive."""
        now = time.monotonic()
        if now - self._read < min(_PATIENT_S, self._exchange.beat_s):
            return ""
        self._read = now
        signs = self._exchange.signs(ranks) if ranks else {}
        return "; ".join(why for rank in sorted(ranks) if (why := self._hopeless(rank, signs[rank], now)))

    def _hopeless(self, rank: int, sign: LifeSign, now: float) -> str:
        exchange = self._exchange
        if exchange.died(rank):
            return f"{exchange.name(rank)} has ended"
        if rank not in self._signs or self._signs[rank][0] != sign:
            self._signs[rank] = sign, now
        silent_s, waited_s = now - self._signs[rank][1], now - self._start_s
        if self._has_arrived(sign) and now - self._missing_since.setdefault(rank, now) > exchange.silent_s:
            return f"what {exchange.name(rank)} said is not there any more"
        if sign.inside:
            if silent_s > exchange.silent_s:
                return f"{exchange.name(rank)} has given no sign of life for {silent_s:.0f} s"
        elif waited_s > self._late_s:
            return f"{exchange.name(rank)} did not come within {waited_s:.0f} s"
        return ""
