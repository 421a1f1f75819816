"""The inner loops of the codecs `planes` and `delta` in NumPy.

They serve where `_plane_loops` was not compiled or cannot be vectorised.

Both modules have the same functions and give the same bytes. Here each call into NumPy is for a whole block, although
smaller pieces would stay in the CPU's caches: NumPy releases the interpreter's lock in each call, and threads that
decode at the same time would wait for it most of the time.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.codec.number_layout import Bytes

_BLOCK = 1 << 20  # bytes: the largest block of byte_planes
LONGEST = 255  # the gap that no element follows, so that another one continues it
_BIAS = 128  # added to each difference, so that small ones of both signs have equal upper bytes
_NO_CODE = 15  # of a byte that is not among the 15 neighbours


class _Scratch(threading.local):
    """Memory of one thread, because two threads must not share it."""

    def __init__(self) -> None:
        self.first, self.second, self.third = (np.empty(_BLOCK, np.uint8) for _ in range(3))


_scratch = _Scratch()


def split_top(elements: Bytes, width: int, folded: bool, low: Bytes, high: Bytes) -> None:
    """Write the low and the high bytes of the elements' top words.

    Args:
        elements: the elements, of `width` bytes each.
        folded: rotate each top word left by one bit first, which puts a number's whole exponent into the high byte.
        low, high: receive a byte an element.
    """
    count = len(elements) // width
    top = _scratch.first[: 2 * count].view("<u2")
    np.copyto(top, elements[: count * width].view("<u2").reshape(count, width // 2)[:, -1])
    turned = _scratch.second[: 2 * count].view("<u2")
    if folded:
        np.right_shift(top, 15, out=turned)
        np.left_shift(top, 1, out=top)
        np.bitwise_or(top, turned, out=top)
    np.copyto(low[:count], top, casting="unsafe")
    np.right_shift(top, 8, out=turned)
    np.copyto(high[:count], turned, casting="unsafe")


def take_words(elements: Bytes, width: int, index: int, out: Bytes) -> None:
    """Write the words with this index, 0 for the lowest, of elements of 4 or 8 bytes."""
    count = len(elements) // width
    np.copyto(out[: 2 * count].view("<u2"), elements[: count * width].view("<u2").reshape(count, width // 2)[:, index])


def pack_pairs(plane: Bytes, base: int, halves: Bytes, escapes: Bytes) -> int:
    """Write two codes a byte, and the bytes that have none.

    Returns:
        The number of bytes without a code; -1 if `escapes` has no room for them.
    """
    codes = _scratch.first[: len(plane) + len(plane) % 2]
    codes[-1:] = 0  # fills up the last pair if the number of codes is odd
    near = codes[: len(plane)]
    np.subtract(plane, np.uint8(base), out=near)
    places = np.flatnonzero(near >= _NO_CODE)
    if len(places) > len(escapes):
        return -1
    escapes[: len(places)] = plane[places]
    near[places] = _NO_CODE
    pairs, shifted = codes.view("<u2"), _scratch.second[: len(codes)].view("<u2")
    np.right_shift(pairs, 4, out=shifted)
    np.bitwise_or(pairs, shifted, out=pairs)
    np.copyto(halves[: len(pairs)], pairs, casting="unsafe")
    return len(places)


def unpack_pairs(halves: Bytes, base: int, escapes: Bytes, plane: Bytes) -> bool:
    """Fill `plane` from codes, and from `escapes` where there is no code. Returns whether exactly these were needed."""
    size = len(plane)
    used = halves[: (size + 1) // 2]
    codes = _scratch.first[: 2 * len(used)]
    pairs = codes.view("<u2")
    shifted = _scratch.second[: 2 * len(used)].view("<u2")
    np.copyto(pairs, used)
    np.left_shift(pairs, 4, out=shifted)
    np.bitwise_or(pairs, shifted, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    places = _places_of_escapes(used, size)
    if len(places) != len(escapes):
        return False
    np.add(codes[:size], np.uint8(base), out=plane)
    plane[places] = escapes
    return True


def _places_of_escapes(halves: Bytes, size: int) -> npt.NDArray[np.intp]:
    high, low = (scratch[: len(halves)].view(bool) for scratch in (_scratch.second, _scratch.third))
    codes = low.view(np.uint8)
    np.bitwise_and(halves, _NO_CODE, out=codes)
    np.equal(codes, _NO_CODE, out=low)
    np.greater_equal(halves, _NO_CODE << 4, out=high)
    np.bitwise_or(high, low, out=low)
    pairs = np.flatnonzero(low)
    is_escape = np.stack((halves[pairs] & _NO_CODE, halves[pairs] >> 4), axis=1) == _NO_CODE
    places = np.asarray((2 * pairs[:, None] + np.arange(2))[is_escape])
    return np.asarray(places[places < size])


def join(elements: Bytes, width: int, folded: bool, low: Bytes, high: Bytes, *below: Bytes) -> None:
    """Fill elements from the planes of their top words, and from the words below, lowest first."""
    count = len(elements) // width
    words: npt.NDArray[Any] = elements[: count * width].view("<u2").reshape(count, width // 2)
    in_place = not below and words.flags.aligned
    top = words[:, 0] if in_place else _scratch.first[: 2 * count].view("<u2")
    wide, sign = (scratch[: 2 * count].view("<u2") for scratch in (_scratch.second, _scratch.third))
    # with `dtype`, because NumPy 1 would multiply bytes by 128 in 8 bits
    np.multiply(high[:count], 1 << (7 if folded else 8), out=top, dtype=np.uint16)
    np.copyto(wide, low[:count])
    if folded:  # the lowest bit is the sign
        np.multiply(wide, np.uint16(0x8000), out=sign)
        np.bitwise_or(top, sign, out=top)
        np.right_shift(wide, 1, out=wide)
    np.bitwise_or(top, wide, out=top)
    if in_place:
        return
    for index, plane in enumerate(below):
        word = plane[: 2 * count].view("<u2")
        if index:
            words[:, index] = word
        else:  # because NumPy vectorises a widening copy, but not a store to every other word
            np.copyto(elements[: count * width].view(f"<u{width}"), word)
    words[:, -1] = top


def subtract(new: Bytes, old: Bytes, width: int) -> Bytes:
    """Return the differences of elements modulo 2 to the power of their bits, plus 128, with the highest byte first."""
    differences = new.view(f"<u{width}") - old.view(f"<u{width}")
    differences += differences.dtype.type(_BIAS)
    return np.asarray(differences.byteswap(inplace=True).view(np.uint8))


def add(elements: Bytes, width: int, differences: Bytes) -> None:
    """Add to each element its difference, as `subtract` returns them."""
    elements.view(f"<u{width}")[:] += _values(width, differences)


def _values(width: int, differences: Bytes) -> npt.NDArray[Any]:
    values = differences.view(f">u{width}").astype(f"<u{width}")
    values -= values.dtype.type(_BIAS)
    return values


def find_changes(new: Bytes, old: Bytes, width: int, gaps: Bytes, differences: Bytes) -> tuple[int, int] | None:
    """Write the number of equal elements before each that differs, and by how much that does, as `subtract`.

    Returns:
        The number of gaps and of elements that differ; None if `gaps` or `differences` has no room for them.
    """
    places = np.flatnonzero(new.view(f"<u{width}") != old.view(f"<u{width}"))
    if not len(places):
        return 0, 0
    before = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(before // LONGEST + 1)
    changed, gap_count = len(places), int(ends[-1])
    if gap_count > len(gaps) or changed * width > len(differences):
        return None
    gaps[:gap_count] = LONGEST
    gaps[ends - 1] = before % LONGEST
    ours, theirs = (data.view(f"<u{width}")[places].view(np.uint8) for data in (new, old))
    differences[: changed * width] = subtract(ours, theirs, width)
    return gap_count, changed


def add_changes(elements: Bytes, width: int, gaps: Bytes, differences: Bytes) -> bool:
    """Add differences to the elements that `find_changes` named; return whether the gaps name exactly as many."""
    values, places = _values(width, differences), np.cumsum(gaps, dtype=np.intp)[gaps != LONGEST]
    places += np.arange(len(places))
    count = len(elements) // width
    if len(places) != len(values) or (len(gaps) and gaps[-1] == LONGEST) or (len(places) and places[-1] >= count):
        return False
    elements.view(f"<u{width}")[places] += values
    return True
