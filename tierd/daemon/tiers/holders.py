"""Whether some tier still holds what the spool is about to delete.

Invariant: one tier that fails or stalls hides no other tier's answer, because a save that found the disk full waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.daemon.tiers.objects import get_stored, manifest_now, read_manifest, surely
from tierd.daemon.tiers.observe import missing_chunks
from tierd.stores.base import Store

_NEXT = 0.5  # seconds after which the next tier is asked, too: most tiers answer sooner, and need no second request


async def lacking(
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
    return [await holds(store, part, manifest) for part, manifest in local.items()]


async def holds(
    store: Store, part: PartId, local: Manifest | None, going: Callable[[], None] = lambda: None
) -> bool | bytes:
    """Whether a tier holds a copy of a part: the content of `local`, with every chunk there at its stored size.

    The bytes were verified before the manifest was put; this check precedes the deletion of the spool's copy.
    `going` is called at each answer of the store.

    Returns:
        False if the part was pruned there, or its manifest was replaced meanwhile, which is no sign of corruption. If
            the copy is proven corrupt, the bytes of its manifest, by which `quarantine` knows it.
    """
    manifest = None
    try:
        manifest = await read_manifest(store, part)
        if local is None or manifest.same_content(local):
            going()
            missing = await missing_chunks(store, manifest, going)
            if all(chunk.stored for chunk in manifest.chunks()) and await _are_readable(
                store, manifest, missing, going
            ):
                return True
    except ObjectNotFound:
        return False
    except ManifestError:
        pass
    try:
        judged, now = await manifest_now(store, part)
    except ObjectNotFound:  # pruned meanwhile
        return False
    return judged if now == manifest else False


async def _are_readable(store: Store, manifest: Manifest, keys: set[str], going: Callable[[], None]) -> bool:
    """Whether objects that a listing does not show can be read all the same, because some stores list late."""
    links = (link for chunk in manifest.chunks() for link in chunk.chain())
    for link in links:
        if link.stored and f"{manifest.run}/{link.stored.key}" in keys:
            try:
                await surely(partial(get_stored, store, manifest.run, link))
            except CorruptChunk:
                return False
            going()
    return True
