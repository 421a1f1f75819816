"""A run's checkpoints as its tiers list them, each complete one delivered once, and the log of those deliveries.

Invariant: the tiers are listed at most once in a period, however many checkpoints are delivered in it. The log's file
changes by a rename alone, and each change is durable before `add` returns. Names are never dropped from it, because a
checkpoint may vanish from a listing and come back: by a repair, from another tier, from a node's spool.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Attempt, Step
from tierd.core.planning.copies import CheckpointCopy, is_complete, union_ranks
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.launch_chain import check_origin
from tierd.core.timeline.restore_order import Candidate, restore_candidates
from tierd.daemon.concurrency import gather_limited
from tierd.daemon.transfer.replicas import Replicas
from tierd.reading.run_on_tiers import RunOnTiers, error_if_pruned
from tierd.spool.file_io import open_own, sync_directory

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
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


def list_checkpoints(inventory: Inventory, run: str) -> tuple[ListedCheckpoint, ...]:
    """Describe every checkpoint: first those that a restore would try, in that order, then all others, newest first."""
    copies = inventory.copies(run)
    tried = [candidate.checkpoint for candidate in restore_candidates(inventory, run).candidates]
    first = _restore_choice(inventory, {tried_id: copies[tried_id] for tried_id in tried})
    listing = []
    for checkpoint in (*tried, *sorted(copies.keys() - set(tried), reverse=True)):
        copies_by_tier = copies[checkpoint]
        ranks = union_ranks(*(place.ranks for place in copies_by_tier.values()))
        sound = union_ranks(*(place.sound_ranks for place in copies_by_tier.values()))
        facts = next((place.metadata_facts for place in copies_by_tier.values() if place.metadata_facts), None)
        listing.append(
            ListedCheckpoint(
                step=checkpoint.step,
                attempt=checkpoint.attempt,
                created=facts.created if facts else None,
                metrics=dict(facts.metrics) if facts else {},
                world_size=min(
                    (size for size, sound_ranks in ranks.items() if len(sound_ranks) == size), default=max(ranks)
                ),
                complete=is_complete(sound),
                tiers=tuple(name for name, place in copies_by_tier.items() if place.usable),
                resumes=checkpoint == first,
            )
        )
    return tuple(listing)


def _restore_choice(
    inventory: Inventory, tried: Mapping[CheckpointId, Mapping[str, CheckpointCopy]]
) -> CheckpointId | None:
    """Return the candidate that a restore would load, as far as the manifests show; None if that cannot be known.

    A restore passes over a candidate only if its manifests are proven corrupt.
    """
    for checkpoint, copies_by_tier in tried.items():
        if is_complete(union_ranks(*(place.sound_ranks for place in copies_by_tier.values()))):
            return checkpoint
        defects = (why for place in copies_by_tier.values() for why in place.defects.values())
        corrupt = all(isinstance(why, ManifestError) for why in defects)
        if not corrupt or None in inventory.tiers.values():
            return None  # another key, or a tier that does not answer now, may prove this candidate valid
    return None


_VERSION = 1


class _StateFile(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    run: str
    delivered: dict[Attempt, list[Step]]


class DeliveryLog:
    """The delivered checkpoints of one run; a context manager that holds the file's lock.

    Args:
        path: the file, which need not exist; None keeps the names in memory.
        waiting: called before the wait for a lock that another process holds; None raises instead of waiting.

    Raises:
        ConfigError: another follower uses the file; or it is damaged, of another run or of a newer tierd.
    """

    def __init__(self, path: Path | None, run: str, waiting: Callable[[], None] | None = None) -> None:
        self.path, self._run = path, run
        self._steps: dict[str, set[int]] = {}
        self.lock = -1
        if path is not None:
            self.lock = _open_locked(path.with_name(f"{path.name}.lock"), waiting)
            try:
                self._steps = _read_state(path, run)
            except BaseException:
                self.close()
                raise

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint.step in self._steps.get(checkpoint.attempt, ())

    @property
    def newest(self) -> CheckpointId | None:
        newest = (CheckpointId(self._run, attempt, max(steps)) for attempt, steps in self._steps.items())
        return max(newest, default=None)

    def add(self, checkpoint: CheckpointId) -> None:
        """Record a delivery, durably. Adding a checkpoint twice is harmless."""
        self._steps.setdefault(checkpoint.attempt, set()).add(checkpoint.step)
        if self.path is not None:
            steps = {attempt: sorted(attempt_steps) for attempt, attempt_steps in sorted(self._steps.items())}
            form = _StateFile(version=_VERSION, run=self._run, delivered=steps)
            write_durably(self.path, msgspec.json.encode(form) + b"\n")

    def close(self) -> None:
        """Give up the lock, unless a process that inherited it still runs."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_durably(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a write that was cut off, or an odd file in its place
    with fresh.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_directory(path.parent)


