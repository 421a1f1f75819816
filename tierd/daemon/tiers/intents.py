"""Keep flushes, prunes and pins of one run on several nodes from harming each other, without a lock or a server.

A flush may name chunks that already lie on the tier. A prune that does not know of the flush may delete them.
Invariant, after Dekker: a flush first puts its intent, and only then lists the marks. A prune first puts its marks, and
only then lists the intents and the pins. So of a concurrent flush and prune at least one sees the other.

    <run>/flushing/<checkpoint>/<part>.<when>-<who>     an intent: the manifest that is about to be put
    <run>/pruning/<checkpoint>.<when>-<who>             a mark, empty: chunks under this checkpoint are being deleted

Both normally exist for seconds. If their writer was cut off they remain, and expire after 15 minutes for the node that
wrote them, and after a day for any node that prunes the run. On a tier that refuses deletions they remain.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import NamedTuple

from tierd.core.errors import ObjectNotFound, StoreUnavailable, TierdError
from tierd.core.ids import (
    CheckpointId,
    PartId,
    flushing_prefix,
    manifests_prefix,
    parse_pin,
    pin_key,
    pins_prefix,
    pruning_prefix,
)
from tierd.daemon.concurrency import gather_limited
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.announcements import (
    STALE_MS,
    STAMP,
    age_ms,
    delete_stamped,
    is_expired,
    is_standing,
    make_stamp,
)
from tierd.spool.spool import Spool
from tierd.stores.base import Store, delete_if_permitted

DEADLINE_S = 600.0  # that a flush's put or a prune may take
_FORGETS_S = 10.0  # that a prune which is cancelled may take to remove its marks
_WHEN = "%Y-%m-%d %H:%M:%S %Z"
_MAX_PUTS = 8  # marks that are put at once
_LEFT_OVER_S = 15.0  # a mark this old may remain for long, so chunks under it are sent again instead of shared


@asynccontextmanager
async def protect_chunks(
    store: Store,
    part: PartId,
    manifest: bytes,
    owners: Collection[CheckpointId],
    who: str = "",
    timings: DaemonTimings = USUAL,
) -> AsyncIterator[None]:
    """Protect the chunks that `manifest` names: within the context no prune deletes those that existed on entry.

    Args:
        owners: the checkpoints under whose names its chunks are stored.
        who: this node's id, 8 hex digits; random for a process that will not come back to sweep.

    Raises:
        StoreUnavailable: a prune marks these checkpoints and does not end.
    """
    intent_prefix = f"{flushing_prefix(part.checkpoint.run)}{part.checkpoint.name}/{part.name}."
    stamp = make_stamp(who, timings)
    intent = f"{intent_prefix}{stamp}"
    async with _limit_duration(f"putting the manifest of {part}"):
        await store.put(intent, manifest)
        try:
            await _wait_for_marks(store, part, owners, who, timings)
        except StoreUnavailable:
            await delete_stamped(store, [intent])
            raise
        yield
        # If the manifest's put fails, the intent is left, because that put may still take effect. Intents of earlier
        # tries of this node are deleted too. This one is deleted unlisted, as a listing may be older than the put.
        earlier = {info.key async for info in store.scan(intent_prefix) if info.key.endswith(stamp[-9:])}
        await delete_if_permitted(store, sorted({intent, *earlier}))


async def _wait_for_marks(
    store: Store, part: PartId, owners: Collection[CheckpointId], who: str, timings: DaemonTimings
) -> None:
    for _ in range(timings.mark_reads):
        met = await marked_checkpoints(store, part.checkpoint.run, timings, who) & set(owners)
        if not met:
            return
        await asyncio.sleep(timings.mark_pause_s)
    raise StoreUnavailable(f"{part}: chunks of {min(met)}, which it names, are being deleted")


async def long_marked(store: Store, run: str, timings: DaemonTimings = USUAL) -> set[CheckpointId]:
    """Return the checkpoints that have been marked for longer than most prunes take.

    A flush should not name their chunks, because an interrupted prune leaves its marks and the flush might wait in
    vain.
    """
    return await marked_checkpoints(store, run, timings, older=_LEFT_OVER_S * 1000)


async def marked_checkpoints(
    store: Store, run: str, timings: DaemonTimings, who: str = "", older: float = -math.inf
) -> set[CheckpointId]:
    """Return the checkpoints whose chunks are being deleted, by marks that are older than `older` ms.

    Marks that have expired for `who`, as in `sweep`, do not count.
    """
    marks = [STAMP.fullmatch(info.key.rpartition("/")[2]) async for info in store.scan(pruning_prefix(run))]
    checkpoints = {
        CheckpointId.parse(run, mark[1])
        for mark in marks
        if mark and age_ms(mark[2], timings) > older and not is_expired(mark[2], mark[3], who, timings)
    }
    return {checkpoint for checkpoint in checkpoints if checkpoint}


class Marks:
    """The marks of one prune. Invariant: no chunk under a checkpoint's name is deleted before its mark was `put`."""

    def __init__(self, store: Store, run: str, stamp: str) -> None:
        self._store, self.run, self._stamp = store, run, stamp
        self._keys: dict[CheckpointId, str] = {}
        # Set by the prune when it begins to delete; from then on, a failure leaves the marks in place.
        self.has_begun = False

    @property
    def owners(self) -> frozenset[CheckpointId]:
        """The checkpoints under whose names no flush begins to name a chunk."""
        return frozenset(self._keys)

    @property
    def keys(self) -> list[str]:
        return list(self._keys.values())

    async def put_marks(self, owners: Collection[CheckpointId]) -> None:
        """Put marks on these checkpoints too."""
        fresh = {owner: f"{pruning_prefix(self.run)}{owner.name}.{self._stamp}" for owner in sorted(owners)}
        fresh = {owner: key for owner, key in fresh.items() if owner not in self._keys}
        self._keys |= fresh
        await gather_limited(_MAX_PUTS, [self._store.put(key, b"") for key in fresh.values()])


