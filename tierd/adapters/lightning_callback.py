"""The callback through which a Lightning trainer resumes from tierd, and the saves that wait for a step's metrics.

A `ModelCheckpoint` may ask for a save at a step's end, and another one for the same step after its validation. A
checkpoint is saved once, so the first save waits while metrics of the step are to come that some `ModelCheckpoint`
monitors. After a notice of preemption the callback saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from tierd.adapters import framework
from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import ConfigError
from tierd.state.kinds.random_generators import RngState

_callbacks = framework("lightning.pytorch.callbacks", "lightning")

BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"


class TrainingStep:
    """The step that a fit is at, which ends with a batch, perhaps a validation, and perhaps an epoch."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._before: dict[str, Any] = {}  # the metrics of earlier steps
        self._at = ""  # what has ended of this step; empty if nothing has

    def begin(self, trainer: Any, measured: Collection[str] = ()) -> None:
        """Forget the metrics of earlier steps: all but those `measured` at a step from which training resumes."""
        before = {name: value for name, value in trainer.callback_metrics.items() if name not in measured}
        self._trainer, self._before, self._at = trainer, before, ""

    def end_part(self, part: str) -> None:
        self._at = part

    def measured(self) -> dict[str, Any]:
        if self._trainer is None:
            return {}
        metrics = self._trainer.callback_metrics.items()
        return {name: value for name, value in metrics if not _is_same(value, self._before.get(name))}

    def newest_values(self) -> dict[str, torch.Tensor]:
        """Return the newest value of each metric, which schedulers and callbacks may read long after it was logged."""
        metrics = {} if self._trainer is None else self._trainer.callback_metrics
        return {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}

    def monitored(self) -> list[str]:
        callbacks = [] if self._trainer is None else self._trainer.checkpoint_callbacks
        return [callback.monitor for callback in callbacks if getattr(callback, "monitor", None)]

    def is_incomplete(self) -> bool:
        """Whether a save waits: for a monitored metric that a later part of this step may measure, and at an epoch's
        last batch for its validation or its end.

        Lightning cannot resume from a checkpoint of that batch's end: it leaves out the validation and the steps of
        schedulers, and a second resume counts the epochs wrongly.
        """
        if self._trainer is None or not self._at:
            return False
        fit_loop = self._trainer.fit_loop
        if self._at == BATCH and fit_loop.epoch_loop._num_ready_batches_reached():
            return True
        if set(self.monitored()) <= self.measured().keys():
            return False
        epoch_ends = bool(fit_loop.epoch_loop._is_training_done)
        if self._at == BATCH:
            return epoch_ends or (
                self._validates() and fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
            )
        return self._at == VALIDATION and epoch_ends

    def set_at_last_batch(self, loop: dict[str, Any]) -> None:
        """Let a checkpoint of an epoch's end resume as one of its last batch, in a training by `max_steps`.

        There Lightning 2.6 counts the epoch as two if it resumes at the end, so that samplers are set to another epoch,
        and its counts differ after each resume.
        """
        if self._trainer is None or not self._trainer.fit_loop._iteration_based_training():
            return
        for counts in loop["epoch_progress"].values():
            epoch = counts["processed"] - (self._at == EPOCH)
            counts.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
        if not self._validates():
            for name in ("total", "current"):
                counts = loop["epoch_loop.batch_progress"][name]
                counts["completed"] = counts["processed"] - 1

    def _validates(self) -> bool:
        batches = self._trainer.num_val_batches
        return sum(batches if isinstance(batches, list) else [batches]) > 0


