"""How the ranks of a launch hear each other: notes on a board, signs of life, and an end to every wait.

    hello/<rank>          the process that is this rank now (`Mate`)
    welcome               rank 0's: the tokens of all, which name the meeting
    <meeting>/here/<rank>       it has read the welcome
    <meeting>/beat/<rank>       a counter, and whether the rank is `in` what the others may wait for, or `out`
    <meeting>/<turn>/<rank>     what the rank says at this exchange
    <meeting>/<turn>/all        rank 0's: what all said, or who did not come

Law: every note is written before anybody is waited for. A rank that works is waited for as long as it gives signs of
life; one that did not come, and one that gives none, for a bounded time, and all ranks are told which. Time is each
process's own: nothing hangs on two clocks.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tierd.client.board import Board
from tierd.core.errors import StoreUnavailable, TierdError

_QUICK_S = 0.002  # the first pause between two looks for a note
_PATIENT_S = 1.0  # that a rank is waited for before its signs of life are looked at
_IDLE_S = 5.0  # after which the thread ends
_GRACE_S = 5.0  # more than a rank is waited for, the board may take for one call
_LIMIT = 1 << 28  # bytes of all that is said in one exchange


class Mate(msgspec.Struct, frozen=True):
    """A process that came as a rank.

    Attributes:
        token: made by this process for this meeting.
        host: its name, for messages.
        scope: boot id and pid namespace: who has the same sees its process.
        born: when it started, in clock ticks since boot (proc(5), field 22 of `stat`); None if unknown.
    """

    token: str
    host: str
    scope: str
    pid: int
    born: int | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _All(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of an exchange: what every rank said, or why there is none."""

    heard: tuple[bytes, ...] = ()
    why: str = ""


class _Absent(Exception):
    """Some ranks were waited for in vain."""


