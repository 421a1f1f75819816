"""The tensor file: plain safetensors, laid out so that every tensor can be used where it lies.

Law: the layout is a pure function of names, dtypes, shapes, and which tensors are known to move; nothing here reads a
tensor's values except `copy`, `copy_into` and `pieces`.

A file is eight bytes of little-endian header length, a JSON header padded with spaces to a page boundary, and the
tensors, adjacent and without holes: first those whose length is a multiple of 64 bytes, so that each of them is aligned
to 64, then the others, aligned to their element size. Among the first, those that may stand still come before those
that move at every step, and of the former large ones before small ones, so that `core.cuts` leaves what does not change
undisturbed; the metadata say where those that move lie. Last come element size (largest first) and name. Only the
dtypes that safetensors 0.5 knows are used.
"""

from __future__ import annotations

import json
import math
import mmap
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from json.encoder import encode_basestring as quoted
from typing import NamedTuple, TypeAlias

import torch

from tierd.core.cuts import GRAIN, MOVING
from tierd.core.errors import StateMismatch, StateRefused
from tierd.device import PAGE

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

MAX_HEADER = 100_000_000  # safetensors' own limit
ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
MAX_DIMS = 64  # torch's own limit for most operations
METADATA = "__metadata__"

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


class Entry(NamedTuple):
    """One tensor's place: `offset` and `nbytes` in bytes, the offset from the file's first byte."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A tensor file's header (length prefix and padding included), size in bytes, and entries in file order."""

    header: bytes
    size: int
    entries: dict[str, Entry]


_Described: TypeAlias = tuple[tuple[bool, bool, bool, int, str], torch.dtype, torch.Size, int]


