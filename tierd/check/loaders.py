"""Read how far the process's data loaders are, and the samplers and datasets that they draw from.

A loop often holds only the loader, and a framework holds it for the loop. The iterator of a loader that is under way
knows how many batches it gave away, also if other code refers to it.

Invariant: as `insides`, this module reads attributes and calls nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from tierd.check.insides import walk
from tierd.check.kinds import POSITION
from tierd.check.leaves import ValueLeaf, is_generator, leaf_of
from tierd.check.places import ObjectPlaces

_LINKS = ("batch_sampler", "sampler", "base_sampler")


def loader_leaves(places: ObjectPlaces, iterators: Iterable[Any], read: set[int] | None = None) -> dict[str, ValueLeaf]:
    """Return for each loader the batches that its newest iterator has read, and the attributes of its samplers.

    The path of a loader has the class of its dataset, and of its samplers their classes, because both runs have these.

    Args:
        iterators: all iterators of torch's loaders in this process.
        read: gets the ids of the objects that were read.
    """
    newest: dict[str, Any] = {}
    for iterator in sorted(iterators, key=lambda candidate: places.of(candidate)[0]):
        newest[_loader_name(iterator)] = iterator
    by_path: dict[str, ValueLeaf] = {}
    for name, iterator in newest.items():
        batches = _count_batches(iterator)
        by_path[f"{name}: {POSITION}"] = ValueLeaf(str(batches), str(batches), sample=(float(batches),))
        visited: set[int] = set()  # another loader may have the same dataset
        by_path |= dict(_part_leaves(iterator, name, visited))
        if read is not None:
            read |= visited
    return by_path


def order_digests(orders: Iterable[Any]) -> list[str]:
    """Return the digests of the generators from which torch's loaders and samplers draw the order of the samples.

    Args:
        orders: the loaders and samplers. A loader with workers seeds these, and so what a dataset draws there.
    """
    digests = set()
    for source in orders:
        generator = getattr(source, "__dict__", {}).get("generator")
        if (
            is_generator(generator)
            and not getattr(source, "num_workers", 0)
            and (leaf := leaf_of(generator)) is not None
        ):
            digests.add(leaf.digest)
    return sorted(digests)


def _loader_name(iterator: Any) -> str:
    dataset = iterator._dataset
    count = ""
    with suppress(Exception):  # a stream has no length
        count = f" ({len(dataset)} items)"
    return f"DataLoader of {type(dataset).__name__}{count}"


def _count_batches(iterator: Any) -> int:
    """Return the batches that were read, with those that a loader of accelerate skipped at its beginning."""
    skipped, sampler = 0, getattr(iterator, "_index_sampler", None)
    for _ in range(len(_LINKS)):
        skipped += getattr(sampler, "skip_batches", 0)
        sampler = getattr(sampler, "batch_sampler", None)
    return int(iterator._num_yielded + skipped)


def _part_leaves(iterator: Any, name: str, visited: set[int]) -> Iterator[tuple[str, ValueLeaf]]:
    sampler = getattr(iterator, "_index_sampler", None)
    todo = [sampler]
    while todo:
        current = todo.pop()
        if current is None or id(current) in visited or not hasattr(current, "__dict__"):
            continue
        visited.add(id(current))
        where = f"{type(current).__name__} of the {name}"
        for key, value in list(vars(current).items()):
            if key in _LINKS:
                todo.append(value)
            elif key != "skip_batches" and (leaf := _setting_leaf(value)) is not None:
                yield f"{where}.{key}", leaf
    yield from walk(iterator._dataset, f"{type(iterator._dataset).__name__} of the {name}", visited)


def _setting_leaf(value: object) -> ValueLeaf | None:
    return leaf_of(value) if type(value) in (int, float, bool, str) or is_generator(value) else None
