"""Detect from a sample of a chunk's bytes which numbers it holds, without knowing the file's format. Pure.

Invariant: a layout decides only how short an object becomes, never whether it can be read, because every layout fits
any bytes. Equal bytes give equal layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
SMALLEST = 4096  # bytes; smaller chunks are not sampled

_SAMPLE, _PIECES = 8192, 8
_NOISE = 0.97  # share of 8 bits per byte; zstd gives up above it
_WIDER = 0.985  # a wider element must lower the cost to less than this share
_DEAD = 0.02  # share of 8 bits per byte; bytes with less entropy hardly change
_RARE = 0.02  # share of elements; a rarer sign is not worth one bit of every element
_BITS = np.arange(_SAMPLE + 1) * np.log2(np.maximum(np.arange(_SAMPLE + 1), 1))  # n * log2(n)
_FIRST = (0, 1, 3, 7)  # index of each width's first histogram among all
_ROWS = np.arange(8) * 256


@dataclass(frozen=True, slots=True)
class NumberLayout:
    """How to split a block into planes.

    Attributes:
        width: bytes of an element.
        lead: bytes before the first element.
        folded: whether to rotate the top word left by one bit.
        words: for each 16-bit word below the top one, from the lowest: whether to compress it.
        low: whether to compress the byte below the top one.
    """

    width: int = 1
    lead: int = 0
    folded: bool = False
    words: tuple[bool, ...] = ()
    low: bool = False


def detect_layout(block: Bytes) -> NumberLayout:
    """Return the layout under which a sample of `block` takes the fewest bits; width 1 if none is clearly better.

    The cost is an estimate of a Huffman coder's output: the order-0 entropy (Shannon) of the bytes by their position
    modulo 8. Miller and Madow's correction accounts for the small number of sampled bytes.
    """
    return _best(*_count_bytes(block))


def sampled_share(block: Bytes, width: int) -> float:
    """Return the share of its size, 0..1, to which a Huffman coder brings a sample of elements of `width` bytes."""
    _, entropy = _count_bytes(block)
    first = _FIRST[WIDTHS.index(width)]
    return float(entropy[first : first + width].mean())


def _count_bytes(block: Bytes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    # Returns the histograms of all widths, and the entropy of each.
    by_eight = _histograms(block)
    by_four = by_eight[:4] + by_eight[4:]
    by_two = by_four[:2] + by_four[2:]
    rows = np.concatenate((by_two[:1] + by_two[1:], by_two, by_four, by_eight))
    return rows, _entropy(rows)


def _best(rows: npt.NDArray[np.intp], entropy: npt.NDArray[np.float64]) -> NumberLayout:
    costs = np.add.reduceat(np.where(entropy < _NOISE, entropy, 1.0), _FIRST) / WIDTHS
    best = 0
    for index, cost in enumerate(costs.tolist()):
        if cost < costs[best] * _WIDER:
            best = index
    best_rows = slice(_FIRST[best], _FIRST[best] + WIDTHS[best])
    return _layout(WIDTHS[best], rows[best_rows], entropy[best_rows])


def _histograms(block: Bytes) -> npt.NDArray[np.intp]:
    # Returns counts by position modulo 8 and by value: shape (8, 256).
    if len(block) <= _SAMPLE:
        sample = block[: len(block) & ~7]
    else:
        step = (len(block) // _PIECES) & ~7
        sample = block[: step * _PIECES].reshape(_PIECES, step)[:, : _SAMPLE // _PIECES]
    return np.bincount((sample.reshape(-1, 8) + _ROWS).ravel(), minlength=2048).reshape(8, 256)


def _entropy(rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    # Returns bits per bit, 0..1, of each histogram.
    totals = np.maximum(rows.sum(1), 1)
    bits = np.log2(totals) - np.take(_BITS, rows).sum(1) / totals
    bits += ((rows > 0).sum(1) - 1) / (2 * np.log(2) * totals)
    return np.asarray(np.minimum(bits / 8, 1.0))


def _layout(width: int, rows: npt.NDArray[np.intp], entropy: npt.NDArray[np.float64]) -> NumberLayout:
    if width == 1:
        return NumberLayout()
    # Sign and exponent have the least entropy. Bytes that hardly change are ignored, because they do not show where an
    # element ends.
    top = int(np.argmin(np.where(entropy > _DEAD, entropy, 2.0)))
    minus = float(rows[top, 128:].sum() / max(1, rows[top].sum()))
    worth = np.roll(entropy, -((top + 1) % width)) < _NOISE
    words = tuple(bool(worth[at] or worth[at + 1]) for at in range(0, width - 2, 2))
    return NumberLayout(width, (top + 1) % width, _RARE < minus < 1 - _RARE, words, bool(worth[width - 2]))


class ChunkKind(Enum):
    """The content of a chunk: `NUMBERS` of several bytes in a sample or more, `NOISE` in all of them, or `UNKNOWN`."""

    NUMBERS = "numbers"
    NOISE = "noise"
    UNKNOWN = "other"


def chunk_kind(raw: bytes | bytearray | memoryview) -> ChunkKind:
    """Classify a chunk by samples at up to 16 positions."""
    data = np.frombuffer(raw, np.uint8)
    if len(data) < SMALLEST:
        return ChunkKind.UNKNOWN
    step = max(len(data) // 16, _SAMPLE) & ~7
    noise = True
    for at in range(0, len(data) - SMALLEST + 1, step):
        rows, entropy = _count_bytes(data[at : at + step])
        if _best(rows, entropy).width > 1:
            return ChunkKind.NUMBERS
        noise = noise and float(entropy[0]) >= _NOISE
    return ChunkKind.NOISE if noise else ChunkKind.UNKNOWN


def neighbour_base(plane: Bytes) -> int:
    """Return the lowest of the 15 neighbouring values most frequent in a sample of `plane` (at least 8 bytes)."""
    pieces = plane[: len(plane) & ~7].reshape(8, -1)[:, : _SAMPLE // 8]
    below = np.concatenate(([0], np.cumsum(np.bincount(pieces.ravel(), minlength=256))))
    return int(np.argmax(below[15:] - below[:-15]))
