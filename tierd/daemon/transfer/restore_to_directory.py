"""Tier -> any directory, for `tierd restore`: without spool, daemon or configuration.

Invariant: the order is that of every restore: newest first down the timeline, and proven-bad checkpoints are skipped
and named. Everything in the final directory was verified. Until then the files are in a directory next to it, under a
name that the next attempt finds. The next attempt keeps the chunks of an interrupted one whose digests are right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, SpoolFull, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import MANIFEST_NAME, Manifest
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.launch_chain import check_origin
from tierd.core.timeline.restore_order import (
    INCOMPLETE,
    QUARANTINED,
    UNKNOWN_METRIC,
    UNPROVEN,
    Candidate,
    RestoreOrder,
    not_found_error,
    restore_candidates,
)
from tierd.daemon.concurrency import MemoryBudget, thread_uncancelled
from tierd.daemon.tiers.tier_objects import has_all_manifests
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.transfer.download import Progress, Twins, download, missing_bytes
from tierd.daemon.transfer.local_files import (
    check_restore_target,
    locked_partial,
    partial_path,
    publish_directory,
    remove_all_but,
)
from tierd.daemon.transfer.replicas import Replicas
from tierd.spool.file_io import sync_directory, write_file
from tierd.spool.spool_access import is_disk_full, space_remedy
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

PRUNED_REASON = "pruned while it was read"
_LISTINGS = 3  # listings of the tiers, because a checkpoint may be pruned between a listing and the reading


@dataclass(frozen=True, slots=True)
class RestoredDirectory:
    """A checkpoint that was restored into a directory.

    Attributes:
        directories: one directory for each rank.
        tiers: the tiers from which its bytes came.
        skipped: newer checkpoints that could not be used, and why.
    """

    run: str
    step: int
    attempt: str
    directories: tuple[str, ...]
    size: int
    tiers: tuple[str, ...]
    skipped: tuple[str, ...]


async def restore_to_directory(
    stores: Mapping[str, Store],
    run: str,
    target: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    budget: MemoryBudget | None = None,
    best: MetricGoal | None = None,
    rank: int | None = None,
    accept: Callable[[Manifest], None] = lambda manifest: None,
) -> RestoredDirectory:
    """Restore every rank's files of the newest verified checkpoint, or of the best one, into a directory.

    Args:
        target: the directory, which must be empty or absent.
        accept: called with each manifest before any file is fetched; it may raise `ConfigError`.

    Raises:
        CheckpointNotFound: no checkpoint could be verified, or the requested one could not.
        StoreUnavailable: a tier did not answer, so that a newer or a right copy may be there; or checkpoints vanished
            repeatedly while they were read.
        SpoolFull: the disk lacks space.
        ConfigError: `target` is not usable, or another restore to it is running; or the checkpoint has no such rank.
    """
    target = check_restore_target(target)
    work = _Export(stores, run, target, progress, budget or MemoryBudget(), rank, accept)
    resume, pruned = await work.observe(step, attempt, best), list[str]()
    with _translated_disk_errors(target), locked_partial(partial_path(target)) as home:
        for _ in range(_LISTINGS):
            exported = await work.first(resume, home, step, pruned)
            if exported:
                return exported
            resume = await work.observe(step, attempt, best)
    raise StoreUnavailable(
        f"run {run!r}: what was to be restored vanished while it was read, {_LISTINGS} times; try again"
    )


async def restore_candidate(
    stores: Mapping[str, Store], candidate: Candidate, target: Path, progress: Progress, budget: MemoryBudget
) -> RestoredDirectory:
    """Restore one known checkpoint, as `restore_to_directory` does, without a listing of the tiers.

    Raises:
        CorruptChunk: the checkpoint is proven corrupt, or was pruned.
        ManifestError: its parts do not belong together.
        StoreUnavailable, SpoolFull, ConfigError: as `restore_to_directory`.
    """
    target = check_restore_target(target)
    work = _Export(stores, candidate.checkpoint.run, target, progress, budget, None)
    with _translated_disk_errors(target), locked_partial(partial_path(target)) as home:
        return await work.one(candidate, home, (), {})


@contextmanager
def _translated_disk_errors(target: Path) -> Iterator[None]:
    """Convert an error of a full disk into `SpoolFull`, of a file's size into `ConfigError`; other errors pass."""
    try:
        yield
    except OSError as error:
        way_out = space_remedy(error, "there", target.parent)
        if not way_out:
            raise
        kind = SpoolFull if is_disk_full(error) else ConfigError
        raise kind(f"{target}: {error.strerror}{way_out}; then run the same command again") from error


def _unusable(resume: RestoreOrder, step: int | None) -> dict[CheckpointId, str]:
    """Return what would have been taken as this step, and is not whole, with the reason."""
    first = resume.candidates[0].checkpoint if resume.candidates else None
    reasons = dict.fromkeys(resume.incomplete, INCOMPLETE) | dict.fromkeys(resume.quarantined, QUARANTINED)
    reasons |= dict.fromkeys(resume.unproven, UNPROVEN)
    return {
        checkpoint: why
        for checkpoint, why in reasons.items()
        if checkpoint.step == step and (first is None or checkpoint > first)
    }


