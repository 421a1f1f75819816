"""Read the attributes of loaders, samplers and datasets, and the local variables of running generator functions.

Invariant: this module reads attributes and calls nothing, so that a capture is safe at any moment. State in another
process, such as a loader's worker, is not visible to it.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

import xxhash

from tierd.check.history import CUDA, NUMPY, PYTHON, TORCH
from tierd.check.leaves import ValueLeaf, is_generator, leaf_of, run_of
from tierd.check.objects import generators, is_data, is_users

_MOST = 2000  # leaves in one capture, at most
_DEEPEST = 12
_INSIDES = ("torch.utils.data", "torchdata")


def insides(state: Mapping[str, Any] | None) -> dict[str, ValueLeaf]:
    """Return the leaves of all loaders, samplers and datasets in `state`, and of the user's generator functions."""
    found: dict[str, ValueLeaf] = {}
    seen: set[int] = set()
    for key, value in (state or {}).items():
        if is_data(value):
            for path, leaf in _walk(value, f'state["{key}"]', seen, 0):
                if len(found) < _MOST:
                    found[path] = leaf
    names: dict[str, int] = {}
    for one in generators():
        if id(one) in seen:
            continue
        name = f"{one.gi_code.co_qualname if hasattr(one.gi_code, 'co_qualname') else one.gi_code.co_name}()"
        names[name] = names.get(name, 0) + 1
        for path, leaf in _walk(one, name if names[name] == 1 else f"{name} {names[name]}", seen, 0):
            if len(found) < _MOST:
                found[path] = leaf
    return found


def global_generators() -> dict[str, ValueLeaf]:
    """Return the process's global random number generators by name. Changes none of them."""
    states = {PYTHON: repr(random.getstate()).encode()}
    if numpy := sys.modules.get("numpy"):
        states[NUMPY] = repr([repr(part) for part in numpy.random.get_state(legacy=True)]).encode()
    if torch := sys.modules.get("torch"):
        states[TORCH] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            states[CUDA] = b"".join(one.numpy().tobytes() for one in torch.cuda.get_rng_state_all())
    digests = {name: xxhash.xxh3_64_hexdigest(state) for name, state in states.items()}
    return {name: ValueLeaf(digest, f"generator {digest[:8]}") for name, digest in digests.items()}


def _walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, ValueLeaf]]:
    if depth > _DEEPEST:
        return
    if is_generator(value) or (leaf := leaf_of(value)) is not None:
        leaf = leaf_of(value)
        if leaf is not None:
            yield path, leaf
    elif isinstance(value, Mapping) and len(value) < _MOST:
        yield path, _count(len(value))
        for key, inner in list(value.items()):
            yield from _walk(inner, f"{path}[{key!r}]", seen, depth + 1)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        if (run := run_of(value)) is not None:
            yield path, run
            return
        yield path, _count(len(value))
        for index, inner in enumerate(list(value)):
            yield from _walk(inner, f"{path}[{index}]", seen, depth + 1)
    elif id(value) not in seen and _is_looked_into(value):
        seen.add(id(value))
        if isinstance(value, GeneratorType):
            inside = dict(value.gi_frame.f_locals) if value.gi_frame is not None else {}
        else:
            inside = dict(getattr(value, "__dict__", {}))
        for name, inner in inside.items():
            yield from _walk(inner, f"{path}.{name}", seen, depth + 1)


def _is_looked_into(value: object) -> bool:
    kind = type(value)
    if isinstance(value, GeneratorType):
        return value.gi_frame is not None and is_users(value.gi_code.co_filename)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    if kind.__module__.startswith(_INSIDES):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return False
    module = sys.modules.get(kind.__module__)
    return is_users(getattr(module, "__file__", None) or "<builtin>")


def _count(count: int) -> ValueLeaf:
    return ValueLeaf(str(count), f"{count} items", count)
