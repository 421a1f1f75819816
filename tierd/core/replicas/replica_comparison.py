"""Compare the fingerprints of tensors that should be the same on all ranks, as the ranks of one checkpoint held them.

A manifest's `replicas` maps names to fingerprints, each with its function: ``xxh3:…``. Invariant: fingerprints of
different functions are never compared, because they differ for equal bytes. A rank without a name is not compared by
that name. The result names a few tensors and ranks and counts the others, so that its size does not depend on theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

MAX_TENSORS = 8  # that a result describes
MAX_RANKS = 16  # that a list of ranks names
_MAX_NAME = 120  # characters of a tensor's name that a text shows
NO_REPLICAS = b""  # the digest of a manifest without fingerprints


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose bytes differ between ranks that should hold the same.

    Attributes:
        tensor: its name.
        agree: the first 16 ranks of the largest group with equal fingerprints; empty if two groups are the largest,
            so that nothing tells which of them is right.
        agree_count: how many ranks this group has.
        differ: the first 16 of the other ranks that were compared.
        differ_count: how many other ranks there are.
    """

    tensor: str
    agree: tuple[int, ...]
    agree_count: int
    differ: tuple[int, ...]
    differ_count: int

    def __str__(self) -> str:
        differ = _list_ranks(self.differ, self.differ_count)
        name = repr(self.tensor if len(self.tensor) <= _MAX_NAME else f"{self.tensor[:_MAX_NAME]}…")
        if not self.agree:
            return f"{name} differs among {differ}, with no majority that tells which is right"
        return f"{name} on {differ} differs from {_list_ranks(self.agree, self.agree_count)}, which agree"


@dataclass(frozen=True, slots=True)
class ReplicaDifferences:
    """The result of a comparison."""

    compared: frozenset[int]  # the ranks with fingerprints
    tensors: frozenset[str]  # the names of all tensors that differ
    # the first `MAX_TENSORS` of them by name, those first of which a group of ranks is the largest
    described: tuple[TensorDifference, ...]

    def __str__(self) -> str:
        unlisted = len(self.tensors) - len({difference.tensor for difference in self.described})
        suffix = f"; and {unlisted} more tensors" if unlisted else ""
        return "; ".join(map(str, self.described)) + suffix


def replicas_digest(replicas: Mapping[str, str]) -> bytes:
    """Digest a manifest's fingerprints: 16 bytes that are equal for equal maps; `NO_REPLICAS` for an empty one."""
    if not replicas:
        return NO_REPLICAS
    return xxhash.xxh3_128_digest(msgspec.json.encode(sorted(replicas.items())))


def summarize_replicas(replicas: Mapping[str, str]) -> dict[str, str]:
    """Return one fingerprint for all tensors of each function, of a few bytes, by how many and which tensors these are.

    `compare_replicas` of the summaries shows which ranks differ, of those that have fingerprints of the same tensors.
    """
    by_function: dict[str, dict[str, str]] = {}
    for name, fingerprint in replicas.items():
        by_function.setdefault(fingerprint.partition(":")[0], {})[name] = fingerprint
    return {
        f"{len(of_function)} tensors, {xxhash.xxh3_64_hexdigest(msgspec.json.encode(sorted(of_function)))}": (
            f"{function}:{replicas_digest(of_function).hex()}"
        )
        for function, of_function in by_function.items()
    }


def compare_replicas(replicas: Mapping[int, Mapping[str, str]]) -> ReplicaDifferences:
    """Compare the fingerprints of several ranks of one checkpoint and one world size.

    Ranks that share one map object are compared once, because most ranks agree.

    Args:
        replicas: by rank, tensor names with their fingerprints.
    """
    by_map: dict[int, tuple[Mapping[str, str], list[int]]] = {}
    for rank in sorted(replicas):
        if replicas[rank]:
            by_map.setdefault(id(replicas[rank]), (replicas[rank], []))[1].append(rank)
    maps = list(by_map.values())
    differences = [
        difference
        for name in sorted(set[str]().union(*(fingerprints for fingerprints, _ in maps)))
        for difference in _differences(name, maps)
    ]
    differences.sort(key=lambda difference: (not difference.agree, difference.tensor))
    return ReplicaDifferences(
        frozenset(rank for _, ranks in maps for rank in ranks),
        frozenset(difference.tensor for difference in differences),
        tuple(differences[:MAX_TENSORS]),
    )


def _differences(name: str, maps: Sequence[tuple[Mapping[str, str], list[int]]]) -> list[TensorDifference]:
    """Compare one tensor; return a difference for each function of which the fingerprints differ."""
    by_function: dict[str, dict[str, list[int]]] = {}
    for fingerprints, ranks in maps:
        if fingerprint := fingerprints.get(name):
            function = fingerprint.partition(":")[0]
            by_function.setdefault(function, {}).setdefault(fingerprint, []).extend(ranks)
    return [_difference(name, list(groups.values())) for groups in by_function.values() if len(groups) > 1]


def _difference(name: str, groups: list[list[int]]) -> TensorDifference:
    groups.sort(key=len, reverse=True)
    agree = sorted(groups[0]) if len(groups[0]) > len(groups[1]) else []
    differ = sorted(rank for group in groups[1 if agree else 0 :] for rank in group)
    return TensorDifference(
        tensor=name,
        agree=tuple(agree[:MAX_RANKS]),
        agree_count=len(agree),
        differ=tuple(differ[:MAX_RANKS]),
        differ_count=len(differ),
    )


def _list_ranks(ranks: Sequence[int], count: int) -> str:
    """Write ranks in words: ``ranks 0-6, 8``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    suffix = f" and {count - len(ranks)} more" if count > len(ranks) else ""
    return f"{'rank' if count == 1 else 'ranks'} {text}{suffix}"