class DeferredSave(_callbacks.Checkpoint):  # type: ignore[misc,name-defined]
    """Save what has waited, behind all `ModelCheckpoint`s, because they may have saved the step by themselves.

    It is a `Checkpoint` because Lightning calls these last when an epoch ends.
    """

    def __init__(self, step: TrainingStep, waiting: Callable[[int], str | None]) -> None:
        super().__init__()
        self._step, self._waiting = step, waiting

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer)

    def _save(self, trainer: Any) -> None:
        if self._step.is_incomplete():  # the same on every rank
            return
        path = self._waiting(trainer.global_step)  # known to rank 0 alone
        if trainer.strategy.reduce_boolean_decision(path is not None, all=False):
            trainer.save_checkpoint(path or f"{trainer.default_root_dir}/waiting.ckpt")  # all of tierd's end at `io`


class Resumption:
    """What Lightning does not do by itself when it resumes.

    It steps no `ReduceLROnPlateau` at the end of the epoch in which it resumes, nor for an epoch at whose last batch
    the checkpoint was saved (`is_last`), because it does not save the metrics.
    """

    def __init__(self, metrics: Mapping[str, Any], is_last: bool) -> None:
        self._metrics = metrics
        self._schedulers_pending = is_last  # whether an epoch has ended without a step of its schedulers

    def begin(self, trainer: Any) -> None:
        trainer._logger_connector._callback_metrics.update(self._metrics)

    def epoch_starts(self, trainer: Any) -> None:
        """Step the schedulers for the epoch before, if Lightning has not ended it again."""
        if self._schedulers_pending and self._can_step(trainer):
            epochs = trainer.fit_loop.epoch_progress.current
            epochs.completed -= 1  # as when that epoch ended, because Lightning steps at every `frequency`-th epoch
            try:
                trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            finally:
                epochs.completed += 1
        self._schedulers_pending = False

    def epoch_ends(self, trainer: Any) -> None:
        """Let Lightning step the schedulers next."""
        if self._can_step(trainer):
            # As its own `run` does. The property would have the inner loops restart, too, in a training by `max_steps`.
            trainer.fit_loop._restarting = False
        self._schedulers_pending = False

    def _can_step(self, trainer: Any) -> bool:
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        return all(monitor in trainer.callback_metrics for monitor in monitors)


