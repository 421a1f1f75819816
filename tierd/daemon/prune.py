"""Deleting and setting aside on a tier. What goes was decided by `core/plan.py`; how it goes is decided here.

Law: the manifest first, then what it names, minus what a surviving manifest names, or one that is about to be put
(`turns`). Cut off anywhere, the next look finds either a whole checkpoint or chunks that no manifest names, and the
plan comes back for those; under a name that still lends, by the mark that stands there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from tierd.codec import check_stored
from tierd.core.errors import CorruptChunk, DeleteRefused, FormatTooNew, ManifestError, ObjectNotFound
from tierd.core.ids import CheckpointId, PartId, chunks_prefix, quarantine_prefix
from tierd.core.manifest import Manifest, Stored
from tierd.core.world import Place
from tierd.daemon.borrowed import mark_of
from tierd.daemon.copies import put_manifest, read_manifest, surely
from tierd.daemon.doomed import Going, Pass
from tierd.daemon.manifests import Manifests
from tierd.daemon.observe import missing_chunks
from tierd.daemon.turns import deleting
from tierd.stores.base import Store

_FEW = 16  # manifests that may be read while the marks stand
_PAGE = 999  # chunks of others that a listing passes before it is cheaper to begin a new one


class Pruned(NamedTuple):
    """What a pass has done.

    `gone`: the checkpoints of which anything was deleted; not those of which another node is just putting a manifest,
    nor those of which nothing is there but what others name. `bare`: others, pruned before, whose last chunks went.
    `held`: those that stay for now, each with the reason.
    """

    gone: set[CheckpointId]
    bare: set[CheckpointId]
    held: Mapping[CheckpointId, str] = {}


async def prune(
    store: Store,
    checkpoints: Collection[CheckpointId],
    who: str = "",
    known: Manifests | None = None,
    seen: Place | None = None,
) -> Pruned:
    """Delete checkpoints of one run from a tier in one pass, and the chunks that nothing but they named.

    Every surviving manifest was read before anything goes: what it names is known, and nothing goes on the strength of
    a newer checkpoint that cannot be used.

    Args:
        who: 8 hex digits, this node's own; random where nobody comes back to sweep.
        known: what was read on this tier before, and need not be read again.
        seen: what the decision rests on: a checkpoint of which there is more by now is not deleted.

    Raises:
        ManifestError, FormatTooNew: a surviving manifest cannot be used, so what it names is not known; nothing was
            deleted, and `known` knows it now.
        FormatTooNew: or one of the checkpoints' own; nothing was deleted.
    """
    runs = {one.run for one in checkpoints}
    if not runs:
        return Pruned(set(), set())
    (run,) = runs
    known = known or Manifests(store)
    if known.unread(run) > _FEW or not all(known.is_read(one) for one in checkpoints):
        await known.learn(run, checkpoints)  # before the marks, which stand for seconds
    async with deleting(store, run, who) as marks:
        going = await Pass(store, set(checkpoints), who, known, marks, seen or Place()).settle(listed=seen is None)
        if not going.doomed:
            return Pruned(set(), set(), going.held)
        marks.begun = True
        own = going.listed.own
        manifests = [key for one in sorted(own) for key in own[one]]
        try:
            await store.delete(manifests)
        except DeleteRefused:
            marks.begun = False  # no chunk is being deleted: the marks go, where they may
            raise
        gone = [key async for key in _lying(store, run, going)]
        aside = [info.key async for info in store.scan(quarantine_prefix(run)) if _of(run, info.key) in going.doomed]
        await store.delete(gone + aside)
        await store.delete([mark for one in sorted(going.doomed) for mark in going.cut.get(one, [])])
    known.cut[run] -= going.doomed
    bare = {owner for owner in going.orphans if not going.listed.named.under(owner)}
    return Pruned(going.doomed & {*own, *(_of(run, key) for key in gone + aside)}, bare, going.held)


async def _lying(store: Store, run: str, going: Going) -> AsyncGenerator[str]:
    """The keys of the chunks that go, by one listing from the first checkpoint to the last. Where much lies between
    two of them, that is skipped."""
    prefix = chunks_prefix(run)
    left = deque(sorted((one.name, one) for one in {*going.doomed, *going.orphans}))
    while left:
        passed = 0
        async with aclosing(store.scan(prefix, f"{prefix}{left[0][0]}")) as listing:
            async for info in listing:
                name = info.key[len(prefix) :].partition("/")[0]
                while left and left[0][0] < name:
                    left.popleft()
                if not left:
                    return
                passed = 0 if name == left[0][0] else passed + 1
                if passed > _PAGE:
                    break
                if not passed and going.goes(left[0][1], mark_of(info.key[len(run) + 1 :])):
                    yield info.key
            else:
                return


def _of(run: str, key: str) -> CheckpointId | None:
    """The checkpoint under whose name an object lies: ``<run>/<sort>/<checkpoint>/…``."""
    return CheckpointId.parse(run, key.split("/")[2])


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
