"""Restore for a trainer: try checkpoints newest first, until every rank has verified one or knows why there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierd.client.ranks.attempts import RankClock, make_rank_clock
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.candidate_trials import CandidateTrials, Skipped
from tierd.client.restoring.other_world import choose_part
from tierd.client.restoring.part_image import PartImage
from tierd.client.restoring.part_reader import LoadedPart
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.ranged_reader import PartFiles
from tierd.client.restoring.saved_entries import read_entries
from tierd.client.restoring.share_exchange import ShareExchange
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.place import SPOOL
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.restore_order import Candidate, own_part
from tierd.core.units import html_table
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Request
from tierd.ipc.messages import RestoreFinished as ReportRestored
from tierd.spool.arena import Arena

log = logging.getLogger("tierd")


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that a restore loaded, and where its bytes came from.

    Attributes:
        step: the checkpoint's step; training continues at `step + 1`.
        attempt: the launch that wrote it.
        tier: where its bytes came from: `"local"`, or the tier that repaired or supplied them; `"memory"` if a trainer
            that was killed had handed the snapshot over to the daemon.
        metrics: the metrics given to `save`.
        skipped: newer checkpoints (or better ones) that were skipped, each with its reason.
        unreached: tiers that did not answer; a newer checkpoint could lie there.
        directory: the verified files, if the restore was one without a state. With a state, the part's directory if the
            spool has it; it has not if the bytes came from a tier, and with `only` not all of its files are verified.
    """

    step: int
    attempt: str
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]
    directory: Path

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        skipped = f", {len(self.skipped)} newer skipped" if self.skipped else ""
        return f"<Restored step {self.step} (attempt {self.attempt}) from {self.tier}{metrics}{skipped}>"

    def _repr_html_(self) -> str:
        rows = [(name, f"{value:.6g}") for name, value in self.metrics.items()]
        rows += [(f"skipped: step {skipped.step}", skipped.reason) for skipped in self.skipped]
        rows.append(("files", str(self.directory)))
        return html_table(f"restored step {self.step} (attempt {self.attempt}) from {self.tier}", ("", ""), rows)


