"""The compression policy: whether compressing chunks makes a flush faster, from two rates, a ratio and the last choice.

Reading, encoding and putting overlap, so the slowest of them sets the throughput. Let E be the encoder's rate and L the
link's rate in bytes per second, and r the stored bytes per raw byte. A raw byte then takes max(1/E, r/L) seconds
compressed and 1/L uncompressed. So for r < 1 compressing is faster exactly if E > L, whatever r is.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 1.2  # the factor by which a rate has to exceed the other to change the choice, so that it does not oscillate
_GAIN, _GAIN_AGAIN = 0.98, 0.96  # above these ratios, the time to encode and to decode again is not worth the bytes


@dataclass(frozen=True, slots=True)
class CompressionChoice:
    """Whether to compress (`pack`) the next chunks for a tier, and why, in one line for people."""

    pack: bool
    why: str


def compression_choice(
    link: float | None, encoder: float | None, ratio: float | None, before: bool = True
) -> CompressionChoice:
    """Whether to compress.

    An unknown rate leads to compressing, because its time is spent once, and an object's size remains.

    Args:
        link: stored bytes per second that the tier takes from all workers together. None or 0: not measured yet.
        encoder: raw bytes per second of all encoding threads together. None or 0: not measured yet.
        ratio: the recent number of stored bytes per raw byte of compressed chunks. None: not measured yet. A caller
            that stopped compressing still has to compress a chunk now and then, to notice when the ratio changes.
        before: the last choice, which stands until the other choice is better by a fifth.
    """
    if ratio is not None and ratio > (_GAIN if before else _GAIN_AGAIN):
        return CompressionChoice(False, f"not compressing: {ratio:.0%} would be left")
    if not link or not encoder:
        return CompressionChoice(True, "compressing: the rates are not known yet")
    pack = encoder * _MARGIN >= link if before else encoder > link * _MARGIN
    word = "compressing" if pack else "not compressing"
    return CompressionChoice(pack, f"{word}: the link takes {_rate(link)}, the encoder makes {_rate(encoder)}")


def _rate(rate: float) -> str:
    # 180 MB/s, 1.2 GB/s
    return f"{rate / 1e9:.1f} GB/s" if rate >= 999.5e6 else f"{rate / 1e6:.0f} MB/s"
