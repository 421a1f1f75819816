"""Read the attributes of objects of the user's own classes, wherever they are: callbacks, collators, trainers.

A framework often holds such an object, so that no variable of the loop refers to it. A difference in an attribute is
evidence for a cause only: many attributes, such as sums for a log, change nothing.

Invariant: as `insides`, this module reads attributes and calls nothing.
"""

from __future__ import annotations

import dis
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import FunctionType
from typing import Any

import msgspec

from tierd.check.leaves import ValueLeaf, leaves
from tierd.check.places import is_users
from tierd.check.usage import only_logged, set_elsewhere

_MAX_OF_CLASS = 16  # objects of one class; of more, none is read, because they are records or samples
_MAX_LEAVES = 2000  # leaves in one capture, at most
_MAX_ATTRIBUTE_LEAVES = 200  # leaves of one attribute, at most


def is_own_class(kind: type) -> bool:
    """Return whether a class is defined in the user's own code."""
    module = sys.modules.get(kind.__module__)
    return is_users(getattr(module, "__file__", None) or "<builtin>")


def set_by_user(objects: Iterable[Any]) -> list[Any]:
    """Return the objects of libraries' classes of which the user's code sets an attribute."""
    names = set_elsewhere()
    # Past methods of the object's class, one of which may warn or import.
    return [instance for instance in objects if not names.isdisjoint(object.__getattribute__(instance, "__dict__"))]


def is_kerass_callback(kind: type) -> bool:
    """Return whether a class is a callback of Keras, which saves none of their attributes, and is no log."""
    names = {base.__name__ for base in kind.__mro__}
    return kind.__module__.startswith("keras.") and "Callback" in names and not names & {"History", "ProgbarLogger"}


def is_kerass_optimizer(kind: type) -> bool:
    """Return whether a class is an optimizer of Keras, which is none of torch's."""
    return any(base.__name__ == "BaseOptimizer" and base.__module__.startswith("keras.") for base in kind.__mro__)


def _optimizer_variables(optimizer: Any) -> dict[str, Any]:
    return {str(variable.name): variable.value for variable in optimizer.variables}


def owned_leaves(objects: Iterable[Any], known: bool) -> dict[str, ValueLeaf]:
    """Return numbers, tensors and generators in the attributes of `objects`, and in containers there.

    Args:
        known: whether the saved state was captured; it does not contain them.
    """
    by_class: defaultdict[str, list[Any]] = defaultdict(list)
    for instance in objects:
        by_class[type(instance).__qualname__.split("<locals>.")[-1]].append(instance)
    pairs = (
        leaf
        for name, instances in by_class.items()
        if len(instances) <= _MAX_OF_CLASS
        for leaf in _class_leaves(name, instances)
    )
    saved = False if known else None
    return {path: msgspec.structs.replace(leaf, saved=saved) for path, leaf in islice(pairs, _MAX_LEAVES)}


@lru_cache(maxsize=4096)
def _is_own_attribute(kind: type, name: str) -> bool:
    """Return whether the user's own code sets an attribute, where a class has a library's class as its base."""
    if is_kerass_callback(kind):
        return not name.startswith("_")
    if not is_own_class(kind):
        return name in set_elsewhere()
    libraries = [base for base in kind.__mro__[:-1] if not is_own_class(base)]
    return not libraries or not any(name in _attributes_set_by(base) for base in libraries)


def _class_values(kind: type) -> dict[str, Any]:
    """Return the values that a user's class sets for its objects, which have their own only after an assignment."""
    own_bases = [base for base in kind.__mro__[-2::-1] if is_own_class(base)]
    kinds = (bool, int, float, str, list, dict, set, deque)
    return {
        name: value
        for base in own_bases
        for name, value in vars(base).items()
        if type(value) in kinds and not name.startswith("__")
    }


def _slot_values(instance: object) -> dict[str, Any]:
    """Return the values in the slots of an object of a user's class."""
    names = [name for base in type(instance).__mro__ for name in _slot_names(vars(base).get("__slots__", ()))]
    return {name: getattr(instance, name) for name in names if name[:2] != "__" and hasattr(instance, name)}


def _slot_names(slots: object) -> list[str]:
    return [slots] if isinstance(slots, str) else [str(name) for name in slots]  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _attributes_set_by(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class set."""
    codes = [method.__code__ for method in vars(kind).values() if isinstance(method, FunctionType)]
    return frozenset(
        str(instruction.argval)
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
    )


def _is_read_with_modules(value: object) -> bool:
    return type(value) in (int, float) or isinstance(value, sys.modules["torch"].Tensor)


def _class_leaves(name: str, objects: list[Any]) -> Iterator[tuple[str, ValueLeaf]]:
    torch, logged = sys.modules["torch"], only_logged()
    for number, instance in enumerate(objects, start=1):
        where = name if len(objects) == 1 else f"{name} ({number} of {len(objects)})"
        kind: Any = type(instance)
        if is_kerass_optimizer(kind):
            yield from leaves(_optimizer_variables(instance), where).items()
            if not is_own_class(kind):
                continue
        is_module = isinstance(instance, torch.nn.Module)
        for key, value in (
            _class_values(kind) | _slot_values(instance) | dict(getattr(instance, "__dict__", {}))
        ).items():
            # Other functions read the numbers and tensors of modules, their mode, and their inner modules.
            if key in logged or not _is_own_attribute(kind, key):
                continue
            if is_module and (key.startswith("_") or key == "training" or _is_read_with_modules(value)):
                continue
            yield from leaves(value, f"{where}.{key}", None, _MAX_ATTRIBUTE_LEAVES).items()
