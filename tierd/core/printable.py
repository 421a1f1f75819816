"""Text of unknown origin, made safe to look at: the one function that all tierd shows passes through.

Names in a bucket, and what a server answers, may hold characters that a terminal obeys, that turn the order of a line
around, or that end it. A person would then read something other than what is there.

Invariant: what is given back holds no character of the categories Cc, Cf, Cs, Co, Cn, Zl or Zp. It can be given again,
and stays what it is.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: object) -> str:
    """`text` as one line: what is not for the eye stands there as an escape, as in ``\\x9b`` or ``\\u202e``."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join([one if _is_visible(one) else _escaped(one) for one in shown])


def printable_lines(text: object) -> str:
    """As `printable`, for text of several lines. Lines after the first are indented where they are not yet, so that
    none passes for one of tierd's own."""
    first, *others = map(printable, str(text).split("\n"))
    return "\n".join([first, *(one if one.startswith("  ") else f"  {one}" for one in others)])


def printable_json(text: str) -> str:
    """JSON of the same value, without characters that are not for the eye but line feeds between its tokens."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join([one if one == "\n" or _is_visible(one) else _json_escaped(one) for one in text])


def _is_visible(one: str) -> bool:
    return one.isprintable() or category(one) == "Zs"


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode()


def _json_escaped(one: str) -> str:
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
