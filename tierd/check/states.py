"""Capture a loop's state: the entries that it saves, and the objects outside of them.

Invariant: the loop runs unchanged. Its state is captured in the same form in which a save asks for it. An exception are
loaders, samplers and datasets that are not the user's own, or from which threads or processes read ahead. Their
`state_dict()` may start processes, and their position is up to chance. The samples show their behaviour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from tierd.check.carried import carried
from tierd.check.history import Taken
from tierd.check.insides import global_generators, held_generators, insides
from tierd.check.leaves import ValueLeaf, leaves
from tierd.check.loaders import loader_leaves, order_digests
from tierd.check.naming import users_names
from tierd.check.objects import details, find_live, gradients, is_data, kind_of, live, named
from tierd.check.owned import owned_leaves
from tierd.check.places import ObjectPlaces, is_alone
from tierd.check.variables import variable_leaves


class States:
    """Captures the values by which two runs are compared.

    It knows the saved state after the loop's first save or restore.
    """

    def __init__(self) -> None:
        self._places = ObjectPlaces()
        self._state: Mapping[str, Any] | None = None
        self._last_note: tuple[str, int] | None = None
        self._stable_keys: set[str] = set()  # keys whose save gets the same object as the restore did
        self._places.hook()

    def note(self, state: object, how: str, step: int) -> None:
        """Record the state that the loop saves as `step`, or into which it restored that step.

        Args:
            how: `save` or `restore`.
        """
        if not isinstance(state, Mapping):
            return
        if how == "restore":
            self._stable_keys = set(state)
        elif state is not self._state:
            before = self._state or {}
            self._stable_keys = {
                key for key in self._stable_keys if not _is_scalar(state.get(key)) and state.get(key) is before.get(key)
            }
        self._state, self._last_note = state, (how, step)

    def take(self, step: int, at: str) -> Taken:
        """Capture everything after a step."""
        generators = global_generators()
        if "torch" not in sys.modules:  # without torch tierd saves nothing, and no state is known
            return Taken(step, at, {}, {}, generators)
        entries, forms = _read_entries(self._state or {}, self._stable_keys)
        objects = find_live()
        unsaved, kinds = live(self._places, objects, self._state)
        for key, value in (self._state or {}).items():
            kinds[f'state["{key}"]'] = kind = kind_of(value)
            if kind == "weights":
                kinds |= {f'state["{key}"]["{name}"]': "buffers" for name, _ in value.named_buffers()}
        generators |= {path: leaf for path, leaf in held_generators(self._state).items() if path not in unsaved}
        is_captured = self._state is not None
        read: set[int] = set()  # by id, what is read as data already
        data = insides(objects, self._state, entries, read)
        loaders = loader_leaves(self._places, objects.iterators, read)
        user_objects = [*objects.owned, *(value for value in objects.data if id(value) not in read)]
        owned = owned_leaves(_drop_saved(user_objects, self._state), is_captured)
        owned |= variable_leaves(objects.functions, self._state, {*owned, *unsaved, *generators, *data})
        evidence = owned | generators | data | details(self._places, objects, is_captured)
        return Taken(
            step,
            at,
            entries,
            unsaved,
            evidence,
            kinds,
            forms,
            self._last_note,
            loaders,
            order_digests(objects.orders),
            users_names(named(self._places, objects), objects.owned),
            sorted(owned),
            carried=carried(),
        )

    def take_gradients(self, step: int) -> Taken:
        """Capture the gradients that the first backward pass after a step adds to."""
        return Taken(step, "backward", {}, {}, gradients(self._places, find_live()))


def _drop_saved(objects: Iterable[Any], state: Mapping[str, Any] | None) -> list[Any]:
    saved = {id(value) for value in (state or {}).values()}
    return [instance for instance in objects if id(instance) not in saved]


def _is_scalar(value: object) -> bool:
    """Return whether `value` is of a type whose objects may be shared, so that identity proves nothing."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple)


def _read_entries(state: Mapping[str, Any], stable_keys: Set[str]) -> tuple[dict[str, ValueLeaf], dict[str, str]]:
    """Return the leaves of a state, and the form of each of its keys."""
    from tierd.state.classify import is_stateful  # torch is imported here

    by_path: dict[str, ValueLeaf] = {}
    forms: dict[str, str] = {}
    for key, value in state.items():
        forms[path := f'state["{key}"]'] = "unread"
        with suppress(Exception):  # the loop's next save reports the reason
            if not is_data(value) or (is_stateful(value) and is_alone(value)):
                objects: list[Any] = []
                by_path |= leaves(_replace_objects(value, objects), path, True)
                form = "object" if is_stateful(value) else "both" if objects else "values"
                forms[path] = form if key in stable_keys else f"other {form}"
    return by_path, forms


def _replace_objects(value: Any, objects: list[Any], depth: int = 0) -> Any:
    """Replace each object inside `value` by its `state_dict()`, and add the object to `objects`."""
    from tierd.state.classify import is_stateful

    if is_stateful(value):
        objects.append(value)
        return value.state_dict()
    if depth < 20 and type(value) is dict:
        return {key: _replace_objects(inner, objects, depth + 1) for key, inner in value.items() if not is_data(inner)}
    if depth < 20 and type(value) in (list, tuple) and len(value) < 1000:
        return [_replace_objects(inner, objects, depth + 1) for inner in value]
    return value
