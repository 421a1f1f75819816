"""Deliver each complete checkpoint of a run once, as they arrive on the tiers.

Invariant: the tiers are listed at most once in a period, however many checkpoints are delivered in it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.timeline.candidates import Candidate
from tierd.core.timeline.chain import check_origin
from tierd.daemon.transfer.concurrency import together
from tierd.daemon.transfer.replicas import Replicas
from tierd.reading.delivered import DeliveryLog
from tierd.reading.gone import corrupt_or_gone
from tierd.reading.listing import Listed, list_checkpoints
from tierd.reading.tiers import RunOnTiers

log = logging.getLogger("tierd")

_CONCURRENCY = 8  # manifests in flight at once
_LISTINGS = 3  # with `once`, because a checkpoint may be pruned between a listing and the reading
# Why a checkpoint is not delivered now, and may be later. `ObjectNotFound` means that it was pruned.
UNFIT = (CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable, StoreRefused)


def rounds(
    tiers: RunOnTiers,
    delivered: DeliveryLog,
    *,
    latest: bool,
    period_s: float,
    once: bool,
    pruned: Callable[[], bool],
) -> Iterator[list[Listed]]:
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


def follow(tiers: RunOnTiers, delivered: DeliveryLog, *, latest: bool, period_s: float, once: bool) -> Iterator[Listed]:
    """Yield each checkpoint, and record it once the caller asks for the next. Arguments and errors as for `rounds`."""
    pruned = False
    due_rounds = rounds(tiers, delivered, latest=latest, period_s=period_s, once=once, pruned=lambda: pruned)
    for due_checkpoints in due_rounds:
        pruned = False
        for listed in due_checkpoints:
            try:
                check_manifests(tiers, listed)
            except UNFIT as error:
                pruned |= isinstance(error, ObjectNotFound)
                log.warning("not delivered now: %s", error)
                continue
            yield listed
            delivered.add(name_of(tiers.run, listed))


def name_of(run: str, listed: Listed) -> CheckpointId:
    return CheckpointId(run, listed.attempt, listed.step)


def check_manifests(tiers: RunOnTiers, listed: Listed) -> None:
    """Read every rank's manifest. A flush writes it last, after it has verified each chunk on the tier.

    Raises:
        CorruptChunk: a manifest is proven corrupt.
        ManifestError: the ranks' parts do not belong together.
        ObjectNotFound: the checkpoint was pruned since the listing.
        StoreUnavailable: a tier that may hold a manifest did not answer.
    """

    origins: dict[str, CheckpointId | None] = {}

    async def ask(rank: int) -> None:
        copies = Replicas(PartId(name_of(tiers.run, listed), rank, listed.world_size), tiers.stores)
        await copies.ask()
        if not copies.manifests:
            raise copies.lost("its manifest", copies.unavailable)
        check_origin(copies.contents()[0], origins)

    async def ask_all() -> None:
        await together(_CONCURRENCY, [ask(rank) for rank in range(listed.world_size)])

    try:
        tiers.loop.run(ask_all())
    except (CorruptChunk, ManifestError) as error:
        raise corrupt_or_gone(tiers, Candidate(name_of(tiers.run, listed), listed.world_size), error) from None


def _select_due(run: str, listed: tuple[Listed, ...], delivered: DeliveryLog, latest: bool) -> list[Listed]:
    complete = sorted(
        (checkpoint for checkpoint in listed if checkpoint.complete), key=lambda checkpoint: name_of(run, checkpoint)
    )
    if latest:
        newest = delivered.newest
        complete = [checkpoint for checkpoint in complete[-1:] if newest is None or name_of(run, checkpoint) > newest]
    return [checkpoint for checkpoint in complete if name_of(run, checkpoint) not in delivered]