@dataclass(frozen=True, slots=True)
class _Export:
    stores: Mapping[str, Store]
    run: str
    target: Path
    progress: Progress
    budget: MemoryBudget
    rank: int | None
    accept: Callable[[Manifest], None] = lambda manifest: None

    async def observe(self, step: int | None, attempt: str | None, best: MetricGoal | None) -> RestoreOrder:
        resume = restore_candidates(await observe_places(None, self.stores, self.run), self.run, step, attempt, best)
        if resume.unreached:
            raise StoreUnavailable(f"not every tier could be asked: {', '.join(resume.unreached)}")
        if resume.unread:
            raise StoreUnavailable(f"rank 0's manifest of {resume.unread[0]} cannot be read, and it may be the best")
        return resume

    async def first(
        self, resume: RestoreOrder, home: Path, step: int | None, pruned: list[str]
    ) -> RestoredDirectory | None:
        """Restore the first candidate that is right; None if one was pruned meanwhile, which is added to `pruned`.

        After None the caller lists the tiers again.
        """
        reasons = {**dict.fromkeys(resume.corrupt, UNKNOWN_METRIC), **_unusable(resume, step)}
        skipped = [
            f"step {checkpoint.step} (attempt {checkpoint.attempt}): {why}" for checkpoint, why in reasons.items()
        ]
        for candidate in (*resume.candidates, *resume.same_step):
            checkpoint = candidate.checkpoint
            try:
                return await self.one(candidate, home, skipped, resume.origins)
            except (CorruptChunk, ManifestError) as error:
                if not await has_all_manifests(self.stores, checkpoint, candidate.world):
                    pruned.append(f"step {checkpoint.step} (attempt {checkpoint.attempt}): {PRUNED_REASON}")
                    return None
                skipped.append(f"step {checkpoint.step} (attempt {checkpoint.attempt}): {error}")
        remove_all_but(home, set())
        raise not_found_error(resume, self.run, step, [*pruned, *skipped])

    async def one(
        self, candidate: Candidate, home: Path, skipped: Sequence[str], origins: Mapping[str, CheckpointId | None]
    ) -> RestoredDirectory:
        """Restore one candidate.

        Raises:
            CorruptChunk: it is proven corrupt, or was pruned.
            ManifestError: its parts do not belong together, or not to the known origin.
        """
        parts, tiers = await self._restore_parts(candidate, home, dict(origins))
        publish_directory(home, self.target, {manifest.part.name for manifest in parts})
        return RestoredDirectory(
            self.run,
            candidate.checkpoint.step,
            candidate.checkpoint.attempt,
            tuple(str(self.target / manifest.part.name) for manifest in parts),
            sum(manifest.size for manifest in parts),
            tiers,
            tuple(skipped),
        )

    async def _restore_parts(
        self, candidate: Candidate, directory: Path, origins: dict[str, CheckpointId | None]
    ) -> tuple[list[Manifest], tuple[str, ...]]:
        if self.rank is not None and (type(self.rank) is not int or not 0 <= self.rank < candidate.world):
            raise ConfigError(f"rank={self.rank!r}: {candidate.checkpoint} has ranks 0..{candidate.world - 1}")
        ranks = range(candidate.world) if self.rank is None else (self.rank,)
        replicas = [await _ask(self.stores, PartId(candidate.checkpoint, rank, candidate.world)) for rank in ranks]
        for _, manifest in replicas:
            self.accept(manifest)
            check_origin(manifest, origins)  # before anything is fetched
        self.progress.begin(sum(manifest.size for _, manifest in replicas))
        needed_bytes = sum(missing_bytes(directory / manifest.part.name, manifest) for _, manifest in replicas)
        room = os.statvfs(directory)
        if needed_bytes > room.f_bavail * room.f_frsize:
            raise SpoolFull(
                f"{directory.readlink()}: {needed_bytes} bytes are still to come, and "
                f"{room.f_bavail * room.f_frsize} are free"
            )
        used: set[str] = set()
        parts: list[Manifest] = []
        twins: Twins = {}
        for copies, manifest in replicas:
            home = directory / manifest.part.name
            if home.is_symlink() or not home.is_dir():
                home.unlink(missing_ok=True)
                home.mkdir()
            parts.append(await _download_part(home, copies, self.budget, self.progress, twins))
            check_origin(parts[-1], origins)  # another tier's content may be of another history
            await thread_uncancelled(_describe, home, parts[-1])
            used |= copies.used_tiers
        return parts, tuple(name for name in self.stores if name in used)


async def _download_part(
    home: Path, copies: Replicas, budget: MemoryBudget, progress: Progress, twins: Twins
) -> Manifest:
    """Download a part, and return the manifest that it matches; the tiers' manifests may contradict each other."""
    contents = copies.contents()
    for manifest in contents:
        copies.trust(manifest)
        try:
            await download(home, manifest, copies, budget, progress, public=True, twins=twins)
            break
        except CorruptChunk:
            if manifest is contents[-1]:
                raise
    return manifest


def _describe(home: Path, manifest: Manifest) -> None:
    write_file(home / MANIFEST_NAME, MANIFEST_NAME, encode_manifest(manifest))
    sync_directory(home)


async def _ask(stores: Mapping[str, Store], part: PartId) -> tuple[Replicas, Manifest]:
    copies = Replicas(part, stores)
    await copies.read_manifests()
    manifest = copies.first_content()
    copies.trust(manifest)
    return copies, manifest
