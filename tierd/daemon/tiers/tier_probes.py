"""Ask a tier: which operations it allows this node, whether it holds a part, whether a quarantined copy is right.

Invariants: no meaningful object is changed by a try. One tier that fails or stalls hides no other tier's answer. Of
quarantined copies only the manifest is deleted, after the same bytes were put back in their place and confirmed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
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
    TierdError,
)
from tierd.core.ids import CHECK_KEY, KEY_KINDS, OWN_KEYS, README_KEY, PartId
from tierd.core.manifest import Chunk, Manifest
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.daemon.tiers.intents import protect_chunks
from tierd.daemon.tiers.tier_identity import tier_readme
from tierd.daemon.tiers.tier_objects import (
    find_chunk_defect,
    manifest_bytes,
    put_manifest,
    read_manifest,
    read_stored_manifest,
    reread_manifest,
)
from tierd.daemon.tiers.tier_observer import missing_chunks
from tierd.stores.base import BucketAbsent, Store, delete_if_permitted, list_children, octets

# Nodes that start together try out one key together, so one may delete or replace it before another reads it back.
_TRIES, _APART_S = 5, 0.2  # seconds at most between two of them
_UNREADABLE = (CorruptChunk, ManifestError, FormatTooNew)
_NEXT = 0.5  # seconds after which the next tier is asked, too: most tiers answer sooner, and need no second request


@dataclass(frozen=True, slots=True)
class TierAccess:
    """The operations that a tier was found to allow."""

    # None if the tier did not answer, or returned other bytes than it was given.
    mode: Literal["read-write", "append-only", "read-only"] | None
    why: str = ""  # the reason for that, or for any mode less than read-write
    # What is wrong with a tier without a mode; None: it has one.
    failure: Literal["no answer", "refused", "no bucket", "full"] | None = None


async def probe_access(store: Store) -> TierAccess:
    """List, delete, put, read back and delete again, with all options of the tier's URL (storage class, KMS key).

    Also try whether each kind of object may be deleted.
    """
    try:
        async for _ in list_children(store, ""):
            break
        why_kept = await _refuses_to_delete(store) or await _why_kinds_are_kept(store)
        return await _try(store, CHECK_KEY if not why_kept else README_KEY, why_kept)
    except StoreFull as error:
        return TierAccess(None, str(error), "full")
    except StoreRefused as error:
        return TierAccess(None, str(error), "no bucket" if isinstance(error, BucketAbsent) else "refused")
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
    async for name in list_children(store, ""):
        if name not in OWN_KEYS:
            run = name
            break
    for kind in KEY_KINDS:
        try:
            await store.delete([f"{run}/{kind}/none"])
        except DeleteRefused as error:
            kinds_kept.append(kind)
            why = str(error)
    if not kinds_kept:
        return ""
    return f"nothing is pruned, because of {run}/ some kinds of objects stay, {', '.join(kinds_kept)}: {why}"


async def _try(store: Store, key: str, why_kept: str) -> TierAccess:
    data = tier_readme()
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
            await delete_if_permitted(store, [key])
    if not why_kept and await _outlives_deletion(store, key):
        why_kept = f"{key} was deleted, and is still there: the tier keeps what it has (a lock on objects?)"
    return TierAccess("append-only", why_kept) if why_kept else TierAccess("read-write")


async def _outlives_deletion(store: Store, key: str) -> bool:
    """Return whether an object outlives its deletions, which another node's object of this name does not."""
    for _ in range(_TRIES):
        if not any([info.key == key async for info in store.scan(key)]):
            return False
        await asyncio.sleep(random.uniform(0, _APART_S))  # noqa: S311
        await delete_if_permitted(store, [key])
    return True


async def _read(store: Store, key: str) -> bytes | None:
    """Read an object; None if it is absent or not encrypted with this tier's key."""
    try:
        return bytes(await store.get(key))
    except (ObjectNotFound, *_UNREADABLE):
        return None


