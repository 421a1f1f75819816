"""How the ranks of a launch hear each other: notes on a board, signs of life, and an end to every wait.

    hello/<rank>          the process that is this rank now (`Mate`)
    welcome               rank 0's: the tokens of all, which name the meeting
    <meeting>/here/<rank>       it has read the welcome
    <meeting>/beat/<rank>       a counter, and whether the rank is `in` what the others may wait for, or `out`
    <meeting>/<turn>/<rank>     what the rank says at this exchange; empty once it has given up
    <meeting>/<turn>/closing    rank 0's: all were heard, and who gives up from now on waits for what it decides
    <meeting>/<turn>/all        rank 0's: what all said, or who did not come

Law: every note is written before anybody is waited for. A rank that works is waited for as long as it gives signs of
life; one that did not come, and one that gives none, for a bounded time, and all ranks are told which. No exchange
succeeds on some ranks alone: who gives up takes back what it said, before rank 0 closes it or not at all. Time is each
process's own: nothing hangs on two clocks.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tierd.client.board import Board
from tierd.core.errors import StoreUnavailable, TierdError

log = logging.getLogger("tierd")

_SAID = b"+"  # before what a rank says: what is empty was taken back
_QUICK_S = 0.002  # the first pause between two looks for a note
_PATIENT_S = 1.0  # that a rank is waited for before its signs of life are looked at
_IDLE_S = 5.0  # after which the thread ends
_LAST_S = 2.0  # that the last sign of life is waited for, so that no call of the board meets the interpreter's end
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
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
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
                done = threading.Event()
                self._submit(self._beat)
                self._submit(done.set)
                done.wait(_LAST_S)

    def close(self) -> None:
        """End the thread. Whoever uses this again begins another one."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)
                self._thread = None

    # -- the thread -------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], object]) -> None:
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
            if job is None:
                return
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
            if quiet > self._silent_s:
                raise StoreUnavailable(f"{self._board.what} does not answer")
        value, error = result[0]
        if isinstance(error, _Absent):
            raise StoreUnavailable(str(error)) from None
        if isinstance(error, RuntimeError | OSError | msgspec.MsgspecError | zlib.error | ValueError):
            raise StoreUnavailable(
                f"{self._board.what}: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error
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
        board, begun, pause_s, told = self._board, time.monotonic(), _QUICK_S, False
        board.put(f"hello/{self._rank}", msgspec.json.encode(self._me))
        while True:
            mates = self._hellos() if self._rank == 0 else self._welcome()
            if mates and None not in mates and mates[self._rank] == self._me and self._all_here(mates):
                self._mates = mates
                self._name = mates[0].token
                self._beat()
                return
            waited_s = time.monotonic() - begun
            if waited_s > late_s:
                raise _Absent(f"{self._missing(mates)} within {late_s:g} s ({board.what})")
            if waited_s > self._silent_s and not told:
                told = True
                log.warning("rank %d waits for the others: %s", self._rank, self._missing(mates))
            pause_s = self._pause(pause_s)

    def _missing(self, mates: list[Any]) -> str:
        """Who is not there, for people. `mates`: as far as they are known; empty where rank 0 is not heard."""
        if not mates:
            return "rank 0 did not come"
        gone = [f"rank {rank} ({mate}) has ended" for rank, mate in enumerate(mates) if mate and self._is_dead(mate)]
        absent = [rank for rank, mate in enumerate(mates) if mate is None]
        if not absent and not gone and self._rank == 0:
            absent = [r for r in range(1, self._world) if not self._board.get(f"{mates[0].token}/here/{r}")]
        absent_text = [f"{_listed(absent)} of {self._world} did not come"] if absent else []
        return "; ".join(gone + absent_text) or "not all saw each other"

    def _hellos(self) -> list[Any]:
        """Rank 0's look at who is there, which it tells the others."""
        found = [self._board.get(f"hello/{rank}") for rank in range(self._world)]
        mates = [None if one is None else msgspec.json.decode(one, type=Mate) for one in found]
        if None not in mates:  # at each look, because a rank 0 that is about to die may write over it
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
        self._put(f"{turn}/{self._rank}", _SAID + said)
        if self._rank == 0:
            self._collect(turn, late_s)
        found = self._answer(turn, late_s)
        unpacker = zlib.decompressobj()
        answer = msgspec.msgpack.decode(unpacker.decompress(found, _LIMIT), type=_All)
        if answer.why:
            raise _Absent(answer.why)
        return list(answer.heard)

    def _collect(self, turn: int, late_s: float) -> None:
        """Rank 0's: gather what all say, and publish it, or who did not come."""
        heard: dict[int, bytes] = {}
        watch, pause_s, why = _Watch(self, late_s), _QUICK_S, ""
        while not why and (absent := set(range(self._world)) - heard.keys()):
            for rank in absent:
                if (said := self._get(f"{turn}/{rank}")) is not None:
                    heard[rank] = said
            why = watch.given_up(set(range(self._world)) - heard.keys()) or self._gave_up(heard)
            pause_s = pause_s if why or len(heard) == self._world else self._pause(pause_s)
        if not why:
            self._put(f"{turn}/closing", b"1")
            why = self._gave_up({rank: self._get(f"{turn}/{rank}") or b"" for rank in heard})
        answer = _All(why=why) if why else _All(tuple(heard[rank][1:] for rank in range(self._world)))
        # As what ranks say is much the same, all of it together is hardly longer than one.
        self._put(f"{turn}/all", zlib.compress(msgspec.msgpack.encode(answer), 1))
        for what in (*heard, "closing"):
            self._board.remove(f"{self._name}/{turn}/{what}")
        if turn and not why:
            self._board.remove(f"{self._name}/{turn - 1}/all")  # whoever is in this turn has read it

    def _gave_up(self, heard: Mapping[int, bytes]) -> str:
        """Which ranks waited in vain for this one, and took back what they had said; empty if none did."""
        gone = "; ".join(f"{self.name(rank)} gave up waiting" for rank, said in sorted(heard.items()) if not said)
        return gone and f"{gone} for {self.name(0)}"

    def _answer(self, turn: int, late_s: float) -> bytes:
        """What rank 0 publishes."""
        watch, pause_s = _Watch(self, late_s), _QUICK_S
        why = ""
        while (found := self._get(f"{turn}/all")) is None:
            if not why and (why := watch.given_up({0})):
                self._put(f"{turn}/{self._rank}", b"")
                if self._get(f"{turn}/closing") is None and self._get(f"{turn}/all") is None:
                    raise _Absent(why)
                watch = _Watch(self, self._silent_s)  # it is about to decide, and has seen that or not
            elif why and watch.given_up({0}):
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
        return self._is_dead(self._mates[rank])

    def _is_dead(self, mate: Mate) -> bool:
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