def _is_same(value: Any, before: Any) -> bool:
    """Whether a metric was not measured again: Lightning gives new views of the tensor that it holds."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.data_ptr() == before.data_ptr()
    return value is before


log = logging.getLogger("tierd")


class ResumeCallback(_callbacks.Callback):  # type: ignore[misc,name-defined]
    """Restore generators and samplers' epochs after everything is loaded and before the first batch is fetched.

    Save and stop after a notice of preemption.
    """

    generators: dict[str, Any] | None = None
    loaders: Sequence[Any] = ()
    restored: Restored | None = None  # for the fit that begins next
    resumed: Restored | None = None  # from which the fit that runs, or ran last, has loaded all
    resumption: Resumption | None = None  # for the fit that begins next
    _resumed: Resumption | None = None  # of the fit that runs, until its first epoch has ended
    waiting = False  # whether saves are refused until a restored checkpoint is loaded
    _fitting = False  # whether a fit has begun that has not loaded everything yet
    _has_read = False  # whether that fit has read a checkpoint

    def __init__(self, checkpointer: Checkpointer, step: TrainingStep, waiting: DeferredSave) -> None:
        super().__init__()
        self._checkpointer = checkpointer
        self._step, self._waiting = step, waiting
        self._stepped = -1
        self._stateless: list[str] = []  # the kinds of train loaders whose position is not saved, until a warning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        sharded = getattr(strategy, "_state_dict_type", None) == "sharded"
        if sharded or getattr(strategy, "_save_distributed_checkpoint", False):
            raise ConfigError(
                f"{type(strategy).__name__} writes its shards without a CheckpointIO, so tierd would get none: leave "
                "the plugin out and let `tierd watch` take its directories; or save whole states "
                '(state_dict_type="full", save_distributed_checkpoint=False)'
            )
        self._fitting, self._has_read = stage == "fit", False  # Lightning loads after this hook
        if stage == "fit":
            self.resumed = None
            if self._waiting not in trainer.callbacks:
                trainer.callbacks.append(self._waiting)

    def read(self) -> None:
        """Let saves in, unless a fit has read the checkpoint: it has yet to load it into its objects."""
        if self._fitting:
            self._has_read = True
        elif self.waiting:
            self.waiting = False
            with internals(self._checkpointer).launch.restoring():
                pass

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._fitting = False

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._loaded()  # a fit that has nothing left to train comes to no `on_train_start`

    def _loaded(self) -> None:
        self._fitting, has_read = False, self._fitting and self._has_read
        if has_read:
            self.read()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        restored, self.restored = self.restored, None
        if self._fitting and self._has_read and restored is not None and restored.step == trainer.global_step:
            self.resumed = restored
        self._loaded()
        generators, loaders = self.generators, self.loaders
        self.generators, self.loaders = None, ()
        if any(isinstance(callback, _callbacks.StochasticWeightAveraging) for callback in trainer.callbacks):
            log.warning(
                "a resume with StochasticWeightAveraging is not exact, also from Lightning's own files: its scheduler "
                "has a step fewer than in a training that was not interrupted, so the learning rate differs"
            )
        flattened = trainer.fit_loop._combined_loader.flattened
        self._stateless = sorted({type(loader).__name__ for loader in flattened if not _has_state(loader)})
        self._resumed, self.resumption = self.resumption, None
        if self._resumed is not None:
            self._resumed.begin(trainer)
        self._step.begin(trainer, restored.metrics if restored is not None else ())
        if generators is None:
            return
        if self._set_epochs(trainer):  # the loaders have already begun, in another order
            trainer.fit_loop._combined_loader._load_state_dicts(loaders)
            iter(trainer.fit_loop._data_fetcher)
        if trainer.is_global_zero:
            RngState().load_state_dict(generators)

    def warn_of_data(self) -> None:
        """Warn, once in a fit, that a checkpoint within an epoch lacks the position in the data."""
        if self._stateless:
            log.warning(
                "a checkpoint within an epoch is saved without its position in the data, because the train loader %s "
                "has no state_dict and load_state_dict: a resume from it reads the epoch's first samples again, and "
                "not its last. Use torchdata's StatefulDataLoader, or save at the end of epochs",
                " and ".join(self._stateless),
            )
        self._stateless = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Save and stop if some rank got notice that it ends.

        Each rank's `Checkpointer` knows its own notices alone, so the ranks agree by a collective of the trainer's.
        """
        when, before, self._stepped = self._checkpointer.when, self._stepped, trainer.global_step
        self._step.end_part(BATCH)
        if when is None or not when.preemption or trainer.should_stop or self._stepped == before:
            return  # a batch whose gradients are accumulated ends no step
        self._checkpointer.due(self._stepped)
        if trainer.strategy.reduce_boolean_decision(self._checkpointer.notice is not None, all=False):
            self._step.end_part("")  # so that nothing waits: the process may end before it is measured
            trainer.save_checkpoint(f"{trainer.default_root_dir}/preempted.ckpt")  # all of tierd's end at `io`
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._step.begin(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._step.end_part(VALIDATION)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._resumed is not None:
            self._resumed.epoch_starts(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._step.end_part(EPOCH)
        if self._resumed is not None:
            self._resumed.epoch_ends(trainer)
            self._resumed = None

    def _set_epochs(self, trainer: Any) -> bool:
        """Set the epoch of each sampler that has one, and return whether there was any."""
        parts: list[Any] = [
            getattr(loader, name, None)
            for loader in trainer.fit_loop._combined_loader.flattened
            for name in ("sampler", "batch_sampler")
        ]
        parts += [getattr(part, "sampler", None) for part in parts]
        samplers = [part for part in parts if callable(getattr(part, "set_epoch", None))]
        for sampler in samplers:
            sampler.set_epoch(trainer.current_epoch)
        return bool(samplers)


def _has_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
