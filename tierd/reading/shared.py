"""Which entries of a checkpoint are the same on all its ranks, so that any rank's part gives them.

Law: two entries count as equal only if their trees are the same JSON, and their tensors the same bytes: by the digests
of the manifests where those tell, else by the verified bytes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

from tierd.client.entries import (
    check_names,
    check_written_by_save,
    parse_entries,
    read_header,
    read_tree,
    tensors_named,
)
from tierd.client.tensorfile import Entry
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, Manifest
from tierd.device import memory_for
from tierd.persist import digest
from tierd.reading.tiers import TierFiles

_READERS = 8  # ranks compared at once
_PIECE = 64 << 20  # bytes compared at once

_Piece: TypeAlias = tuple[int, int, str]  # first and last byte of a chunk, relative to a tensor, and its digest


@dataclass(slots=True)
class _Part:
    """One rank's part: each entry's JSON and tensors, and where tensors lie in the tensor file."""

    id: PartId
    entries: dict[str, str]
    tensors: dict[str, set[str]]
    places: dict[str, Entry]
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of ranges that were read


def differing(files: TierFiles, names: Collection[str] | None) -> list[str]:
    """The entries that are not the same on all ranks, in the order in which they were saved.

    Args:
        names: compare these alone; None: all.

    Raises:
        StateMismatch: it was not written by `save`, or has no such entry.
        CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable: as `Ranges.fill`.
    """
    manifest = files.manifest(files.part(0))
    check_written_by_save(manifest.part, [file.path for file in manifest.files])
    if files.world == 1:
        return []
    first = _describe(files, files.part(0))
    if names is not None:
        check_names(first.entries, names, str(first.id))

    def compare(rank: int) -> set[str]:
        part = files.part(rank)
        if _content(files.manifest(part)) == _content(manifest):
            return set()
        other = _describe(files, part)
        asked = dict.fromkeys((*first.entries, *other.entries)) if names is None else names
        return {name for name in asked if not _is_same(files, first, other, name)}

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tierd-compare") as pool:
        found = set[str]().union(*pool.map(compare, range(1, files.world)))
    return [*(name for name in first.entries if name in found), *sorted(found - first.entries.keys())]


def _content(manifest: Manifest) -> list[tuple[str, list[str]]]:
    return [(file.path, [chunk.xxh3_128 for chunk in file.chunks]) for file in manifest.files]


def _describe(files: TierFiles, part: PartId) -> _Part:
    paths = [file.path for file in files.manifest(part).files]
    check_written_by_save(part, paths)
    parsed = parse_entries(read_tree(files, part), str(part))
    entries = {name: json.dumps(value) for name, value in parsed.items()}  # text: 1, 1.0 and true are not the same
    tensors = {name: tensors_named(text) for name, text in entries.items()}
    return _Part(part, entries, tensors, read_header(files, part)[1].entries)


def _is_same(files: TierFiles, one: _Part, other: _Part, name: str) -> bool:
    if name not in one.entries or one.entries[name] != other.entries.get(name):
        return False
    return all(_are_equal(files, one, other, tensor) for tensor in sorted(one.tensors[name]))


def _are_equal(files: TierFiles, one: _Part, other: _Part, tensor: str) -> bool:
    """Whether a tensor is the same on two ranks."""
    here, there = one.places.get(tensor), other.places.get(tensor)
    if here is None or there is None or (here.dtype, here.shape) != (there.dtype, there.shape):
        return here is there is None
    if not here.nbytes:
        return True
    mine, theirs = _pieces(files, one, here), _pieces(files, other, there)
    if [piece[:2] for piece in mine] != [piece[:2] for piece in theirs]:
        return _bytes_are_equal(files, one, here, other, there, 0, here.nbytes)
    unlike = [a for a, b in zip(mine, theirs, strict=True) if a[2] != b[2]]
    if any(begin >= 0 and end <= here.nbytes for begin, end, _ in unlike):
        return False  # a chunk of nothing but this tensor
    # What else differs shares its chunk with neighbours, which may be what differs.
    return all(
        _bytes_are_equal(files, one, here, other, there, max(begin, 0), min(end, here.nbytes))
        for begin, end, _ in unlike
    )


def _pieces(files: TierFiles, part: _Part, entry: Entry) -> list[_Piece]:
    """The chunks that a tensor lies in."""
    span = files.span(part.id, TENSORS, entry.offset, entry.nbytes)
    found, offset = list[_Piece](), span.start - entry.offset
    for chunk in span.file.chunks[span.first : span.end]:
        found.append((offset, offset + chunk.size, chunk.xxh3_128))
        offset += chunk.size
    return found


def _bytes_are_equal(
    files: TierFiles, one: _Part, here: Entry, other: _Part, there: Entry, begin: int, end: int
) -> bool:
    return all(
        _digest(files, one, here.offset + at, size) == _digest(files, other, there.offset + at, size)
        for at, size in ((at, min(_PIECE, end - at)) for at in range(begin, end, _PIECE))
    )


def _digest(files: TierFiles, part: _Part, offset: int, size: int) -> str:
    """The digest of a range of the tensor file, read and verified; remembered, since rank 0's is compared with all."""
    key = offset, size
    if key not in part.digests:
        memory = memory_for(size)
        files.fill(memory, [files.span(part.id, TENSORS, offset, size)], base=offset)
        part.digests[key] = digest(memory[:size])
    return part.digests[key]
