"""Announcements: a node tells the others which checkpoint it takes or sends.

    <run>/flushing/<checkpoint>/sending.<when>-<who>    an announcement, empty: a node sends parts of this checkpoint

An announcement prevents neither deletions nor shared chunks. It exists while a part is sent. Other nodes then choose
the same checkpoint, because a checkpoint is useless before all its parts are on the tier. Of a watched run it exists
from before a unit is read, and is renewed (`intake/taker.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tierd.core.ids import CheckpointId, flushing_prefix
from tierd.daemon.tiers.stamps import STAMP, forget, is_over, stamp_now
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.stores.base import Store

_SENDING = "sending"
_standing: set[str] = set()  # announcements of flushes that run in this process


@asynccontextmanager
async def announcing(
    store: Store, checkpoint: CheckpointId, who: str, timings: DaemonTimings = USUAL
) -> AsyncIterator[None]:
    """Announce to other nodes, within the context, that this node sends parts of `checkpoint`.

    Raises:
        StoreUnavailable, StoreRefused: the announcement could not be put.
    """
    key = await announce(store, checkpoint, who, timings)
    try:
        yield
    finally:
        _standing.discard(key)
        await forget(store, [key])


async def announce(store: Store, checkpoint: CheckpointId, who: str, timings: DaemonTimings = USUAL) -> str:
    """Announce that this node takes or sends parts of `checkpoint`; return the announcement's key.

    Raises:
        StoreUnavailable, StoreRefused: the announcement could not be put.
    """
    key = f"{flushing_prefix(checkpoint.run)}{checkpoint.name}/{_SENDING}.{stamp_now(who, timings)}"
    await store.put(key, b"")
    _standing.add(key)
    return key


async def withdraw(store: Store, key: str) -> None:
    """Delete an announcement.

    Raises:
        StoreUnavailable, StoreRefused: it could not be deleted.
    """
    _standing.discard(key)
    await store.delete([key])


async def announcements(store: Store, run: str, who: str) -> frozenset[str]:
    """Return the keys of all announcements of nodes other than `who`, whatever their age.

    Raises:
        StoreUnavailable, StoreRefused: the tier could not be listed.
    """
    keys = [info.key async for info in store.scan(flushing_prefix(run))]
    stamped = [(key, STAMP.fullmatch(key.rpartition("/")[2])) for key in keys]
    return frozenset(key for key, match in stamped if match and match[1] == _SENDING and match[3] != who)


async def announced(
    store: Store, run: str, who: str, timings: DaemonTimings = USUAL
) -> dict[CheckpointId, frozenset[str]]:
    """Return, by checkpoint, the other nodes that announce that they send its parts.

    Announcements of `who` itself and expired ones do not count.

    Raises:
        StoreUnavailable, StoreRefused: the tier could not be listed.
    """
    senders: dict[CheckpointId, frozenset[str]] = {}
    prefix = flushing_prefix(run)
    async for info in store.scan(prefix):
        name, _, stamp = info.key[len(prefix) :].partition("/")
        match, checkpoint = STAMP.fullmatch(stamp), CheckpointId.parse(run, name)
        if not checkpoint or not match or match[1] != _SENDING or match[3] == who:
            continue
        if not is_over(match[2], match[3], who, timings):
            senders[checkpoint] = senders.get(checkpoint, frozenset()) | {match[3]}
    return senders


def is_standing(key: str) -> bool:
    """Whether this is an announcement of this process that was not withdrawn."""
    return key in _standing
