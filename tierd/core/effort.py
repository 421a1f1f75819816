"""Whether compressing pays: a pure function of three rates, with a memory of what was decided last.

Law: reading, encoding and putting overlap, so the slowest of them sets the pace. A raw byte takes max(1/E, r/L) seconds
where it is compressed and 1/L where it is not, with the encoder's rate E and the link's L in bytes a second and r the
stored part of a raw byte. So with r < 1 compressing is the faster way exactly where E > L, whatever r is.
"""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 1.2  # the rate that is to win has to be so many times the other, so that two near each other do not flap
_GAIN, _GAIN_AGAIN = 0.98, 0.96  # a ratio above is not worth anybody's time, now or when it is restored


@dataclass(frozen=True, slots=True)
class Effort:
    """What to do with the next chunks of a tier, and why, in one line for people."""

    pack: bool
    why: str


def effort(link: float | None, encoder: float | None, ratio: float | None, before: bool = True) -> Effort:
    """Whether to compress.

    Args:
        link: bytes a second that the tier takes, as stored, from all workers together. None or 0: not measured yet.
        encoder: raw bytes a second of all encoding threads together. None or 0: not measured yet.
        ratio: stored bytes for a raw one where it is compressed, as lately measured. None: not measured yet.
            A caller that stopped compressing still has to compress a chunk now and then, or it never learns better.
        before: what was decided last. It stands until the other way is better by a fifth.

    What is not measured speaks for compressing: its time is lost once, an object's size stays.
    """
    if ratio is not None and ratio > (_GAIN if before else _GAIN_AGAIN):
        return Effort(False, f"not compressing: {ratio:.0%} would be left")
    if not link or not encoder:
        return Effort(True, "compressing: the rates are not known yet")
    pack = encoder * _MARGIN >= link if before else encoder > link * _MARGIN
    word = "compressing" if pack else "not compressing"
    return Effort(pack, f"{word}: the link takes {_rate(link)}, the encoder makes {_rate(encoder)}")


def _rate(rate: float) -> str:
    # 180 MB/s, 1.2 GB/s
    return f"{rate / 1e9:.1f} GB/s" if rate >= 999.5e6 else f"{rate / 1e6:.0f} MB/s"
