"""The tensor file: plain safetensors, laid out so that every tensor can be used in place.

Invariant: the layout is a pure function of names, dtypes, shapes, and the set of tensors known to move. Only
`file_pieces` reads a tensor's values.

A file has three parts: eight bytes of little-endian header length, a JSON header padded with spaces to a page boundary,
and the tensors. The tensors are adjacent, without holes. Tensors whose length is a multiple of 64 bytes come first, so
that each of them is aligned to 64. The others follow, aligned to their element size. Among the first group, tensors
that may be frozen come before tensors that move, that is, that change at every step. Among the frozen ones, large
tensors come before small ones, so that `core.chunk_boundaries` does not shift the chunks of unchanged data. The
metadata give the range of the tensors that move. The last criteria are element size (largest first) and name. Only the
dtypes that safetensors 0.5 knows are used.
"""

from __future__ import annotations

import bisect
import functools
import json
import mmap
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from json.encoder import encode_basestring as quoted
from typing import NamedTuple, TypeAlias

import torch

from tierd.core.chunk_boundaries import GRAIN, HOMES, MOVING
from tierd.core.errors import StateRefused
from tierd.spool.direct_io import PAGE

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
MAX_DIMS = 64  # torch's own limit for most operations
METADATA = "__metadata__"
ELSEWHERE = "tierd.elsewhere"  # in the metadata: the tensors that lie in other ranks' files, {rank: [name, …]}
REPLICATED = "tierd.replicated"  # there: the names of the state's entries that were declared replicated

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Targets: TypeAlias = dict[str, torch.Tensor]


class TensorEntry(NamedTuple):
    """One tensor's position: `offset` from the file's first byte and `nbytes`, both in bytes."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorFileLayout:
    """The layout of one tensor file.

    `elsewhere` names the tensors of the same state that lie in other ranks' files, each with that rank. `replicated`
    are the state's entries that every rank has alike.
    """

    header: bytes  # with its length prefix and padding
    size: int  # of the whole file, in bytes
    entries: dict[str, TensorEntry]  # by name, in file order
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()

    def elsewhere_by_rank(self, names: Collection[str] | None = None) -> dict[int, list[str]]:
        """Return, in the order of ranks, which tensors lie in which rank's file: of these, or of all."""
        by_rank: dict[int, list[str]] = {}
        for name, rank in self.elsewhere.items():
            if names is None or name in names:
                by_rank.setdefault(rank, []).append(name)
        return dict(sorted(by_rank.items()))


@dataclass(frozen=True)
class ReplicaShare:
    """What one rank's file holds of a state's replicated tensors."""

    homes: Mapping[str, int] = field(default_factory=dict)  # the lowest rank that holds each replicated tensor, by name
    # the replicated tensors that this file leaves out, each with the rank whose file has it
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    entries: tuple[str, ...] = ()  # the state's entries that were declared replicated
    # dtype and shape of the tensors elsewhere, at offset 0
    forms: Mapping[str, TensorEntry] = field(default_factory=dict)
    # of the node's ranks, and of the names, dtypes, shapes and owners of what is the same on all ranks, 32 hex digits.
    # It is the same on all ranks that divide alike, also if they divide nothing, and empty if the node has one rank.
    digest: str = ""
    # by home, the number of this rank's node among the nodes that hold these tensors, how many they are, and whether
    # equally many ranks of each divide them
    senders: Mapping[int, tuple[int, int, bool]] = field(default_factory=dict)
    # the tensors that are the same on all ranks, in rounds of about as many bytes. The ranks compare those of one round
    # at each save.
    rounds: tuple[tuple[str, ...], ...] = ()


UNSHARED = ReplicaShare()
# The sections of a file, in order. `MOVING` is one range over the second and the third.
_OWN_FROZEN, _OWN_MOVING, _HOMED_MOVING, _HOMED_FROZEN, _ODD = range(5)
_MAX_ITEM_BYTES = 8

# Section, home, whether it is small, minus the element size, name.
_Place: TypeAlias = tuple[int, int, bool, int, str]
_TensorRow: TypeAlias = tuple[_Place, torch.dtype, tuple[int, ...], int, str]
_place_of = operator.itemgetter(0)
# Faster than `TensorEntry._make`, because it adds no Python frame per tensor.
_entry_of = functools.partial(tuple.__new__, TensorEntry)


