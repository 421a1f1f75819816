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

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from tierd.core.dcp_pickle import PICKLED_GLOBALS, PickledDict, PickledInstance, interpret
from tierd.core.errors import ManifestError, StateRefused
from tierd.formats.byte_source import ByteSource, DamagedFile, SoundFile, SubSource, UncheckedFile, UnknownFormat
from tierd.formats.tensorflow_files import TABLE_MAGIC, check_ocdbt_manifest, read_table
from tierd.formats.torch_pickles import check_pickle, check_tar, is_legacy_save, is_tar, looks_like_pickle
from tierd.formats.weight_files import HDF5_MAGIC, check_hdf5, check_safetensors, looks_like_safetensors
from tierd.formats.zip_archives import ZIP_END_MAGIC, ZIP_MAGIC, check_zip

_Check: TypeAlias = Callable[[ByteSource], SoundFile]
_MAX_JSON = 64 << 20
CUT_JSON = "JSON that ends early"
EMPTY_JSON = "an empty file, and no JSON"


def read_json(source: ByteSource) -> Any:
    """Read the value in a file. NaN and infinities, which Python's `json` writes, become None."""
    if source.size > _MAX_JSON:
        raise UncheckedFile(f"JSON of {source.size} bytes, more than {_MAX_JSON}")
    data = source.read(0, source.size)
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        text = data.strip()
        if b"NaN" in data or b"Infinity" in data:
            return _read_with_constants(data)
        if not text:
            raise DamagedFile(source.size, EMPTY_JSON) from None
        if text[:1] in (b"{", b"[") and text[-1:] not in (b"}", b"]"):
            raise DamagedFile(source.size, f"{CUT_JSON}: {error}") from None
        raise DamagedFile(0, f"no JSON: {error}") from None


def _read_with_constants(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=lambda _: None)  # msgspec accepts no NaN
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except ValueError as error:
        raise DamagedFile(getattr(error, "pos", 0), f"no JSON: {error}") from None


def check_json(source: ByteSource) -> SoundFile:
    read_json(source)
    return SoundFile("JSON", "the format holds no digest")


_MAX_METADATA = 128 << 20
_TAIL = 22  # bytes of the end record of an archive without a comment, as torch writes it
_HEAD = 40
_LONGEST = 1 << 63


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of a file with one entry; if an extension of DCP `transformed` it, it is no archive."""

    offset: int
    length: int
    tensor: bool
    transformed: bool


def read_extents(source: ByteSource) -> dict[str, list[Extent]]:
    """Read the ranges that the metadata names, by the name of the file that holds them."""
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
    """Check a file against the ranges that the metadata names in it."""
    at = 0
    strange: str | None = None
    opaque = 0
    for extent in sorted(set(extents)):
        end = extent.offset + extent.length
        if end > source.size:
            why = f"the file ends there, before an entry of {extent.length} bytes at {extent.offset}"
            raise DamagedFile(source.size, why)
        if extent.offset < at:
            raise DamagedFile(extent.offset, f"two entries overlap: one ends at {at}, one begins at {extent.offset}")
        at = end
        part = SubSource(source, extent.offset, extent.length)
        label = f"the entry of {extent.length} bytes at {extent.offset}"
        if extent.transformed:
            opaque += 1
        elif extent.tensor or (part.size >= _TAIL and _is_archive(*_ends(part))):
            try:
                check_zip(part)
            except DamagedFile as error:
                raise DamagedFile(extent.offset + error.offset, f"{label}: {error.reason}") from None
        else:
            strange = strange or label
    if strange is not None:
        raise UncheckedFile(f"{strange} is no archive of torch.save")
    return SoundFile("DCP entries", f"{opaque} entries were written through an extension" if opaque else None)


def _ends(source: ByteSource) -> tuple[bytes, bytes]:
    tail_size = min(_TAIL, source.size)
    return source.read(0, min(_HEAD, source.size)), source.read(source.size - tail_size, tail_size)


def _is_archive(head: bytes, tail: bytes) -> bool:
    """Whether either end is an archive's, so that one damaged byte does not hide an archive."""
    return head.startswith(ZIP_MAGIC) or tail.startswith(ZIP_END_MAGIC)


def _check_archive_or_pickle(source: ByteSource) -> SoundFile:
    """Check a file of torch.save: a zip archive or, before 1.6 or on request, pickles, or before 0.2 a tar archive."""
    if not source.size:
        raise DamagedFile(0, "the file is empty")
    head, tail = _ends(source)
    if _is_archive(head, tail):
        return check_zip(source)
    if (check := _pickle_check(source, head)) is not None:
        return check(source)
    if not any(head) and not any(tail):
        raise DamagedFile(0, "zeros where an archive of torch.save begins and ends: it was never written")
    raise UncheckedFile("neither an archive of torch.save nor a pickle")


def _pickle_check(source: ByteSource, head: bytes) -> _Check | None:
    if looks_like_pickle(head) or is_legacy_save(head):
        return check_pickle
    return check_tar if is_tar(source) else None


def _check_table(source: ByteSource) -> SoundFile:
    for _ in read_table(source):
        pass
    return SoundFile("table")


_BY_NAME: tuple[tuple[tuple[str, ...], _Check], ...] = (
    ((".safetensors",), check_safetensors),
    ((".keras", ".npz"), check_zip),
    ((".h5", ".hdf5"), check_hdf5),
    ((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _check_archive_or_pickle),
    (("manifest.ocdbt",), check_ocdbt_manifest),
    ((".json", "_METADATA", "_sharding"), check_json),  # Orbax writes the last two names without a suffix
)


def check_file(name: str, source: ByteSource) -> SoundFile:
    if name.startswith("._"):
        raise UnknownFormat("attributes of a file that macOS wrote on another file system")
    for endings, check in _BY_NAME:
        if name.endswith(endings):
            return check(source)
    if name.endswith(".distcp"):  # a sequence of archives; only `.metadata` says where each one begins
        raise UnknownFormat("no .metadata names its entries")
    head, tail = _ends(source)
    if head.startswith(ZIP_MAGIC):
        return check_zip(source)
    if head.startswith(HDF5_MAGIC):
        return check_hdf5(source)
    if (pickle_check := _pickle_check(source, head)) is not None:
        return pickle_check(source)
    if looks_like_safetensors(head, source.size):
        return check_safetensors(source)
    if len(tail) == _TAIL and tail.endswith(TABLE_MAGIC):
        return _check_table(source)
    raise UnknownFormat("of no format whose structure can be checked")
