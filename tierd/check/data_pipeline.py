"""Read how far data loaders are, and the attributes of loaders, samplers, datasets and running generator functions.

A loop often holds only the loader, and a framework holds it for the loop. The iterator of a loader that is under way
knows how many batches it gave away, also if other code refers to it.

Invariant: this module reads attributes and calls nothing, so that a capture is safe at any moment. State in another
process, such as a loader's worker, is not visible to it.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import FunctionType, GeneratorType, MethodType
from typing import Any

import msgspec
import xxhash

from tierd.check.launch_records import (
    CUDA_GENERATORS,
    NUMPY_GENERATOR,
    POSITION_LABEL,
    PYTHON_GENERATOR,
    TORCH_GENERATOR,
)
from tierd.check.live_objects import LiveObjects, is_data_source
from tierd.check.source_analysis import log_only_names
from tierd.check.user_code import CreationSites, is_user_code, user_frames
from tierd.check.user_values import cell_contents, is_user_class
from tierd.check.value_leaves import ValueLeaf, is_random_generator, leaf_of, sequence_leaf

_MAX_LEAVES = 2000  # leaves in one capture, at most
_MAX_DEPTH = 12
_MAX_ATTRIBUTE_LEAVES = 200  # leaves of one attribute, at most
_MAX_LIST_ITEMS = 100  # items of a list that may hold generators
_DATA_MODULES = ("torch.utils.data", "torchdata")


def data_pipeline_leaves(
    objects: LiveObjects,
    state: Mapping[str, Any] | None,
    entries: Collection[str] = (),
    visited: set[int] | None = None,
) -> dict[str, ValueLeaf]:
    """Return the leaves of all loaders, samplers and datasets in `state`, and of the user's generator functions.

    Args:
        entries: the paths of the saved state's values.
        visited: gets the ids of the objects that were read.
    """
    read: set[int] = set() if visited is None else visited
    leaves = chain(_state_leaves(state, read), _generator_leaves(objects, read), _unsaved_leaves(state, entries, read))
    return dict(islice(leaves, _MAX_LEAVES))


def _state_leaves(state: Mapping[str, Any] | None, visited: set[int]) -> Iterator[tuple[str, ValueLeaf]]:
    for key, value in (state or {}).items():
        if is_data_source(value):
            yield from _walk(value, f'state["{key}"]', visited, 0)


def _generator_leaves(objects: LiveObjects, visited: set[int]) -> Iterator[tuple[str, ValueLeaf]]:
    names: dict[str, int] = {}
    for generator in objects.generators:
        if id(generator) in visited:
            continue
        code = generator.gi_code
        name = f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}()"
        names[name] = names.get(name, 0) + 1
        yield from _walk(generator, name if names[name] == 1 else f"{name} {names[name]}", visited, 0)


def _unsaved_leaves(
    state: Mapping[str, Any] | None, entries: Collection[str], visited: set[int]
) -> Iterator[tuple[str, ValueLeaf]]:
    """Yield what the checkpoint lacks of what gives the samples or counts the steps.

    These are the attributes of loaders, samplers and the like in the loop's variables, because one of them may read
    ahead of the source that is saved, and the attributes of the user's own objects in `state` that its
    entries do not have.
    """
    is_saved = False if state is not None else None
    for name, value in _variables():
        if is_data_source(value) and not isinstance(value, GeneratorType) and _is_readable(value):
            for path, leaf in _walk(value, name, visited, 0):
                yield path, msgspec.structs.replace(leaf, saved=is_saved)
    for key, value in (state or {}).items():
        if not is_data_source(value) and _is_readable(value):
            for attribute, inner in list(vars(value).items()):
                if f'state["{key}"]["{attribute}"]' not in entries:
                    for path, leaf in islice(
                        _walk(inner, f'state["{key}"].{attribute}', visited, 0), _MAX_ATTRIBUTE_LEAVES
                    ):
                        yield path, msgspec.structs.replace(leaf, saved=False)


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the local variables of the loop's own functions."""
    for frame in user_frames():
        for name, value in list(frame.f_locals.items()):
            yield f"{frame.f_code.co_name}() {name}", value


def global_generators() -> dict[str, ValueLeaf]:
    """Return the process's global random number generators by name. Changes none of them."""
    states = {PYTHON_GENERATOR: repr(random.getstate()).encode()}
    if numpy := sys.modules.get("numpy"):
        states[NUMPY_GENERATOR] = repr([repr(part) for part in numpy.random.get_state(legacy=True)]).encode()
    if torch := sys.modules.get("torch"):
        states[TORCH_GENERATOR] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            states[CUDA_GENERATORS] = b"".join(state.numpy().tobytes() for state in torch.cuda.get_rng_state_all())
    digests = {name: xxhash.xxh3_64_hexdigest(state) for name, state in states.items()}
    return {name: ValueLeaf(digest, f"generator {digest[:8]}") for name, digest in digests.items()}


def reachable_generators(state: Mapping[str, Any] | None) -> dict[str, ValueLeaf]:
    """Return the generators that the loop's own functions reach: through objects, closures and global variables.

    `data_pipeline_leaves` has those of the data in `state`.
    """
    by_path: dict[str, ValueLeaf] = {}
    visited = {id(value) for value in (state or {}).values() if is_data_source(value)}
    for frame in user_frames():
        local_variables = {f"{frame.f_code.co_name}() {name}": value for name, value in list(frame.f_locals.items())}
        for path, value in [*local_variables.items(), *list(frame.f_globals.items())]:
            if not path.startswith("__"):
                by_path |= _find_generators(value, path, visited, 0)
    return by_path


