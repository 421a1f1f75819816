"""Describe two values for a reader so that the texts differ where the values do.

Invariant: pure.
"""

from __future__ import annotations

from tierd.check.leaves import ValueLeaf

_CONTEXT = 24  # characters before the first difference that are shown


def both_texts(a: ValueLeaf, b: ValueLeaf) -> tuple[str, str]:
    """Return a text for each of two different values: their usual ones, or the place where they differ."""
    if a.text != b.text:
        return a.text, b.text
    if a.whole and b.whole:
        start = next((at for at, (x, y) in enumerate(zip(a.whole, b.whole)) if x != y), min(len(a.whole), len(b.whole)))  # noqa: B905
        return _excerpt(a.whole, start), _excerpt(b.whole, start)
    if len(a.sample) == len(b.sample):
        for x, y in zip(a.sample, b.sample, strict=True):
            if x != y:
                return f"{a.text} with {x!r}", f"{b.text} with {y!r}"
    return f"{a.text} #{a.digest[:8]}", f"{b.text} #{b.digest[:8]}"


def _excerpt(text: str, start: int) -> str:
    begin = max(0, start - _CONTEXT)
    excerpt = text[begin : start + 2 * _CONTEXT]
    return f"{'…' if begin else ''}{excerpt}{'…' if begin + len(excerpt) < len(text) else ''} (from character {begin})"