async def find_missing_parts(
    stores: Mapping[str, Store], local: Mapping[PartId, Manifest | None]
) -> list[tuple[str, PartId, bytes]] | None:
    """Ask tiers whether they hold the content of these parts, until one of them holds all.

    Args:
        stores: the tiers that were seen to hold all parts, by name. Each is asked when the one before it has answered,
            has failed, or has been silent for `_NEXT` seconds.
        local: each part's manifest in the spool, None where it cannot be read.

    Returns:
        None if a tier holds all parts, or if there is no tier. Otherwise the tiers and parts that lack a chunk that
        their manifest names, each with that manifest's bytes.

    Raises:
        TierdError, OSError: a tier failed, and no tier holds or lacks anything.
    """
    later, name_by_task = list(stores), dict[asyncio.Task[list[bool | bytes]], str]()
    lacking_parts: list[tuple[str, PartId, bytes]] = []
    failure: BaseException | None = None
    try:
        while later or name_by_task:
            if later:
                name = later.pop(0)
                name_by_task[asyncio.create_task(_ask_tier(stores[name], local))] = name
            done, _ = await asyncio.wait(
                name_by_task, timeout=_NEXT if later else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                name = name_by_task.pop(task)
                if isinstance(error := task.exception(), (TierdError, OSError)):
                    failure = error
                    continue
                answers = task.result()
                if all(answer is True for answer in answers):
                    return None
                lacking_parts += [
                    (name, part, answer)
                    for part, answer in zip(local, answers, strict=True)
                    if isinstance(answer, bytes)
                ]
    finally:
        for task in name_by_task:
            task.cancel()
        await asyncio.gather(*name_by_task, return_exceptions=True)
    if failure and not lacking_parts:
        raise failure
    return lacking_parts if stores else None


async def _ask_tier(store: Store, local: Mapping[PartId, Manifest | None]) -> list[bool | bytes]:
    return [await is_part_held(store, part, manifest) for part, manifest in local.items()]


async def is_part_held(
    store: Store, part: PartId, local: Manifest | None, on_answer: Callable[[], None] = lambda: None
) -> bool | bytes:
    """Whether a tier holds a copy of a part: the content of `local`, with every chunk there at its stored size.

    The bytes were verified before the manifest was put; this check precedes the deletion of the spool's copy.

    Returns:
        False if the part was pruned there, or its manifest was replaced meanwhile, which is no sign of corruption. If
            the copy is proven corrupt, the bytes of its manifest, by which `quarantine` knows it.
    """
    manifest = None
    try:
        manifest = await read_manifest(store, part)
        if local is None or manifest.same_content(local):
            on_answer()
            missing = await missing_chunks(store, manifest, on_answer)
            if all(chunk.stored for chunk in manifest.chunks()) and await _are_readable(
                store, manifest, missing, on_answer
            ):
                return True
    except ObjectNotFound:
        return False
    except ManifestError:
        pass
    try:
        judged, now = await reread_manifest(store, part)
    except ObjectNotFound:  # pruned meanwhile
        return False
    return judged if now == manifest else False


async def _are_readable(store: Store, manifest: Manifest, keys: set[str], going: Callable[[], None]) -> bool:
    """Whether objects that a listing does not show can be read all the same, because some stores list late."""
    links = (link for chunk in manifest.chunks() for link in chunk.chain())
    for link in links:
        if link.stored and f"{manifest.run}/{link.stored.key}" in keys:
            if await find_chunk_defect(store, manifest.run, link):
                return False
            going()
    return True


class QuarantinedCopy:
    """A quarantined copy on a tier, and how much of it was read again."""

    def __init__(self, store: Store, part: PartId, who: str = "", timings: DaemonTimings = USUAL) -> None:
        self._store, self._part, self._who, self._timings = store, part, who, timings
        self._data = b""
        self._chunks_to_check: Iterator[Chunk] = iter(())
        self._defect = ""

    async def release(self, ends_s: float = math.inf) -> bool | None:
        """Read on, and put the manifest back in its place once every byte has proved right.

        Args:
            ends_s: when to stop reading, monotonic seconds. The next call goes on where this one stopped, so that the
                flushes that wait for a prune wait for seconds.

        Returns:
            Whether the copy is used again; None if not all of it was read yet. False if its bytes are proven corrupt,
            if it is not in quarantine, or if another copy of the part is on the tier.

        Raises:
            FormatTooNew, StoreUnavailable, StoreRefused: not all bytes could be judged (`core.corruption`), or the
                manifest could not be put; the quarantined manifest is kept.
        """
        try:
            data, manifest = await read_stored_manifest(self._store, self._part, self._part.quarantine_key)
        except (ObjectNotFound, ManifestError):
            return False
        if data != self._data:
            self._data, self._defect = data, ""
            self._chunks_to_check = (link for chunk in manifest.chunks() for link in chunk.chain())
        if self._defect or not await self._is_right(ends_s):
            return False if self._defect else None
        return await self._put_back(manifest)

    async def _is_right(self, ends_s: float) -> bool:
        """Read on until `ends_s`; whether all was read, and is right."""
        while time.monotonic() < ends_s:
            link = next(self._chunks_to_check, None)
            if link is None:
                return True
            try:
                self._defect = await find_chunk_defect(self._store, self._part.checkpoint.run, link) or ""
            except BaseException:
                self._data = b""  # the next call begins anew, because this chunk was not judged
                raise
            if self._defect:
                return False
        return False

    async def _put_back(self, manifest: Manifest) -> bool:
        store, part = self._store, self._part
        owners = manifest.owners | {part.checkpoint}
        async with protect_chunks(store, part, self._data, owners, self._who, self._timings):
            try:
                if await manifest_bytes(store, part) != self._data:
                    return False  # it was sent again meanwhile, and that copy is judged as any other
            except ObjectNotFound:
                pass
            missing = await missing_chunks(store, manifest)
            if not missing:
                await put_manifest(store, part.manifest_key, self._data, reread=True)
        if missing:
            raise StoreUnavailable(f"{part}: {len(missing)} chunks were deleted while it was verified again")
        await delete_if_permitted(store, [part.quarantine_key])
        return True