@asynccontextmanager
async def deletion_marks(store: Store, run: str, who: str = "", timings: DaemonTimings = USUAL) -> AsyncIterator[Marks]:
    """Within the context, no flush begins to name a chunk that lies under a marked checkpoint."""
    marks = Marks(store, run, make_stamp(who, timings))
    async with _limit_duration(f"deleting chunks of {run}"):
        try:
            yield marks
        except (TierdError, asyncio.CancelledError):
            if not marks.has_begun:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FORGETS_S):
                        await delete_stamped(store, marks.keys)
            raise
        # If a deletion fails, the marks are left, because it may still take effect.
        await store.delete(marks.keys)


class SweepResult(NamedTuple):
    """The intents and marks of a run that `sweep` found."""

    is_tidy: bool  # whether none of the caller's own objects still has to expire
    intents: list[tuple[str, PartId]]  # the keys of intents that have not expired, each with its part
    # Checkpoint -> the marks of its interrupted deletion. They are kept until all of it is deleted, because nothing
    # else may show that chunks are left.
    cut: dict[CheckpointId, list[str]]
    pins: set[CheckpointId]


async def sweep(store: Store, run: str, who: str, timings: DaemonTimings = USUAL) -> SweepResult:
    """Remove the expired intents of interrupted flushes, and return the other intents and the expired marks."""
    stale: list[str] = []
    intents: list[tuple[str, PartId]] = []
    cut: dict[CheckpointId, list[str]] = {}
    pins: set[CheckpointId] = set()
    tidy = True
    flushing = [info.key async for info in store.scan(flushing_prefix(run))]
    for key in [*flushing, *await _pins_and_marks(store, run)]:
        if pinned := parse_pin(run, key):
            pins.add(pinned)
            continue
        if is_standing(key):
            continue
        match = STAMP.fullmatch(key)
        if match and is_expired(match[2], match[3], who, timings):
            marked = CheckpointId.parse(run, match[1].removeprefix(pruning_prefix(run)))
            (cut.setdefault(marked, []) if marked else stale).append(key)
            continue
        if match and match[3] == who:
            tidy = False
        if part := _intent_part(run, key):
            intents.append((key, part))
    await delete_if_permitted(store, stale)
    return SweepResult(tidy, intents, cut, pins)


async def _pins_and_marks(store: Store, run: str) -> list[str]:
    """The keys of pins and marks. No other kind of object sorts between them, so one listing shows both."""
    keys, sorts = [], (pins_prefix(run), pruning_prefix(run))
    async with aclosing(store.scan(f"{run}/", pins_prefix(run)[:-1])) as listing:
        async for info in listing:
            if not info.key.startswith(sorts):
                break
            keys.append(info.key)
    return keys


async def intent_protections(store: Store, run: str, timings: DaemonTimings = USUAL) -> dict[CheckpointId, str]:
    """Return the checkpoints that intents protect from a prune by any node, and why; nothing is changed."""
    keys = [info.key async for info in store.scan(flushing_prefix(run))]
    matches = {key: STAMP.fullmatch(key) for key in keys if not is_standing(key)}
    fresh = [key for key, stamp in matches.items() if not (stamp and is_expired(stamp[2], stamp[3], "", timings))]
    return why_kept((key, part) for key in fresh if (part := _intent_part(run, key)))