def _open_locked(path: Path, waiting: Callable[[], None] | None) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}; name a file in a directory of yours") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            os.close(lock)
            raise ConfigError(f"{path}: another follower holds it; give each follower a state of its own") from None
        waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _read_state(path: Path, run: str) -> dict[str, set[int]]:
    try:
        with os.fdopen(open_own(path, follow=True), "rb") as file:  # a FIFO in its place would block
            form = msgspec.json.decode(file.read(), type=_StateFile)
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a follower's state: {error}; if you move it away, every checkpoint is delivered again"
        ) from error
    if form.version != _VERSION:
        raise ConfigError(f"{path}: state of version {form.version}, and this tierd knows {_VERSION}: use a newer one")
    if form.run != run:
        raise ConfigError(f"{path}: the state of run {form.run!r}, not of {run!r}; name another file")
    return {attempt: set(steps) for attempt, steps in form.delivered.items()}


log = logging.getLogger("tierd")

_CONCURRENCY = 8  # manifests in flight at once
_LISTINGS = 3  # with `once`, because a checkpoint may be pruned between a listing and the reading
# Why a checkpoint is not delivered now, and may be later. `ObjectNotFound` means that it was pruned.
DELIVERY_ERRORS = (CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable, StoreRefused)


def delivery_rounds(
    tiers: RunOnTiers, delivered: DeliveryLog, *, latest: bool, period_s: float, once: bool, pruned: Callable[[], bool]
) -> Iterator[list[ListedCheckpoint]]:
    """List the tiers once in a period, and yield the checkpoints that are to be delivered then, oldest first.

    The list is empty in a round without a new one. A checkpoint that the caller does not add to `delivered` is in the
    next round again.

    Args:
        latest: only the newest checkpoint, and only if it is newer than all that were delivered.
        once: end after the first round, unless a checkpoint of it was pruned: then newer ones are there.
        pruned: whether a checkpoint of the last round was pruned before it was delivered.

    Raises:
        StoreUnavailable: with `once`, no tier answered. Otherwise the next round tries again.
    """
    for number in itertools.count(1):
        started_s = time.monotonic()
        try:
            inventory = tiers.observe()
        except StoreUnavailable as error:
            if once:
                raise
            log.warning("%s; the next try is in %.0f s", error, period_s)
        else:
            yield _select_due(tiers.run, list_checkpoints(inventory, tiers.run), delivered, latest)
            del inventory
        if once:
            if number == _LISTINGS or not pruned():
                return
            continue
        time.sleep(max(0.0, started_s + period_s - time.monotonic()))


def follow(
    tiers: RunOnTiers, delivered: DeliveryLog, *, latest: bool, period_s: float, once: bool
) -> Iterator[ListedCheckpoint]:
    """Yield each checkpoint, and record it once the caller asks for the next. Otherwise as `delivery_rounds`."""
    pruned = False
    due_rounds = delivery_rounds(tiers, delivered, latest=latest, period_s=period_s, once=once, pruned=lambda: pruned)
    for due_checkpoints in due_rounds:
        pruned = False
        for listed in due_checkpoints:
            try:
                check_manifests(tiers, listed)
            except DELIVERY_ERRORS as error:
                pruned |= isinstance(error, ObjectNotFound)
                log.warning("not delivered now: %s", error)
                continue
            yield listed
            delivered.add(listed_id(tiers.run, listed))


def listed_id(run: str, listed: ListedCheckpoint) -> CheckpointId:
    return CheckpointId(run, listed.attempt, listed.step)


def check_manifests(tiers: RunOnTiers, listed: ListedCheckpoint) -> None:
    """Read every rank's manifest. A flush writes it last, after it has verified each chunk on the tier."""

    origins: dict[str, CheckpointId | None] = {}

    async def ask(rank: int) -> None:
        copies = Replicas(PartId(listed_id(tiers.run, listed), rank, listed.world_size), tiers.stores)
        await copies.read_manifests()
        if not copies.manifests:
            raise copies.lost_error("its manifest", copies.unavailable)
        check_origin(copies.contents()[0], origins)

    async def ask_all() -> None:
        await gather_limited(_CONCURRENCY, [ask(rank) for rank in range(listed.world_size)])

    try:
        tiers.loop.run(ask_all())
    except (CorruptChunk, ManifestError) as error:
        raise error_if_pruned(tiers, Candidate(listed_id(tiers.run, listed), listed.world_size), error) from None


def _select_due(
    run: str, listed: tuple[ListedCheckpoint, ...], delivered: DeliveryLog, latest: bool
) -> list[ListedCheckpoint]:
    complete = {listed_id(run, checkpoint): checkpoint for checkpoint in listed if checkpoint.complete}
    due = sorted(complete)
    if latest:
        newest = delivered.newest
        due = [checkpoint for checkpoint in due[-1:] if newest is None or checkpoint > newest]
    return [complete[checkpoint] for checkpoint in due if checkpoint not in delivered]
