"""Fetch a run's newest weights, of which only the chunks that differ from the ones that are held.

Invariant: a follower never falls back to older weights, unless a later launch of the trainer went back behind the ones
that it holds. What does not verify is never held.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.core.timeline.launch_chain import is_abandoned
from tierd.core.timeline.restore_order import Candidate
from tierd.daemon.transfer.replicas import Replicas
from tierd.exporting.weight_image import TensorSelection, WeightImage, read_image
from tierd.reading.head_watch import HeadWatch, NewerCheckpoints
from tierd.reading.object_cache import ObjectCache
from tierd.reading.run_on_tiers import RunOnTiers, TierFiles, read_verified

log = logging.getLogger("tierd")

_MANIFEST_S = 10.0  # seconds that a tier may take for its manifest, because another one may have the checkpoint


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A checkpoint's verified weights, with the origins that were known then and the tiers that provided bytes."""

    candidate: Candidate
    image: WeightImage
    origins: Mapping[str, CheckpointId | None]
    tiers: tuple[str, ...]

    @property
    def checkpoint(self) -> CheckpointId:
        return self.candidate.checkpoint


class WeightFeed:
    """The newest weights of a run.

    Attributes:
        newest: the newest that were fetched; None before the first ones.
        problem: why the newest checkpoint on the tiers is not held, for people; empty if it is.
    """

    def __init__(self, tiers: RunOnTiers, selection: TensorSelection, cache: Path | None) -> None:
        self._tiers, self._selection = tiers, selection
        self._objects, self._watch = ObjectCache(cache), HeadWatch(tiers)
        self.newest: HeldWeights | None = None
        self.problem = "no checkpoint was read yet"

    @property
    def fetched_bytes(self) -> int:
        """Bytes of chunks that came from a tier."""
        return self._objects.fetched_bytes

    def fetch_newer(self) -> bool:
        """Fetch the first checkpoint that a restore would take, if it replaces the one that is held.

        Returns whether `newest` changed. Raises as `HeadWatch.find` and `read_image`; the next call then lists.
        """
        try:
            newer = self._watch.find(self.newest.candidate if self.newest else None)
            fetched = self._fetch_first(newer) if newer is not None else None
        except Exception as error:
            self._watch.list_next()
            self._report(str(error))
            raise
        if fetched is not None:
            self.newest = fetched
            self._objects.remove_unused()
        return fetched is not None

    def _fetch_first(self, newer: NewerCheckpoints) -> HeldWeights | None:
        held = self.newest
        problem = "" if newer.candidates else f"run {self._tiers.run!r}: the tiers have no complete checkpoint of it"
        for candidate in newer.candidates:
            checkpoint = candidate.checkpoint
            if held and not (checkpoint > held.checkpoint or is_abandoned(held.checkpoint, newer.origins)):
                if checkpoint < held.checkpoint:
                    problem = problem or f"{held.checkpoint} is not on the tiers any more, and is kept here"
                break
            fetched = self._fetch(candidate, newer.origins)
            if isinstance(fetched, HeldWeights):
                self._report(problem)
                return fetched
            if not newer.is_listed:
                raise StoreUnavailable(f"{checkpoint}: {fetched}")  # a listing shows whether it is there at all
            problem = problem or f"{checkpoint}: {fetched}"
        self._report(problem or next(iter(self._tiers.unreached.values()), ""))
        return None

    def _fetch(self, candidate: Candidate, origins: Mapping[str, CheckpointId | None]) -> HeldWeights | Exception:
        """Fetch one checkpoint; return the reason if it is proven corrupt everywhere. Raises other errors."""
        earlier = self.newest.image if self.newest else WeightImage()
        replicas = partial(Replicas, held=earlier.held_chunk, read_object=self._objects.read, answer_s=_MANIFEST_S)
        files = TierFiles(self._tiers, candidate.checkpoint, candidate.world, origins, replicas)
        read = partial(read_image, files, files.part(0), self._selection, earlier)
        image, error = read_verified(self._tiers, candidate, files, read)
        if image is not None:
            return HeldWeights(candidate, image, origins, files.used_tiers)
        assert error is not None
        if isinstance(error, CorruptChunk | ManifestError):
            return error
        raise error

    def _report(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("live weights: %s", problem)
        self.problem = problem
