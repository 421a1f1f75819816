"""What this node's trainers and commands ask of the daemon: who is attached, what is held, and what is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from tierd.core.ids import CheckpointId, PartId
from tierd.daemon.presence import TrainerActivity


class ClientRequests:
    """The requests under way, and the trainers on this node.

    Attributes:
        writers: returns `PartId.writer` of each rank that will write again.
        attended: returns whether a trainer is attached.
        presence: the attached trainers, by run.
        held: the checkpoints that are being restored, so that nothing of them is deleted.
        needed: the checkpoints for which a restore on another node waits.
        awaited: the parts whose flush a caller awaits.
        interest: the runs that a client asked for, in addition to those in the spool.
    """

    def __init__(self) -> None:
        self.writers: Callable[[], frozenset[str]] = frozenset
        self.attended: Callable[[], bool] = lambda: True
        self.presence = TrainerActivity()
        self.held: Counter[CheckpointId] = Counter()
        self.needed: Counter[CheckpointId] = Counter()
        self.awaited: Counter[PartId] = Counter()
        self.interest: set[str] = set()
        self._asking: Counter[str] = Counter()  # requests per run that are being answered; a tier may take long

    @contextmanager
    def asking(self, run: str | None) -> Iterator[None]:
        """Count a request about a run while it is answered. So the run is observed; None asks for the spool's runs."""
        if run is None:
            yield
            return
        self.interest.add(run)
        self.presence.asked(run)
        self._asking[run] += 1
        try:
            yield
        finally:
            self._asking -= Counter([run])

    @contextmanager
    def waiting(self, part: PartId, *, needed: bool) -> Iterator[None]:
        """Count a caller that awaits the flush of a part; `needed` if a restore on another node waits for it."""
        self.needed.update([part.checkpoint] * needed)
        self.awaited[part] += 1
        try:
            yield
        finally:
            self.needed -= Counter([part.checkpoint] * needed)
            self.awaited -= Counter([part])

    def is_trained(self, run: str) -> bool:
        """Whether an attached trainer saves a run, or may."""
        return not self.presence.trainerless([run], self.writers())

    def lose_interest(self, in_spool: Collection[str], after_s: float) -> None:
        """Forget runs that are not in the spool (`in_spool`) and for which nobody asked for `after_s` seconds."""
        unheld = dict.fromkeys(self.interest.difference(in_spool) - self._asking.keys())
        self.interest -= self.presence.quiet(unheld, self.writers(), after_s)
