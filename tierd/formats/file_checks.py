"""Choose a file's format by its name and its first bytes, and check it; also JSON, and torch.distributed.checkpoint's
`.metadata` and the `.distcp` files whose ranges it names.

If the name indicates a format, the name decides, so that a file with a damaged first byte is still checked. Otherwise
the first bytes decide. If neither indicates a format, the result is the error for an unknown one. JSON is read as a
whole, up to 64 MiB, for its syntax.

Of DCP are covered: `.metadata` is a pickle of DCP's metadata, and each range is within its file and overlaps no other.
If a range is an archive of `torch.save`, the archive with the CRC of each record is covered as well. DCP's own planner
and writer make all ranges such archives. Not covered: the names and shapes in `.metadata`, because a pickle holds no
digest; ranges that an extension transformed; bytes between ranges. Source: torch 2.13,
`torch/distributed/checkpoint/filesystem.py`. `_write_item` writes each entry by `torch.save` and notes path, offset and
length in `_StorageInfo`. `finish` writes `.metadata.tmp`, fsyncs it and renames it, after all files. Bound: metadata of
128 MiB. Reading takes about ten times its size in memory, and up to thirty times for adversarial input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.core.dcp_pickle import PICKLED_GLOBALS, PickledDict, PickledInstance, interpret
from tierd.core.errors import ManifestError, StateRefused
from tierd.formats.byte_source import (
    ByteSource,
    DamagedFile,
    SoundFile,
    SubSource,
    UncheckedFile,
    UnknownFormat,
    with_offset,
)
from tierd.formats.tensorflow_files import TABLE_MAGIC as TABLE_END
from tierd.formats.tensorflow_files import check_ocdbt_manifest, read_table
from tierd.formats.torch_pickles import check_pickle, check_tar, is_legacy_save, is_tar, looks_like_pickle
from tierd.formats.weight_files import HDF5_MAGIC as HDF5
from tierd.formats.weight_files import check_hdf5, check_safetensors, looks_like_safetensors
from tierd.formats.zip_archives import ZIP_MAGIC, check_zip
from tierd.formats.zip_archives import ZIP_MAGIC as ZIP

_MAX_JSON = 64 << 20
CUT_JSON = "JSON that ends early"
EMPTY_JSON = "an empty file, and no JSON"


def read_json(source: ByteSource) -> Any:
    """Read the value in a file. NaN and infinities, which Python's `json` writes, become None.

    Raises:
        DamagedFile: the file is empty, truncated, or not JSON.
        UncheckedFile: the file is too large or nested too deep.
    """
    if source.size > _MAX_JSON:
        raise UncheckedFile(f"JSON of {source.size} bytes, more than {_MAX_JSON}")
    data = source.read(0, source.size)
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        if b"NaN" in data or b"Infinity" in data:
            return _read_with_constants(data)
        text = data.strip()
        if not text:
            raise DamagedFile(source.size, EMPTY_JSON) from None
        if text[:1] in (b"{", b"[") and text[-1:] not in (b"}", b"]"):
            raise DamagedFile(source.size, f"{CUT_JSON}: {error}") from None
        raise DamagedFile(0, f"no JSON: {error}") from None


def _read_with_constants(data: bytes) -> Any:
    import json  # only this decoder accepts NaN; used only for files that may hold it

    try:
        return json.loads(data, parse_constant=lambda _: None)
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except ValueError as error:
        raise DamagedFile(getattr(error, "pos", 0), f"no JSON: {error}") from None


def check_json(source: ByteSource) -> SoundFile:
    """Check a file; raises as `read_json`."""
    read_json(source)
    return SoundFile("JSON", "the format holds no digest")


_MAX_METADATA = 128 << 20
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
    if source.size > _MAX_METADATA:
        raise UncheckedFile(f"metadata of {source.size} bytes, more than {_MAX_METADATA}")
    try:
        pickled = interpret(source.read(0, source.size), PICKLED_GLOBALS)
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
    if type(state) is not PickledDict or any(type(name) is not str for name in state[::2]):
        raise ManifestError(f"no {kind} where one belongs")
    return dict(zip(state[::2], state[1::2], strict=True))


def _pairs(pickled: Any) -> PickledDict:
    if type(pickled) is not PickledDict:
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


def check_extents(source: ByteSource, extents: Iterable[Extent]) -> SoundFile:
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
                raise with_offset(
                    error, extent.offset, f"the entry of {extent.length} bytes at {extent.offset}"
                ) from None
        else:
            strange = strange or extent
    if strange is not None:
        raise UncheckedFile(f"the entry of {strange.length} bytes at {strange.offset} is no archive of torch.save")
    return SoundFile("DCP entries", f"{opaque} entries were written through an extension" if opaque else None)


def _is_archive(part: ByteSource) -> bool:
    """Return whether either end is an archive's, so that one damaged byte does not hide an archive."""
    tail = max(0, part.size - _END_SIZE)
    return part.size >= _END_SIZE and (part.read(0, 4) == ZIP_MAGIC or part.read(tail, 4) == _ARCHIVE_END)


