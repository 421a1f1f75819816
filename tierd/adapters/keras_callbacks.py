"""What a Keras `fit` counts beside the model: the states of its other callbacks, and its passes over the data.

Saved are the attributes in which Keras's own callbacks keep what they have counted, and the `state_dict()` of a
callback that has it and `load_state_dict`. Another callback has a state if its attributes differ from those at the
beginning of `fit`. An exact resume needs the passes over the data to be its epochs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

log = logging.getLogger("tierd")

_STATES = {
    "BackupAndRestore": ("_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
    "EarlyStopping": ("best", "wait", "stopped_epoch", "best_epoch", "best_weights"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
}


def list_of(callback: Any, kind: type[Any]) -> Any:
    """Return the `CallbackList` (`kind`) that is calling a callback, to which Keras gives no way; None without."""
    for frame in _callers():
        caller: Any = frame.f_locals.get("self")
        if isinstance(caller, kind) and any(listed_callback is callback for listed_callback in caller.callbacks):
            return caller
    return None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class CallbackStates:
    """The states of callbacks whose `on_train_begin` was called, by their class's name and their number in it."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._by_name: dict[str, Any] = {}
        for callback in callbacks:
            name = type(callback).__name__
            number = sum(type(registered).__name__ == name for registered in self._by_name.values())
            self._by_name[f"{name}/{number}"] = callback
        self._first_values = {name: _scalars(callback) for name, callback in self._by_name.items()}
        self._warned: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the states. Warn, once for each, of a callback that has a state and no way to save it."""
        states = {}
        for name, callback in self._by_name.items():
            attributes = _attributes(callback)
            if _has_methods(callback):
                states[name] = callback.state_dict()
            elif attributes:
                states[name] = {attribute: getattr(callback, attribute, None) for attribute in attributes}
            else:
                self._warn(name, callback)
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load the state of each callback that has one. A callback that is new in this `fit` begins anew."""
        for name, callback in self._by_name.items():
            if name not in states:
                continue
            if _has_methods(callback):
                callback.load_state_dict(states[name])
            else:
                for attribute in _attributes(callback):
                    if attribute in states[name]:
                        setattr(callback, attribute, states[name][attribute])

    def stopped(self) -> str | None:
        """Return the name of an `EarlyStopping` that has lost its patience; None if there is none."""
        for name, callback in self._by_name.items():
            if "EarlyStopping" in _names(callback) and callback.stopped_epoch and callback.wait >= callback.patience:
                return name.partition("/")[0]
        return None

    def _warn(self, name: str, callback: Any) -> None:
        if name in self._warned or type(callback).__module__.partition(".")[0] == "keras":
            return
        before, now = self._first_values[name], _scalars(callback)
        changed = [attribute for attribute in now if attribute not in before or before[attribute] != now[attribute]]
        if changed:
            self._warned.add(name)
            log.warning(
                "the callback %s begins anew at a resume, because it has no state_dict and load_state_dict: it changes "
                "%s while it trains",
                type(callback).__name__,
                ", ".join(changed),
            )


def _names(callback: Any) -> set[str]:
    """Return the names of Keras's classes that a callback is an instance of."""
    return {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] == "keras"}


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((_STATES[name] for name in sorted(_names(callback)) if name in _STATES), ())


def _has_methods(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _scalars(callback: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(callback).items()
        if value is None or isinstance(value, (bool, int, float, str))
    }


def resume_obstacle(model: Any, has_loader: bool) -> str | None:
    """Return which resumes of the `fit` that is calling are not exact, and why; None if nothing is known against any.

    `has_loader`: the data has a state, which is saved. Keras gives its iterator no other way than the calling stack.
    """
    iterator = _iterator_of(model)
    if iterator is None:
        return None
    steps = iterator.steps_per_epoch
    if steps is None:
        return None
    if iterator.data_adapter.num_batches is None and has_loader:
        return (
            f"a resume of this fit within an epoch is not exact: the data has no length, and Keras reads "
            f"steps_per_epoch={steps} more batches in the resumed epoch; save at the end of epochs alone"
        )
    return (
        f"no resume of this fit is exact: with steps_per_epoch={steps} Keras begins a pass over the data before the "
        "epoch begins, and goes on in it from epoch to epoch, so a resumed run reads samples in another order, twice "
        "in a pass or not at all; leave steps_per_epoch out"
    )


def forget_length(model: Any) -> None:
    """Have the `fit` that is calling count the batches of data without a length again, in its next epoch.

    Keras takes the batches of its first epoch for the length of all. In an epoch that was resumed they are the rest.
    """
    iterator = _iterator_of(model)
    if iterator is not None and iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
        iterator.reset()


def _iterator_of(model: Any) -> Any:
    for frame in _callers():
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame.f_locals.get("epoch_iterator")
    return None
