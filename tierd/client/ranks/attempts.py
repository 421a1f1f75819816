"""The attempts of a run: a launch's name, which its ranks share, its clock, its claimed steps, and other launches.

Invariants:

- An attempt that is chosen here sorts after every attempt that any rank has seen. Several threads, and a signal handler
  between any two lines, get one name, and each step is one save's. No lock is held, because a thread that a fork does
  not copy could hold it, or the code that a handler interrupts.
- A clock that is set forward during a launch makes no earlier checkpoint of that launch older, because retention would
  delete what was saved minutes before.
- A launch shows that it is alive before it writes its first part. A separate thread looks for other launches of the
  run that save at the same time, so that no save waits. A second process for one rank of a launch is refused.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import ConfigError, StoreUnavailable, TierdError
from tierd.core.ids import PartId, check_attempt, next_attempt
from tierd.core.planning.place import SPOOL
from tierd.core.timeline.concurrent_launches import Rival, concurrency_warning
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.ipc.messages import LaunchesRequest
from tierd.spool.leases import acquire_lease, holds_lease, living_trainers, release_lease
from tierd.spool.spool import Spool

# (process id, control, run, attempt, rank): a forked child has the parent's entries, and is another process.
_saved: set[tuple[int, Path, str, str, int]] = set()


class RankClock(msgspec.Struct, frozen=True):
    """One rank's contribution to a launch's name: its wall clock, 8 random hex digits, and its latest attempt."""

    now_ms: int
    token: str
    latest: str | None


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's message at the beginning: the values that have to be the same on all ranks.

    `error` says why this rank cannot begin. `used`: its spool or a tier has checkpoints of the given attempt. `saved`:
    its process made some. `node`: the id of its spool.
    """

    run: str
    world: int
    given: str | None = None
    options: dict[str, str] = {}
    clock: RankClock | None = None
    used: bool = False
    saved: bool = False
    error: str = ""
    node: str = ""


def report_failure(ranks: Ranks, run: str, error: Exception) -> None:
    """Notify ranks that are about to begin that this rank cannot, because they would wait for it."""
    with suppress(StoreUnavailable):
        ranks.gather(Beginning(run=run, world=ranks.world, error=str(error)), first=True)