@dataclass(frozen=True, slots=True)
class VerifiedPart:
    """A part of which every byte was just verified, or every byte of the requested entries.

    `tier` is as in `Restored`. In `files`, the bytes of live tensors of `images` are zeros; these tensors have them,
    once all ranks have agreed. `files` also has the tensor files of other ranks in which tensors of this part lie.
    `arena` is the memory that holds the tensor file, if a predecessor left it or the file was read for a device; saves
    use it afterwards. `kept` are entries of which nothing was saved for this rank, so that it keeps its own.
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
    images: Sequence[PartImage]
    clocks: Sequence[RankClock]  # of every rank, to name the attempt that continues from here
    tree: dict[str, Any] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    hold: DaemonConnection | None = None  # closed by the caller when it no longer needs `directory`


class Restorer(CandidateTrials):
    """Find the newest checkpoint that every rank can verify, and read this rank's part of it, or the entries `only`."""

    def __init__(
        self,
        source: NodeSource,
        ranks: Ranks,
        clock: Callable[[], RankClock] = lambda: make_rank_clock(()),
        report: Callable[[Request], None] = lambda request: None,
        only: Collection[str] | None = None,
        fresh: Collection[str] = (),
        replicated: Collection[str] = (),
        node_ranks: Sequence[int] = (),
    ) -> None:
        self._spool, self._keep, self._only = source.spool, source.keep, only
        self._node_ranks = node_ranks
        self._fresh, self._replicated = fresh, replicated
        self.source: NodeSource = source
        is_on_several_nodes = 0 < len(node_ranks) < ranks.world
        can_exchange = source.keep and only is None and is_on_several_nodes and ranks.can_exchange
        super().__init__(source.run, ranks, source, clock, report, can_exchange=can_exchange)

    def restore(
        self,
        step: int | None,
        attempt: str | None,
        build_tree: Callable[[VerifiedPart], dict[str, Any]] = lambda verified: {},
        best: MetricGoal | None = None,
        at_least: int | None = None,
        *,
        equal_replicas: bool = False,
        changing: Callable[[], None] = lambda: None,
    ) -> VerifiedPart | None:
        """Read the checkpoint to resume from, the same on every rank; None if the run has no checkpoint.

        A restore takes two gathers if nothing is wrong. Ranks that cannot talk each choose by the listings of the
        tiers.

        Args:
            build_tree: makes `VerifiedPart.tree`, and raises if the checkpoint does not fit its target; then no rank
                gets it.
            best: try the best checkpoint first.
            equal_replicas: try checkpoints whose ranks hold different replicas last.
            changing: called before the first live tensor receives bytes. If this raises afterwards, live tensors are
                partly new.

        Raises:
            CheckpointNotFound: checkpoints exist, and none could be verified, or not the requested one.
            StoreUnavailable, DaemonUnavailable: a place did not answer, so neither an older checkpoint nor a fresh
                start would be safe; or another rank could not restore. The message says which and why.
            StateMismatch: the checkpoint was written by another number of ranks, or does not fit another rank's state.
            FormatTooNew: the newest checkpoint was written by a newer tierd.
        """
        began = time.monotonic()
        try:
            for candidate in self.candidates(step, attempt, best, at_least, everything=False, only=self._only):
                verified, error, unfit = self._try(candidate, build_tree)
                has_rest = verified is not None and any(image.missing for image in verified.images)
                replicas = verified.manifest.replicas if verified is not None and equal_replicas else {}
                settled = self.settle(candidate, error, unfit=unfit, rest=has_rest, replicas=replicas)
                if settled.has_rest and settled.should_load:
                    verified, error = self._finish(verified, changing)
                    settled = self.settle(candidate, error)
                if settled.should_load:
                    assert verified is not None
                    elapsed_s = time.monotonic() - began
                    self._report(ReportRestored(part=verified.part, place=verified.tier[:64], seconds=elapsed_s))
                    return verified if self._keep else replace(verified, hold=self.source.hand_over())
                del verified, error  # release this memory before the next candidate is read
            return None
        finally:
            self.source.close()

    def _try(
        self, candidate: Candidate, build_tree: Callable[[VerifiedPart], dict[str, Any]]
    ) -> tuple[VerifiedPart | None, Exception | None, bool]:
        try:
            verified = self._obtain(candidate)
            self.check_origin(verified.manifest)
        except Exception as error:  # raised later, because the other ranks must be notified first
            return None, error, isinstance(error, StateMismatch)
        try:
            return replace(verified, tree=build_tree(verified)), None, False
        except Exception as error:
            return None, error, True

    def _finish(
        self, verified: VerifiedPart | None, changing: Callable[[], None]
    ) -> tuple[VerifiedPart | None, Exception | None]:
        """Bring the rest of a part into live tensors, if it has one. Return the part, or the error if that failed."""
        if verified is None or not any(image.missing for image in verified.images):
            return verified, None
        try:
            changing()
            return replace(verified, tier=self.source.finish()), None
        except Exception as error:  # raised later, because the other ranks must be notified first
            return None, error

    def _obtain(self, candidate: Candidate) -> VerifiedPart:
        part, names, kept = own_part(candidate, self._ranks.rank), self._only, frozenset[str]()
        images: Sequence[PartImage] = ()
        with ExitStack() as stack:
            if candidate.world != self._ranks.world:
                if not self._keep:
                    raise StateMismatch(
                        f"{candidate.checkpoint} was saved by {candidate.world} ranks, and this launch has "
                        f"{self._ranks.world}: launch {candidate.world} ranks to restore their directories"
                    )
                part, names, kept = choose_part(
                    self._part_files(candidate, stack),
                    self._ranks.rank,
                    self._ranks.world,
                    self._fresh,
                    self._replicated,
                    names,
                )
            exchanged = self._exchange(candidate, part)
            if exchanged is not None:
                manifest, contents, tier = exchanged
            elif names is None:
                is_like_saved = candidate.world == self._ranks.world
                manifest, contents, tier = self.source.obtain(
                    part, direct=is_like_saved, node_ranks=self._node_ranks if is_like_saved else ()
                )
                images = self.source.images
            else:
                files = self._part_files(candidate, stack)
                manifest, contents = read_entries(files, part, names)
                tier = next(iter(files.tiers), SPOOL)
        return VerifiedPart(
            part,
            manifest,
            contents,
            tier,
            self.skipped(candidate.checkpoint),
            self._spool.path(part),
            self.resume.attempts,
            (*self.resume.unreached, *self.resume.alone),
            self.source.arena,
            images,
            self.agreement.clocks,
            kept=kept,
        )

    def _exchange(self, candidate: Candidate, part: PartId) -> LoadedPart | None:
        """Read the part as `NodeSource.obtain`, together with the other ranks. None: it is to be read alone."""
        if not self.agreement.can_exchange or candidate.world != self._ranks.world:
            return None
        self.source.forget()
        exchange = ShareExchange(self._ranks, self.source, part, min(self._node_ranks))
        contents = exchange.read()
        return None if contents is None else (exchange.manifest, contents, exchange.place)

    def _part_files(self, candidate: Candidate, stack: ExitStack) -> PartFiles:
        source = self.source
        files = PartFiles(self._spool, candidate.checkpoint, candidate.world, source.link, source.alone)
        stack.callback(files.close)
        return files

    def _check_nothing(self, step: int | None, attempt: str | None) -> None:
        super()._check_nothing(step, attempt)
        for skip in self.skipped():
            log.warning("run %s: starting anew, past %s", self._run, skip)
