"""torch.distributed.checkpoint: `.metadata`, and the `.distcp` files whose ranges it names.

Covered: `.metadata` is a pickle of DCP's metadata, and each range is within its file and overlaps no other. If a range
is an archive of `torch.save`, the archive with the CRC of each record is covered as well. DCP's own planner and writer
make all ranges such archives. Not covered: the names and shapes in `.metadata`, because a pickle holds no digest;
ranges that an extension transformed; bytes between ranges.

Source: torch 2.13, `torch/distributed/checkpoint/filesystem.py`. `_write_item` writes each entry by `torch.save` and
notes path, offset and length in `_StorageInfo`. `finish` writes `.metadata.tmp`, fsyncs it and renames it, after all
files.

Bound: metadata of 128 MiB. Reading takes about ten times its size in memory, and up to thirty times for adversarial
input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tierd.core.dcp_names import NAMES
from tierd.core.errors import ManifestError, StateRefused
from tierd.core.pickled import Pairs, PickledInstance, interpret
from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, SubSource, UncheckedFile, shifted
from tierd.formats.zips import MAGIC, check_zip

_MAX = 128 << 20
_ARCHIVE_END, _END_SIZE = b"PK\x05\x06", 22  # the end record of an archive without a comment, as torch writes it
_LONGEST = 1 << 63


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of a file that holds one entry: bytes `offset` to `offset + length`.

    Attributes:
        tensor: whether it holds a tensor, which DCP always writes with `torch.save`.
        transformed: whether an extension of DCP changed its bytes, so that they are no archive.
    """

    offset: int
    length: int
    tensor: bool
    transformed: bool


def read_extents(source: ByteSource) -> dict[str, list[Extent]]:
    """Read the ranges that the metadata names, by the name of the file that holds them.

    Raises:
        DamagedFile: the file is not DCP's metadata.
        UncheckedFile: the metadata is too large, or names classes that are not DCP's own.
    """
    if source.size > _MAX:
        raise UncheckedFile(f"metadata of {source.size} bytes, more than {_MAX}")
    try:
        pickled = interpret(source.read(0, source.size), NAMES)
        members = _members(pickled, "Metadata")
        states, storage = _pairs(members.get("state_dict_metadata")), _pairs(members.get("storage_data"))
        tensors = {
            key
            for key, value in zip(states[::2], states[1::2], strict=True)
            if type(key) is str and type(value) is PickledInstance and value.of.kind == "TensorStorageMetadata"
        }
        files: dict[str, list[Extent]] = {}
        for index, info in zip(storage[::2], storage[1::2], strict=True):
            path, extent = _extent(index, info, tensors)
            files.setdefault(path, []).append(extent)
    except StateRefused as error:
        raise UncheckedFile(f"metadata of more than DCP's own classes: {error}") from None
    except ManifestError as error:
        raise DamagedFile(0, f"no metadata of DCP: {error}") from None
    return files


def _members(pickled: Any, kind: str) -> dict[str, Any]:
    state = pickled.state if type(pickled) is PickledInstance and pickled.of.kind == kind else None
    if type(state) is not Pairs or any(type(name) is not str for name in state[::2]):
        raise ManifestError(f"no {kind} where one belongs")
    return dict(zip(state[::2], state[1::2], strict=True))


def _pairs(pickled: Any) -> Pairs:
    if type(pickled) is not Pairs:
        raise ManifestError("no dict where one belongs")
    return pickled


def _extent(index: Any, info: Any, tensors: set[str]) -> tuple[str, Extent]:
    name, where = _members(index, "MetadataIndex").get("fqn"), _members(info, "_StorageInfo")
    path, offset, length = where.get("relative_path"), where.get("offset"), where.get("length")
    if type(path) is not str or type(offset) is not int or type(length) is not int:
        raise ManifestError("an entry without a path, an offset and a length")
    if not (0 <= offset < _LONGEST and 0 <= length < _LONGEST):
        raise ManifestError(f"an entry of {length} bytes at {offset}")
    transformed = bool(where.get("transform_descriptors"))
    return path, Extent(offset, length, type(name) is str and name in tensors, transformed)


def check_extents(source: ByteSource, extents: Iterable[Extent]) -> Sound:
    """Check a file against the ranges that the metadata names in it.

    Raises:
        DamagedFile: the file ends before a range's end, two ranges overlap, or a range is not the expected archive.
        UncheckedFile: a range without a tensor is no archive, because another planner wrote it or it was overwritten.
    """
    at = 0
    strange: Extent | None = None
    opaque = 0
    for extent in sorted(set(extents)):
        end = extent.offset + extent.length
        if end > source.size:
            raise DamagedFile(
                source.size, f"the file ends there, before an entry of {extent.length} bytes at {extent.offset}"
            )
        if extent.offset < at:
            raise DamagedFile(extent.offset, f"two entries overlap: one ends at {at}, one begins at {extent.offset}")
        at = end
        part = SubSource(source, extent.offset, extent.length)
        if extent.transformed:
            opaque += 1
        elif extent.tensor or _is_archive(part):
            try:
                check_zip(part)
            except DamagedFile as error:
                raise shifted(error, extent.offset, f"the entry of {extent.length} bytes at {extent.offset}") from None
        else:
            strange = strange or extent
    if strange is not None:
        raise UncheckedFile(f"the entry of {strange.length} bytes at {strange.offset} is no archive of torch.save")
    return Sound("DCP entries", f"{opaque} entries were written through an extension" if opaque else None)


def _is_archive(part: ByteSource) -> bool:
    """Return whether either end is an archive's, so that one damaged byte does not hide an archive."""
    tail = max(0, part.size - _END_SIZE)
    return part.size >= _END_SIZE and (part.read(0, 4) == MAGIC or part.read(tail, 4) == _ARCHIVE_END)