def make_rank_clock(attempts: Iterable[str]) -> RankClock:
    return RankClock(time.time_ns() // 1_000_000, secrets.token_hex(4), max(attempts, default=None))


def agreed_attempt_name(attempts: Iterable[str], clocks: Sequence[RankClock]) -> str:
    """Name the attempt by rank 0's clock and token, pushed past every attempt that a rank has seen."""
    latest = [clock.latest for clock in clocks if clock.latest]
    return check_attempt(next_attempt(clocks[0].now_ms, [*attempts, *latest], clocks[0].token))


def new_attempt(seen: Iterable[str] = ()) -> str:
    """Make a launch's name that sorts after every attempt in `seen`. Give the same name to all ranks of the launch."""
    return next_attempt(time.time_ns() // 1_000_000, seen, secrets.token_hex(4))


def record_saved(control: Path, run: str, attempt: str, rank: int) -> None:
    _saved.add((os.getpid(), control, run, attempt, rank))


def has_saved(control: Path, run: str, attempt: str, rank: int) -> bool:
    """Whether this process has saved that rank of that launch, through any `Checkpointer`."""
    return (os.getpid(), control, run, attempt, rank) in _saved


class CurrentAttempt:
    """The saves of a launch between two restores. A restore replaces the whole object, so no save sees a mixture."""

    def __init__(self, name: str | None = None) -> None:
        self._name: dict[None, str] = {} if name is None else {None: name}
        self.claims: dict[int, PartId] = {}  # the part of a save by step; that object itself is the save's claim

    @property
    def name(self) -> str | None:
        """The attempt's name; None before its first use (`name_or_make`)."""
        return self._name.get(None)

    def name_or_make(self, make: Callable[[], str]) -> str:
        """Return the name. The first of several callers that have made one at once decides."""
        return self.name or self._name.setdefault(None, make())  # `setdefault` is atomic

    def renamed(self, name: str | None) -> CurrentAttempt:
        attempt = CurrentAttempt(name)
        attempt.claims = self.claims
        return attempt

    def claim(self, part: PartId) -> bool:
        return self.claims.setdefault(part.checkpoint.step, part) is part

    def release(self, part: PartId) -> None:
        if self.claims.get(part.checkpoint.step) is part:
            del self.claims[part.checkpoint.step]


log = logging.getLogger("tierd")

_FOLLOWED_S = 60.0  # a step forward of at most this many seconds is followed, because each node corrects its clock


class LaunchClock:
    """The wall clock, without steps forward of more than a minute since the launch began. Steps back are followed."""

    def __init__(self) -> None:
        self._base = time.time(), _elapsed_s()
        self._warned = False

    def now(self) -> datetime:
        """Return the time by which a checkpoint that is made now is dated, in UTC."""
        wall, elapsed = time.time(), _elapsed_s()
        expected = self._base[0] + elapsed - self._base[1]
        if wall - expected > _FOLLOWED_S:
            if not self._warned:
                self._warned = True
                log.warning(
                    "this node's clock was set %.0f s forward during this launch: its checkpoints are dated by the "
                    "time that passes, because keep_within would delete earlier ones; the next launch follows the "
                    "clock",
                    wall - expected,
                )
            wall = expected
        self._base = wall, elapsed
        return datetime.fromtimestamp(wall, UTC)


def _elapsed_s() -> float:
    # It also counts while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_EVERY_S = 1.0  # between two checks of the locks on this node, which are a directory of a few files
_ANSWER_S = 5.0


class ConcurrentLaunchWarning:
    """Show that this trainer is alive, and log each other launch once.

    If `asks`, a daemon, which observes other nodes' checkpoints, is asked every `ask_s` seconds.
    """

    def __init__(self, spool: Spool, *, asks: bool, ask_s: float) -> None:
        self._spool, self._asks, self._ask_s = spool, asks, ask_s
        self._part: PartId | None = None  # a part of the launch that is shown as alive
        self._unseen: str | None = None  # the launch for which a failure to show it was logged
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned_launches: set[str] = set()  # launches that were already warned of

    def saving(self, part: PartId) -> None:
        """Show this launch as alive before it saves `part`: at its first save, and if another Checkpointer of this
        process has saved this rank since.

        Raises `ConfigError` if another process saves this rank of this attempt, because both would write one timeline.
        """
        former, self._part = self._part, part
        lease_held = former is not None and holds_lease(self._spool.control, former, self)
        if lease_held and former and former.checkpoint.attempt == part.checkpoint.attempt:
            return
        try:
            twin = acquire_lease(self._spool.control, part, self, among=former is not None and not lease_held)
        except (TierdError, OSError) as error:
            self._part = None  # the next save tries again
            if isinstance(error, ConfigError):
                raise
            if self._unseen != part.checkpoint.attempt:
                log.warning("other launches do not see yet that this one saves: %s", error)
            self._unseen = part.checkpoint.attempt
            return
        if self._closed.is_set():  # closed by a signal handler, or by another thread, before the lease was taken
            release_lease(self._spool.control, part, self)
        if twin:
            log.warning(
                "two Checkpointers of this process save rank %d of attempt %s of run %s in turns, so that one timeline "
                "holds checkpoints of both: close() one",
                part.rank,
                part.checkpoint.attempt,
                part.checkpoint.run,
            )
        self._list(part)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="tierd-launches", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread could be started, or the interpreter is ending
                pass

    def close(self) -> None:
        self._closed.set()
        if self._part:
            release_lease(self._spool.control, self._part, self)

    def _run(self) -> None:
        ask_s = time.monotonic() + _EVERY_S
        while not self._closed.wait(_EVERY_S):
            part = self._part
            if part is None or not holds_lease(self._spool.control, part, self):
                return  # another Checkpointer of this process saves this rank
            self._list(part)
            if self._asks and time.monotonic() >= ask_s:
                self._ask(part)
                ask_s = time.monotonic() + self._ask_s

    def _list(self, part: PartId) -> None:
        run, own_launch = part.checkpoint.run, (part.checkpoint.attempt, part.world)
        try:
            running = living_trainers(self._spool.control, [run]).get(run, ())
        except OSError as error:
            log.debug("spool %s: %s", self._spool.root, error)
            return
        for trainer in running:
            if (
                trainer.rank == part.rank
                and (trainer.attempt, trainer.world) != own_launch
                and trainer.attempt not in self._warned_launches
            ):
                self._warned_launches.add(trainer.attempt)
                who = f"process {trainer.pid}" if trainer.pid != os.getpid() else "another Checkpointer of this process"
                if trainer.attempt == own_launch[0]:
                    who += f", as rank {trainer.rank} of {trainer.world}"
                log.warning(
                    "another launch of run %s saves at the same time on this node: attempt %s, %s; this one is "
                    "attempt %s. A resume goes on from the later one alone: stop the other",
                    run,
                    trainer.attempt,
                    who,
                    own_launch[0],
                )

    def _ask(self, part: PartId) -> None:
        try:
            with DaemonConnection(self._spool) as link:
                rivals = read_member(
                    link.ask(LaunchesRequest(run=part.checkpoint.run), _ANSWER_S), "launches", list[Rival]
                )
        except (TierdError, TimeoutError, OSError) as error:
            log.debug("the daemon was not asked for other launches: %s", error)
            return
        if fresh := {rival.attempt for rival in rivals if rival.place != SPOOL} - self._warned_launches:
            self._warned_launches |= fresh
            log.warning("%s", concurrency_warning(rivals))
