"""Whether a tier answers, and which operations it allows this node: tried out, not derived from a policy.

Invariant: no meaningful object is changed. Where deletion is allowed, one small object is put, read back and deleted
again. Otherwise the object put is the tier's README.md, which every flush ensures anyway.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Literal

from tierd.core.errors import (
    CorruptChunk,
    DeleteRefused,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from tierd.core.ids import CHECK_KEY, KINDS, OWN_KEYS, README_KEY
from tierd.daemon.transfer.flush import introduction
from tierd.stores.base import Store, children, clear, octets

# Nodes that start together try out one key together, so one may delete or replace it before another reads it back.
_TRIES, _APART_S = 5, 0.2  # seconds at most between two of them
_UNREADABLE = (CorruptChunk, ManifestError, FormatTooNew)


@dataclass(frozen=True, slots=True)
class TierAccess:
    """The operations that a tier was found to allow.

    Attributes:
        mode: None if the tier did not answer, or returned other bytes than it was given.
        why: the reason for that, or for any mode less than read-write.
        failure: what is wrong with a tier without a mode; None: it has one.
    """

    mode: Literal["read-write", "append-only", "read-only"] | None
    why: str = ""
    failure: Literal["no answer", "refused", "full"] | None = None


async def reach(store: Store) -> TierAccess:
    """List, delete, put, read back and delete again, with all options of the tier's URL (storage class, KMS key).

    Also try whether each kind of object may be deleted.
    """
    try:
        async for _ in children(store, ""):
            break
        why_kept = await _refuses_to_delete(store) or await _why_kinds_are_kept(store)
        return await _try(store, CHECK_KEY if not why_kept else README_KEY, why_kept)
    except StoreFull as error:
        return TierAccess(None, str(error), "full")
    except StoreRefused as error:
        return TierAccess(None, str(error), "refused")
    except StoreUnavailable as error:
        return TierAccess(None, str(error), "no answer")


async def _refuses_to_delete(store: Store) -> str:
    """Return why no object can be deleted, or an empty text.

    The key need not exist, because an object store checks the permission also for an absent key. A file system that is
    mounted read-only refuses as well, but with no error of its own for deletions.
    """
    try:
        await store.delete([CHECK_KEY])
    except StoreRefused as error:
        return str(error)
    return ""


async def _why_kinds_are_kept(store: Store) -> str:
    """Return why some kinds of objects cannot be deleted, or an empty text, because a policy may name keys."""
    run, kinds_kept, why = "none", list[str](), ""
    async for name in children(store, ""):
        if name not in OWN_KEYS:
            run = name
            break
    for kind in KINDS:
        try:
            await store.delete([f"{run}/{kind}/none"])
        except DeleteRefused as error:
            kinds_kept.append(kind)
            why = str(error)
    return (
        f"nothing is pruned, because of {run}/ some kinds of objects stay, {', '.join(kinds_kept)}: {why}"
        if kinds_kept
        else ""
    )


async def _try(store: Store, key: str, why_kept: str) -> TierAccess:
    data = introduction()
    try:
        await store.put(key, data)
    except StoreRefused as error:
        await _read(store, README_KEY)
        return TierAccess("read-only", str(error))
    try:
        for tries_left in reversed(range(_TRIES)):
            if (read_back := await _read(store, key)) is not None and octets(read_back) == octets(data):
                break
            if not tries_left:
                raise StoreRefused(f"{key}: what was read back differs from what was put")
            await asyncio.sleep(random.uniform(0, _APART_S))  # noqa: S311
            await store.put(key, data)
    finally:
        if not why_kept:
            await clear(store, [key])
    if not why_kept and await _outlives_deletion(store, key):
        why_kept = f"{key} was deleted, and is still there: the tier keeps what it has (a lock on objects?)"
    return TierAccess("append-only", why_kept) if why_kept else TierAccess("read-write")


async def _outlives_deletion(store: Store, key: str) -> bool:
    """Return whether an object outlives its deletions, which another node's object of this name does not."""
    for _ in range(_TRIES):
        if not any([info.key == key async for info in store.scan(key)]):
            return False
        await asyncio.sleep(random.uniform(0, _APART_S))  # noqa: S311
        await clear(store, [key])
    return True


async def _read(store: Store, key: str) -> bytes | None:
    """Read an object; None if it is absent or not encrypted with this tier's key."""
    try:
        return bytes(await store.get(key))
    except (ObjectNotFound, *_UNREADABLE):
        return None