def _find_generators(value: Any, path: str, visited: set[int], depth: int) -> Iterator[tuple[str, ValueLeaf]]:
    if is_random_generator(value):
        if id(value) not in visited and (leaf := leaf_of(value)) is not None:
            yield path, leaf
        visited.add(id(value))
        return
    if id(value) in visited or depth > _MAX_DEPTH or len(visited) > _MAX_LEAVES:
        return
    inside = referenced_values(value, path)
    if inside:
        visited.add(id(value))
    for place, inner in inside:
        yield from _find_generators(inner, place, visited, depth + 1)


def referenced_values(value: Any, path: str) -> list[tuple[str, Any]]:
    """Return what a container, an object of the user's own code, a module or a function refers to."""
    torch = sys.modules.get("torch")
    if isinstance(value, dict) and len(value) < _MAX_LEAVES:
        return [(f"{path}[{key!r}]", inner) for key, inner in list(value.items())]
    if isinstance(value, list | tuple) and len(value) < _MAX_LIST_ITEMS:
        return [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    if isinstance(value, partial):
        return [(path, inner) for inner in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, MethodType):
        return [(path, value.__self__)]
    if isinstance(value, FunctionType) and is_user_code(value.__code__.co_filename):
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f"{path}.{name}", inner) for name, cell in names for inner in cell_contents(cell)]
    if torch is not None and isinstance(value, torch.nn.Module):
        attributes = [(name, inner) for name, inner in list(vars(value).items()) if not name.startswith("_")]
        return [(f"{path}.{name}", inner) for name, inner in [*attributes, *value._modules.items()]]
    if _is_readable(value) and not isinstance(value, GeneratorType):
        return [(f"{path}.{name}", inner) for name, inner in list(vars(value).items())]
    return []


def leaves_below(value: Any, path: str, visited: set[int]) -> Iterator[tuple[str, ValueLeaf]]:
    """Yield the leaves below one object, if it is of the user's own code or of torch's."""
    yield from islice(_walk(value, path, visited, 0), _MAX_LEAVES)


def _walk(value: Any, path: str, visited: set[int], depth: int) -> Iterator[tuple[str, ValueLeaf]]:
    if depth > _MAX_DEPTH:
        return
    if (leaf := leaf_of(value)) is not None:
        yield path, leaf
    elif is_random_generator(value):
        return
    elif isinstance(value, Mapping) and len(value) < _MAX_LEAVES:
        yield path, _count_leaf(len(value))
        for key, inner in list(value.items()):
            yield from _walk(inner, f"{path}[{key!r}]", visited, depth + 1)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        if (run := sequence_leaf(value)) is not None:
            yield path, run
            return
        yield path, _count_leaf(len(value))
        for index, inner in enumerate(list(value)):
            yield from _walk(inner, f"{path}[{index}]", visited, depth + 1)
    elif id(value) not in visited and _is_readable(value):
        visited.add(id(value))
        if isinstance(value, GeneratorType):
            inside = dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
        else:
            logged = log_only_names() if is_user_class(type(value)) else frozenset()
            inside = {
                name: attribute
                for name, attribute in getattr(value, "__dict__", {}).copy().items()
                if name not in logged
            }
        for name, inner in inside.items():
            yield from _walk(inner, f"{path}.{name}", visited, depth + 1)


def _is_readable(value: object) -> bool:
    kind = type(value)
    if isinstance(value, GeneratorType):
        return value.gi_frame is not None and is_user_code(value.gi_code.co_filename)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    if kind.__module__.startswith(_DATA_MODULES):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return False
    module = sys.modules.get(kind.__module__)
    return is_user_code(getattr(module, "__file__", None) or "<builtin>")


def _count_leaf(count: int) -> ValueLeaf:
    return ValueLeaf(str(count), f"{count} items", count)


_LINKS = ("batch_sampler", "sampler", "base_sampler")


def loader_leaves(
    places: CreationSites, iterators: Iterable[Any], read: set[int] | None = None
) -> dict[str, ValueLeaf]:
    """Return for each loader the batches that its newest iterator has read, and the attributes of its samplers.

    The path of a loader has the class of its dataset, and of its samplers their classes, because both runs have these.

    Args:
        iterators: all iterators of torch's loaders in this process.
        read: gets the ids of the objects that were read.
    """
    newest: dict[str, Any] = {}
    for iterator in sorted(iterators, key=lambda candidate: places.creation_of(candidate)[0]):
        newest[_loader_name(iterator)] = iterator
    by_path: dict[str, ValueLeaf] = {}
    for name, iterator in newest.items():
        batches = _count_batches(iterator)
        by_path[f"{name}: {POSITION_LABEL}"] = ValueLeaf(str(batches), str(batches), sample=(float(batches),))
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
            is_random_generator(generator)
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
    yield from leaves_below(iterator._dataset, f"{type(iterator._dataset).__name__} of the {name}", visited)


def _setting_leaf(value: object) -> ValueLeaf | None:
    return leaf_of(value) if type(value) in (int, float, bool, str) or is_random_generator(value) else None
