"""Which checkpoint all ranks read, when each needs bytes of many parts.

Law: ranks end alike: all with the same checkpoint, all with none, or all with an error that says whose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tierd.client.launch import exchange
from tierd.client.restore import Restorer, Skipped
from tierd.core.errors import CheckpointNotFound, CorruptChunk, ManifestError, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId
from tierd.core.resume import Candidate, Resume, not_found
from tierd.link import Link

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer


_MANY = 64  # checkpoints that a rank tells the others, newest first


class Agreement:
    """The line to the node's daemon, and what the ranks agree on over it.

    This class is the one place to replace where ranks agree otherwise on checkpoints whose every part each can have.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        launch = self._launch = checkpointer._launch
        tiers = checkpointer._daemon.tiers
        self._restorer = Restorer(checkpointer._spool, launch.run, launch.rank, launch.world, tiers=tiers)
        self.link: Link | None = self._restorer._connect()
        self.alone = self._restorer._why_alone

    def newest(
        self, step: int | None, attempt: str | None, skipped: Collection[Skipped]
    ) -> tuple[Candidate, Resume] | None:
        """The newest checkpoint that every rank sees whole, but for what was skipped; None on a fresh start.

        Raises:
            CheckpointNotFound: there are some, and none that all ranks see.
            StoreUnavailable, DaemonUnavailable: starting anew would rest on a place that did not answer.
        """
        resume, failure = None, None
        own: list[tuple[CheckpointId, int]] = []
        nothing = ""
        try:
            resume = self._restorer._ask(self.link, step, attempt)
            passed = {(one.attempt, one.step) for one in skipped}
            left = [one for one in resume.candidates if (one.checkpoint.attempt, one.checkpoint.step) not in passed]
            own = [(one.checkpoint, one.world) for one in left[:_MANY]]
            nothing = self._why_nothing(resume, step, bool(own), skipped)
        except Exception as raised:
            failure = raised
        told = exchange((own, nothing, told_of(failure)), self._launch.world) or [(own, nothing, told_of(failure))]
        raise_alike([one for _, _, one in told], failure)
        assert resume is not None
        common = set.intersection(*(set(candidates) for candidates, _, _ in told))
        for checkpoint, world in told[0][0]:
            if (checkpoint, world) in common:
                known = {one.checkpoint: one for one in resume.candidates}
                return known[checkpoint], resume
        for rank, (candidates, why, _) in enumerate(told):
            if candidates or why:
                why = why or "it sees checkpoints that other ranks do not"
                raise CheckpointNotFound(f"run {self._launch.run!r}: no checkpoint for all ranks; rank {rank}: {why}")
        return None

    def _why_nothing(self, resume: Resume, step: int | None, some: bool, skipped: Collection[Skipped]) -> str:
        """Why this rank must not start anew, though it has no candidate; raises where that cannot be known."""
        if step is None and resume.unreached and (resume.incomplete or not some):
            raise StoreUnavailable(
                f"run {self._launch.run!r}: {', '.join(resume.unreached)} did not answer, and may hold what is missing "
                "here"
            )
        if not some and self.alone:
            raise StoreUnavailable(f"run {self._launch.run!r}: no checkpoint in the spool, and {self.alone}")
        if not some and (step is not None or skipped or resume.quarantined or resume.branches):
            return str(not_found(resume, self._launch.run, step, [str(one) for one in skipped]))
        return ""


def told_of(failure: BaseException | None) -> TierdError | None:
    """A failure as other ranks are told it: every `TierdError` can be sent."""
    if failure is None or isinstance(failure, TierdError):
        return failure and type(failure)(str(failure))
    return StoreUnavailable(f"{type(failure).__name__}: {failure}")


def raise_alike(told: list[TierdError | None], own: BaseException | None) -> None:
    """Raise on every rank where one has failed; its own failure on that one."""
    if own is not None:
        raise own
    for rank, failure in enumerate(told):
        if failure is not None:
            raise type(failure)(f"rank {rank}: {failure}")


def corruption(failures: Mapping[int, BaseException | None], world: int) -> str:
    """What was proven corrupt, by these ranks' failures; empty where none failed.

    Raises:
        TierdError: a failure that is no corruption, the same on every rank: nobody steps back for it.
    """
    failed = {rank: error for rank, error in sorted(failures.items()) if error is not None}
    for rank, error in failed.items():
        if not isinstance(error, CorruptChunk | ManifestError):
            told = told_of(error)
            raise (type(told)(f"rank {rank}: {told}") if told and world > 1 else error) from error
    return "; ".join(f"rank {rank}: {error}" if world > 1 else str(error) for rank, error in failed.items())
