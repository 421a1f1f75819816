"""Limits for the contents of a state's tree, checked on its text before anything is built from it.

A reader needs such limits for its memory and time, because anyone who can write to an unencrypted tier can write any
tree.

Invariant: `save` and a restore pass the same text to the same function, so a saved tree is never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

# Arrays, objects and members of objects. 50,000 parameters with Adam's state need 700,000.
# No kind of node costs more memory per count than a set of five: three nodes and 730 bytes. So all nodes together need
# at most 500 MiB.
MAX_NODES = 1 << 21
# Commas outside strings, which count the items in lists of numbers and strings, at most 70 bytes each.
# Also limits the number of values in all packed runs together, at 32 to 90 bytes each.
MAX_VALUES = 1 << 24
# Keys of one dict, or members of one set, that share a hash; limited because each is compared with all others.
MOST_ALIKE = 64


def excess(text: str) -> str:
    """Describe which limit typed JSON exceeds; empty if it is within the limits."""
    if len(text) <= MAX_NODES:
        return ""
    nodes, values = _count(text)
    if nodes > MAX_NODES or values > MAX_VALUES:  # an upper bound, because those inside strings are counted too
        nodes, values = count(text)
    if nodes > MAX_NODES:
        return f"{nodes} containers, members and tensors, {MAX_NODES} at most"
    return f"{values} values, {MAX_VALUES} at most" if values > MAX_VALUES else ""


def excess_of_runs(values: int) -> str:
    """Describe the excess as `excess` does, for this number of values in packed runs."""
    return f"{values} values in packed runs, {MAX_VALUES} at most" if values > MAX_VALUES else ""


def count(text: str, step: int = 1 << 16) -> tuple[int, int]:
    """Count the nodes and the commas of JSON that lie outside strings.

    Uses the memory of `step` characters for a text of any length.
    """
    nodes = values = at = inside = 0
    while at < len(text):
        window = text[at : at + step]
        if (len(window) - len(window.rstrip("\\"))) % 2:  # so that the window does not end inside an escape
            window += text[at + len(window) : at + len(window) + 1]
        at += len(window)
        pieces = window.replace("\\\\", "").replace('\\"', "").split('"')
        window_nodes, window_values = _count("".join(pieces[inside::2]))
        nodes, values = nodes + window_nodes, values + window_values
        inside ^= (len(pieces) - 1) % 2
    return nodes, values


def _count(text: str) -> tuple[int, int]:
    return sum(map(text.count, "[{:")), text.count(",")


def alike(keys: Collection[object]) -> int:
    """Return how many keys share one hash, if they are more than `MOST_ALIKE`; else 0."""
    if len(keys) <= MOST_ALIKE or len(set(map(hash, keys))) > len(keys) - MOST_ALIKE:
        return 0
    largest = max(Counter(map(hash, keys)).values())
    return largest if largest > MOST_ALIKE else 0
