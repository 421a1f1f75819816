"""What a watch took of a directory: the content of `.tierd/watched/<run>.json`, and how a unit differs from it now.

Invariant: members of the record are only ever added, each with a default, because an older daemon may have written it,
and may read it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple, TypeAlias

import msgspec
import xxhash

from tierd import __version__
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import UNIT_NAME, Chunk, File, Manifest
from tierd.core.storage_faults import read_until_proven
from tierd.spool.file_io import digest
from tierd.watching.checkpoint_names import checkpoint_time
from tierd.watching.directory_tree import DirectoryTree, OpenFile
from tierd.watching.unit import ListedEntry, Listing

_NEWEST = 2  # checkpoints of each series that are kept, so that one is whole on the tiers while the next one comes
MOST_SERIES = 100  # series of which the newest are kept, if nobody says of how many
_SUPERSEDING = 10  # newer series that begin after the last save of one, until its launch is taken to be over
_DIGEST_PREFIX = f"{__version__} "  # another version may cut a file into other chunks, so its digests are not compared
Sizes: TypeAlias = dict[str, tuple[int, int]]  # by file: its size in bytes, its time of modification in ns


class WaitingUnit(msgspec.Struct, frozen=True):
    """A unit that was not taken yet, and the attempt and the step of the newest checkpoint before it appeared."""

    sizes: Sizes
    after: tuple[str, int] | None
    doubts: int = 0  # how many checkpoints were in doubt before it appeared


class UncertainOrder(msgspec.Struct, frozen=True):
    """A checkpoint whose place in the order is in doubt, as were `number` before it.

    `settled` is a later checkpoint of its series that is in no doubt; None: there is none yet.
    """

    checkpoint: tuple[str, int]
    series: str
    number: int
    settled: tuple[str, int] | None = None


class TakenRecord(msgspec.Struct):
    taken: dict[str, Sizes]
    waiting: dict[str, WaitingUnit]
    earlier: dict[str, int] = {}  # by unit: how many versions of the same time were taken before
    newest: tuple[str, int] | None = None  # the newest checkpoint after the last listing; None in an older record
    has_steps: bool = False  # whether a unit ever had a step in its name
    contents: dict[str, tuple[str, str, int]] = {}  # by unit, the digest of what was taken last, attempt and step
    saved: dict[str, datetime] = {}  # by unit, when that checkpoint was saved
    has_several: bool = False  # whether there ever were several series
    series: dict[str, list[tuple[str, int]]] = {}  # by series, its newest checkpoints, the newest first
    released: list[tuple[str, int]] = []  # checkpoints whose pins on the tiers are to be removed
    held: list[tuple[str, int]] = []  # checkpoints that are pinned in the spool until they are on the tiers
    begun: dict[str, Sizes] = {}  # units that were refused because the checkpoint before had more files
    doubts: int = 0  # how many checkpoints were ever in doubt
    doubted: list[UncertainOrder] = []  # those that are pinned because of that
    digests: dict[str, tuple[int, int, str]] = {}  # by file: its size, its time in ns, the digest of what was taken
    amended: dict[str, list[str]] = {}  # by unit: its files that were written again since it was saved
    generations: dict[str, int] = {}  # by series: how many generations of series had begun at its last save
    generation: int = 0  # how many there are; series that begin together are one generation
    begun_after: tuple[str, int] | None = None  # the newest checkpoint before the newest generation appeared


def rewritten_files(was: Sizes, now: Sizes) -> set[str]:
    return {name for name, size in now.items() if name in was and was[name] != size}


def is_saved_again(was: Sizes, now: Sizes) -> bool:
    """Whether a unit is a new save in the place of an earlier one, and not that one with some files changed or added.

    A save writes at least as many bytes again as it leaves. A file that is gone counts as written again if files were
    added, because a save may give its files other names, as `model-00001-of-00003` for `model-00001-of-00002`.
    """
    rewritten = rewritten_files(was, now)
    deleted = was.keys() - now.keys() if now.keys() - was.keys() else set[str]()
    left_bytes = sum(size for name, (size, _) in now.items() if name in was and name not in rewritten)
    return sum(now[name][0] for name in rewritten) + sum(was[name][0] for name in deleted) >= left_bytes


def add_digests(record: TakenRecord, sizes: Sizes, files: Iterable[File]) -> None:
    record.digests |= {file.path: (*sizes[file.path], _digest(file)) for file in files if file.path in sizes}


def decayed_files(record: TakenRecord, sizes: Sizes, files: Iterable[File]) -> list[str]:
    """Return the files that have the size and the time with which they were taken, and other bytes."""
    recorded = ((file, record.digests.get(file.path)) for file in files if file.path in sizes)
    return [
        file.path
        for file, was in recorded
        if was and was[:2] == sizes[file.path] and was[2] != _digest(file) and was[2].startswith(_DIGEST_PREFIX)
    ]


def _digest(file: File) -> str:
    chunks = [(chunk.size, chunk.xxh3_128) for chunk in file.chunks]
    return f"{_DIGEST_PREFIX}{xxhash.xxh3_128_hexdigest(repr(chunks).encode())}"


def add_to_series(record: TakenRecord, path: str, series: str, pair: tuple[str, int]) -> None:
    """Add the checkpoint of a unit to its series, and release the pins of those that are no longer its newest."""
    waiting = record.waiting.get(path)
    after = waiting.after if waiting else None
    if series not in record.series and after != record.begun_after:
        record.begun_after, record.generation = after, record.generation + 1
    record.generations[series] = record.generation
    newest = record.series.pop(series, [])
    record.series[series] = sorted({*newest, pair}, reverse=True)  # last in the dict, because it was saved last
    if record.has_several:
        record.released += record.series[series][_NEWEST:]
    del record.series[series][_NEWEST:]


def release_series(record: TakenRecord, most: int) -> list[str]:
    """Release the pins of all series but those that were saved last, which are `most`; return their names."""
    names = [*record.series][:-most]
    for name in names:
        record.generations.pop(name, None)
        over = record.series.pop(name)
        if record.has_several:
            record.released += over
    return names


def superseded_series(record: TakenRecord) -> list[str]:
    """Return the series after whose last save so many newer ones began that their launches seem to be over."""
    return [name for name in record.series if record.generation - record.generations.get(name, 0) >= _SUPERSEDING]


def settle_doubts(record: TakenRecord, path: str, series: str, pair: tuple[str, int]) -> None:
    """Settle the doubts about what was taken before a unit of the series appeared, unless it is in doubt itself."""
    waiting = record.waiting.get(path)
    if waiting is None or any(entry.checkpoint == pair for entry in record.doubted):
        return
    record.doubted = [
        msgspec.structs.replace(entry, settled=pair)
        if entry.series == series and entry.number < waiting.doubts and entry.settled is None
        else entry
        for entry in record.doubted
    ]


class Difference(NamedTuple):
    """Where a unit differs from its manifest, for people, and the path of the file, if it is not there."""

    why: str
    absent: str | None = None


def differences(tree: DirectoryTree, listing: Listing, manifest: Manifest) -> Iterator[Difference]:
    """Yield where a unit differs from its manifest; right bytes are read once. Raises as `DirectoryTree.opened`."""
    for file in manifest.files:
        entry = listing.entries.get(file.path)
        if file.path == UNIT_NAME:
            continue
        if entry is None or entry.kind != "file":
            yield Difference(f"{file.path} is not there", absent=file.path)
            continue
        since = _why_edited(entry, manifest)
        if entry.size != file.size:
            yield Difference(f"{file.path} has {entry.size} bytes, and had {file.size} when it was taken{since}")
            continue
        with tree.opened(file.path, entry) as source:
            offset = 0
            for chunk in file.chunks:
                if not _is_right(source, offset, chunk, file.path):
                    at = f"bytes {offset}..{offset + chunk.size}"
                    yield Difference(f"{file.path}: {at} are not those that were taken{since}")
                offset += chunk.size


def _is_right(source: OpenFile, offset: int, chunk: Chunk, path: str) -> bool:
    """Whether a file has a chunk's bytes. Raises UnstableRead, an OSError, if its reads differ from each other."""

    def check() -> None:
        actual = digest(source.read(offset, chunk.size))
        if actual != chunk.xxh3_128:
            source.drop_cached()
            error = CorruptChunk(path)
            error.read_digest = actual
            raise error

    try:
        read_until_proven(check, path)
    except CorruptChunk:
        return False
    return True


def _why_edited(entry: ListedEntry, manifest: Manifest) -> str:
    """Say if a file was written to after the save; such an edit is no decay of the disk, and a person may want it."""
    at = checkpoint_time(entry.mtime_ns)
    return f"; it was written to at {at:%Y-%m-%d %H:%M:%S} UTC, after the save" if at > manifest.created_at else ""