def why_kept(intents: Iterable[tuple[str, PartId]]) -> dict[CheckpointId, str]:
    """Say of each checkpoint with an intent until when the intent protects it; of several, the one that ends last."""
    latest = sorted(intents, key=lambda intent: _ends(intent[0]))
    return {
        part.checkpoint: f"{key} says that it is being flushed; that is over by {_ends(key):{_WHEN}}"
        for key, part in latest
    }


def _ends(intent: str) -> datetime:
    """Return when an intent, given by its key, expires for any node that prunes."""
    match = STAMP.fullmatch(intent)
    return datetime.fromtimestamp((int(match[2], 16) + STALE_MS) / 1000 if match else 0, UTC)


def checkpoint_of_mark(run: str, key: str) -> CheckpointId | None:
    """Return the checkpoint of a mark, given by its key; None if the prune that put it may still be deleting."""
    match = STAMP.fullmatch(key)
    if match is None or 0 <= age_ms(match[2], USUAL) <= 1000 * DEADLINE_S:
        return None
    return CheckpointId.parse(run, match[1].removeprefix(pruning_prefix(run)))


def _intent_part(run: str, key: str) -> PartId | None:
    """Return the part whose manifest is about to be put, given the key of an intent."""
    pieces = key.split("/")
    match = STAMP.fullmatch(pieces[-1])
    return PartId.parse(run, pieces[2], match[1]) if match and len(pieces) == 4 else None


@asynccontextmanager
async def _limit_duration(doing: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{doing}: not done within {DEADLINE_S:.0f} s") from error


async def pin(
    spool: Spool | None,
    stores: Collection[Store],
    checkpoint: CheckpointId,
    timings: DaemonTimings = USUAL,
    *,
    note: str = "",
) -> None:
    """Pin a checkpoint in the spool and on every tier, also where it is not yet. `note`: a person's text
    in the pin; without it, an earlier one is kept.

    A prune puts its marks first and lists the pins afterwards. So it sees this pin, or its mark is seen here and its
    end awaited.

    Raises:
        ObjectNotFound: a prune that had begun before deleted the last copy. The pins are removed.
        StoreUnavailable: the mark of such a prune stays: the prune is slow, or was cut off. Or a tier does not answer.
            The pin is kept.
    """
    text = f"{note}\n".encode() if note else b""  # a line, so that it is no text of a watch's own pins
    if spool:
        await asyncio.to_thread(spool.pin, checkpoint, pinned=True, text=text)
    # First on every tier: one that fails, or whose prune is awaited, keeps no other tier from getting the pin.
    puts = [_put_pin(store, checkpoint, text) for store in stores]
    for answer in await asyncio.gather(*puts, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
    outlasts = False
    for store in stores:
        for _ in range(timings.mark_reads):
            # A mark that looks old counts too, because the pruning node's clock may be behind.
            if checkpoint not in await marked_checkpoints(store, checkpoint.run, timings):
                break
            await asyncio.sleep(timings.mark_pause_s)
        else:
            raise StoreUnavailable(
                f"{checkpoint} is pinned, but a prune that began before may be under way and delete it; if it is still "
                f"there in {DEADLINE_S / 60:.0f} minutes, it is kept"
            )
        outlasts |= bool([info async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")])
    if not outlasts and not (spool and spool.parts_of(checkpoint)):
        await unpin(spool, stores, checkpoint)
        raise ObjectNotFound(f"{checkpoint} was being deleted when it was pinned, and is gone")


async def _put_pin(store: Store, checkpoint: CheckpointId, text: bytes) -> None:
    await store.put(pin_key(checkpoint), text or await read_pin(store, checkpoint) or b"")


async def read_pin(store: Store, checkpoint: CheckpointId) -> bytes | None:
    """Return the text of a pin, which may be empty; None if there is none."""
    try:
        return bytes(await store.get(pin_key(checkpoint)))
    except ObjectNotFound:
        return None


async def unpin(spool: Spool | None, stores: Collection[Store], checkpoint: CheckpointId) -> None:
    """Give a checkpoint back to retention."""
    if spool:
        await asyncio.to_thread(spool.pin, checkpoint, pinned=False)
    for store in stores:
        await store.delete([pin_key(checkpoint)])
