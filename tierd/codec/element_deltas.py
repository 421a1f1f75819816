"""The codec `delta`: store by how much the elements of a chunk differ from those of its base, as integers.

Invariant: equal bytes give equal objects. Reading allocates at most the chunk and a few blocks, whatever the object
claims, and checks every position before it is used. Anything that FORMAT.md does not allow raises `ValueError`.

One step of training changes few bits of many weights: most differences are 0, 1 or -1 units in the last place. XOR
would turn a carry into several bits. If few differ, these that differ are named by the number of equal
ones before each, because these numbers cost a Huffman coder about the entropy of the positions.
"""

from __future__ import annotations

import struct

import numpy as np

from tierd.codec import byte_planes
from tierd.codec.block_patches import MOST_SHARE
from tierd.codec.byte_planes import BLOCK_LOG, BLOCK_LOGS, HEAD, Buffer, Reader, Writer, mapped_memory
from tierd.codec.number_layout import WIDTHS, Bytes, NumberLayout, detect_layout, sampled_share
from tierd.codec.numpy_loops import LONGEST, add, subtract
from tierd.spool.direct_io import memory_for

MAGIC = b"TED1"  # the rest of the head is that of the codec `planes`
BLOCK_HEAD = struct.Struct("<BBII")  # width of an element, bytes before the first, elements that differ, gaps

_SPARSE_SHARE = 2  # at most one element in this many differs; positions of more take longer to code than zeros
_NO_GAPS = np.empty(0, np.uint8)
_STRETCH = 8  # blocks that share one detected layout
_MARGIN = 2 << 20  # bytes; no block takes more


def delta_share(new: Bytes, old: Bytes) -> float:
    """Return an estimate of a delta's share of its chunk, 0..1, from samples of both; 1 if a whole chunk is shorter.

    A sample begins at a multiple of 8 bytes of the chunk, as each piece of which it consists.
    """
    layout = detect_layout(new)
    end = layout.lead + (len(new) - layout.lead) // layout.width * layout.width
    share = sampled_share(subtract(new[layout.lead : end], old[layout.lead : end], layout.width), layout.width)
    return share if share < sampled_share(new, layout.width) else 1.0


# -- writing ----------------------------------------------------------------------------------------------------------


def make_delta(raw: Buffer, base: Buffer) -> memoryview | None:
    """Return the delta that turns `base` into `raw`, of equal size; None if it is longer than `MOST_SHARE` of it."""
    new, old = np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8)
    if len(new) != len(old):
        return None
    most, size = int(len(new) * MOST_SHARE), 1 << BLOCK_LOG
    out = Writer(mapped_memory(most + _MARGIN))
    out.put(HEAD.pack(MAGIC, len(new), BLOCK_LOG, bytes(3)))
    layout = NumberLayout()
    for start in range(0, len(new), size):
        block = new[start : start + size]
        if start % (_STRETCH * size) == 0:
            layout = detect_layout(block)
        _write_block(out, block, old[start : start + size], layout)
        if out.at > most:
            return None
    return out.view[: out.at]


def _write_block(out: Writer, new: Bytes, old: Bytes, layout: NumberLayout) -> None:
    width, lead = layout.width, layout.lead
    count = max(0, len(new) - lead) // width
    end = lead + count * width
    most = count // _SPARSE_SHARE
    gaps, differences = np.empty(most, np.uint8), np.empty(most * width, np.uint8)
    changes = byte_planes.loops.find_changes(new[lead:end], old[lead:end], width, gaps, differences)
    if changes:
        gap_count, changed = changes
    else:
        gap_count, changed = 0, count
        differences = subtract(new[lead:end], old[lead:end], width)
    out.put(BLOCK_HEAD.pack(width, lead, changed, gap_count))
    out.put(new[:lead].data)
    out.put(new[end:].data)
    if gap_count:
        byte_planes.write_pairs(out, gaps[:gap_count])
    if changed:
        byte_planes.write_block(out, differences[: changed * width], _LAYOUTS[width])


# How differences are split: the lowest byte, which varies most, is the top one, and the ones above hardly vary.
_LAYOUTS = {width: NumberLayout(width, 0, False, (True,) * (width // 2 - 1), width > 1) for width in WIDTHS}


# -- reading ----------------------------------------------------------------------------------------------------------


def apply_delta(delta: Buffer, base: Buffer, into: memoryview | None = None) -> memoryview:
    """Return the bytes of the chunk, in `into` or in new memory. The bytes of the base may be in `into` already.

    Raises ValueError if this is no delta of a chunk of that size.
    """
    reader = Reader(delta)
    magic, size, log, zeros = reader.heads(HEAD)
    if magic != MAGIC or size != len(base) or log not in BLOCK_LOGS or any(zeros):
        raise ValueError(f"its head is not that of a delta of {len(base)} bytes")
    out = memory_for(max(size, 1))[:size] if into is None else into
    array, old = np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8)
    is_in_place = np.shares_memory(array, old)
    for start in range(0, size, 1 << log):
        block = array[start : start + (1 << log)]
        if not is_in_place:
            block[:] = old[start : start + (1 << log)]
        _read_block(reader, block)
    reader.end()
    return out


def _read_block(reader: Reader, block: Bytes) -> None:
    """Turn a block of the base into that of the chunk."""
    width, lead, changed, steps = reader.heads(BLOCK_HEAD)
    if width not in WIDTHS or lead >= width or lead > len(block):
        raise ValueError(f"elements of {width} bytes after {lead} bytes")
    count = (len(block) - lead) // width
    end = lead + count * width
    if changed > count or steps > count or (steps == 0 and changed not in (0, count)):
        raise ValueError(f"{changed} of {count} elements differ, after {steps} gaps")
    block[:lead] = np.frombuffer(reader.bytes(lead), np.uint8)
    block[end:] = np.frombuffer(reader.bytes(len(block) - end), np.uint8)
    gaps = reader.top_plane(steps).copy() if steps else _NO_GAPS
    if steps and (len(gaps) - int(np.count_nonzero(gaps == LONGEST)) != changed or gaps[-1] == LONGEST):
        raise ValueError(f"its gaps name another number of elements than {changed}")
    if steps and int(gaps.sum(dtype=np.int64)) + changed > count:
        raise ValueError(f"its gaps end after its {count} elements")
    if not changed:
        return
    differences = np.empty(changed * width, np.uint8)
    byte_planes.read_block(reader, differences)
    if not steps:
        add(block[lead:end], width, differences)
    elif not byte_planes.loops.add_changes(block[lead:end], width, gaps, differences):
        raise ValueError("its gaps do not fit its differences")
