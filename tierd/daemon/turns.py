"""How flushes and prunes of one run, on whatever nodes, keep out of each other's way with no lock and no server.

A flush may name chunks that lie there already, its own of an earlier try or another checkpoint's, while a prune that
knows nothing of it deletes them. Law, after Dekker: each first says what it is about to do and then looks what the
others said; it never looks first. So of two that meet, one sees the other: a prune spares what an intent names, and a
flush that finds a mark on a checkpoint waits until the mark is gone, and then looks whether its chunks are still there.

    <run>/flushing/<checkpoint>/<part>.<when>-<who>     an intent: the manifest that is about to be put
    <run>/pruning/<checkpoint>.<when>-<who>             a mark, empty: chunks under this checkpoint are being deleted
    <run>/flushing/<checkpoint>/sending.<when>-<who>    an announcement, empty: a node sends parts of this checkpoint

An announcement keeps nothing from being deleted or named. It stands while a part is sent, and other nodes then choose
that checkpoint, too, because none is of use before all of its parts are there.

Intents and marks stand for seconds. One whose writer was cut off stands on, and only keeps something from being deleted
or named. It is over for the node that wrote it after a quarter of an hour, and for whoever prunes the run once it is a
day old: they remove an intent, wait for no mark, and take one for a deletion that is to be done again. On a tier that
lets nothing be deleted, intents stay and mean nothing once they are over.
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
from tierd.daemon.together import together
from tierd.persist import digest
from tierd.stores.base import Store, clear

_DEADLINE = 600.0  # seconds that a turn may take
_AT_ONCE = 8  # marks that are put at once
_LOOKS, _PAUSE = 30, 0.5  # how often a flush looks whether marks are gone, and the seconds in between
_LEFT_OVER_S = 15.0  # a mark this old may stand for long: what it marks is sent rather than named
_OWN_STALE = 900_000  # milliseconds after which this node's own are left over: its clock is the one that stamped them
_STALE = 86_400_000  # and anybody's, whatever their clock
_STAMP = re.compile(r"(.+)\.([0-9a-f]{12})-([0-9a-f]{8})")

_SENDING = "sending"
_standing: set[str] = set()  # announcements of flushes that go on in this process

_ahead: dict[str, float] = {}  # own stamps that are ahead of this clock -> monotonic seconds of the first look


def node(home: Path) -> str:
    """8 hex digits for whoever has its spool at `home`; the same after a restart, mostly others on other nodes."""
    return digest(f"{socket.gethostname()} {home} {home.stat().st_ino}".encode())[:8]


def _stamp(who: str) -> str:
    return f"{time.time_ns() // 1_000_000:012x}-{who or secrets.token_hex(4)}"


def _age(stamp: str) -> int:
    return time.time_ns() // 1_000_000 - int(stamp, 16)


def _is_over(stamp: str, by: str, who: str) -> bool:
    """Whether what `by` stamped is over for `who`: too old, or from so far ahead that no clock can be trusted.

    If this node's own clock was set back since, its own stamps age from the moment that they were first looked at.
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
    """Within, no chunk that `manifest` names is deleted from a tier, if it was there when the context was entered.

    Args:
        manifest: as it is about to be put.
        owners: the checkpoints under whose names its chunks lie.
        who: 8 hex digits, this node's own; random where nobody comes back to sweep.

    Raises:
        StoreUnavailable: others are deleting there and do not come to an end.
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
        # Left where the manifest's put failed: it may still take effect. Earlier tries' go too, but not another node's.
        await clear(store, [info.key async for info in store.scan(own) if info.key.endswith(stamp[-9:])])


@asynccontextmanager
async def announcing(store: Store, checkpoint: CheckpointId, who: str) -> AsyncIterator[None]:
    """Within, other nodes see that this one sends parts of `checkpoint`.

    Raises:
        StoreUnavailable, StoreRefused: it could not be said.
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
    """By checkpoint, the nodes other than `who` that said that they send parts of it, and for whom that is not over.

    Raises:
        StoreUnavailable, StoreRefused: it could not be asked.
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
    """Checkpoints that are marked for longer than most turns take: naming their chunks might be waited for in vain,
    because a prune that an outage has cut off leaves its marks."""
    return await _marked(store, run, older=_LEFT_OVER_S * 1000)


async def _marked(store: Store, run: str, who: str = "", older: float = -math.inf) -> set[CheckpointId]:
    """What is being deleted: not where that is over, for `who` and its own marks as for `sweep`."""
    marks = [_STAMP.fullmatch(info.key.rpartition("/")[2]) async for info in store.scan(pruning_prefix(run))]
    found = {
        CheckpointId.parse(run, mark[1])
        for mark in marks
        if mark and older < _age(mark[2]) and not _is_over(mark[2], mark[3], who)
    }
    return {checkpoint for checkpoint in found if checkpoint}


class Marks:
    """The marks of one prune. Nothing under a checkpoint is deleted before it was `put`.

    Attributes:
        begun: set by whoever begins to delete: from then on, a failure leaves the marks where they are.
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
        """Mark these, too."""
        fresh = {owner: f"{pruning_prefix(self.run)}{owner.name}.{self._stamp}" for owner in sorted(owners)}
        fresh = {owner: key for owner, key in fresh.items() if owner not in self._keys}
        self._keys |= fresh
        await together(_AT_ONCE, [self._store.put(key, b"") for key in fresh.values()])


@asynccontextmanager
async def deleting(store: Store, run: str, who: str = "") -> AsyncIterator[Marks]:
    """Within, no flush begins to name a chunk that lies under a checkpoint that was marked."""
    marks = Marks(store, run, _stamp(who))
    async with _bounded(f"deleting chunks of {run}"):
        try:
            yield marks
        except TierdError:
            if not marks.begun:
                await _forget(store, marks.keys)
            raise
        # Left where a deletion failed: it may still take effect.
        await store.delete(marks.keys)


class Swept(NamedTuple):
    """What others of a run are about to do.

    `tidy` is False where something of the asker has still to come of age. `intents`: the keys of manifests that are
    about to be put, and whose they are. `cut`: the marks of deletions that were cut off, by checkpoint. They stand
    until all of it is deleted: nothing else may tell that something is left.
    """

    tidy: bool
    intents: list[tuple[str, PartId]]
    cut: dict[CheckpointId, list[str]]


async def sweep(store: Store, run: str, who: str) -> Swept:
    """Remove the intents of turns that were cut off, and tell of the others."""
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
    """When an intent, by its key, is over for whoever prunes."""
    match = _STAMP.fullmatch(intent)
    return datetime.fromtimestamp((int(match[2], 16) + _STALE) / 1000 if match else 0, UTC)


def marked(run: str, key: str) -> CheckpointId | None:
    """The checkpoint of a mark, by its key; None where a deletion may still be going on that put it."""
    match = _STAMP.fullmatch(key)
    if match is None or 0 <= _age(match[2]) <= 1000 * _DEADLINE:
        return None
    return CheckpointId.parse(run, match[1].removeprefix(pruning_prefix(run)))


def _intended(run: str, key: str) -> PartId | None:
    """The part whose manifest is about to be put, by an intent's key."""
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
        pass  # it stands for a day, and at worst keeps too much
