"""Deleting and setting aside on a tier. What goes was decided by `core/plan.py`; how it goes is decided here.

Law: the manifest first, then what it names, minus what a surviving manifest names, or one that is about to be put
(`turns`). Cut off anywhere, the next look finds either a whole checkpoint or chunks that no manifest names, and the
plan comes back for those; under a name that still lends, by the mark that stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial

from tierd.codec import check_stored
from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, chunk_owner, chunks_prefix, manifests_prefix, quarantine_prefix
from tierd.core.manifest import Manifest, Stored
from tierd.daemon.copies import put_manifest, read_manifest, surely
from tierd.daemon.manifests import READERS, Manifests
from tierd.daemon.observe import missing_chunks
from tierd.daemon.together import each
from tierd.daemon.turns import deleting, intents, sweep
from tierd.stores.base import ObjectInfo, Store


async def prune(store: Store, checkpoint: CheckpointId, who: str = "", known: Manifests | None = None) -> bool:
    """Delete a checkpoint from a tier, and the chunks that nothing but it named.

    Every surviving manifest was read before anything goes: what it names is known, and nothing goes on the strength of
    a newer checkpoint that cannot be used.

    Args:
        who: 8 hex digits, this node's own; random where nobody comes back to sweep.
        known: what was read on this tier before: one that borrows nothing from here need not be read again.

    Returns:
        Whether anything went; False where another node is just putting a manifest of it, or others name what is there.

    Raises:
        ManifestError, FormatTooNew: a surviving manifest cannot be used, so what it names is not known; no chunk was
            deleted, and `known` knows it now.
        FormatTooNew: or one of the checkpoint's own; nothing was deleted.
    """
    run, known = checkpoint.run, known or Manifests(store)
    _, cut = await sweep(store, run, who)
    known.cut[run] = set(cut)
    own = await _own(store, checkpoint)
    named = await _named_by(known, own)
    doomed = named - await _survivors(store, checkpoint, named, known)
    owners, keys = _owners(doomed) | {checkpoint}, [info.key for info in own]
    async with deleting(store, run, owners, who):
        coming = any(part.checkpoint == checkpoint for _, part in await intents(store, run))
        if coming or keys != [info.key for info in await _own(store, checkpoint)]:
            return False
        await store.delete(keys)
        doomed |= {info.key async for info in store.scan(f"{chunks_prefix(run)}{checkpoint.name}/")}
        aside = [info.key async for info in store.scan(f"{quarantine_prefix(run)}{checkpoint.name}/")]
        # After the marks and after the listing of chunks: whoever names one of these from now on sees the marks.
        gone = sorted(doomed - await _survivors(store, checkpoint, doomed, known))
        await store.delete(gone + aside)
        await store.delete(cut.get(checkpoint, []))
    known.cut[run].discard(checkpoint)
    return bool(own or gone or aside)


async def _own(store: Store, checkpoint: CheckpointId) -> list[ObjectInfo]:
    return [info async for info in store.scan(f"{manifests_prefix(checkpoint.run)}{checkpoint.name}/")]


async def _named_by(known: Manifests, own: list[ObjectInfo]) -> set[str]:
    """The chunks that these manifests name; one that is damaged names none."""
    found = set[str]()

    async def look(info: ObjectInfo) -> None:
        with suppress(ObjectNotFound, ManifestError):
            found.update(_chunks(await known.read(info)))

    await each(READERS, look, own)
    return found


async def _survivors(store: Store, checkpoint: CheckpointId, doomed: set[str], known: Manifests) -> set[str]:
    """Those of `doomed`, chunks, that are named by what is there beside `checkpoint`, or is about to be."""
    found = set[str]()

    def spare(manifest: Manifest) -> None:  # many name the same, and most of it is not asked about
        found.update(doomed.intersection(_chunks(manifest)))

    async def coming(intent: tuple[str, PartId]) -> None:
        with suppress(ObjectNotFound):
            spare(await read_manifest(store, None, intent[0]))

    async def there(info: ObjectInfo) -> None:
        with suppress(ObjectNotFound):
            spare(await known.read(info))

    # Intents are read before manifests are listed: one that is gone by then has its manifest among those.
    await each(READERS, coming, await intents(store, checkpoint.run))
    async with aclosing(known.naming(checkpoint, _owners(doomed) | {checkpoint})) as naming:
        await each(READERS, there, naming)
    return found


def _chunks(manifest: Manifest) -> Iterator[str]:
    """The keys of the chunks that a manifest names."""
    return (f"{manifest.run}/{chunk.stored.key}" for chunk in manifest.chunks() if chunk.stored)


def _owners(keys: set[str]) -> set[CheckpointId]:
    """The checkpoints under whose names these chunks lie."""
    found = {chunk_owner(*key.split("/", 1)) for key in keys}
    return {owner for owner in found if owner}


async def quarantine(store: Store, part: PartId) -> bool:
    """Take a part's manifest out of sight on a tier: its copy is proven corrupt. The chunks stay to be looked at.

    Returns:
        Whether there was a manifest.
    """
    try:
        data = await store.get(part.manifest_key)
    except ObjectNotFound:
        return False
    except (CorruptChunk, ManifestError):  # larger than any manifest, or not of this tier's key: a mark is enough
        data = b""
    try:  # what was set aside before stays, if it can be read: it may be all that tells where its attempt came from
        await read_manifest(store, part, part.quarantine_key)
    except (ObjectNotFound, ManifestError, FormatTooNew):
        await put_manifest(store, part.quarantine_key, data)
    await store.delete([part.manifest_key])
    return True


async def holds(store: Store, part: PartId, local: Manifest | None) -> bool | None:
    """Whether a tier holds a copy of a part: the content that `local` describes, every chunk there at its stored size.
    None: it was pruned, which says nothing bad of it.

    The bytes were verified before the manifest was put; this is asked once more before the spool's copy goes.
    """
    try:
        manifest = await read_manifest(store, part)
        if local is not None and not manifest.same_content(local):
            return False
        if all(chunk.stored for chunk in manifest.chunks()) and not await missing_chunks(store, manifest):
            return True
        await store.get(part.manifest_key)  # if that is there still, nobody was just pruning it
    except ObjectNotFound:
        return None
    except ManifestError:
        pass
    return False


async def verify(store: Store, part: PartId, read: Callable[[int], None]) -> tuple[Manifest, list[str]]:
    """Re-read every stored byte of a part on a tier and compare; the manifest, and what is wrong.

    Args:
        read: told the stored bytes of each chunk as it has been compared.

    Raises:
        ObjectNotFound, ManifestError, FormatTooNew: the manifest is not there or cannot be used.
        StoreUnavailable, StoreRefused: says nothing about the bytes.
    """
    manifest = await read_manifest(store, part)
    wrong: list[str] = []
    for chunk in manifest.chunks():
        if chunk.stored is None:
            wrong.append(f"chunk {chunk.xxh3_128}: the manifest does not say where it is")
            continue
        key = f"{part.checkpoint.run}/{chunk.stored.key}"
        try:
            await surely(partial(_compare, store, key, chunk.stored))
        except ObjectNotFound:
            wrong.append(f"{key}: missing")
        except CorruptChunk as error:
            wrong.append(str(error))
        read(chunk.stored.size)
    return manifest, wrong


async def _compare(store: Store, key: str, stored: Stored) -> None:
    check_stored(stored, await store.get(key), key.partition("/")[0])
