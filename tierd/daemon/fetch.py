"""Tier -> spool: make a part whole again, chunk by chunk, from whichever tier has each chunk right; or bring some
chunks of it for whoever needs no more.

Law: a part appears in the spool whole or not at all. What an interrupted fetch left lies under a name that the next one
for the part finds, and is taken up where it is right. Bytes are verified as stored, as raw, and again by whoever reads
them from the spool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, SpoolFull
from tierd.core.ids import PartId
from tierd.core.manifest import DRAFT_NAME, MANIFEST_NAME, Manifest
from tierd.core.manifest import encode as encode_manifest
from tierd.core.world import SPOOL
from tierd.daemon.budget import Budget
from tierd.daemon.copies import Copies
from tierd.daemon.download import Progress, Wanted, download, make_way, missing, wanted_size
from tierd.daemon.together import to_the_end
from tierd.persist import sync_directory, write_file
from tierd.spool import Spool, translated
from tierd.stage import Stage, make_locked
from tierd.stores.base import Store

_SPARE = 64 << 20  # bytes left free on the spool's disk beside what is fetched, on a small disk
_SPARE_SHARE = 32  # one part in so many of it


@dataclass(frozen=True, slots=True)
class Fetched:
    """`tiers` gave chunks; `defects` are tiers whose copy was found proven bad on the way; `chunks` were written."""

    tiers: tuple[str, ...]
    defects: Mapping[str, str]
    chunks: int


async def fetch(
    spool: Spool,
    part: PartId,
    stores: Mapping[str, Store],
    budget: Budget | None = None,
    progress: Progress | None = None,
    wanted: Wanted | None = None,
    partial: Partial | None = None,
) -> Fetched:
    """Make the spool's copy of `part` whole, whatever of it is there.

    Args:
        progress: is kept up to date for whoever looks.
        wanted: only these chunks; a part that is not in the spool stays in `partial`, and is not committed.
        partial: where it is put together. Given, its lock is left to the caller, unless the part was committed.

    Raises:
        ConfigError: `wanted` names a chunk that the part does not have.
        CorruptChunk: no copy, and no mixture of copies, is right; says why for each.
        ObjectNotFound: no place has a copy.
        StoreUnavailable: not known, since a tier could not be asked.
        SpoolFull: there is no room.
    """
    progress = progress or Progress()
    copies = Copies(part, stores)
    await copies.ask()
    local, defect = await to_the_end(_local_manifest, spool, part)
    contents = [local] if local else copies.contents()  # the spool's word counts
    if not contents:
        if isinstance(defect, OSError):  # a disk that does not answer proves nothing about the bytes
            copies.unavailable[SPOOL] = f"local: {defect}"
        if not (defect or copies.unavailable or copies.defects):  # pruned since somebody saw it, say: nothing is wrong
            raise ObjectNotFound(f"{part}: neither the spool nor any tier has a copy")
        copies.give_up(str(defect or "the spool has no copy"), copies.unavailable)
        raise AssertionError
    budget, home = budget or Budget(), spool.path(part)
    for reference in contents:
        copies.agree(reference)
        progress.begin(wanted_size(reference, wanted))
        try:
            with translated(f"spool {home}"):
                if home.is_dir():
                    needed = wanted if reference is local else None  # a new manifest speaks for all of the part
                    await download(home, reference, copies, budget, progress, committed=True, wanted=needed)
                    if reference is not local:
                        await to_the_end(_replace_manifest, spool, part, reference)
                    break
                place = partial or Partial(spool, part)
                try:
                    await _download(spool, place, reference, copies, budget, progress, wanted)
                    break
                finally:
                    if partial is None:
                        place.leave()
        except CorruptChunk:
            if reference is contents[-1]:
                raise
    return Fetched(progress.tiers, copies.defects, progress.written)


def _local_manifest(spool: Spool, part: PartId) -> tuple[Manifest | None, ManifestError | OSError | None]:
    try:
        return spool.manifest(part), None
    except ObjectNotFound:
        return None, None
    except (ManifestError, OSError) as error:
        return None, error


def _replace_manifest(spool: Spool, part: PartId, manifest: Manifest) -> None:
    home = spool.path(part)
    fresh = home / DRAFT_NAME
    for name in (fresh.name, MANIFEST_NAME):
        make_way(home, name)
    fresh.unlink(missing_ok=True)
    write_file(fresh, MANIFEST_NAME, encode_manifest(manifest))
    fresh.replace(home / MANIFEST_NAME)
    sync_directory(home)


class Partial(Stage):
    """A stage that the next fetch of its part finds again. While it is held, nobody sweeps it away."""

    def __init__(self, spool: Spool, part: PartId) -> None:
        self.part, self._target, self._spool = part, spool.path(part), spool
        self._committed = lambda: None  # what is fetched was not saved here
        self.path, self._fd = spool.fetching(part), -1

    def take(self) -> None:
        """Make it, or find it again, and hold it. Apart from the making: whoever is cancelled here has to let go."""
        self._spool.check_way(self.part.checkpoint.run)
        if self._fd < 0:
            self._fd = make_locked(self.path)

    def leave(self) -> None:
        """Let go of it, and leave what is there; harmless after `commit` and `abandon`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def _download(
    spool: Spool,
    partial: Partial,
    manifest: Manifest,
    copies: Copies,
    budget: Budget,
    progress: Progress,
    wanted: Wanted | None,
) -> None:
    try:
        await to_the_end(partial.take)
        await to_the_end(_make_room, spool, partial, manifest, wanted)
        await download(partial.path, manifest, copies, budget, progress, wanted=wanted)
        if wanted is None:
            await to_the_end(partial.commit, manifest)
    except CorruptChunk:
        await to_the_end(partial.abandon)  # nobody has it right: it will not be asked for again
        raise


def _make_room(spool: Spool, partial: Partial, manifest: Manifest, wanted: Wanted | None) -> None:
    """See that the disk takes what is missing; other downloads that nobody goes on with give way."""
    spare = min(_SPARE, spool.free()[1] // _SPARE_SHARE)
    needed = min(missing(partial.path, manifest), wanted_size(manifest, wanted)) + spare
    if needed > spool.free()[0]:
        for name in spool.leftovers():
            if name.startswith("fetch/"):
                spool.discard(name)
    free, _ = spool.free()
    if needed > free:
        need = f"{needed} bytes more, {spare} of them to spare"
        raise SpoolFull(f"spool {spool.root}: {partial.part} needs {need}, and {free} are free")
