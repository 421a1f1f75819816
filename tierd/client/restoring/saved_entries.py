"""Read some entries of a saved state, and no more bytes than they take.

Invariant: every returned byte was verified on this read. Other bytes are not verified.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tierd.client.restoring.ranged_reader import PartRanges, Span
from tierd.client.restoring.tensor_locations import check_division, check_held, read_layout, sibling_of
from tierd.core.errors import StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.spool.direct_io import finish_read, memory_for
from tierd.state.single_values import path_part_text
from tierd.state.state_tree import NAMING
from tierd.state.tensor_file import TensorFileLayout
from tierd.state.tensor_header import sibling_path
from tierd.state.tree_parser import parse_key, tree_text


def read_entries(files: PartRanges, part: PartId, names: Collection[str]) -> tuple[Manifest, dict[str, memoryview]]:
    """Return the part's manifest and its two files as `save` writes them, with only the entries in `names`.

    The tree has only these entries. In the tensor file, the bytes of other tensors are zeros that take no memory. So it
    is in the files of other ranks that have tensors of these entries; they are added as by `read_elsewhere`. If the
    part was not written by `save`, its files are returned by name, without content. Raises `StateMismatch`, which says
    which entries there are, for another one; and as `PartRanges.fill`.
    """
    manifest = files.manifest(part)
    sizes = {file.path: file.size for file in manifest.files}
    if TREE not in sizes or TENSORS not in sizes:
        return manifest, {name: memoryview(b"") for name in sizes}
    saved = parse_entries(read_tree(files, part), str(part))
    check_names(saved, names, str(part))
    tree = json.dumps({"$dict": [[name, saved[name]] for name in names]}).encode()
    memory, layout = read_header(files, part)
    wanted = referenced_tensors(tree)
    files.fill(memory, list(_spans(files, part, layout, wanted)))
    contents = {TREE: memoryview(tree), TENSORS: finish_read(memory, sizes[TENSORS])}
    return manifest, contents | read_elsewhere(files, part, layout, wanted)


def read_elsewhere(
    files: PartRanges, part: PartId, layout: TensorFileLayout, names: Collection[str] | None = None
) -> dict[str, memoryview]:
    """Return the tensor files of other ranks, by `sibling_path`, in which tensors of this part lie.

    Of each file only these tensors are read, or those in `names`.

    Raises:
        ManifestError: a file does not have such a tensor, or its rank divided another state.
        CorruptChunk, …: as `PartRanges.fill`.
    """
    contents = {}
    for rank, its_names in layout.elsewhere_by_rank(names).items():
        sibling = sibling_of(part, rank)
        check_division(files.manifest(part), files.manifest(sibling))
        image, theirs = read_header(files, sibling)
        check_held(part, rank, theirs, *its_names)
        files.fill(image, list(_spans(files, sibling, theirs, its_names)))
        contents[sibling_path(rank)] = finish_read(image, theirs.size)
    return contents


def check_written_by_save(part: PartId, paths: Collection[str]) -> None:
    """Raise `StateMismatch`, which says how to read these, unless `paths` are the files of `Checkpointer.save`."""
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


def read_tree(files: PartRanges, part: PartId) -> bytes:
    return _bytes(files, files.span(part, TREE))


def read_header(files: PartRanges, part: PartId) -> tuple[memoryview, TensorFileLayout]:
    """Return memory for the part's tensor file, filled only with its header, and the offsets of its tensors.

    Raises as `read_layout`.
    """
    layout = read_layout(files, part)
    memory = memory_for(layout.size)
    memory[: len(layout.header)] = layout.header
    return memory, layout


def parse_entries(tree: bytes, where: str) -> dict[str, Any]:
    """Return the state's entries by name, each as plain JSON. `StateMismatch` if tierd did not write the tree."""
    try:
        root = json.loads(tree_text(tree))
        pairs = list(root["$dict"] if root.keys() == {"$dict"} else root.items())
        names = parse_key([name for name, _ in pairs])
        if not all(type(name) is str for name in names):
            raise ValueError("its root is no mapping of names")
        return dict(zip(names, [value for _, value in pairs], strict=True))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateMismatch(f"{where}: the state tree: {str(error)[:300]}") from error


def check_names(saved: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raise `StateMismatch`, which says which were saved, if an entry of `names` was not."""
    missing = [path_part_text(name) for name in names if name not in saved]
    if missing:
        raise StateMismatch(
            f"{where}: {', '.join(missing)} not in the checkpoint; it has {', '.join(map(path_part_text, saved))}"
        )


def referenced_tensors(tree: bytes | str) -> set[str]:
    """Return the names of the tensors that a tree, or one entry of it, refers to."""
    names: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tag, payload = pairs[0] if len(pairs) == 1 else ("", None)
        if tag in NAMING:
            names.update(name for name in (payload if type(payload) is list else [payload])[:1] if type(name) is str)
        return dict(pairs)

    json.loads(tree, object_pairs_hook=note)
    return names


def _bytes(files: PartRanges, span: Span) -> bytes:
    """Read a range that begins at the file's first byte."""
    memory = bytearray(span.length)
    files.fill(memoryview(memory), [span])
    return bytes(memory)


def _spans(files: PartRanges, part: PartId, layout: TensorFileLayout, names: Collection[str]) -> Iterator[Span]:
    # A missing tensor is reported when the entry is decoded.
    for name in layout.entries.keys() & set(names):
        entry = layout.entries[name]
        if entry.nbytes:
            yield files.span(part, TENSORS, entry.offset, entry.nbytes)
