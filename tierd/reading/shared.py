"""Find the entries of a checkpoint that are the same on all its ranks, so that any rank's part provides them.

Invariant: two entries count as equal only if their trees are the same JSON and their tensors the same bytes. The
manifests' digests decide that where they suffice; otherwise the verified bytes are compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tierd.client.restoring.entries import (
    check_names,
    check_written_by_save,
    parse_entries,
    read_header,
    read_tree,
    tensors_named,
)
from tierd.client.restoring.tensor_equality import ComparedPart, are_equal
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.reading.tiers import TierFiles
from tierd.state.tensor_file import TensorEntry

_READERS = 8  # ranks compared at once


@dataclass(slots=True)
class _Part:
    """One rank's part: each entry's JSON and tensor names, and the tensors' places in the tensor file."""

    id: PartId
    entries: dict[str, str]
    tensors: dict[str, set[str]]
    places: dict[str, TensorEntry]
    side: ComparedPart


def differing(files: TierFiles, names: Collection[str] | None) -> list[str]:
    """List the entries that are not the same on all ranks, in the order in which they were saved.

    Args:
        names: compare these alone; None compares all.

    Raises:
        StateMismatch: `save` did not write the checkpoint, or it has no such entry.
        CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable: as for `Ranges.fill`.
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
        described = _describe(files, part)
        entry_names = dict.fromkeys((*first.entries, *described.entries)) if names is None else names
        return {name for name in entry_names if not _is_same(files, first, described, name)}

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tierd-compare") as pool:
        differences = set[str]().union(*pool.map(compare, range(1, files.world)))
    return [*(name for name in first.entries if name in differences), *sorted(differences - first.entries.keys())]


def _content(manifest: Manifest) -> list[tuple[str, list[str]]]:
    return [(file.path, [chunk.xxh3_128 for chunk in file.chunks]) for file in manifest.files]


def _describe(files: TierFiles, part: PartId) -> _Part:
    paths = [file.path for file in files.manifest(part).files]
    check_written_by_save(part, paths)
    parsed = parse_entries(read_tree(files, part), str(part))
    # Compared as text, because 1, 1.0 and true are different values.
    entries = {name: json.dumps(value) for name, value in parsed.items()}
    tensors = {name: tensors_named(text) for name, text in entries.items()}
    return _Part(part, entries, tensors, read_header(files, part)[1].entries, ComparedPart(part))


def _is_same(files: TierFiles, first: _Part, second: _Part, name: str) -> bool:
    if name not in first.entries or first.entries[name] != second.entries.get(name):
        return False
    return all(_are_equal(files, first, second, tensor) for tensor in sorted(first.tensors[name]))


def _are_equal(files: TierFiles, first: _Part, second: _Part, tensor: str) -> bool:
    first_place, second_place = first.places.get(tensor), second.places.get(tensor)
    if first_place is None or second_place is None:
        return first_place is second_place is None
    return are_equal(files, first.side, first_place, second.side, second_place)
