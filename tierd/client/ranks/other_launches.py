"""Warn of other launches of the run that save at the same time, and refuse a second process for one rank of a launch.

Invariant: a launch shows that it is alive before it writes its first part. A separate thread looks for other launches,
so that no save waits. If the spool or the daemon does not answer, it is asked again.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from tierd.core.errors import ConfigError, TierdError
from tierd.core.ids import PartId
from tierd.core.planning.place import SPOOL
from tierd.core.timeline.launches import Rival, warning
from tierd.ipc.client import Link
from tierd.ipc.messages import Launches
from tierd.ipc.replies import read_member
from tierd.spool.leases import hold, holds, release, trainers
from tierd.spool.spool import Spool

log = logging.getLogger("tierd")

_EVERY_S = 1.0  # between two checks of the locks on this node, which are a directory of a few files
_ANSWER_S = 5.0


class ConcurrentLaunchWarning:
    """Show that this trainer is alive, and log each other launch once.

    Args:
        asks: whether a daemon is expected.
        ask_s: seconds between two questions to the daemon, which observes other nodes' checkpoints.
    """

    def __init__(self, spool: Spool, *, asks: bool, ask_s: float) -> None:
        self._spool, self._asks, self._ask_s = spool, asks, ask_s
        self._part: PartId | None = None  # a part of the launch that is shown as alive
        self._unseen: str | None = None  # the launch for which a failure to show it was logged
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned_launches: set[str] = set()  # launches that were already warned of

    def saving(self, part: PartId) -> None:
        """Show this launch as alive before it saves `part`. Acts at the first save of a launch, and if another
        Checkpointer of this process has saved this rank since.

        Raises:
            ConfigError: another process saves this rank of this attempt, so both would write one timeline.
        """
        former, self._part = self._part, part
        lease_held = former is not None and holds(self._spool.control, former, self)
        if lease_held and former and former.checkpoint.attempt == part.checkpoint.attempt:
            return
        try:
            twin = hold(self._spool.control, part, self, among=former is not None and not lease_held)
        except (TierdError, OSError) as error:
            self._part = None  # the next save tries again
            if isinstance(error, ConfigError):
                raise
            if self._unseen != part.checkpoint.attempt:
                log.warning("other launches do not see yet that this one saves: %s", error)
            self._unseen = part.checkpoint.attempt
            return
        if self._closed.is_set():  # closed by a signal handler, or by another thread, before the lease was taken
            release(self._spool.control, part, self)
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
        """Stop showing this launch as alive."""
        self._closed.set()
        if self._part:
            release(self._spool.control, self._part, self)

    def _run(self) -> None:
        ask_s = time.monotonic() + _EVERY_S
        while not self._closed.wait(_EVERY_S):
            part = self._part
            if part is None or not holds(self._spool.control, part, self):
                return  # another Checkpointer of this process saves this rank
            self._list(part)
            if self._asks and time.monotonic() >= ask_s:
                self._ask(part)
                ask_s = time.monotonic() + self._ask_s

    def _list(self, part: PartId) -> None:
        run, own_launch = part.checkpoint.run, (part.checkpoint.attempt, part.world)
        try:
            running = trainers(self._spool.control, [run]).get(run, ())
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
            with Link(self._spool) as link:
                rivals = read_member(link.ask(Launches(run=part.checkpoint.run), _ANSWER_S), "launches", list[Rival])
        except (TierdError, TimeoutError, OSError) as error:
            log.debug("the daemon was not asked for other launches: %s", error)
            return
        if fresh := {rival.attempt for rival in rivals if rival.place != SPOOL} - self._warned_launches:
            self._warned_launches |= fresh
            log.warning("%s", warning(rivals))