def plan_layout(tensors: Mapping[str, torch.Tensor], moving: Collection[str] = ()) -> Layout:
    """Lay the tensors out; only their dtypes and shapes are looked at.

    Args:
        moving: names of those that change at every step.

    Raises:
        StateRefused: a dtype that safetensors does not hold, or so many tensors that the header passes 100 MB.
    """
    described: list[_Described] = []
    for name, tensor in tensors.items():
        dtype, shape = tensor.dtype, tensor.shape
        if dtype not in DTYPE_NAMES:
            raise StateRefused(f"tensor {name!r}: safetensors does not hold {dtype}")
        nbytes = shape.numel() * dtype.itemsize
        odd = not nbytes or nbytes % ALIGNMENT > 0
        moves = not odd and name in moving
        described.append(
            ((odd, moves, not odd and not moves and nbytes < GRAIN, -dtype.itemsize, name), dtype, shape, nbytes)
        )
    described.sort(key=operator.itemgetter(0))
    lines, end = [_metadata(described)], 0
    for (*_, name), dtype, shape, nbytes in described:
        begin, end = end, end + nbytes
        sizes = ",".join(map(str, shape))
        lines.append(
            f'{quoted(name)}:{{"dtype":"{DTYPE_NAMES[dtype]}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'
        )
    text = f"{{{','.join(lines)}}}".encode()
    start = -(-(8 + len(text)) // PAGE) * PAGE
    if start - 8 > MAX_HEADER:
        raise StateRefused(
            f"{len(tensors)} tensors need a header of {start - 8} bytes; safetensors allows {MAX_HEADER}"
        )
    entries, end = {}, start
    for (*_, name), dtype, shape, nbytes in described:
        entries[name] = Entry(end, nbytes, dtype, tuple(shape))
        end += nbytes
    return Layout((start - 8).to_bytes(8, "little") + text.ljust(start - 8), end, entries)


def _metadata(described: list[_Described]) -> str:
    """What the file says of itself: where in its data the tensors that move begin and end, if there are any."""
    still = sum(nbytes for (odd, moves, *_), _, _, nbytes in described if not odd and not moves)
    moved = sum(nbytes for (_, moves, *_), _, _, nbytes in described if moves)
    where = f',{quoted(MOVING)}:"{still}:{still + moved}"' if moved else ""
    return f'{quoted(METADATA)}:{{"format":"pt"{where}}}'


def targets(layout: Layout, buffer: Buffer) -> Targets:
    """Where in `buffer`, which is writable and at least `layout.size` bytes long, each tensor goes: what `copy` copies
    into. They hold the buffer and can be used as long as it stays what it is.
    """
    size = memoryview(buffer).nbytes
    if size < layout.size:
        raise ValueError(f"a buffer of {size} bytes for a layout of {layout.size}")
    found: Targets = {}
    # The tensors of one dtype lie one behind the other, so one call of torch cuts all of them.
    for dtype, run in groupby(layout.entries.items(), lambda item: item[1].dtype):
        named = list(run)
        counts = [entry.nbytes // dtype.itemsize for _, entry in named]
        whole = view(buffer, Entry(named[0][1].offset, sum(counts) * dtype.itemsize, dtype, (sum(counts),)))
        for (name, entry), part in zip(named, whole.split_with_sizes(counts), strict=True):
            found[name] = part if len(entry.shape) == 1 else part.view(entry.shape)
    return found


def copy(into: Targets, tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None) -> None:
    """Copy the tensors of these names, all by default, to where they go.

    They are on any device, in any memory format. When this returns the values are there: copies from an accelerator
    have been waited for.
    """
    chosen = [name for name in (into if names is None else names) if into[name].numel()]
    sources = [tensors[name] for name in chosen]
    if not chosen:
        return
    devices = {source.device for source in sources if source.device.type != "cpu"}
    with torch.no_grad():
        torch._foreach_copy_([into[name] for name in chosen], sources, non_blocking=bool(devices))
    for device in devices:
        torch.accelerator.synchronize(device)


def copy_into(layout: Layout, tensors: Mapping[str, torch.Tensor], buffer: Buffer) -> None:
    """Write the file's image, header and all, into `buffer`: writable and at least `layout.size` bytes long.

    `tensors` are those that the layout was planned for; for the rest see `copy`.
    """
    into = targets(layout, buffer)
    memoryview(buffer).cast("B")[: len(layout.header)] = layout.header
    copy(into, tensors)


def pieces(layout: Layout, tensors: Mapping[str, torch.Tensor], buffer: memoryview) -> Iterator[memoryview]:
    """The file's image in consecutive pieces, each as long as `buffer` but the last; a piece is in `buffer`, and good
    until the next one is asked for. A tensor that is not contiguous is copied whole for as long as it is on its way.

    Args:
        buffer: a positive multiple of 4,096 bytes, so that every tensor is aligned to its elements in every piece.
    """
    if not buffer.nbytes or buffer.nbytes % PAGE:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes; it has to be a multiple of {PAGE}")
    filled = 0
    for source in _parts(layout, tensors):
        # Element by element, not byte by byte: a dtype's own copy is the one that every device has.
        done, size = 0, source.element_size()
        while done < source.numel():
            count = min(source.numel() - done, (buffer.nbytes - filled) // size)
            into = torch.frombuffer(buffer, dtype=source.dtype, count=count, offset=filled)
            with torch.no_grad():
                into.copy_(source[done : done + count])
            done, filled = done + count, filled + count * size
            if filled == buffer.nbytes:
                yield buffer[:filled]
                filled = 0
    if filled:
        yield buffer[:filled]


def _parts(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The header and the tensors in the order of the file, each flat."""
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for name, entry in layout.entries.items():
        if entry.nbytes:
            yield tensors[name].detach().reshape(-1)


def view(file: Buffer, entry: Entry) -> torch.Tensor:
    """The tensor at `entry`, as a view of `file`, which has to outlive it (do not close a mapping under it)."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    count = entry.nbytes // entry.dtype.itemsize
    return torch.frombuffer(file, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)


def parse_layout(file: Buffer, name: str = "tensors.safetensors") -> Layout:
    """Read a header strictly: the inverse of `plan_layout`, for bytes that may come from anywhere.

    Raises:
        StateMismatch: the file is no safetensors file that tierd could have written; names the file and the defect.
    """
    with memoryview(file).cast("B") as raw:
        size = raw.nbytes
        length = int.from_bytes(raw[:8], "little") if size >= 8 else -1
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise StateMismatch(f"{name}: a header of {length} bytes in a file of {size}")
        header = bytes(raw[: 8 + length])
    return parse_header(header, size, name)


def parse_header(header: bytes, size: int, name: str = "tensors.safetensors") -> Layout:
    """As `parse_layout`, of the header alone; `size` is the whole file's, in bytes."""
    try:
        description = json.loads(str(header[8:], "utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
        if type(description) is not dict:
            raise ValueError(f"the header is no object but {type(description).__name__}")
        _check_metadata(description.pop(METADATA, {}))
        entries = {key: _entry(key, value, len(header), size) for key, value in description.items()}
        ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        end = len(header)
        for key, entry in ordered.items():
            if entry.offset != end:
                raise ValueError(f"tensor {key[:100]!r} begins at {entry.offset}, the one before it ends at {end}")
            end += entry.nbytes
        if end != size:
            raise ValueError(f"the tensors end at {end}, the file at {size}")
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{name}: {str(error)[:300]}") from error
    return Layout(header, size, ordered)


def _entry(name: str, value: object, start: int, size: int) -> Entry:
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:100]!r} is not described by dtype, shape and data_offsets")
    code, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise ValueError(f"tensor {name[:100]!r} has the unknown dtype {str(code)[:20]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS or math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"tensor {name[:100]!r} has an impossible shape")
    if not _naturals(span) or len(span) != 2 or not span[0] <= span[1] <= size - start:
        raise ValueError(f"tensor {name[:100]!r} lies outside the file")
    nbytes = span[1] - span[0]
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"tensor {name[:100]!r} needs {math.prod(shape) * dtype.itemsize} bytes and has {nbytes}")
    if nbytes and (start + span[0]) % dtype.itemsize:
        raise ValueError(f"tensor {name[:100]!r} is not aligned to its element size")
    return Entry(start + span[0], nbytes, dtype, tuple(shape))


def _naturals(value: object) -> bool:
    return type(value) is list and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_metadata(value: object) -> None:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ValueError(f"{METADATA} maps names to anything but strings")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
