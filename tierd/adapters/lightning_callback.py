"""The callback through which a Lightning trainer resumes from tierd, and saves after a notice of preemption."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tierd.adapters import framework
from tierd.adapters.lightning_step import BATCH, EPOCH, VALIDATION, Resumption, StepOfTraining, WaitingSave
from tierd.client.checkpointer import Checkpointer, made_of
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import ConfigError
from tierd.state.kinds.rng import RngState

log = logging.getLogger("tierd")
_callbacks = framework("lightning.pytorch.callbacks", "lightning")


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

    def __init__(self, checkpointer: Checkpointer, step: StepOfTraining, waiting: WaitingSave) -> None:
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
            with made_of(self._checkpointer).launch.restoring():
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
        self._step.ended(BATCH)
        if when is None or not when.preemption or trainer.should_stop or self._stepped == before:
            return  # a batch whose gradients are accumulated ends no step
        self._checkpointer.due(self._stepped)
        if trainer.strategy.reduce_boolean_decision(self._checkpointer.notice is not None, all=False):
            self._step.ended("")  # so that nothing waits: the process may end before it is measured
            trainer.save_checkpoint(f"{trainer.default_root_dir}/preempted.ckpt")  # all of tierd's end at `io`
            trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._step.begin(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._step.ended(VALIDATION)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._resumed is not None:
            self._resumed.epoch_starts(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._step.ended(EPOCH)
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
