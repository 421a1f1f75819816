"""How much a state's tree may hold, told from its text before anything is built of it.

Whoever writes to a tier that is not encrypted can write any tree, so a reader's memory and time need bounds.

Invariant: `save` and a restore ask the same function about the same text, so what was saved is never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

# Arrays, objects and members of objects. 50,000 parameters with Adam's state come to 700,000. A set of five is three of
# them and 730 bytes, and nothing takes more for its count, so all together take at most 500 MiB.
MAX_NODES = 1 << 21
# Commas outside strings: what lists of numbers and strings cost, at most 70 bytes each.
MAX_VALUES = 1 << 24
# Keys of one dict, or members of one set, whose hash is the same: each is compared with all the others.
MOST_ALIKE = 64

_WINDOW = 1 << 16  # characters that are looked at at once


def excess(text: str) -> str:
    """What typed JSON has too much of; empty where it is within the budget."""
    if len(text) <= MAX_NODES:
        return ""
    nodes, values = _count(text)
    if nodes > MAX_NODES or values > MAX_VALUES:  # those in strings were counted, too
        nodes, values = count(text)
    if nodes > MAX_NODES:
        return f"{nodes} containers, members and tensors, {MAX_NODES} at most"
    return f"{values} values, {MAX_VALUES} at most" if values > MAX_VALUES else ""


def count(text: str) -> tuple[int, int]:
    """The nodes and the commas of JSON that stand outside strings. Takes a window's memory, whatever the text is."""
    nodes = values = at = inside = 0
    while at < len(text):
        window = text[at : at + _WINDOW]
        if (len(window) - len(window.rstrip("\\"))) % 2:  # an escape is not cut
            window += text[at + len(window) : at + len(window) + 1]
        at += len(window)
        pieces = window.replace("\\\\", "").replace('\\"', "").split('"')
        more, others = _count("".join(pieces[inside::2]))
        nodes, values = nodes + more, values + others
        inside ^= (len(pieces) - 1) % 2
    return nodes, values


def _count(text: str) -> tuple[int, int]:
    return sum(map(text.count, "[{:")), text.count(",")


def alike(keys: Collection[object]) -> int:
    """How many keys have the same hash, where these are more than `MOST_ALIKE`; else 0."""
    if len(keys) <= MOST_ALIKE:
        return 0
    most = max(Counter(map(hash, keys)).values())
    return most if most > MOST_ALIKE else 0
