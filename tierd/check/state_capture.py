"""Capture a loop's state at its moments: the entries that it saves, the objects outside of them, and their names.

Invariant: the loop runs unchanged, and a process that was forked from it, and code that torch compiles or traces, is
left alone. Its state is captured in the same form in which a save asks for it. An exception are loaders, samplers and
datasets that are not the user's own, or from which threads or processes read ahead. Their `state_dict()` may start
processes, and their position is up to chance. The samples show their behaviour.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import wraps
from typing import Any

from tierd.check.data_pipeline import (
    data_pipeline_leaves,
    global_generators,
    loader_leaves,
    order_digests,
    reachable_generators,
    referenced_values,
)
from tierd.check.launch_records import StateCapture
from tierd.check.live_objects import (
    find_live_objects,
    gradient_leaves,
    is_data_source,
    kind_of_object,
    module_attribute_leaves,
    objects_by_name,
    unsaved_leaves,
)
from tierd.check.source_analysis import loop_carried_names
from tierd.check.user_code import CreationSites, call_on_import, depends_on_steps_alone, user_frames
from tierd.check.user_values import user_object_leaves, variable_leaves
from tierd.check.value_leaves import ValueLeaf, leaves_by_path

_MAX_EVALUATIONS = 16  # passes in evaluation mode that call back, because each capture takes time


class PassHooks:
    """Waits for the passes after a step, and for loads of weights and optimizers.

    A load of weights alone counts until the first backward pass, because later it may be a step's: of a target network.
    A forward pass in evaluation mode may be an evaluation, so that the passes after it call back as well, until one is
    in training mode or a backward pass shows that the last one trained.

    Attributes:
        forward_after_step: the step after which the next forward pass calls back; None if none does.
        backward: the same for the next backward pass.
    """

    def __init__(
        self, on_forward: Callable[[int], None], on_backward: Callable[[int], None], on_load: Callable[[], None]
    ) -> None:
        self.forward_after_step: int | None = None
        self.backward_after_step: int | None = None
        self._on_forward, self._on_backward, self._on_load = on_forward, on_backward, on_load
        self._pid = os.getpid()
        self._went_back = False
        # The modules of passes in evaluation mode since a callback was due. A reference would keep them in captures.
        self._evaluations: list[weakref.ref[Any]] = []

    def install(self) -> None:
        """Begin to watch torch's passes and loads as soon as it is imported."""
        call_on_import(
            {
                "torch.nn.modules.module": self._watch_modules,
                "torch.optim.optimizer": lambda module: self._watch_load(module.Optimizer, True),
                "torch.autograd": self._watch_backward,
            }
        )

    def _watch_modules(self, module: Any) -> None:
        self._watch_load(module.Module, False)
        module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, *_: Any) -> None:
        torch: Any = sys.modules["torch"]
        # A forward pass without gradients is an evaluation, which may come before the step's batch is fetched.
        if torch.compiler.is_compiling() or self.forward_after_step is None or not torch.is_grad_enabled():
            return
        if os.getpid() != self._pid or torch.jit.is_tracing() or self._is_inside_evaluation(module):
            return
        after = self.forward_after_step
        if module.training or len(self._evaluations) >= _MAX_EVALUATIONS:
            self._end_wait()
        else:
            self._evaluations.append(weakref.ref(module))
        self._on_forward(after)

    def _is_inside_evaluation(self, module: Any) -> bool:
        last = self._evaluations[-1]() if self._evaluations else None
        return last is not None and last is not module and any(inner is module for inner in last.modules())

    def _end_wait(self) -> None:
        self.forward_after_step = None
        self._evaluations.clear()

    def _watch_backward(self, module: Any) -> None:
        backward = module.backward

        @wraps(backward)
        def going_back(*args: Any, **kwargs: Any) -> Any:
            self._went_back = True
            if self._evaluations and os.getpid() == self._pid:
                self._end_wait()
            if self.backward_after_step is not None and os.getpid() == self._pid:
                after, self.backward_after_step = self.backward_after_step, None
                self._on_backward(after)
            return backward(*args, **kwargs)

        module.backward = going_back

    def _watch_load(self, kind: Any, always: bool) -> None:
        load = kind.load_state_dict

        @wraps(load)
        def loading(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if always or not self._went_back:
                self._on_load()
            return result

        kind.load_state_dict = loading


_MAX_OBJECTS = 5000  # objects that one search goes through
_MAX_DEPTH = 4


def user_names(objects: Mapping[str, object], owned: Iterable[object]) -> dict[str, str]:
    """Return the shortest name that the user gave to each of `objects`, by the key there; without one it is left out.

    Args:
        objects: by the names that captures have for them.
        owned: objects of the user's own classes, whose attributes are names as well.
    """
    keys_by_id = {id(value): key for key, value in objects.items()}
    names: dict[str, str] = {}
    todo: deque[tuple[str, Any, int]] = deque()
    for frame in user_frames():
        for name, value in list(frame.f_locals.items()):
            todo.append((f"{frame.f_code.co_name}() {name}", value, 0))
    todo.extend((type(instance).__qualname__.split("<locals>.")[-1], instance, 1) for instance in owned)
    visited: set[int] = set()
    while todo and len(visited) < _MAX_OBJECTS:
        name, value, depth = todo.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if (key := keys_by_id.get(id(value))) is not None:
            names.setdefault(key, name)
        if depth < _MAX_DEPTH:
            todo.extend((path, inner, depth + 1) for path, inner in referenced_values(value, name))
    return names


class StateCapturer:
    """Captures the values by which two runs are compared.

    It knows the saved state after the loop's first save or restore.
    """

    def __init__(self) -> None:
        self._places = CreationSites()
        self._state: Mapping[str, Any] | None = None
        self._last_note: tuple[str, int] | None = None
        self._stable_keys: set[str] = set()  # keys whose save gets the same object as the restore did
        self._places.record_creations()

    def note_state(self, state: object, how: str, step: int) -> None:
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

    def capture(self, step: int, at: str) -> StateCapture:
        """Capture everything after a step."""
        generators = global_generators()
        if "torch" not in sys.modules:  # without torch tierd saves nothing, and no state is known
            return StateCapture(step, at, {}, {}, generators)
        entries, forms = _read_entries(self._state or {}, self._stable_keys)
        objects = find_live_objects()
        unsaved, kinds = unsaved_leaves(self._places, objects, self._state)
        for key, value in (self._state or {}).items():
            kinds[f'state["{key}"]'] = kind = kind_of_object(value)
            if kind == "weights":
                kinds |= {f'state["{key}"]["{name}"]': "buffers" for name, _ in value.named_buffers()}
        generators |= {path: leaf for path, leaf in reachable_generators(self._state).items() if path not in unsaved}
        is_captured = self._state is not None
        read: set[int] = set()  # by id, what is read as data already
        data = data_pipeline_leaves(objects, self._state, entries, read)
        loaders = loader_leaves(self._places, objects.iterators, read)
        user_objects = [*objects.user_objects, *(value for value in objects.user_data if id(value) not in read)]
        owned = user_object_leaves(_drop_saved(user_objects, self._state), is_captured)
        owned |= variable_leaves(objects.functions, self._state, {*owned, *unsaved, *generators, *data})
        evidence = owned | generators | data | module_attribute_leaves(self._places, objects, is_captured)
        return StateCapture(
            step,
            at,
            entries,
            unsaved,
            evidence,
            kinds,
            forms,
            self._last_note,
            loaders,
            order_digests(objects.loaders_and_samplers),
            user_names(objects_by_name(self._places, objects), objects.user_objects),
            sorted(owned),
            carried_names=loop_carried_names(),
        )

    def capture_gradients(self, step: int) -> StateCapture:
        """Capture the gradients that the first backward pass after a step adds to."""
        return StateCapture(step, "backward", {}, {}, gradient_leaves(self._places, find_live_objects()))


def _drop_saved(objects: Iterable[Any], state: Mapping[str, Any] | None) -> list[Any]:
    saved = {id(value) for value in (state or {}).values()}
    return [instance for instance in objects if id(instance) not in saved]


def _is_scalar(value: object) -> bool:
    """Return whether `value` is of a type whose objects may be shared, so that identity proves nothing."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple)


def _read_entries(state: Mapping[str, Any], stable_keys: Set[str]) -> tuple[dict[str, ValueLeaf], dict[str, str]]:
    """Return the leaves of a state, and the form of each of its keys."""
    from tierd.state.value_kinds import is_stateful  # torch is imported here

    by_path: dict[str, ValueLeaf] = {}
    forms: dict[str, str] = {}
    for key, value in state.items():
        forms[path := f'state["{key}"]'] = "unread"
        with suppress(Exception):  # the loop's next save reports the reason
            if not is_data_source(value) or (is_stateful(value) and depends_on_steps_alone(value)):
                objects: list[Any] = []
                by_path |= leaves_by_path(_replace_objects(value, objects), path, True)
                form = "object" if is_stateful(value) else "both" if objects else "values"
                forms[path] = form if key in stable_keys else f"other {form}"
    return by_path, forms


def _replace_objects(value: Any, objects: list[Any], depth: int = 0) -> Any:
    """Replace each object inside `value` by its `state_dict()`, and add the object to `objects`."""
    from tierd.state.value_kinds import is_stateful

    if is_stateful(value):
        objects.append(value)
        return value.state_dict()
    if depth < 20 and type(value) is dict:
        return {
            key: _replace_objects(inner, objects, depth + 1)
            for key, inner in value.items()
            if not is_data_source(inner)
        }
    if depth < 20 and type(value) in (list, tuple) and len(value) < 1000:
        return [_replace_objects(inner, objects, depth + 1) for inner in value]
    return value