class Meeting:
    """One rank's side of what the ranks of a launch tell each other.

    Every rank makes one, at the same places of its program, and calls `exchange` in the same order. All that touches
    the board runs in one thread of its own, so that a board that hangs holds nobody up for ever.

    Args:
        silent_s: seconds after which a rank that gave no sign of life counts as gone.
    """

    def __init__(self, board: Board, rank: int, world: int, silent_s: float) -> None:
        self._board, self._rank, self._world, self._silent_s = board, rank, world, silent_s
        self._me = _this_process()
        self._mates: list[Mate] = []
        self._name, self._turn, self._beats = "", 0, 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inside = 0  # how many `attending` blocks are open
        self._moved = self._beaten = time.monotonic()

    def meet(self, late_s: float) -> None:
        """Find the processes that are this launch's ranks now. What earlier ones have left is not taken for theirs.

        Raises:
            StoreUnavailable: not all came within `late_s` seconds, or the board does not answer; names who did not.
        """
        self._run(lambda: self._meet(late_s))

    def exchange(self, said: bytes, late_s: float) -> list[bytes]:
        """What every rank said, in order.

        Args:
            late_s: seconds that a rank is waited for which lives, and is not in an `attending` block.

        Raises:
            StoreUnavailable: another rank did not come, is gone, or gives no sign of life; or the board is silent.
        """
        with self.attending():
            found: list[bytes] = self._run(lambda: self._exchange(said, late_s))
            return found

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Give signs of life: within, this rank is on its way to the next exchange, however long that takes."""
        self._inside += 1
        self._submit(self._beat)
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._submit(self._beat)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tierd-ranks", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._board.beat_s if self._inside else _IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._inside and self._jobs.empty():
                        self._thread = None
                        return
                job = self._beat
            job()

    def _run(self, work: Callable[[], Any]) -> Any:
        """What `work` gives or raises, in the thread; bounded where the board hangs."""
        ended = threading.Event()
        result: list[tuple[Any, BaseException | None]] = []

        def job() -> None:
            try:
                result.append((work(), None))
            except BaseException as error:
                result.append((None, error))
            ended.set()

        self._submit(job)
        quiet, moved = 0, self._moved  # counted, not timed: this process may have been stopped itself
        while not ended.wait(1.0):
            quiet, moved = (quiet + 1 if moved == self._moved else 0), self._moved
            if quiet > self._silent_s + _GRACE_S:
                raise StoreUnavailable(f"{self._board.what} does not answer")
        value, error = result[0]
        if isinstance(error, _Absent):
            raise StoreUnavailable(str(error)) from None
        if isinstance(error, RuntimeError | OSError | msgspec.MsgspecError | zlib.error | ValueError):
            raise StoreUnavailable(f"{self._board.what}: {error}") from error
        if error is not None:
            raise error
        return value

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        if not self._name:
            return
        self._beats += 1
        with suppress(RuntimeError, OSError, TierdError):  # the others see that there is none
            self._put(f"beat/{self._rank}", f"{self._beats} {'in' if self._inside else 'out'}".encode())

    def _put(self, key: str, value: bytes) -> None:
        self._board.put(f"{self._name}/{key}", value)
        self._moved = time.monotonic()

    def _get(self, key: str) -> bytes | None:
        found = self._board.get(f"{self._name}/{key}")
        self._moved = time.monotonic()
        return found

    def _pause(self, pause_s: float) -> float:
        """Wait, with signs of life; the next pause."""
        time.sleep(pause_s)
        self._moved = time.monotonic()
        if self._moved - self._beaten > self._board.beat_s:
            self._beat()
        return min(pause_s * 1.5, self._board.poll_s)

    # -- finding each other -----------------------------------------------------------------------------------------

    def _meet(self, late_s: float) -> None:
        board, begun, pause_s = self._board, time.monotonic(), _QUICK_S
        board.put(f"hello/{self._rank}", msgspec.json.encode(self._me))
        while True:
            mates = self._hellos() if self._rank == 0 else self._welcome()
            if mates and None not in mates and mates[self._rank] == self._me and self._all_here(mates):
                self._mates = mates
                self._name = mates[0].token
                self._beat()
                return
            if time.monotonic() - begun > late_s:
                missing = [rank for rank, mate in enumerate(mates) if mate is None] if mates else [0]
                who = f"{_listed(missing)} of {self._world} did not come" if missing else "not all saw each other"
                raise _Absent(f"{who} within {late_s:g} s ({board.what})")
            pause_s = self._pause(pause_s)

    def _hellos(self) -> list[Any]:
        """Rank 0's look at who is there, which it tells the others."""
        found = [self._board.get(f"hello/{rank}") for rank in range(self._world)]
        mates = [None if one is None else msgspec.json.decode(one, type=Mate) for one in found]
        if None not in mates:
            self._board.put("welcome", msgspec.json.encode(mates))
        return mates

    def _welcome(self) -> list[Any]:
        found = self._board.get("welcome")
        mates = [] if found is None else msgspec.json.decode(found, type=list[Mate])
        return mates if len(mates) == self._world else []

    def _all_here(self, mates: list[Mate]) -> bool:
        """Whether every rank has seen that it is one of these; says so of this one."""
        meeting = mates[0].token
        if self._rank:
            self._board.put(f"{meeting}/here/{self._rank}", b"1")
            return True
        return all(self._board.get(f"{meeting}/here/{rank}") for rank in range(1, self._world))

    # -- telling each other -----------------------------------------------------------------------------------------

    def _exchange(self, said: bytes, late_s: float) -> list[bytes]:
        turn, self._turn = self._turn, self._turn + 1
        self._put(f"{turn}/{self._rank}", said)
        if self._rank == 0:
            self._collect(turn, late_s)
        found = self._await(f"{turn}/all", late_s)
        unpacker = zlib.decompressobj()
        answer = msgspec.msgpack.decode(unpacker.decompress(found, _LIMIT), type=_All)
        if answer.why:
            raise _Absent(answer.why)
        return list(answer.heard)

    def _collect(self, turn: int, late_s: float) -> None:
        """Rank 0's: gather what all say, and publish it, or who did not come."""
        heard: dict[int, bytes] = {}
        watch, pause_s, why = _Watch(self, late_s), _QUICK_S, ""
        while not why:
            for rank in set(range(self._world)) - heard.keys():
                if (said := self._get(f"{turn}/{rank}")) is not None:
                    heard[rank] = said
            absent = set(range(self._world)) - heard.keys()
            if not absent:
                break
            why = watch.given_up(absent)
            pause_s = pause_s if why else self._pause(pause_s)
        answer = _All(why=why) if why else _All(tuple(heard[rank] for rank in range(self._world)))
        # As what ranks say is much the same, all of it together is hardly longer than one.
        self._put(f"{turn}/all", zlib.compress(msgspec.msgpack.encode(answer), 1))
        for rank in heard:
            self._board.remove(f"{self._name}/{turn}/{rank}")
        if turn and not why:
            self._board.remove(f"{self._name}/{turn - 1}/all")  # whoever is in this turn has read it

    def _await(self, key: str, late_s: float) -> bytes:
        watch, pause_s = _Watch(self, late_s), _QUICK_S
        while (found := self._get(key)) is None:
            if why := watch.given_up({0}):
                raise _Absent(why)
            pause_s = self._pause(pause_s)
        return found

    def sign(self, rank: int) -> str:
        """The last sign of life of a rank: changes with each, and ends with `in` or `out`; empty if there is none."""
        return (self._get(f"beat/{rank}") or b"").decode()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self._mates[rank]})"

    def died(self, rank: int) -> bool:
        """Whether it is known that a rank's process has ended: where this one can see it."""
        mate = self._mates[rank]
        if not mate.scope or mate.scope != self._me.scope:
            return False
        try:
            os.kill(mate.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            return False
        return _born(mate.pid) not in (mate.born, None)

    @property
    def silent_s(self) -> float:
        return self._silent_s

    @property
    def beat_s(self) -> float:
        return self._board.beat_s


class _Watch:
    """For how long some ranks are waited for."""

    def __init__(self, meeting: Meeting, late_s: float) -> None:
        self._meeting, self._late_s = meeting, late_s
        self._begun = self._looked = time.monotonic()
        self._signs: dict[int, tuple[str, float]] = {}  # by rank, the last one, and when it was new

    def given_up(self, ranks: Collection[int]) -> str:
        """Who of `ranks` is not waited for any longer, and why; empty while there is hope for all."""
        now = time.monotonic()
        if now - self._looked < min(_PATIENT_S, self._meeting.beat_s):
            return ""
        self._looked = now
        return "; ".join(why for rank in sorted(ranks) if (why := self._hopeless(rank, now)))

    def _hopeless(self, rank: int, now: float) -> str:
        meeting = self._meeting
        if meeting.died(rank):
            return f"{meeting.name(rank)} has ended"
        sign = meeting.sign(rank)
        if self._signs.get(rank, ("", 0.0))[0] != sign or rank not in self._signs:
            self._signs[rank] = sign, now
        silent_s, waited_s = now - self._signs[rank][1], now - self._begun
        if sign.endswith("in"):
            if silent_s > meeting.silent_s:
                return f"{meeting.name(rank)} has given no sign of life for {silent_s:.0f} s"
        elif waited_s > self._late_s:
            return f"{meeting.name(rank)} did not come within {waited_s:.0f} s"
        return ""


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _this_process() -> Mate:
    pid, scope = os.getpid(), ""
    with suppress(OSError):
        scope = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return Mate(secrets.token_hex(8), socket.gethostname(), scope, pid, _born(pid))


def _born(pid: int) -> int | None:
    """When a process started; -1 once it has ended, and None where that cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
