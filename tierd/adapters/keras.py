"""Save and resume Keras 3 (torch backend) training through tierd.

    saving = tierd.adapters.keras.TierdCallback(ckpt, every_batches=100, data=loader)
    model.fit(loader, epochs=10, callbacks=[saving])

The callback saves weights, optimizer, metrics, seed generators, the process's generators and the states of the other
callbacks (`keras_callbacks`). It saves at the end of every epoch and of every `every_batches`-th batch, with `fit`'s
logs as metrics; or when the checkpointer's `when` says so: `When(best="val_loss", best_only=True)` saves the best
alone. What is due at an epoch's last batch is saved when the epoch has ended, with the metrics of its validation.

A later call of `fit` in another process resumes from there, without `initial_epoch`. `load_best` loads the best
weights.

A resume at an epoch's end is exact if each epoch is one pass over the data (`resume_obstacle`). Inside an epoch `fit`
cannot skip batches, so:

- With `data`, the torchdata `StatefulDataLoader` that `fit` reads, training continues with the very next batch. The
  loader's order may depend on the epoch alone (the callback calls the sampler's `set_epoch`), because `fit` creates
  more iterators of a loader than it reads.
- Without `data`, the epoch begins again with the learned weights, so its samples up to that batch are seen twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from tierd.adapters import framework
from tierd.adapters.keras_callbacks import CallbackStates, forget_length, list_of, resume_obstacle
from tierd.adapters.step_metrics import LastSave, StepMetrics
from tierd.core.errors import ConfigError, StateMismatch
from tierd.state.kinds.random_generators import RngState

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer
    from tierd.client.restoring.restorer import Restored

log = logging.getLogger("tierd")
_CALLBACKS = "callbacks"
_BACKEND = ", and set the environment variable KERAS_BACKEND=torch before Keras is imported"
_keras = framework("keras", "keras", _BACKEND)
_seeds = framework("keras.src.random.seed_generator", "keras", _BACKEND)


class TierdCallback(_keras.callbacks.Callback):  # type: ignore[misc,name-defined]
    """Restore when training begins, and save while it runs; a step is a batch.

    It moves itself behind the other callbacks of `fit`, because they change their states and the learning rate when an
    epoch ends, and reset their states when training begins.

    If the `Checkpointer` has a `when`, save where `due` says so; else at the end of each epoch. After a notice of
    preemption, training stops.

    Args:
        checkpointer: saves and restores the state.
        every_batches: also save every so many batches, and at the end of each epoch, whatever `when` says.
        data: the `StatefulDataLoader` that `fit` reads, if it reads one.

    Raises:
        ConfigError: Keras uses another backend than torch, or `every_batches` is no positive number.
    """

    def __init__(self, checkpointer: Checkpointer, every_batches: int | None = None, data: Any = None) -> None:
        super().__init__()
        if _keras.backend.backend() != "torch":
            raise ConfigError(
                f"Keras runs on {_keras.backend.backend()}: set KERAS_BACKEND=torch before it is imported"
            )
        if every_batches is not None and (type(every_batches) is not int or every_batches < 1):
            raise ConfigError(f"every_batches={every_batches!r}: a number from 1")
        self._checkpointer = checkpointer
        self._every_batches = every_batches
        self._data = data
        self._epoch = self._batches_done = 0
        self._last = LastSave(0)
        self._resumed_within = False  # whether the epoch was resumed within
        self._save_at_epoch_end = False  # whether a save waits for the end of the epoch
        self._numbers = StepMetrics(checkpointer)
        self._callbacks = CallbackStates([])
        self._within: dict[str, Any] | None = None  # restored within an epoch, to be loaded when the epoch has begun
        self._best: Restored | None = None  # what `load_best` has loaded since the last `fit` began

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest verified checkpoint, if there is one.

        Warn if the model loses what it holds by that, and if a resume of this `fit` is not exact.

        Raises:
            As `Checkpointer.restore`; StateMismatch: the checkpoint's model has other variables.
        """
        callbacks = list_of(self, _keras.callbacks.CallbackList)
        if callbacks is not None and callbacks.callbacks[-1] is not self:
            # In place, because the list is being iterated: it ends with this callback's turn.
            callbacks.callbacks[callbacks.callbacks.index(self)] = _keras.callbacks.Callback()
            callbacks.callbacks.append(self)
            return
        if (warning := resume_obstacle(self.model, has_loader=self._data is not None)) is not None:
            log.warning(warning)
        self._callbacks = CallbackStates(callbacks.callbacks[:-1] if callbacks is not None else [])
        state = self._state(epoch=0, within=False)
        state["metrics"] = None  # restored as raw values, because Keras resets metrics when the epoch begins
        restored = self._checkpointer.restore(state)
        best, self._best = self._best, None
        self._save_at_epoch_end, self._within = False, None
        if restored is None:
            return
        self._warn_of_loss(restored, best)
        self._epoch, self._batches_done, self._last = state["epoch"], state["done"], LastSave(restored.step)
        self._callbacks.load_state_dict(state["metrics"].get(_CALLBACKS, {}))
        if state["within"]:
            rate = float(self.model.optimizer.learning_rate) if self._has_rate() else None
            self._within = {"metrics": state["metrics"], "rate": rate}
        self.model._initial_epoch = self._epoch  # the same as keras.callbacks.BackupAndRestore does
        if not state["within"] and (stopped := self._callbacks.stopped()) is not None:
            self.model._initial_epoch = self.params["epochs"]
            log.warning("%s had stopped this run at epoch %d; raise its patience to train on", stopped, self._epoch)

    def _warn_of_loss(self, restored: Restored, best: Restored | None) -> None:
        if best is not None:
            discarded = f"the weights of step {best.step} that load_best had loaded"
            is_discarded = (best.attempt, best.step) != (restored.attempt, restored.step)
        else:
            discarded, is_discarded = (
                f"what this callback trained up to step {self._batches_done}",
                self._batches_done > restored.step,
            )
        if not is_discarded:
            return
        log.warning(
            "fit continues from step %d, the newest checkpoint of run %s, and discards %s; to train what is in memory, "
            "make a Checkpointer with a new run name, and a callback with it",
            restored.step,
            self._checkpointer.run,
            discarded,
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        sampler: Any = getattr(self._data, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        within, self._within = self._within, None
        self._resumed_within = within is not None
        if within is None:
            return
        # Others have begun an epoch that had begun before: a LearningRateScheduler has stepped once more.
        saved = dict(within["metrics"])
        self._callbacks.load_state_dict(saved.pop(_CALLBACKS, {}))
        _Variables(lambda: self.model.metrics_variables).load_state_dict(saved)
        if self._has_rate():
            self.model.optimizer.learning_rate = within["rate"]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches_done += 1
        save_due = self._checkpointer.when is not None and self._checkpointer.due(self._batches_done)
        if save_due or (self._every_batches is not None and self._batches_done % self._every_batches == 0):
            self._save_at_epoch_end = self._checkpointer.notice is None and self._is_last(batch)
            if not self._save_at_epoch_end:
                self._save(self._epoch, within=True, logs=logs)
        if self._checkpointer.notice is not None:
            self.model.stop_training = True

    def _has_rate(self) -> bool:
        """Whether the learning rate is a number that callbacks may set, and no schedule."""
        optimizer = self.model.optimizer
        schedule = _keras.optimizers.schedules.LearningRateSchedule
        return optimizer is not None and not isinstance(getattr(optimizer, "_learning_rate", None), schedule)

    def _is_last(self, batch: int) -> bool:
        """Whether a batch is known to be the last of its epoch."""
        steps = (self.params or {}).get("steps")
        if not steps:
            return False
        return bool(self._batches_done % steps == 0 if self._data is not None else batch + 1 == steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._resumed_within:
            forget_length(self.model)
        save_due, self._save_at_epoch_end = self._save_at_epoch_end or self._every_batches is not None, False
        when = self._checkpointer.when
        if when is None:
            save_due = True
        else:
            numbers = self._numbers.decisive(self._numbers.usable(logs or {}))
            save_due = self._checkpointer.due(self._batches_done, epoch, numbers) or save_due
        if save_due:
            self._save(epoch + 1, within=False, logs=logs)

    def load_best(self, metric: str, mode: Literal["min", "max"] = "min") -> Restored | None:
        """Load the weights with the smallest (`mode="min"`) or largest value of a metric into the model.

        Call it after `fit`. It needs a retention rule that keeps the best checkpoint (`keep_best`).

        Returns:
            What was restored; None if the run has no checkpoint.

        Raises:
            As `Checkpointer.restore`.
        """
        state = {"model": _Variables(lambda: self.model.variables)}
        self._best = self._checkpointer.restore(state, best=metric, mode=mode, only="model")
        return self._best

    def _save(self, epoch: int, within: bool, logs: Any) -> None:
        if self._last.needs_save(self._batches_done):
            self._last.save(
                self._checkpointer, self._batches_done, self._state(epoch, within), self._numbers.usable(logs or {})
            )

    def _state(self, epoch: int, within: bool) -> dict[str, Any]:
        model = self.model
        seeds = _seeds.global_seed_generator()
        return {
            "model": _Variables(lambda: model.variables),
            "optimizer": _Variables(lambda: model.optimizer.variables),
            "metrics": _Metrics(_Variables(lambda: model.metrics_variables), self._callbacks),
            "seeds": _Variables(lambda: [seeds.state]),
            "rng": RngState(),
            "data": self._data,
            "epoch": epoch,
            "within": within,
            "done": self._batches_done,
        }


class _Metrics:
    """The variables of metrics, and the states of callbacks beside them, so that older versions read this entry."""

    def __init__(self, variables: _Variables, callbacks: CallbackStates) -> None:
        self._variables, self._callbacks = variables, callbacks

    def state_dict(self) -> dict[str, Any]:
        states = self._callbacks.state_dict()
        return self._variables.state_dict() | ({_CALLBACKS: states} if states else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("the callback restores raw values")


class _Variables:
    """Keras variables by their order, because their paths contain counters of the models that the process has made."""

    def __init__(self, variables: Any) -> None:
        self._variables = variables

    def state_dict(self) -> dict[str, Any]:
        return {str(number): variable.value.detach() for number, variable in enumerate(self._variables())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Assign all variables, or none: `StateMismatch` names the first that differs."""
        variables = list(self._variables())
        if len(variables) != len(state_dict):
            raise StateMismatch(f"{len(state_dict)} variables in the checkpoint, {len(variables)} in the model")
        for number, variable in enumerate(variables):
            saved = tuple(state_dict[str(number)].shape)
            if saved != tuple(variable.shape):
                raise StateMismatch(f"{variable.path}: {saved} in the checkpoint, {tuple(variable.shape)} in the model")
        for number, variable in enumerate(variables):
            variable.assign(state_dict[str(number)])
