"""Keep flushes and prunes of one run on several nodes from harming each other, without a lock or a server.

A flush may name chunks that already lie on the tier, its own from an earlier try or another checkpoint's. A prune that
does not know of the flush may delete them.

Invariant, after Dekker: a flush first puts its intent, and only then lists the marks. A prune first puts its marks, and
only then lists the intents. So of a concurrent flush and prune at least one sees the other. A prune spares the chunks
that an intent names. A flush that finds a mark on a checkpoint waits until the mark is deleted, and then checks that
its chunks still exist.

    <run>/flushing/<checkpoint>/<part>.<when>-<who>     an intent: the manifest that is about to be put
    <run>/pruning/<checkpoint>.<when>-<who>             a mark, empty: chunks under this checkpoint are being deleted
    <run>/flushing/<checkpoint>/sending.<when>-<who>    an announcement, empty: a node sends parts of this checkpoint

An announcement prevents neither deletions nor shared chunks. It exists while a part is sent. Other nodes then choose
the same checkpoint, because a checkpoint is useless before all its parts are on the tier.

Intents and marks normally exist for seconds. If their writer was cut off they remain, and only prevent chunks from
being deleted or named. They expire after 15 minutes for the node that wrote them, and after a day for any node that
prunes the run. For an expired object, a node deletes the intent, does not wait for the mark, and treats the mark as a
deletion to repeat. On a tier that refuses deletions, expired intents remain without effect.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tierd.core.errors import StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId, flushing_prefix, pruning_prefix
from tierd.daemon.transfer.concurrency import together
from tierd.spool.file_io import digest
from tierd.stores.base import Store, clear

_DEADLINE = 600.0  # seconds that a flush's put or a prune may take
_AT_ONCE = 8  # marks that are put at once
_LOOKS, _PAUSE = 30, 0.5  # how often a flush lists the marks, and seconds in between
_LEFT_OVER_S = 15.0  # a mark this old may remain for long, so chunks under it are sent again instead of shared
_OWN_STALE = 900_000  # milliseconds until this node's own objects expire; short, because it trusts its own clock
_STALE = 86_400_000  # milliseconds until the objects of any node expire; long, because clocks differ
_STAMP = re.compile(r"(.+)\.([0-9a-f]{12})-([0-9a-f]{8})")

_SENDING = "sending"
_standing: set[str] = set()  # announcements of flushes that run in this process

_ahead: dict[str, float] = {}  # own stamps ahead of this clock -> monotonic seconds when first seen


def node(home: Path) -> str:
    """Return the id of the node whose spool is at `home`: 8 hex digits, stable over restarts, and mostly unique."""
    return digest(f"{socket.gethostname()} {home} {home.stat().st_ino}".encode())[:8]


def _stamp(who: str) -> str:
    return f"{time.time_ns() // 1_000_000:012x}-{who or secrets.token_hex(4)}"


def _age(stamp: str) -> int:
    return time.time_ns() // 1_000_000 - int(stamp, 16)


def _is_over(stamp: str, by: str, who: str) -> bool:
    """Whether an object that `by` stamped has expired for `who`.

    It has if it is too old, or stamped so far in the future that its clock cannot be trusted. If this node's own clock
    was set back since, its own stamps age from their first observation.
    """
    age = _age(stamp)
    if by == who and age < 0:
        now_s = time.monotonic()
        age = int(1000 * (now_s - _ahead.setdefault(stamp, now_s)))
    return not -_STALE < age < (_OWN_STALE if by == who else _STALE)


@asynccontextmanager
async def naming(
    store: Store, part: PartId, manifest: bytes, owners: Collection[CheckpointId], who: str = ""
) -> AsyncIterator[None]:
    """Protect the chunks that `manifest` names: within the context no prune deletes those that existed on entry.

    Args:
        store: the tier's store.
        part: the part that is flushed.
        manifest: its manifest, as it is about to be put.
        owners: the checkpoints under whose names its chunks are stored.
        who: this node's id, 8 hex digits; random for a process that will not come back to sweep.

    Raises:
        StoreUnavailable: a prune marks these checkpoints and does not end.
    """
    own = f"{flushing_prefix(part.checkpoint.run)}{part.checkpoint.name}/{part.name}."
    stamp = _stamp(who)
    intent = f"{own}{stamp}"
    async with _bounded(f"putting the manifest of {part}"):
        await store.put(intent, manifest)
        try:
            await _wait_for_marks(store, part, owners, who)
        except StoreUnavailable:
            await _forget(store, [intent])
            raise
        yield
        # If the manifest's put fails, the intent is left, because that put may still take effect. Intents of this
        # node's
        # earlier tries are deleted too. This one is deleted unlisted, because a listing may be older than the put.
        earlier = {info.key async for info in store.scan(own) if info.key.endswith(stamp[-9:])}
        await clear(store, sorted({intent, *earlier}))


@asynccontextmanager
async def announcing(store: Store, checkpoint: CheckpointId, who: str) -> AsyncIterator[None]:
    """Announce to other nodes, within the context, that this node sends parts of `checkpoint`.

    Raises:
        StoreUnavailable, StoreRefused: the announcement could not be put.
    """
    key = f"{flushing_prefix(checkpoint.run)}{checkpoint.name}/{_SENDING}.{_stamp(who)}"
    await store.put(key, b"")
    _standing.add(key)
    try:
        yield
    finally:
        _standing.discard(key)
        await _forget(store, [key])


async def announced(store: Store, run: str, who: str) -> dict[CheckpointId, frozenset[str]]:
    """Return, by checkpoint, the other nodes that announce that they send its parts.

    Announcements of `who` itself and expired ones do not count.

    Raises:
        StoreUnavailable, StoreRefused: the tier could not be listed.
    """
    found: dict[CheckpointId, frozenset[str]] = {}
    prefix = flushing_prefix(run)
    async for info in store.scan(prefix):
        name, _, said = info.key[len(prefix) :].partition("/")
        match, checkpoint = _STAMP.fullmatch(said), CheckpointId.parse(run, name)
        if checkpoint and match and match[1] == _SENDING and match[3] != who and not _is_over(match[2], match[3], who):
            found[checkpoint] = found.get(checkpoint, frozenset()) | {match[3]}
    return found


async def _wait_for_marks(store: Store, part: PartId, owners: Collection[CheckpointId], who: str) -> None:
    for _ in range(_LOOKS):
        met = await _marked(store, part.checkpoint.run, who) & set(owners)
        if not met:
            return
        await asyncio.sleep(_PAUSE)
    raise StoreUnavailable(f"{part}: chunks of {min(met)}, which it names, are being deleted")


async def left_over(store: Store, run: str) -> set[CheckpointId]:
    """Return the checkpoints that have been marked for longer than most prunes take.

    A flush should not name their chunks, because an interrupted prune leaves its marks and the flush might wait in
    vain.
    """
    return await _marked(store, run, older=_LEFT_OVER_S * 1000)


async def _marked(store: Store, run: str, who: str = "", older: float = -math.inf) -> set[CheckpointId]:
    """Return the checkpoints whose chunks are being deleted.

    Marks that have expired for `who`, as in `sweep`, do not count.
    """
    marks = [_STAMP.fullmatch(info.key.rpartition("/")[2]) async for info in store.scan(pruning_prefix(run))]
    found = {
        CheckpointId.parse(run, mark[1])
        for mark in marks
        if mark and older < _age(mark[2]) and not _is_over(mark[2], mark[3], who)
    }
    return {checkpoint for checkpoint in found if checkpoint}


class Marks:
    """The marks of one prune. Invariant: no chunk under a checkpoint's name is deleted before its mark was `put`.

    Attributes:
        begun: set by the prune when it begins to delete; from then on, a failure leaves the marks in place.
    """

    def __init__(self, store: Store, run: str, stamp: str) -> None:
        self._store, self.run, self._stamp = store, run, stamp
        self._keys: dict[CheckpointId, str] = {}
        self.begun = False

    @property
    def owners(self) -> frozenset[CheckpointId]:
        """The checkpoints under whose names no flush begins to name a chunk."""
        return frozenset(self._keys)

    @property
    def keys(self) -> list[str]:
        return list(self._keys.values())

    async def put(self, owners: Collection[CheckpointId]) -> None:
        """Put marks on these checkpoints too."""
        fresh = {owner: f"{pruning_prefix(self.run)}{owner.name}.{self._stamp}" for owner in sorted(owners)}
        fresh = {owner: key for owner, key in fresh.items() if owner not in self._keys}
        self._keys |= fresh
        await together(_AT_ONCE, [self._store.put(key, b"") for key in fresh.values()])


@asynccontextmanager
async def deleting(store: Store, run: str, who: str = "") -> AsyncIterator[Marks]:
    """Within the context, no flush begins to name a chunk that lies under a marked checkpoint."""
    marks = Marks(store, run, _stamp(who))
    async with _bounded(f"deleting chunks of {run}"):
        try:
            yield marks
        except TierdError:
            if not marks.begun:
                await _forget(store, marks.keys)
            raise
        # If a deletion fails, the marks are left, because it may still take effect.
        await store.delete(marks.keys)


class Swept(NamedTuple):
    """The intents and marks of a run that `sweep` found.

    Attributes:
        tidy: whether none of the caller's own objects still has to expire.
        intents: the keys of intents that have not expired, each with its part.
        cut: checkpoint -> the marks of its interrupted deletion. They are kept until all of it is deleted, because
            nothing else may show that chunks are left.
    """

    tidy: bool
    intents: list[tuple[str, PartId]]
    cut: dict[CheckpointId, list[str]]


async def sweep(store: Store, run: str, who: str) -> Swept:
    """Remove the expired intents of interrupted flushes, and return the other intents and the expired marks."""
    stale: list[str] = []
    intents: list[tuple[str, PartId]] = []
    cut: dict[CheckpointId, list[str]] = {}
    tidy = True
    for prefix in (flushing_prefix(run), pruning_prefix(run)):
        async for info in store.scan(prefix):
            if info.key in _standing:
                continue
            match = _STAMP.fullmatch(info.key)
            if match and _is_over(match[2], match[3], who):
                marked = CheckpointId.parse(run, match[1].removeprefix(pruning_prefix(run)))
                (cut.setdefault(marked, []) if marked else stale).append(info.key)
                continue
            if match and match[3] == who:
                tidy = False
            if part := _intended(run, info.key):
                intents.append((info.key, part))
    await clear(store, stale)
    return Swept(tidy, intents, cut)


def ends(intent: str) -> datetime:
    """Return when an intent, given by its key, expires for any node that prunes."""
    match = _STAMP.fullmatch(intent)
    return datetime.fromtimestamp((int(match[2], 16) + _STALE) / 1000 if match else 0, UTC)


def marked(run: str, key: str) -> CheckpointId | None:
    """Return the checkpoint of a mark, given by its key; None if the prune that put it may still be deleting."""
    match = _STAMP.fullmatch(key)
    if match is None or 0 <= _age(match[2]) <= 1000 * _DEADLINE:
        return None
    return CheckpointId.parse(run, match[1].removeprefix(pruning_prefix(run)))


def _intended(run: str, key: str) -> PartId | None:
    """Return the part whose manifest is about to be put, given the key of an intent."""
    pieces = key.split("/")
    match = _STAMP.fullmatch(pieces[-1])
    return PartId.parse(run, pieces[2], match[1]) if match and len(pieces) == 4 else None


@asynccontextmanager
async def _bounded(doing: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_DEADLINE):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{doing}: not done within {_DEADLINE:.0f} s") from error


async def _forget(store: Store, keys: list[str]) -> None:
    try:
        await store.delete(keys)
    except TierdError:
        pass  # harmless: it expires within a day, and until then only keeps too much
