"""Some entries of a saved state, and of its files no more than they take.

Law: every byte that is handed on was verified on this read; of other bytes nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tierd.client.budget import excess
from tierd.client.files import Ranges, Span
from tierd.client.tensorfile import Layout, parse_layout
from tierd.client.tree import MAX_TREE, NAMING, parse_key
from tierd.client.values import show_part
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.device import memory_for, settle


def read_entries(files: Ranges, part: PartId, names: Collection[str]) -> tuple[Manifest, Mapping[str, memoryview]]:
    """The part's manifest, and its two files as `save` writes them, with nothing in them but these entries: the tree
    has no others, and in the tensor file the bytes of other tensors are zeros that take no memory. Where something else
    was written, its files by name, without a byte.

    Raises:
        StateMismatch: the checkpoint has no such entry, and says which it has; or the tree is none of tierd's.
        CorruptChunk, ManifestError, StoreUnavailable, DaemonUnavailable, ObjectNotFound: as `Ranges.fill`.
    """
    manifest = files.manifest(part)
    sizes = {file.path: file.size for file in manifest.files}
    if TREE not in sizes or TENSORS not in sizes:
        return manifest, {name: memoryview(b"") for name in sizes}
    kept = _kept(read_tree(files, part), names, str(part))
    memory, layout = read_header(files, part)
    files.fill(memory, list(_spans(files, part, layout, kept)))
    return manifest, {TREE: memoryview(kept), TENSORS: settle(memory, sizes[TENSORS])}


def check_written_by_save(part: PartId, paths: Collection[str]) -> None:
    """Raises `StateMismatch` unless `paths` are the files that `Checkpointer.save` writes; names the way out."""
    if any(path.endswith((".distcp", ".metadata")) for path in paths):
        raise StateMismatch(
            f"{part} was written through DCP: tierd.dcp.load(state, checkpointer) reads it; without a Checkpointer, "
            "tierd.open(url, run).download(DIR) copies its files"
        )
    if TREE not in paths or TENSORS not in paths:
        raise StateMismatch(
            f"{part} was written through stage(): call Checkpointer.restore() without a state and read its "
            "`directory`; or tierd.open(url, run).download(DIR) copies its files"
        )


def read_tree(files: Ranges, part: PartId) -> bytes:
    """The part's whole tree. Raises as `Ranges.fill`."""
    return _bytes(files, files.span(part, TREE))


def read_header(files: Ranges, part: PartId) -> tuple[memoryview, Layout]:
    """Memory for the part's tensor file, with nothing in it but its header, and where tensors lie in it.

    Raises:
        StateMismatch: no safetensors file that tierd could have written.
        Also as `Ranges.fill`.
    """
    size = files.span(part, TENSORS).length
    first = _bytes(files, files.span(part, TENSORS, 0, files.span(part, TENSORS, 0, 1).stop))  # a chunk is read whole
    length = min(8 + int.from_bytes(first[:8], "little"), size)
    memory = memory_for(size)
    memory[: min(len(first), length)] = first[:length]
    if length > len(first):
        files.fill(memory, [files.span(part, TENSORS, len(first), length - len(first))])
    return memory, parse_layout(memory[:size])


def parse_entries(tree: bytes, where: str) -> dict[str, Any]:
    """The state's entries by name, each as plain JSON.

    Raises:
        StateMismatch: the tree is none of tierd's.
    """
    try:
        if len(tree) > MAX_TREE:
            raise ValueError(f"{len(tree)} bytes, more than the {MAX_TREE} that tierd writes")
        text = str(tree, "utf-8")
        if reason := excess(text):
            raise ValueError(reason)
        root = json.loads(text)
        pairs = list(root["$dict"] if root.keys() == {"$dict"} else root.items())
        names = parse_key([name for name, _ in pairs])
        if not all(type(name) is str for name in names):
            raise ValueError("its root is no mapping of names")
        return dict(zip(names, [value for _, value in pairs], strict=True))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateMismatch(f"{where}: the state tree: {str(error)[:300]}") from error


def check_names(saved: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raises `StateMismatch` where an entry of `names` was not saved; says which were."""
    missing = [show_part(name) for name in names if name not in saved]
    if missing:
        raise StateMismatch(
            f"{where}: {', '.join(missing)} not in the checkpoint; it has {', '.join(map(show_part, saved))}"
        )


def tensors_named(tree: bytes | str) -> set[str]:
    """The names of the tensors that a tree, or an entry's part of one, refers to."""
    named: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tag, payload = pairs[0] if len(pairs) == 1 else ("", None)
        if tag in NAMING:
            named.update(name for name in (payload if type(payload) is list else [payload])[:1] if type(name) is str)
        return dict(pairs)

    json.loads(tree, object_pairs_hook=note)
    return named


def _bytes(files: Ranges, span: Span) -> bytes:
    """A range that begins at the file's first byte."""
    memory = bytearray(span.length)
    files.fill(memoryview(memory), [span])
    return bytes(memory)


def _kept(tree: bytes, names: Collection[str], where: str) -> bytes:
    """The tree without all other entries."""
    saved = parse_entries(tree, where)
    check_names(saved, names, where)
    return json.dumps({"$dict": [[name, saved[name]] for name in names]}).encode()


def _spans(files: Ranges, part: PartId, layout: Layout, tree: bytes) -> Iterator[Span]:
    """Where the tensors lie that a tree names."""
    for name in tensors_named(tree) & layout.entries.keys():  # what lacks is found out, and said, when it is read
        entry = layout.entries[name]
        if entry.nbytes:
            yield files.span(part, TENSORS, entry.offset, entry.nbytes)
