"""Pickles of DCP's metadata, assembled opcode by opcode, and what none of them may change in this process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

MODULE = "torch.distributed.checkpoint.metadata"
LEVELS = 30  # of doubled tuples: a hash of them takes many seconds, and ends


def named(name: str, module: str = MODULE) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def made(planner_data: bytes, more: bytes = b"") -> bytes:
    """Whole metadata with these opcodes for its planner's data, and `more` between its members."""
    empty = text("state_dict_metadata") + b"}" + text("storage_data") + b"}"
    return b"\x80\x02" + named("Metadata") + b")\x81}(" + empty + text("planner_data") + planner_data + more + b"ub."


def keyed(key: bytes) -> bytes:
    return made(b"}" + key + b"Ns")


def doubled(levels: int = LEVELS, first: int = 0) -> bytes:
    """A tuple of a tuple twice, of a tuple twice …: small in a pickle, endless to a reader that follows it."""
    return b")" + b"".join(b"q%ch%c\x86" % (place, place) for place in range(first, first + levels))


def changing(what: bytes, member: str, slots: bool) -> bytes:
    """Metadata that sets a member of what it only names, and drops it again into a planner's data."""
    state = b"}" + text(member) + text("planted") + b"s"
    return made(what + (b"N" + state + b"\x86" if slots else state) + b"b")


CLASSES = (
    *(getattr(metadata, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.MetadataIndex, metadata.StorageMeta),
    *(filesystem._StorageInfo, metadata._MEM_FORMAT_ENCODING, *metadata._MEM_FORMAT_ENCODING),
    *(torch.serialization._get_layout, torch.Size),
)


def of_process() -> list[Any]:
    """What a pickle could change of those, to be compared with what it was before."""
    special = ("__name__", "__qualname__", "__module__", "__defaults__", "__kwdefaults__", "__code__")
    found = [[dict(vars(one)), *(getattr(one, name, None) for name in special)] for one in CLASSES]
    for members, *_ in found:
        members.pop("__slotnames__", None)  # which Python notes when it first pickles an instance
    return found


_MASK = (1 << 64) - 1
_P1, _P2, _P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261


def colliding(count: int) -> list[tuple[int, int]]:
    """Pairs of integers, as offsets are, of one hash: CPython's hash of a tuple can be solved for its last item."""

    def turned(value: int) -> int:
        value &= _MASK
        return ((value << 31 | value >> 33) & _MASK) * _P1 & _MASK

    back, found = pow(_P2, -1, 1 << 64), []
    for first in itertools.count(1):
        second = (12345 - turned(_P5 + first * _P2)) * back & _MASK
        if second < (1 << 61) - 1:
            found.append((first, second))
            if len(found) == count:
                return found
    raise AssertionError
