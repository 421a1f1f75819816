"""What Lightning measures at a step, and saves that wait for it.

A `ModelCheckpoint` may ask for a save at a step's end, and another one for the same step after its validation. A
checkpoint is saved once, so the first save waits while metrics of the step are to come that some `ModelCheckpoint`
monitors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from tierd.adapters import framework

_callbacks = framework("lightning.pytorch.callbacks", "lightning")

BATCH, VALIDATION, EPOCH = "batch", "validation", "epoch"


class StepOfTraining:
    """The step that a fit is at, which ends with a batch, perhaps a validation, and perhaps an epoch."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._before: dict[str, Any] = {}  # the metrics of earlier steps
        self._at = ""  # what has ended of this step; empty if nothing has

    def begin(self, trainer: Any, measured: Collection[str] = ()) -> None:
        """Forget the metrics of earlier steps: all but those `measured` at a step from which training resumes."""
        before = {name: value for name, value in trainer.callback_metrics.items() if name not in measured}
        self._trainer, self._before, self._at = trainer, before, ""

    def ended(self, part: str) -> None:
        self._at = part

    def measured(self) -> dict[str, Any]:
        """Return the metrics that were measured since the step began."""
        if self._trainer is None:
            return {}
        metrics = self._trainer.callback_metrics.items()
        return {name: value for name, value in metrics if not _is_same(value, self._before.get(name))}

    def all(self) -> dict[str, torch.Tensor]:
        """Return the newest value of each metric, which schedulers and callbacks may read long after it was logged."""
        metrics = {} if self._trainer is None else self._trainer.callback_metrics
        return {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}

    def monitored(self) -> list[str]:
        """Return the metrics by which some `ModelCheckpoint` decides."""
        callbacks = [] if self._trainer is None else self._trainer.checkpoint_callbacks
        return [callback.monitor for callback in callbacks if getattr(callback, "monitor", None)]

    def is_incomplete(self) -> bool:
        """Return whether a save waits: for a monitored metric that a later part of this step may measure, and at an
        epoch's last batch for its validation or its end.

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


class WaitingSave(_callbacks.Checkpoint):  # type: ignore[misc,name-defined]
    """Save what has waited, behind all `ModelCheckpoint`s, because they may have saved the step by themselves.

    It is a `Checkpoint` because Lightning calls these last when an epoch ends.
    """

    def __init__(self, step: StepOfTraining, waiting: Callable[[int], str | None]) -> None:
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
    the checkpoint was saved, because it does not save the metrics.

    Args:
        metrics: the newest value of each metric when the checkpoint was saved.
        is_last: whether it was saved at an epoch's last batch.
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
    """Return whether a metric was not measured again: Lightning gives new views of the tensor that it holds."""
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.data_ptr() == before.data_ptr()
    return value is before
