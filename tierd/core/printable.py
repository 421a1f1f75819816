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
    line = str(text)
    if line.isprintable():
        return line
    return "".join([char if _is_visible(char) else _escaped(char) for char in line])


def printable_lines(text: object) -> str:
    """Escape like `printable`, but keep lines. Lines after the first are indented if they are not yet, so that no line
    can be mistaken for one of tierd's own."""
    first, *following = map(printable, str(text).split("\n"))
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in following)])


def printable_json(text: str) -> str:
    """JSON of the same value, with each unprintable character escaped except line feeds between tokens."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join([char if char == "\n" or _is_visible(char) else _json_escaped(char) for char in text])


def _is_visible(char: str) -> bool:
    return char.isprintable() or category(char) == "Zs"


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def _json_escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
