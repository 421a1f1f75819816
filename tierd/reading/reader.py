"""`Reader`, which `tierd.open` returns.

Invariant: outside of this process, a reader changes only the directory that `download` writes to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.entries import check_written_by_save, read_entries
from tierd.client.restoring.search import Search, Skipped
from tierd.core.config import from_urls
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    StateMismatch,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_run, check_step
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.core.planning.inventory import CheckpointCopy, Inventory, is_complete, union
from tierd.core.save_policy import Goal, check_goal
from tierd.core.timeline.alternatives import runs_there
from tierd.core.timeline.candidates import Candidate, restore_candidates
from tierd.core.urls import parse_url
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.export import Exported, export
from tierd.reading.shared import differing
from tierd.reading.tiers import RunOnTiers, TierFiles, TierView
from tierd.spool.direct_io import memory_for, settle
from tierd.state.flatten import unflatten
from tierd.state.load import check_fit, chosen, load
from tierd.state.values import show_part
from tierd.stores.base import Store
from tierd.stores.keys import read_key
from tierd.stores.open import open_store

if TYPE_CHECKING:
    from typing import Self

PathLike: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint on the tiers, described from names and manifests alone; no chunk was read.

    Attributes:
        step: the step at which it was saved.
        attempt: the launch that saved it.
        created: when rank 0 began to save it, by that node's clock, in UTC; None if no manifest can be read.
        metrics: rank 0's metrics, as given to `save`.
        world_size: how many ranks saved it.
        complete: whether the tiers together have every rank's part. A part whose manifest is known to be unusable
            (corrupt, or encrypted with another key) does not count.
        tiers: the tiers that each have every rank's part.
        resumes: whether a restore would load this checkpoint, unless a chunk turns out to be corrupt.
    """

    step: int
    attempt: str
    created: datetime | None
    metrics: dict[str, float]
    world_size: int
    complete: bool
    tiers: tuple[str, ...]
    resumes: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of `Reader.restore`. Its members have the same meanings as those of `Restored`.

    Attributes:
        rank: the rank whose part was loaded; 0 if the call named no rank, because all ranks have the same entries then.
        world_size: how many ranks saved the checkpoint.
    """

    step: int
    attempt: str
    rank: int
    world_size: int
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]


def open(url_or_urls: PathLike | Sequence[PathLike], run: str, key_file: PathLike | None = None) -> Reader:
    """Open a run's checkpoints for reading, on one tier or on several, in order of preference.

    The call connects to nothing; the first read does. A reader needs no spool and no daemon, and writes nothing to a
    tier.

    Args:
        url_or_urls: `file:///path` or `s3://bucket/prefix`, as in a tier's configuration.
        run: the training job's name.
        key_file: the file with the key that encrypts the tiers.

    Raises:
        ConfigError: a URL, the run's name or the key is invalid, or a package is missing; the message names it.
    """
    if isinstance(url_or_urls, str | bytes | os.PathLike) or not isinstance(url_or_urls, Iterable):
        url_or_urls = [url_or_urls]
    urls = [os.fspath(_path(url, "tierd.open(url_or_urls): a URL, a path or a list of them")) for url in url_or_urls]
    if not urls:
        raise ConfigError("tierd.open: name at least one tier's URL")
    check_run(run)
    path = Path(_path(key_file, "tierd.open(key_file): a path")).absolute() if key_file is not None else None
    config = from_urls("/", urls, key_file=str(path) if path else None, where="tierd.open")
    key = read_key(path) if path else None
    return Reader({tier.name: open_store(parse_url(tier.url), key=key) for tier in config.tier}, run)


class Reader:
    """Reads one run's checkpoints. Made by `tierd.open`; a context manager.

    Use it in an evaluation, an export or a notebook instead of a `Checkpointer`. A reader starts no daemon, needs no
    spool, and has no influence on retention. It also works inside a running event loop.

    Args:
        stores: the tiers by name, in order of preference; `close` closes them.
        run: the training job's name.
    """

    def __init__(self, stores: Mapping[str, Store], run: str) -> None:
        self.run = check_run(run)
        self._tiers = RunOnTiers(stores, run)

    @property
    def unreached(self) -> tuple[str, ...]:
        """The tiers that did not answer the most recent listing."""
        return tuple(self._tiers.unreached)

    # -- listing ----------------------------------------------------------------------------------------------------

    def checkpoints(self) -> tuple[Listed, ...]:
        """List the run's checkpoints.

        The order is: first those that a restore would try, in that order, then all others, newest first. The result is
        empty if the run has no checkpoint yet. It lacks the checkpoints that only a tier in `unreached` holds.

        Raises:
            StoreUnavailable: no tier answered.
        """
        inventory = self._tiers.look()
        copies = inventory.copies(self.run)
        tried = [candidate.checkpoint for candidate in restore_candidates(inventory, self.run).candidates]
        first = _first(inventory, {one: copies[one] for one in tried})
        found = []
        for one in (*tried, *sorted(copies.keys() - set(tried), reverse=True)):
            seen = copies[one]
            ranks = union(*(place.ranks for place in seen.values()))
            sound = union(*(place.sound for place in seen.values()))
            facts = next((place.spoken for place in seen.values() if place.spoken), None)
            found.append(
                Listed(
                    step=one.step,
                    attempt=one.attempt,
                    created=facts.created if facts else None,
                    metrics=dict(facts.metrics) if facts else {},
                    world_size=min((size for size, some in ranks.items() if len(some) == size), default=max(ranks)),
                    complete=is_complete(sound),
                    tiers=tuple(name for name, place in seen.items() if place.usable),
                    resumes=one == first,
                )
            )
        return tuple(found)

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        only: str | Collection[str] | None = None,
        rank: int | None = None,
        at_least: int | None = None,
    ) -> Loaded:
        """Load the newest verified checkpoint of the run's timeline into `state`, or the best.

        The result is the same as that of `Checkpointer.restore`, with the tiers as its only source.

        Args:
            state, step, attempt, best, mode, only, at_least: as for `Checkpointer.restore`.
            rank: load this rank's part, independently of the present number of ranks. If it is not given, the loaded
                entries must be the same on all ranks that saved.

        Raises:
            CheckpointNotFound: the tiers have no checkpoint, or not the requested one, or none could be verified. The
                message names each skipped checkpoint with the reason, or the runs that exist. A trainer may begin
                without a checkpoint; a reader always expects one.
            StateMismatch: the checkpoint does not fit `state`, or entries differ between ranks and no rank was given;
                the message names them.
            StoreUnavailable: a tier that may hold a newer or the right copy did not answer, or checkpoints vanished
                repeatedly while they were read.
            ConfigError: `state` lacks a name in `only`; the checkpoint has no such rank; the reader is closed.
        """
        names = (only,) if isinstance(only, str) else only if only is None else tuple(only)
        if not isinstance(state, Mapping):
            raise ConfigError("restore(state): a mapping of names to what is loaded into; download(DIR) copies files")
        chosen(state, names)
        search = Search(self.run, Ranks(0, 1), TierView(self._tiers, (best,) if isinstance(best, str) else ()))
        for candidate in search.whole(step, attempt, None if best is None else Goal(best, mode), at_least):
            files = TierFiles(self._tiers, candidate.checkpoint, candidate.world)
            found, error = self._try(search, candidate, files, state, names, rank)
            unfit = isinstance(error, StateMismatch | ConfigError)
            if search.settle(candidate, error, unfit=unfit).load:
                assert found is not None
                manifest, tree, tensors = found
                into = chosen(state, names)
                load(into, tree, lent=False, file=tensors)
                if into is not state and isinstance(state, MutableMapping):
                    state.update(into)
                return Loaded(
                    step=manifest.step,
                    attempt=manifest.attempt,
                    rank=manifest.rank,
                    world_size=manifest.world_size,
                    tier=files.used[0],
                    metrics=manifest.numbers,
                    skipped=search.skipped(candidate.checkpoint),
                    unreached=search.resume.unreached,
                )
            del found, error  # frees the memory before the next candidate is read
        incomplete = [str(one) for one in search.skipped()]
        raise CheckpointNotFound("\n  ".join([self._none_there(), *incomplete]))

    def _try(
        self,
        search: Search,
        candidate: Candidate,
        files: TierFiles,
        state: Mapping[str, Any],
        names: Collection[str] | None,
        rank: int | None,
    ) -> tuple[tuple[Manifest, dict[str, Any], memoryview] | None, Exception | None]:
        """Read and verify `candidate`, and check that it fits `state`.

        Returns:
            The manifest, the tree and the tensors, or None and the error.
        """
        try:
            manifest, found = _whole(files, names, rank)
            search.check_origin(manifest)
            tree = unflatten(found[TREE], found[TENSORS])
            check_fit(chosen(state, names), tree)
            return (manifest, tree, found[TENSORS]), None
        except (CorruptChunk, ManifestError) as error:
            try:
                there = self._tiers.has(candidate.checkpoint, candidate.world)
            except (StoreUnavailable, StoreRefused) as unknown:
                return None, unknown
            gone = ObjectNotFound(f"{candidate.checkpoint} was pruned, or set aside, while it was read")
            return None, error.with_traceback(None) if there else gone
        except Exception as error:
            return None, error

    def _none_there(self) -> str:
        what = runs_there(self.run, self._tiers.runs())
        return f"run {self.run!r}: the tiers have no complete checkpoint of it; {what}"

    # -- downloading ------------------------------------------------------------------------------------------------

    def download(
        self,
        directory: PathLike,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        rank: int | None = None,
    ) -> Exported:
        """Copy the files of the newest verified checkpoint, or the best, into `directory`, as `tierd restore` does.

        Each rank's files are in their own directory. A call after an interrupted one continues the copy.

        Args:
            directory: empty or absent.
            step, attempt, best, mode: as for `restore`.
            rank: copy this rank's files alone.

        Raises:
            CheckpointNotFound, StoreUnavailable: as for `restore`; but every tier has to answer.
            SpoolFull: the disk is full.
            ConfigError: `directory` exists and is not usable; the checkpoint has no such rank; or both the best and a
                step were requested.
        """
        target = Path(_path(directory, "download(directory): a path"))
        if best is not None and step is not None:
            raise ConfigError(f"best={best!r} and step={step}: one of the two")
        goal = None if best is None else check_goal(Goal(best, mode))
        wanted = None if step is None else check_step(step), None if attempt is None else check_attempt(attempt)
        work = export(self._tiers.stores, self.run, target, *wanted, Progress(), self._tiers.budget, goal, rank)
        try:
            return self._tiers.loop.run(work)
        except CheckpointNotFound as error:
            if self.run in self._tiers.runs():
                raise
            raise CheckpointNotFound(self._none_there()) from error

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release connections and threads. Closing twice is harmless."""
        self._tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _path(given: object, wanted: str) -> PathLike:
    """Return `given` if it can be a path or a URL; else raise `ConfigError` with the description in `wanted`."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{wanted}, and not a {type(given).__name__}")
    return given


def _first(inventory: Inventory, tried: Mapping[CheckpointId, Mapping[str, CheckpointCopy]]) -> CheckpointId | None:
    """Return the candidate that a restore would load, as far as the manifests show; None if that cannot be known.

    A restore passes over a candidate only if its manifests are proven corrupt.
    """
    for one, seen in tried.items():
        if is_complete(union(*(place.sound for place in seen.values()))):
            return one
        corrupt = all(isinstance(why, ManifestError) for place in seen.values() for why in place.defects.values())
        if not corrupt or None in inventory.tiers.values():
            return None  # another key, or a tier that does not answer now, may prove this candidate valid
    return None


def _whole(
    files: TierFiles, names: Collection[str] | None, rank: int | None
) -> tuple[Manifest, Mapping[str, memoryview]]:
    """Read the rank's part, or the part that all ranks share.

    If tiers contradict each other, the content whose bytes verify is used.
    """
    while True:
        try:
            return _read(files, _part(files, names, rank), names)
        except CorruptChunk:
            if not files.turn():
                raise


def _part(files: TierFiles, names: Collection[str] | None, rank: int | None) -> PartId:
    """Return the part to read from.

    Raises:
        ConfigError: the checkpoint has no such rank.
        StateMismatch: no rank was given, and the requested entries differ between ranks.
    """
    if rank is not None:
        if type(rank) is not int or not 0 <= rank < files.world:
            raise ConfigError(f"rank={rank!r}: {files.checkpoint} has ranks 0..{files.world - 1}")
        return files.part(rank)
    found = differing(files, names)
    if found:
        shown = ", ".join(map(show_part, found))
        raise StateMismatch(
            f"{files.checkpoint} was saved by {files.world} ranks, and {shown} differ{'s' * (len(found) == 1)} between "
            f"them: say whose is wanted, restore(state, rank=0), or load others alone, restore(state, only=…)"
        )
    return files.part(0)


def _read(files: TierFiles, part: PartId, names: Collection[str] | None) -> tuple[Manifest, Mapping[str, memoryview]]:
    manifest = files.manifest(part)
    check_written_by_save(part, [file.path for file in manifest.files])
    if names is not None:
        return read_entries(files, part, names)
    found = {}
    for file in manifest.files:
        memory = memory_for(file.size)
        if file.size:
            files.fill(memory, [files.span(part, file.path)])
        found[file.path] = settle(memory, file.size)
    return manifest, found
