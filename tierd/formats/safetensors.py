"""safetensors: a length of 8 bytes, a JSON header, and the tensors' bytes without a gap.

Covered: the header's length, syntax, offsets and duplicate names, each tensor's size by its dtype and shape, and the
file's size. Not covered: the tensors' bytes and names, because the format holds no digest.

Sources: the format's description and the checks of its library (huggingface/safetensors, `SafeTensors::read_metadata`
and `Metadata::validate`). The library refuses a header of more than 100 MB, and offsets that leave a hole or overlap.
It also refuses a file that does not end with the last tensor.

Bound: a header of 100 MB; reading takes about ten times its size in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, UncheckedFile, take

_MAX_HEADER = 100_000_000
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


class TensorPlace(msgspec.Struct, gc=False):
    """A tensor, and the range of its bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes:
        begin: the offset of the first tensor's bytes.
        metadata: the texts of `__metadata__`.
    """

    begin: int
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes that begins with `head` (9 bytes or more) may be safetensors."""
    return size > 9 and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= size - 8


def check_safetensors(source: ByteSource, expected: Collection[str] = (), by: str = "") -> Sound:
    """Check a file.

    Args:
        source: the file.
        expected: the tensors that an index places in this file.
        by: the index's name.

    Raises:
        DamagedFile: the file is truncated, its header is wrong, or it lacks a tensor of `expected`.
        UncheckedFile: a tensor has a dtype that this module does not know.
    """
    header = read_header(source)
    begin = header.begin
    tensors = sorted(header.tensors.items(), key=lambda entry: entry[1].data_offsets)
    at = 0
    for name, tensor in tensors:
        where, (first, last) = f"tensor {name[:200]!a}", tensor.data_offsets
        if first != at or last < first:
            how = "overlaps the one before it" if first < at else "leaves a hole before it"
            raise DamagedFile(begin + min(first, at), f"{where} {how}: bytes {first} to {last} of the data, after {at}")
        bits = _BITS.get(tensor.dtype)
        if any(dimension < 0 for dimension in tensor.shape) or (
            bits is not None and math.prod(tensor.shape) * bits != 8 * (last - first)
        ):
            raise DamagedFile(8, f"{where}: {last - first} bytes for {tensor.dtype} of shape {list(tensor.shape)[:16]}")
        at = last
    if begin + at != source.size:
        place = f"its tensors end at byte {begin + at}, and the file at {source.size}"
        raise DamagedFile(
            min(begin + at, source.size), f"{place}: {'it is cut off' if begin + at > source.size else 'it goes on'}"
        )
    if lacking := set(expected).difference(name for name, _ in tensors):
        raise DamagedFile(8, f"it lacks tensor {min(lacking)[:200]!a}, which {by[:200]!a} places in it")
    if unknown := {tensor.dtype for _, tensor in tensors} - _BITS.keys():
        raise UncheckedFile(f"a tensor of dtype {min(unknown)[:100]!a}")
    return Sound("safetensors", "the format holds no digest of the tensors")


def read_header(source: ByteSource) -> Header:
    """Read the header of a file. Raises `DamagedFile`."""
    length = int.from_bytes(take(source, 0, 8, "the header's length"), "little")
    if length > min(_MAX_HEADER, source.size - 8):
        raise DamagedFile(
            0, f"a header of {length} bytes in a file of {source.size}; it is cut off, or never was safetensors"
        )
    return _parse_header(source.read(8, length))


def _parse_header(header: bytes) -> Header:
    try:
        if not header.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        members = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        json.loads(header, object_pairs_hook=_refuse_duplicates)  # msgspec takes the last of equal names
        metadata = members.pop("__metadata__", None)
        texts = msgspec.json.decode(metadata, type=dict[str, str] | None) if metadata is not None else None
        tensors = {name: msgspec.json.decode(raw, type=TensorPlace) for name, raw in members.items()}
        return Header(8 + len(header), tensors, texts or {})
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DamagedFile(8, f"the header is no JSON of tensors: {str(error)[:300]}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raise `ValueError` if an object of the header has a name twice, because readers then differ in what they take."""
    names = set[str]()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"it has {name[:200]!a} twice")
        names.add(name)