class TensorFilePlanner:
    """Plan the layouts of one state, save after save, without describing known tensors again when one is added.

    `share` says which of the tensors other ranks hold as well. Those that it puts elsewhere must not be in `tensors`.

    Invariant: a layout equals that of a new planner for all tensors so far.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], moving: Collection[str] = (), share: ReplicaShare = UNSHARED
    ) -> None:
        self._share = share
        self._rows = sorted((_describe(name, tensors[name], moving, share) for name in tensors), key=_place_of)

    def add(self, name: str, tensor: torch.Tensor, moving: Collection[str] = ()) -> None:
        """Add a tensor that is this rank's own."""
        bisect.insort(self._rows, _describe(name, tensor, moving, UNSHARED), key=_place_of)

    def layout(self) -> TensorFileLayout:
        """Return the layout. Raises `StateRefused` if so many tensors were added that the header exceeds 100 MB."""
        described = self._rows
        offsets = list(accumulate([row[3] for row in described], initial=0))
        lines = [f"{row[4]}{begin},{end}]}}" for row, begin, end in zip(described, offsets, offsets[1:], strict=False)]
        text = f"{{{','.join([_metadata(described, offsets, self._share), *lines])}}}".encode()
        start = -(-(8 + len(text)) // PAGE) * PAGE
        if start - 8 > MAX_HEADER:
            raise StateRefused(
                f"{len(described)} tensors need a header of {start - 8} bytes; safetensors allows {MAX_HEADER}"
            )
        places = [(start + begin, row[3], row[1], row[2]) for row, begin in zip(described, offsets, strict=False)]
        entries = dict(zip([row[0][4] for row in described], map(_entry_of, places), strict=True))
        header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        return TensorFileLayout(header, start + offsets[-1], entries, self._share.elsewhere, self._share.entries)


def _describe(name: str, tensor: torch.Tensor, moving: Collection[str], share: ReplicaShare) -> _TensorRow:
    """Return a tensor's sort key, and the part of its line in the header that does not depend on its offset."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype not in DTYPE_NAMES:
        raise StateRefused(f"tensor {name!r}: safetensors does not hold {dtype}")
    nbytes = shape.numel() * dtype.itemsize
    home = share.homes.get(name, -1)
    if not nbytes or nbytes % ALIGNMENT:
        # By element size before home, because any order of sizes but a descending one leaves elements unaligned.
        section = _ODD + 2 * (_MAX_ITEM_BYTES - dtype.itemsize) + (home < 0)
    elif name in moving:
        section = _OWN_MOVING if home < 0 else _HOMED_MOVING
    else:
        section = _OWN_FROZEN if home < 0 else _HOMED_FROZEN
    is_small = section in (_OWN_FROZEN, _HOMED_FROZEN) and nbytes < GRAIN
    place = section, home, is_small, -dtype.itemsize, name
    sizes = ",".join(map(str, shape))
    line = f'{quoted(name)}:{{"dtype":"{DTYPE_NAMES[dtype]}","shape":[{sizes}],"data_offsets":['
    return place, dtype, tuple(shape), nbytes, line


def _metadata(described: list[_TensorRow], offsets: list[int], share: ReplicaShare) -> str:
    first = bisect.bisect_left(described, (_OWN_MOVING,), key=_place_of)
    last = bisect.bisect_left(described, (_HOMED_FROZEN,), lo=first, key=_place_of)
    members = {"format": "pt"}
    if offsets[last] > offsets[first]:
        members[MOVING] = f"{offsets[first]}:{offsets[last]}"
    if share.homes:
        members[HOMES] = ",".join(_home_ranges(described, offsets))
    if share.elsewhere:
        by_rank: dict[int, list[str]] = {}
        for name, rank in share.elsewhere.items():
            by_rank.setdefault(rank, []).append(name)
        members[ELSEWHERE] = json.dumps(by_rank, separators=(",", ":"))
    if share.entries:
        members[REPLICATED] = json.dumps(share.entries, separators=(",", ":"))
    members = {name: text for name, text in members.items() if text}
    return f"{quoted(METADATA)}:{{{','.join(f'{quoted(name)}:{quoted(text)}' for name, text in members.items())}}}"


def _home_ranges(described: list[_TensorRow], offsets: list[int]) -> Iterator[str]:
    for home, run in groupby(enumerate(described), lambda item: item[1][0][1]):
        numbers = [number for number, _ in run]
        begin, end = offsets[numbers[0]], offsets[numbers[-1] + 1]
        if home >= 0 and end > begin:
            yield f"{begin}:{end}:{home}"


def target_views(layout: TensorFileLayout, buffer: Buffer) -> Targets:
    """Return views into the writable `buffer`, one for each tensor, to be filled."""
    size = memoryview(buffer).nbytes
    if size < layout.size:
        raise ValueError(f"a buffer of {size} bytes for a layout of {layout.size}")
    views: Targets = {}
    # Tensors of one dtype are adjacent, so one call of torch splits all of them.
    names = iter(layout.entries)
    for dtype, run in groupby(layout.entries.values(), operator.attrgetter("dtype")):
        entries, size = list(run), dtype.itemsize
        counts = [entry.nbytes // size for entry in entries]
        joint = tensor_view(buffer, TensorEntry(entries[0].offset, sum(counts) * size, dtype, (sum(counts),)))
        parts = zip(joint.split_with_sizes(counts), [entry.shape for entry in entries], strict=True)
        shaped = [part if len(shape) == 1 else part.view(shape) for part, shape in parts]
        views |= zip(islice(names, len(shaped)), shaped, strict=True)
    return views


def file_pieces(
    layout: TensorFileLayout, tensors: Mapping[str, torch.Tensor], buffer: memoryview
) -> Iterator[memoryview]:
    """Yield the file's bytes in consecutive pieces, each as long as `buffer` except the last.

    A piece is a view of `buffer` and is valid until the next piece is requested. A tensor that is not contiguous is
    copied whole while its pieces are yielded. The buffer is a positive multiple of 4,096 bytes, so that every tensor is
    aligned to its elements in every piece.
    """
    if not buffer.nbytes or buffer.nbytes % PAGE:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes; it has to be a multiple of {PAGE}")
    filled = 0
    for source in _parts(layout, tensors):
        # By element, not by byte, because every device supports a copy in the tensor's own dtype.
        copied, size = 0, source.element_size()
        while copied < source.numel():
            count = min(source.numel() - copied, (buffer.nbytes - filled) // size)
            into = torch.frombuffer(buffer, dtype=source.dtype, count=count, offset=filled)
            with torch.no_grad():
                into.copy_(source[copied : copied + count])
            copied, filled = copied + count, filled + count * size
            if filled == buffer.nbytes:
                yield buffer[:filled]
                filled = 0
    if filled:
        yield buffer[:filled]


def _parts(layout: TensorFileLayout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for name, entry in layout.entries.items():
        if entry.nbytes:
            yield tensors[name].detach().reshape(-1)


def tensor_view(file: Buffer, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor at `entry` as a view of `file`, which must outlive it."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    count = entry.nbytes // entry.dtype.itemsize
    return torch.frombuffer(file, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)
