"""Tier -> any directory, for `tierd restore`: without spool, daemon or configuration.

Invariant: the order is that of every restore: newest first down the timeline, and proven-bad checkpoints are skipped
and named. Everything in the final directory was verified. Until then the files are in a directory next to it, under a
name that the next attempt finds. The next attempt keeps the chunks of an interrupted one whose digests are right.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierd.core.errors import ConfigError, CorruptChunk, SpoolFull, StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import MANIFEST_NAME, Manifest
from tierd.core.manifest_codec import encode as encode_manifest
from tierd.core.save_policy import Goal
from tierd.core.timeline.candidates import UNTOLD, Candidate, RestoreOrder, not_found, restore_candidates
from tierd.daemon.tiers.objects import is_there
from tierd.daemon.tiers.observe import look_around
from tierd.daemon.transfer.concurrency import to_the_end
from tierd.daemon.transfer.download import Progress, download, missing
from tierd.daemon.transfer.memory_budget import Budget
from tierd.daemon.transfer.replicas import Replicas
from tierd.spool.file_io import remove, sync_directory, write_file
from tierd.spool.stage import try_lock
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_LOOKS = 3  # listings of the tiers, because a checkpoint may be pruned between a listing and the reading


@dataclass(frozen=True, slots=True)
class Exported:
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


async def export(
    stores: Mapping[str, Store],
    run: str,
    target: Path,
    step: int | None,
    attempt: str | None,
    progress: Progress,
    budget: Budget | None = None,
    best: Goal | None = None,
    rank: int | None = None,
    accept: Callable[[Manifest], None] = lambda manifest: None,
) -> Exported:
    """Restore every rank's files of the newest verified checkpoint, or of the best one, into a directory.

    Args:
        stores: the tiers.
        run: the run's name.
        target: the directory, which must be empty or absent.
        step: this step only; None for any.
        attempt: this attempt only; None for any.
        progress: updated during the restore.
        budget: the memory budget.
        best: restore the best checkpoint by this goal, not the newest one.
        rank: restore this rank's files only.
        accept: called with each manifest before any file is fetched; it may raise `ConfigError`.

    Raises:
        CheckpointNotFound: no checkpoint could be verified, or the requested one could not.
        StoreUnavailable: a tier did not answer, so that a newer or a right copy may be there; or checkpoints vanished
            repeatedly while they were read.
        SpoolFull: the disk lacks space.
        ConfigError: `target` is not usable, or another restore to it is running; or the checkpoint has no such rank.
    """
    target = usable(target)
    work = _Export(stores, run, target, progress, budget or Budget(), rank, accept)
    resume = await work.look(step, attempt, best)
    with _held(work.aside) as home:
        for _ in range(_LOOKS):
            exported = await work.first(resume, home, step)
            if exported:
                return exported
            resume = await work.look(step, attempt, best)
    raise StoreUnavailable(
        f"run {run!r}: what was to be restored vanished while it was read, {_LOOKS} times; try again"
    )


async def export_one(
    stores: Mapping[str, Store], candidate: Candidate, target: Path, progress: Progress, budget: Budget
) -> Exported:
    """Restore one known checkpoint, as `export` does, without a listing of the tiers.

    Raises:
        CorruptChunk: the checkpoint is proven corrupt, or was pruned.
        StoreUnavailable, SpoolFull, ConfigError: as `export`.
    """
    target = usable(target)
    work = _Export(stores, candidate.checkpoint.run, target, progress, budget, None)
    with _held(work.aside) as home:
        return await work.one(candidate, home, ())


def usable(target: Path) -> Path:
    """Return the path of a directory that a finished one may replace: absent or empty.

    Raises:
        ConfigError: it is another kind of path.
    """
    target = target.resolve() if target.is_symlink() else target.absolute()
    if target.is_mount():
        raise ConfigError(f"{target}: a mount point, which no finished directory can replace; name one inside it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: it exists and is not an empty directory; nothing was touched")
    return target


@dataclass(frozen=True, slots=True)
class _Export:
    stores: Mapping[str, Store]
    run: str
    target: Path
    progress: Progress
    budget: Budget
    rank: int | None
    accept: Callable[[Manifest], None] = lambda manifest: None

    @property
    def aside(self) -> Path:
        """Where files are gathered. A hidden target's name gets no second dot, so a watch knows it as tierd's own."""
        return self.target.with_name(f".{self.target.name.removeprefix('.')}.partial")

    async def look(self, step: int | None, attempt: str | None, best: Goal | None) -> RestoreOrder:
        resume = restore_candidates(await look_around(None, self.stores, self.run), self.run, step, attempt, best)
        if resume.unreached:
            raise StoreUnavailable(f"not every tier could be asked: {', '.join(resume.unreached)}")
        if resume.unread:
            raise StoreUnavailable(f"rank 0's manifest of {resume.unread[0]} cannot be read, and it may be the best")
        return resume

    async def first(self, resume: RestoreOrder, home: Path, step: int | None) -> Exported | None:
        """Restore the first candidate that is right; None if one was pruned meanwhile.

        After None the caller lists the tiers again.
        """
        skipped = [f"step {one.step} (attempt {one.attempt}): {UNTOLD}" for one in resume.corrupt]
        for candidate in resume.candidates:
            one = candidate.checkpoint
            try:
                return await self.one(candidate, home, skipped)
            except CorruptChunk as error:
                if not await is_there(self.stores, one, candidate.world):
                    return None
                skipped.append(f"step {one.step} (attempt {one.attempt}): {error}")
        _clear(home, set())
        raise not_found(resume, self.run, step, skipped)

    async def one(self, candidate: Candidate, home: Path, skipped: Sequence[str]) -> Exported:
        """Restore one candidate. Raises `CorruptChunk` if it is proven corrupt or was pruned."""
        parts, tiers = await self._parts(candidate, home)
        _publish(home, self.aside, self.target, {manifest.part.name for manifest in parts})
        return Exported(
            self.run,
            candidate.checkpoint.step,
            candidate.checkpoint.attempt,
            tuple(str(self.target / manifest.part.name) for manifest in parts),
            sum(manifest.size for manifest in parts),
            tiers,
            tuple(skipped),
        )

    async def _parts(self, candidate: Candidate, directory: Path) -> tuple[list[Manifest], tuple[str, ...]]:
        if self.rank is not None and (type(self.rank) is not int or not 0 <= self.rank < candidate.world):
            raise ConfigError(f"rank={self.rank!r}: {candidate.checkpoint} has ranks 0..{candidate.world - 1}")
        ranks = range(candidate.world) if self.rank is None else (self.rank,)
        found = [await _ask(self.stores, PartId(candidate.checkpoint, rank, candidate.world)) for rank in ranks]
        for _, manifest in found:
            self.accept(manifest)
        self.progress.begin(sum(manifest.size for _, manifest in found))
        needed = sum(missing(directory / manifest.part.name, manifest) for _, manifest in found)
        room = os.statvfs(directory)
        if needed > room.f_bavail * room.f_frsize:
            raise SpoolFull(
                f"{directory.readlink()}: {needed} bytes are still to come, and {room.f_bavail * room.f_frsize} are "
                "free"
            )
        used: set[str] = set()
        for copies, manifest in found:
            home = directory / manifest.part.name
            if home.is_symlink() or not home.is_dir():
                home.unlink(missing_ok=True)
                home.mkdir()
            await to_the_end(_describe, home, await _whole(home, copies, self.budget, self.progress))
            used |= copies.used
        return [manifest for _, manifest in found], tuple(name for name in self.stores if name in used)


@contextmanager
def _held(aside: Path) -> Iterator[Path]:
    """Lock `aside` for this restore, creating it if needed, and log at the end whether files are left in it.

    The yielded path leads to this directory even if a user who may write to the parent directory replaces it. Other
    users cannot enter the directory, so it contains no links of theirs.
    """
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        aside.mkdir(mode=0o700)
    except FileExistsError:
        found = aside.lstat()  # another user could guess the name and may have write access to the parent
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"{aside}: it is in the way, and none of your directories") from None
    lock = try_lock(aside)
    if lock is None:
        raise ConfigError(f"{aside}: another restore is filling it")
    home = Path(f"/proc/self/fd/{lock}")
    try:
        found = os.fstat(lock)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ConfigError(f"{aside}: others may write to it, or own it; look at it, and remove it")
        os.fchmod(lock, 0o700 | found.st_mode & stat.S_ISGID)
        if any(home.iterdir()):
            log.info("going on with what an interrupted restore left in %s", aside)
        yield home
    except OSError as error:
        if error.filename:
            error.filename = str(error.filename).replace(str(home), str(aside))
        raise
    finally:
        if aside.exists() and not any(home.iterdir()):
            aside.rmdir()
        elif aside.exists():
            log.warning("what was fetched is kept in %s; run the same command again to continue", aside)
        os.close(lock)


def _publish(home: Path, aside: Path, target: Path, parts: set[str]) -> None:
    _clear(home, parts)  # removes files of another checkpoint with more ranks that was begun before
    sync_directory(home)
    home.chmod(_mode(home, target))
    aside.replace(target)
    sync_directory(target.parent)
    if not os.path.samestat(home.stat(), target.lstat()):
        raise ConfigError(f"{target}: somebody who may write to {target.parent} put another directory in its place")


def _mode(home: Path, target: Path) -> int:
    """Return the mode of the directory that is replaced; if there is none, the mode that mkdir would give it there."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o777 & ~mask | home.stat().st_mode & stat.S_ISGID


def _clear(home: Path, keep: set[str]) -> None:
    for path in home.iterdir():
        if path.name not in keep:
            remove(path)


async def _whole(home: Path, copies: Replicas, budget: Budget, progress: Progress) -> Manifest:
    """Download a part, and return the manifest that it matches; the tiers' manifests may contradict each other."""
    contents = copies.contents()
    for manifest in contents:
        copies.agree(manifest)
        try:
            await download(home, manifest, copies, budget, progress, public=True)
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
    await copies.ask()
    manifest = next(iter(copies.contents()), None)
    if manifest is None:
        raise copies.lost("its manifest", copies.unavailable)
    copies.agree(manifest)
    return copies, manifest