_HEAD = 40
_TAIL = 22  # bytes of a zip's end record
_ZIP_END = b"PK\x05\x06"


def _check_archive_or_pickle(source: ByteSource) -> SoundFile:
    """Check a file of torch.save: a zip archive or, before 1.6 or on request, pickles, or before 0.2 a tar archive.

    Either end of an archive identifies it.
    """
    if not source.size:
        raise DamagedFile(0, "the file is empty")
    head = source.read(0, min(_HEAD, source.size))
    tail = source.read(max(0, source.size - _TAIL), min(_TAIL, source.size))
    if head.startswith(ZIP) or tail.startswith(_ZIP_END):
        return check_zip(source)
    if looks_like_pickle(head) or is_legacy_save(head):
        return check_pickle(source)
    if is_tar(source):
        return check_tar(source)
    if not any(head) and not any(tail):
        raise DamagedFile(0, "zeros where an archive of torch.save begins and ends: it was never written")
    raise UncheckedFile("neither an archive of torch.save nor a pickle")


def _check_table(source: ByteSource) -> SoundFile:
    for _ in read_table(source):
        pass
    return SoundFile("table")


_BY_NAME: tuple[tuple[tuple[str, ...], Callable[[ByteSource], SoundFile]], ...] = (
    ((".safetensors",), check_safetensors),
    ((".keras", ".npz"), check_zip),
    ((".h5", ".hdf5"), check_hdf5),
    ((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _check_archive_or_pickle),
    (("manifest.ocdbt",), check_ocdbt_manifest),
    ((".json", "_METADATA", "_sharding"), check_json),  # Orbax writes the last two names without a suffix
)


def check_file(name: str, source: ByteSource) -> SoundFile:
    """Check one file by itself.

    Raises:
        DamagedFile: its bytes are proven wrong.
        UnfinishedFile: it says that its writer has not finished.
        UnknownFormat: its format is not known.
        UncheckedFile: its format is known, but the check cannot decide.
    """
    if name.startswith("._"):
        raise UnknownFormat("attributes of a file that macOS wrote on another file system")
    for endings, check in _BY_NAME:
        if name.endswith(endings):
            return check(source)
    if name.endswith(".distcp"):  # a sequence of archives; only `.metadata` says where each one begins
        raise UnknownFormat("no .metadata names its entries")
    head = source.read(0, min(_HEAD, source.size))
    if head.startswith(ZIP):
        return check_zip(source)
    if head.startswith(HDF5):
        return check_hdf5(source)
    if looks_like_pickle(head) or is_legacy_save(head):
        return check_pickle(source)
    if is_tar(source):
        return check_tar(source)
    if looks_like_safetensors(head, source.size):
        return check_safetensors(source)
    if source.size >= _TAIL and source.read(source.size - _TAIL, _TAIL).endswith(TABLE_END):
        return _check_table(source)
    raise UnknownFormat("of no format whose structure can be checked")
