"""The way back for a trainer: candidates newest first, one that every rank has verified, or a reason that every rank is
told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierd.arena import Arena
from tierd.client.entries import read_entries
from tierd.client.files import Files
from tierd.client.handoff import HandOff
from tierd.client.launch import Clock, clock
from tierd.client.ranks import Ranks
from tierd.client.search import Search, Skipped
from tierd.client.source import Part, Source
from tierd.core.choose import Goal
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.core.resume import Candidate, own_part
from tierd.core.wire import Request
from tierd.core.world import SPOOL
from tierd.link import Link
from tierd.spool import Spool

log = logging.getLogger("tierd")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step; training goes on at `step + 1`.
        attempt: the launch that wrote it.
        tier: where its bytes came from: `"local"`, or the tier that healed or supplied them; `"memory"` when a trainer
            that was killed had left them in the daemon's hands.
        metrics: as given to `save`.
        skipped: newer checkpoints (or better ones) that were passed over, each with its reason.
        unreached: tiers that did not answer; a newer checkpoint could lie there.
        directory: the verified files; with `only`, where they are if the spool has them, and not all of them verified.
    """

    step: int
    attempt: str
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]
    directory: Path


@dataclass(frozen=True, slots=True)
class Found:
    """A part whose every byte was verified just now, or every one of some entries.

    `tier` is where bytes came from: as `Restored.tier`. `arena`: the memory that `files` lie in when a predecessor left
    them there; it will be used for saves.
    """

    part: PartId
    manifest: Manifest
    files: Mapping[str, memoryview]
    tier: str
    skipped: tuple[Skipped, ...]
    directory: Path
    attempts: tuple[str, ...]
    unreached: tuple[str, ...]
    arena: Arena | None
    clocks: Sequence[Clock]  # every rank's, to name what goes on from here
    tree: dict[str, Any] = field(default_factory=dict)
    hold: Link | None = None  # to be closed by whoever is done with `directory`


class Restorer(Search):
    """Finds the newest checkpoint that every rank can have verified, and this rank's part of it.

    Args:
        tiers, line, keep, metrics, silent: as `Source` has them.
        clock, tell: as `Search` has them.
        only: these entries of a state, and no byte of others.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        ranks: Ranks,
        *,
        tiers: bool,
        line: HandOff | None = None,
        keep: bool = True,
        clock: Callable[[], Clock] = lambda: clock(()),
        tell: Callable[[Request], None] = lambda request: None,
        metrics: tuple[str, ...] = (),
        only: Collection[str] | None = None,
        silent: str = "",
    ) -> None:
        self._spool, self._keep, self._only = spool, keep, only
        self.source: Source = Source(spool, run, tiers=tiers, line=line, keep=keep, metrics=metrics, silent=silent)
        super().__init__(run, ranks, self.source, clock, tell)

    def restore(
        self,
        step: int | None,
        attempt: str | None,
        fits: Callable[[Found], dict[str, Any]] = lambda found: {},
        best: Goal | None = None,
        at_least: int | None = None,
    ) -> Found | None:
        """Read the checkpoint to resume from, the same on every rank; None when the run has none at all.

        Two gathers, where nothing is wrong. Ranks that cannot talk each find their own by what the tiers show.

        Args:
            fits: makes `Found.tree`, and raises where that does not fit what it is wanted for; then no rank gets it.
            best: the best comes first, by rank 0's manifests, whose `metrics` have to be looked at.

        Raises:
            CheckpointNotFound: there are some, and none could be verified, or not the one asked for.
            StoreUnavailable, DaemonUnavailable: stepping back, or starting anew, would rest on a place that did not
                answer, or another rank could not restore; says which and why.
            StateMismatch: it was written by another number of ranks, or does not fit another rank's state.
            FormatTooNew: the newest was written by a newer tierd.
        """
        try:
            for candidate in self.candidates(
                step, attempt, everything=False, best=best, at_least=at_least, only=self._only
            ):
                self._check_world(candidate)
                found, error, unfit = self._try(candidate, fits)
                if self.settle(candidate, error, unfit=unfit).load:
                    assert found is not None
                    return found if self._keep else replace(found, hold=self.source.hand_over())
                del found, error  # memory, before the next one is read
            return None
        finally:
            self.source.close()

    def _check_world(self, candidate: Candidate) -> None:
        if candidate.world != self._ranks.world:
            raise StateMismatch(
                f"{candidate.checkpoint} was saved by {candidate.world} ranks, and this launch has "
                f"{self._ranks.world}: launch {candidate.world} ranks; or, if its state was saved through "
                "torch.distributed.checkpoint, load it by tierd.dcp, which reshards; "
                f"or, to read one rank's part in one process: tierd.open(url, {self._run!r}).restore(state, rank=0)"
            )

    def _try(
        self, candidate: Candidate, fits: Callable[[Found], dict[str, Any]]
    ) -> tuple[Found | None, Exception | None, bool]:
        part = own_part(candidate, self._ranks.rank)
        try:
            manifest, files, tier = self.source.obtain(part) if self._only is None else self._some(part, self._only)
            self.check_origin(manifest)
            found = Found(
                part,
                manifest,
                files,
                tier,
                self.skipped(candidate.checkpoint),
                self._spool.path(part),
                self.resume.attempts,
                (*self.resume.unreached, *self.resume.alone),
                self.source.arena,
                self.agreement.clocks,
            )
        except Exception as error:  # the others are told before it is raised
            return None, error, isinstance(error, StateMismatch)
        try:
            return replace(found, tree=fits(found)), None, False
        except Exception as error:
            return None, error, True

    def _some(self, part: PartId, names: Collection[str]) -> Part:
        files = Files(self._spool, part.checkpoint, part.world, self.source.link, self.source.alone)
        try:
            manifest, found = read_entries(files, part, names)
        finally:
            files.close()
        return manifest, found, next(iter(files.tiers), SPOOL)

    def _check_nothing(self, step: int | None, attempt: str | None) -> None:
        super()._check_nothing(step, attempt)
        for one in self.skipped():
            log.warning("run %s: starting anew, past %s", self._run, one)
