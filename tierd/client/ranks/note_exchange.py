"""Communication between the ranks of a launch: notes on a board, signs of life, and a bound on every wait.

    hello/<rank>          the process that is this rank now (`RankProcess`)
    welcome               by rank 0: the tokens of all ranks, which name the meeting
    gone                  why the meeting cannot begin: a rank has ended; only if no other launch uses the board
    <meeting>/here/<rank>       the rank has read the welcome
    <meeting>/beat/<rank>       a sign of life (`LifeSign`)
    <meeting>/<turn>/<rank>     the rank's message in this exchange; empty once the rank has given up
    <meeting>/<turn>/closing    by rank 0: all messages have arrived; a rank that gives up from now on waits for rank 0
    <meeting>/<turn>/all        by rank 0: all messages, or which ranks did not arrive
    <meeting>/seen/<rank>       the last turn whose end the rank has read; only if rank 0 hosts the board
    <meeting>/notice/...        see client/preemption/agreement.py

Invariant: every rank writes its note before it waits for another rank. A rank is waited for as long as it gives signs
of life. A rank that did not arrive, or gives no sign of life, is waited for a bounded time. All ranks learn which rank
it is. A rank that gives up takes its message back before rank 0 closes the exchange, or not at all; rank 0's answer
then decides for all. An exchange succeeds on some ranks alone only if a rank cannot read that answer: because the board
fails there, or because rank 0 stops between its last look at the others and the answer. Each process measures time by
its own clock, because no result may depend on two clocks.

The module is longer than 300 lines because the signs of life and the exchanges share one thread, one board and one
count of turns.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from tierd.client.client_timings import USUAL_TIMINGS
from tierd.client.ranks.boards import Board
from tierd.client.ranks.rank_processes import (
    QUICK_S,
    LifeSign,
    RankProcess,
    RanksAbsent,
    RankWatch,
    Rendezvous,
    this_process,
)
from tierd.core.errors import StoreUnavailable, TierdError

log = logging.getLogger("tierd")

_MESSAGE_PREFIX = b"+"  # prefix of a rank's message, because an empty note means that the message was taken back
_IDLE_S = 5.0  # how long the thread may be idle before it ends
_LEAVE_S = 5.0  # the longest time that leaving takes
_LIMIT = 1 << 28  # bytes of all messages in one exchange
_exchanges: weakref.WeakSet[NoteExchange] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads before the interpreter: a thread inside a call of torch's store aborts the process then."""
    for exchange in list(_exchanges):
        exchange._end_thread()


