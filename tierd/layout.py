"""What a chunk's bytes are: a look at a sample of them, without knowing what file they are from. Pure.

Law: a layout only decides how short an object gets, never whether it can be read: every layout fits every bytes. Equal
bytes give equal layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
SMALLEST = 4096  # bytes of a chunk that are worth a look

_SAMPLE, _PIECES = 8192, 8
_NOISE = 0.97  # of 8 bits a byte: zstd gives up above it
_WIDER = 0.985  # a wider element has to bring at least this
_DEAD = 0.02  # of 8 bits a byte
_RARE = 0.02  # a sign that so few have is not worth a bit of each
_BITS = np.arange(_SAMPLE + 1) * np.log2(np.maximum(np.arange(_SAMPLE + 1), 1))  # n * log2(n)
_FIRST = (0, 1, 3, 7)  # where each width's histograms begin among all
_ROWS = np.arange(8) * 256


@dataclass(frozen=True, slots=True)
class Layout:
    """How to cut a block.

    Attributes:
        width: bytes of an element.
        lead: bytes before the first one.
        folded: turn the top word left by one bit.
        words: for each 16-bit word below the top one, from the lowest: whether to compress it.
        low: whether to compress the byte below the top one.
    """

    width: int = 1
    lead: int = 0
    folded: bool = False
    words: tuple[bool, ...] = ()
    low: bool = False


def look(block: Bytes) -> Layout:
    """The layout under which a sample of `block` takes the fewest bits; width 1 where none is clearly better.

    Order-0 entropies (Shannon) of the bytes by their place modulo 8, with Miller and Madow's correction for the few
    that are counted, stand for what a Huffman coder would make of them.
    """
    by_eight = _histograms(block)
    by_four = by_eight[:4] + by_eight[4:]
    by_two = by_four[:2] + by_four[2:]
    rows = np.concatenate((by_two[:1] + by_two[1:], by_two, by_four, by_eight))
    entropy = _entropy(rows)
    costs = np.add.reduceat(np.where(entropy < _NOISE, entropy, 1.0), _FIRST) / WIDTHS
    best = 0
    for index, cost in enumerate(costs.tolist()):
        if cost < costs[best] * _WIDER:
            best = index
    mine = slice(_FIRST[best], _FIRST[best] + WIDTHS[best])
    return _layout(WIDTHS[best], rows[mine], entropy[mine])


def _histograms(block: Bytes) -> npt.NDArray[np.intp]:
    # Counts by place modulo 8 and by value: shape (8, 256).
    if len(block) <= _SAMPLE:
        sample = block[: len(block) & ~7]
    else:
        step = (len(block) // _PIECES) & ~7
        sample = block[: step * _PIECES].reshape(_PIECES, step)[:, : _SAMPLE // _PIECES]
    return np.bincount((sample.reshape(-1, 8) + _ROWS).ravel(), minlength=2048).reshape(8, 256)


def _entropy(rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    # Bits per bit, 0..1, of each histogram.
    totals = np.maximum(rows.sum(1), 1)
    bits = np.log2(totals) - np.take(_BITS, rows).sum(1) / totals
    bits += ((rows > 0).sum(1) - 1) / (2 * np.log(2) * totals)
    return np.asarray(np.minimum(bits / 8, 1.0))


def _layout(width: int, rows: npt.NDArray[np.intp], entropy: npt.NDArray[np.float64]) -> Layout:
    if width == 1:
        return Layout()
    # Sign and exponent are what is most regular; bytes that hardly change say nothing about where an element ends.
    top = int(np.argmin(np.where(entropy > _DEAD, entropy, 2.0)))
    minus = float(rows[top, 128:].sum() / max(1, rows[top].sum()))
    worth = np.roll(entropy, -((top + 1) % width)) < _NOISE
    words = tuple(bool(worth[at] or worth[at + 1]) for at in range(0, width - 2, 2))
    return Layout(width, (top + 1) % width, _RARE < minus < 1 - _RARE, words, bool(worth[width - 2]))


def has_numbers(raw: bytes | bytearray | memoryview) -> bool:
    """Whether some of 16 places of a chunk look like numbers of several bytes; else plain zstd does as well."""
    data = np.frombuffer(raw, np.uint8)
    if len(data) < SMALLEST:
        return False
    step = max(len(data) // 16, _SAMPLE) & ~7
    return any(look(data[at : at + step]).width > 1 for at in range(0, len(data) - SMALLEST + 1, step))


def neighbours(plane: Bytes) -> int:
    """The lowest of those 15 neighbouring values that hold most of a sample of `plane` (8 bytes at least)."""
    pieces = plane[: len(plane) & ~7].reshape(8, -1)[:, : _SAMPLE // 8]
    below = np.concatenate(([0], np.cumsum(np.bincount(pieces.ravel(), minlength=256))))
    return int(np.argmax(below[15:] - below[:-15]))
