"""Some entries of a saved state, and of its files no more than they take.

Law: every byte that is handed on was verified on this read; of other bytes nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tierd.client.files import Files, Span
from tierd.client.tensorfile import Layout, parse_layout
from tierd.client.tree import MAX_TREE
from tierd.client.values import show_part
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.device import memory_for, settle

_NAMING = ("$tensor", "$view", "$array")  # the tags that name a tensor of the file (`tierd.client.tree`)


def read_entries(files: Files, part: PartId, names: Collection[str]) -> tuple[Manifest, Mapping[str, memoryview]]:
    """The part's manifest, and its two files as `save` writes them, with nothing in them but these entries: the tree
    has no others, and in the tensor file the bytes of other tensors are zeros that take no memory. Where something else
    was written, its files by name, without a byte.

    Raises:
        StateMismatch: the checkpoint has no such entry, and says which it has; or the tree is none of tierd's.
        CorruptChunk, ManifestError, StoreUnavailable, DaemonUnavailable, ObjectNotFound: as `Files.read`.
    """
    manifest = files.manifest(part)
    sizes = {file.path: file.size for file in manifest.files}
    if TREE not in sizes or TENSORS not in sizes:
        return manifest, {name: memoryview(b"") for name in sizes}
    tree, prefix = _bytes(files, files.span(part, TREE)), _bytes(files, files.span(part, TENSORS, 0, 8))
    kept = _kept(tree, names, str(part))
    length = min(8 + int.from_bytes(prefix, "little"), sizes[TENSORS])
    memory = memory_for(sizes[TENSORS])
    memory[:length] = _bytes(files, files.span(part, TENSORS, 0, length))
    layout = parse_layout(memory[: sizes[TENSORS]])
    spans = list(_spans(files, part, layout, kept))
    files.bring(spans)
    for span, data in files.read(spans):
        memory[span.offset : span.offset + span.length] = data
    return manifest, {TREE: memoryview(kept), TENSORS: settle(memory, sizes[TENSORS])}


def _bytes(files: Files, span: Span) -> bytes:
    files.bring([span])
    return b"".join(bytes(data) for _, data in files.read([span]))


def _kept(tree: bytes, names: Collection[str], where: str) -> bytes:
    """The tree without all other entries."""
    try:
        if len(tree) > MAX_TREE:
            raise ValueError(f"{len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
        root = json.loads(tree)
        saved = dict(root["$dict"]) if root.keys() == {"$dict"} else dict(root)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateMismatch(f"{where}: the state tree: {str(error)[:300]}") from error
    missing = [show_part(name) for name in names if name not in saved]
    if missing:
        raise StateMismatch(
            f"{where}: {', '.join(missing)} not in the checkpoint; it has {', '.join(map(show_part, saved))}"
        )
    return json.dumps({"$dict": [[name, saved[name]] for name in names]}).encode()


def _spans(files: Files, part: PartId, layout: Layout, tree: bytes) -> Iterator[Span]:
    """Where the tensors lie that a tree names."""
    named: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tag, payload = pairs[0] if len(pairs) == 1 else ("", None)
        if tag in _NAMING:
            named.update(name for name in (payload if type(payload) is list else [payload])[:1] if type(name) is str)
        return dict(pairs)

    json.loads(tree, object_pairs_hook=note)
    for name in named & layout.entries.keys():  # what lacks is found out, and said, when the tree is read
        entry = layout.entries[name]
        if entry.nbytes:
            yield files.span(part, TENSORS, entry.offset, entry.nbytes)
