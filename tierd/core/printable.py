"""Escaping of text of unknown origin. Everything that tierd prints passes through this module.

Names in a bucket and answers of a server may contain characters that control a terminal, reverse the order of a line,
or end it. A person would then read something other than the actual text.

Invariant: the result contains no character of the categories Cc, Cf, Cs, Co, Cn, Zl or Zp. Escaping a result again does
not change it.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: object) -> str:
    """`text` as one line, with each unprintable character escaped, as in ``\\x9b`` or ``\\u202e``."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join([one if _is_visible(one) else _escaped(one) for one in shown])


def printable_lines(text: object) -> str:
    """Escape like `printable`, but keep lines. Lines after the first are indented if they are not yet, so that no line
    can be mistaken for one of tierd's own."""
    first, *others = map(printable, str(text).split("\n"))
    return "\n".join([first, *(one if one.startswith("  ") else f"  {one}" for one in others)])


def printable_json(text: str) -> str:
    """JSON of the same value, with each unprintable character escaped except line feeds between tokens."""
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