class _All(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of an exchange: every rank's message, or why there are none."""

    heard: tuple[bytes, ...] = ()
    why: str = ""


class NoteExchange:
    """One rank's side of the communication between a launch's ranks.

    Every rank makes one at the same places of its program, and calls `exchange` in the same order. One thread makes all
    calls of the board, so that a board that hangs cannot block a caller for ever. After `silent_s` a rank without a
    sign of life counts as gone.
    """

    def __init__(
        self, board: Board, rank: int, world: int, silent_s: float, last_s: float = USUAL_TIMINGS.last_sign_s
    ) -> None:
        self._last_s = last_s
        self._board, self._rank, self._world, self.silent_s = board, rank, world, silent_s
        self._me = this_process()
        self._mates: list[RankProcess] = []
        self.turn = 0  # the number of exchanges in which this rank has taken part
        self._name, self._beats, self._said_count, self._ended_count = "", 0, 0, 0
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # reentrant, because a signal handler that closes may interrupt its holder
        self._thread: threading.Thread | None = None
        self._inside = 0  # the number of open `attending` blocks
        self._moved = self._beaten = time.monotonic()
        _exchanges.add(self)

    def begin(self, late_s: float) -> None:
        """Find the processes that are this launch's ranks now. Notes of earlier processes are ignored.

        Raises `StoreUnavailable` if ranks did not arrive within `late_s`, and names them; or if the board does not
        answer.
        """
        self._run(lambda: self._begin(late_s))

    def exchange(self, message: bytes, late_s: float) -> list[bytes]:
        """Return every rank's message, in order of rank. A rank that is not in an `attending` block gets `late_s`.

        Raises `StoreUnavailable` if another rank did not arrive, is gone, or gives no sign of life; or the board does
        not answer.
        """
        with self.attending():
            messages: list[bytes] = self._run(lambda: self._exchange(message, late_s))
            return messages

    def tell(self, message: bytes, why: str) -> None:
        """Take part in the next exchange without waiting for its end: a caller that is interrupted must not block.

        `why` says what this rank does, for the others if this is rank 0, without which no exchange succeeds.
        """
        self._submit_and_wait(lambda: self._tell(message, why), self._last_s)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Give signs of life during the block: this rank will reach the next exchange, however long that takes."""
        self._inside += 1
        if self._inside == 1:
            self._submit(self._beat)
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._submit_and_wait(self._beat, self._last_s)

    def notes(self) -> tuple[Board, str]:
        """Return a board for another thread, and the prefix of this meeting's keys, which end with the meeting."""
        return self._board.second_connection(), f"{self._name}/"

    def close(self) -> None:
        """Remove this rank's notes from the board, and end the thread. A later call starts another thread.

        If rank 0 hosts the board, rank 0 waits briefly until the others have read its last message.
        """
        if self._name:
            self._submit_and_wait(self._leave, _LEAVE_S)
        self._end_thread()

    def _end_thread(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LEAVE_S)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], object]) -> None:
        with self._lock:
            self._jobs.put(job)
            if self._thread is None:
                thread = self._thread = threading.Thread(target=self._work, name="tierd-ranks", daemon=True)
                thread.start()

    def _submit_and_wait(self, job: Callable[[], object], most_s: float) -> None:
        handled = threading.Event()
        self._submit(job)
        self._submit(handled.set)
        handled.wait(most_s)

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
        """Run `work` in the thread and return or raise its result; raises if the board hangs."""
        finished = threading.Event()
        result: list[tuple[Any, BaseException | None]] = []

        def job() -> None:
            try:
                result.append((work(), None))
            except BaseException as error:
                result.append((None, error))
            finished.set()

        self._submit(job)
        # Seconds are counted, not measured, because this process itself may have been stopped.
        quiet, moved = 0, self._moved
        while not finished.wait(1.0):
            quiet, moved = (quiet + 1 if moved == self._moved else 0), self._moved
            if quiet > self.silent_s:
                raise StoreUnavailable(f"{self._board.description} does not answer")
        value, error = result[0]
        if isinstance(error, RanksAbsent):
            raise StoreUnavailable(str(error)) from None
        if isinstance(error, RuntimeError | OSError | msgspec.MsgspecError | zlib.error | ValueError):
            raise StoreUnavailable(
                f"{self._board.description}: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error
        if error is not None:
            raise error
        return value

    def _leave(self) -> None:
        # The store is gone; notes that remain are swept later.
        with suppress(RuntimeError, OSError, ValueError, TierdError):
            if not self._board.outlives:
                self._await_readers(range(1, self._world) if self.turn else ())
                return
            self._board.remove([f"hello/{self._rank}"])
            self._board.remove([f"{self._name}/beat/{self._rank}"])
            # If two ranks leave at once, at least one sees no signs left.
            if not self._board.holds(f"{self._name}/beat/"):
                self._board.forget(f"{self._name}/")
                self._board.remove(["welcome"])
        self._board.close()

    def _await_readers(self, ranks: Collection[int]) -> None:
        """On rank 0, if the board ends with it: wait until the others have read the end of the last exchange."""
        end_s, pause_s = time.monotonic() + self._last_s, QUICK_S
        while self._rank == 0 and time.monotonic() < end_s:
            progress = self._read(f"seen/{rank}" for rank in ranks)
            if len(progress) == len(ranks) and all(int(number) >= self.turn - 1 for number in progress.values()):
                return
            pause_s = self._pause(pause_s)

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        if not self._name:
            return
        self._beats += 1
        with suppress(RuntimeError, OSError, TierdError):  # the other ranks notice the missing sign of life
            sign = LifeSign(self._beats, bool(self._inside), self._said_count, self._ended_count)
            self._put(f"beat/{self._rank}", msgspec.json.encode(sign))

    def _put(self, key: str, value: bytes) -> None:
        self._board.put(f"{self._name}/{key}", value)
        self._moved = time.monotonic()

    def _get(self, key: str) -> bytes | None:
        return self._read([key]).get(key)

    def _read(self, keys: Iterable[str]) -> dict[str, bytes]:
        names = {f"{self._name}/{key}": key for key in keys}
        notes = self._board.read(names.keys())
        self._moved = time.monotonic()
        return {names[name]: value for name, value in notes.items()}

    def _pause(self, pause_s: float) -> float:
        """Sleep, give a sign of life if one is due, and return the length of the next pause."""
        time.sleep(pause_s)
        self._moved = time.monotonic()
        if self._moved - self._beaten > self._board.beat_s:
            self._beat()
        return min(pause_s * 1.5, self._board.poll_s)

    def _begin(self, late_s: float) -> None:
        me = self._me, self._rank, self._world
        self._mates = Rendezvous(self._board, *me, self.silent_s, self._pause).find(late_s)
        self._name = self._mates[0].token
        self._beat()

    def _exchange(self, message: bytes, late_s: float) -> list[bytes]:
        number = self._say(message)
        answer = self._answer(number, late_s) if self._rank else self._collect(number, late_s)
        if answer.why:
            raise RanksAbsent(answer.why)
        return list(answer.heard)

    def _say(self, message: bytes) -> int:
        number, self.turn = self.turn, self.turn + 1
        self._put(f"{number}/{self._rank}", _MESSAGE_PREFIX + message)
        self._said_count = number + 1
        return number

    def _tell(self, message: bytes, why: str) -> None:
        with suppress(RuntimeError, OSError, TierdError):  # the others then wait for this rank as for one that died
            number = self._say(message)
            if self._rank == 0:
                self._publish(number, _All(why=f"{self.name(0)} {why}"))

    def _publish(self, number: int, answer: _All) -> None:
        # Ranks' messages resemble each other, so all of them together compress to hardly more than one.
        self._put(f"{number}/all", zlib.compress(msgspec.msgpack.encode(answer), 1))
        self._ended_count = number + 1

    def _collect(self, number: int, late_s: float) -> _All:
        """On rank 0: collect all messages and publish them, or publish which ranks did not arrive."""
        heard: dict[int, bytes] = {}
        watch, pause_s, why = RankWatch(self, late_s, lambda sign: sign.said > number), QUICK_S, ""
        while not why and (absent := set(range(self._world)) - heard.keys()):
            heard |= self._read_messages(number, absent)
            why = watch.describe_given_up(set(range(self._world)) - heard.keys()) or self._gave_up(heard)
            pause_s = pause_s if why or len(heard) == self._world else self._pause(pause_s)
        if not why:
            closed = time.monotonic()
            self._put(f"{number}/closing", b"1")
            messages = self._read_messages(number, heard)
            why = self._gave_up({rank: messages.get(rank, b"") for rank in heard})
            if not why and time.monotonic() - closed > self.silent_s / 2:  # after `silent_s` the others give up
                why = f"{self.name(0)} was stopped, or {self._board.description} is slow"
        answer = _All(why=why) if why else _All(tuple(heard[rank][1:] for rank in range(self._world)))
        self._publish(number, answer)
        obsolete = [f"{self._name}/{number}/{suffix}" for suffix in (*heard, "closing")]
        if number and not why:
            # Every rank in this turn has read the previous turn's end.
            obsolete.append(f"{self._name}/{number - 1}/all")
        self._afterwards(lambda: self._board.remove(obsolete))
        if why and not self._board.outlives:  # this process may end now, and the store with it
            self._await_readers(heard.keys() - {0})
        return answer

    def _afterwards(self, work: Callable[[], object]) -> None:
        """Run `work` when the caller has the end of the exchange: its failure must not be this rank's alone."""

        def job() -> None:
            try:
                work()
            except (RuntimeError, OSError, ValueError, TierdError) as error:
                log.debug("notes between ranks, after an exchange: %s", error)

        self._submit(job)

    def _read_messages(self, number: int, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the messages at a turn, by rank; a message is empty once its rank has taken it back."""
        keys = {f"{number}/{rank}": rank for rank in ranks}
        return {keys[key]: message for key, message in self._read(keys).items()}

    def _gave_up(self, heard: Mapping[int, bytes]) -> str:
        """Describe the ranks that took back their messages; empty if none did."""
        withdrawn = "; ".join(
            f"{self.name(rank)} gave up waiting" for rank, message in sorted(heard.items()) if not message
        )
        return withdrawn and f"{withdrawn} for {self.name(0)}"

    def _answer(self, number: int, late_s: float) -> _All:
        """On any other rank: wait for the end of the exchange that rank 0 publishes."""
        watch, pause_s = RankWatch(self, late_s, lambda sign: sign.ended > number), QUICK_S
        why = ""
        while (published := self._get(f"{number}/all")) is None:
            if not why and (why := watch.describe_given_up({0})):
                self._put(f"{number}/{self._rank}", b"")
                if self._get(f"{number}/closing") is None and self._get(f"{number}/all") is None:
                    raise RanksAbsent(why)
                # Rank 0 is about to decide, and may or may not have seen that this rank gave up.
                watch = RankWatch(self, self.silent_s, lambda sign: sign.ended > number)
            elif why and watch.describe_given_up({0}):
                raise RanksAbsent(why)
            pause_s = self._pause(pause_s)
        if not self._board.outlives:
            self._afterwards(lambda: self._put(f"seen/{self._rank}", str(number).encode()))
        return msgspec.msgpack.decode(zlib.decompressobj().decompress(published, _LIMIT), type=_All)

    def signs(self, ranks: Collection[int]) -> dict[int, LifeSign]:
        """Return each rank's last sign of life; one with number 0 if there is none."""
        notes = self._read(f"beat/{rank}" for rank in ranks)
        signs = {rank: notes.get(f"beat/{rank}") for rank in ranks}
        return {rank: msgspec.json.decode(note, type=LifeSign) if note else LifeSign() for rank, note in signs.items()}

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self._mates[rank]})"

    def died(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended. Only known in the same scope."""
        return self._mates[rank].has_ended(self._me.scope)

    @property
    def beat_s(self) -> float:
        return self._board.beat_s
