"""Divide replicated tensors among the ranks of a node, so that each of them is copied and written once.

Invariant: the division is a pure function of the tensors' sizes and the node's ranks. So every rank finds the same
shares without a message, and the shares together are all tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from tierd.core.ids import PartId
from tierd.core.manifest import File, Manifest

ROUNDS = 32  # saves in which the ranks compare all replicated tensors
LEAST_DIVIDED = 4096  # bytes; a smaller tensor is stored by every rank, because naming another rank's takes as much


def divide(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Return the rank that stores each tensor: the largest tensor first, each to the rank with the fewest bytes.

    Tensors of fewer than `LEAST_DIVIDED` bytes are left out. `sizes` are in bytes, by name. The largest share exceeds
    the mean by at most one tensor (R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    """
    loads = [(0, rank) for rank in sorted(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if sizes[name] < LEAST_DIVIDED:
            break
        load, rank = loads[0]
        owners[name] = rank
        heapq.heapreplace(loads, (load + sizes[name], rank))
    return owners


def differing_divisions(divisions: Mapping[PartId, str]) -> dict[PartId, PartId]:
    """Return the parts of one checkpoint that do not belong to that of their node's lowest rank, each with that part,
    because their ranks divided different states.

    `divisions` are the members `division` of the manifests. The first half of one names the ranks of a node.
    """
    first: dict[tuple[int, str], PartId] = {}
    differing: dict[PartId, PartId] = {}
    for part in sorted(part for part, division in divisions.items() if division):
        lowest = first.setdefault((part.world, divisions[part][:16]), part)
        if divisions[part] != divisions[lowest]:
            differing[part] = lowest
    return differing


def stored_by_all(file: File, others: Sequence[Manifest]) -> list[tuple[int, int]]:
    """Return the ranges of a file, in bytes, whose chunks every other manifest has as well, without being declared
    replicated.
    """
    common = (
        set.intersection(*({chunk.content for chunk in manifest.chunks()} for manifest in others)) if others else set()
    )
    ranges: list[tuple[int, int]] = []
    at = 0
    for chunk in file.chunks:
        if chunk.home is None and chunk.content in common:
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == at else at
            ranges.append((begin, at + chunk.size))
        at += chunk.size
    return ranges
