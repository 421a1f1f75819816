"""Save and resume Hugging Face `Trainer` training through tierd.

    saving = tierd.adapters.transformers.TierdCallback(ckpt, every_steps=100)
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[saving])
    trainer.train(resume_from_checkpoint=saving.resume(trainer))

The callback snapshots model, optimizer, scheduler, scaler, generators and `TrainerState` where `Trainer` would save:
after it has logged and evaluated at a step, and at an epoch's last step when the epoch has ended. The metrics are what
was logged at that step. Ranks of data parallelism store one copy, and each its own generators.

`Trainer` resumes from a directory, so `resume` writes one from the bytes that it has just verified. The callback
removes it at the first training step. `Trainer` itself then skips to the very next sample (leave `ignore_data_skip`
off).

Invariant: this process wrote the files that `Trainer` loads, from verified bytes; no file of an earlier process is
unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from tierd.adapters import framework
from tierd.adapters.step_metrics import LastSave, StepMetrics, as_plain_numbers
from tierd.adapters.trainable import TrainableState
from tierd.client.checkpointer import Checkpointer, internals
from tierd.core.errors import ConfigError
from tierd.state.kinds.random_generators import RngState

log = logging.getLogger("tierd")
_REPLICATED = ("model", "optimizer", "scheduler", "scaler", "trainer_state")
_callbacks = framework("transformers.trainer_callback", "transformers accelerate")


class TierdCallback(_callbacks.TrainerCallback):  # type: ignore[misc,name-defined]
    """Save every `every_steps` optimizer steps and at the end of training, as step `global_step`.

    If the checkpointer has a `when`, also save where it says so; it is asked at every step, and after every evaluation
    with its metrics. After a notice of preemption, training stops. Without `every_steps` and `when`,
    `TrainingArguments.save_strategy` decides ("steps" or "epoch"), and what it wants saved is saved here instead of in
    `output_dir`. This allows `load_best_model_at_end`, which then loads the best of the saved checkpoints by
    `metric_for_best_model`; it needs a retention rule that keeps it (`keep_best`).

    Do not use it with FSDP, DeepSpeed or tensor parallelism, because a rank holds a shard there: use `tierd.dcp` or
    `Checkpointer.stage`.

    With `trainable_only`, checkpoints do not hold the frozen parameters, as those below an adapter of PEFT: see
    `TrainableState`. Each launch builds the same model from the same weights.

    Raises:
        ConfigError: `every_steps` is no positive number.
    """

    def __init__(
        self, checkpointer: Checkpointer, every_steps: int | None = None, *, trainable_only: bool = False
    ) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise ConfigError(f"every_steps={every_steps!r}: a number from 1")
        self._checkpointer = checkpointer
        self._every_steps = every_steps
        self._trainer: Any = None
        self._trainable_only = trainable_only
        self._trainable: TrainableState | None = None
        self._last = LastSave(0)
        self._metrics = StepMetrics(checkpointer)
        self._save_step = -1  # the step that is saved when Trainer has done all that belongs to it
        self._evaluation_asked = False  # whether `due` was asked about this step's evaluation
        self._epoch: int | None = None  # the epoch that has just ended
        self._directory: Path | None = None

    def resume(self, trainer: Any) -> str | None:
        """Restore the newest verified checkpoint, and return the value for `resume_from_checkpoint`.

        The value is None on a fresh start.

        Call it before each `train()`, on every rank. It writes the directory ``tierd-resume-<rank>`` in `output_dir`.

        Raises:
            As `Checkpointer.restore`.
        """
        if self._trainer is not trainer:
            self._follow(trainer)
        self._trainer = trainer
        names = ("optimizer", "scheduler", "scaler", "rng", "trainer_state")
        self._trainable = TrainableState(trainer.model) if self._trainable_only else None
        state: dict[str, Any] = {"model": self._trainable or trainer.model, **dict.fromkeys(names)}
        if _is_data_parallel(trainer):
            internals(self._checkpointer).state_saver.declare(_REPLICATED)
        restored = self._checkpointer.restore(state, fresh="rng")
        if restored is None:
            return None
        self._last = LastSave(restored.step)
        self._directory = Path(trainer.args.output_dir) / f"tierd-resume-{trainer.args.process_index}"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        _write(self._directory, trainer, state)
        _warn_of_callbacks(trainer)
        return str(self._directory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise ConfigError("call resume(trainer), and pass what it returns to train(resume_from_checkpoint=...)")
        if self._every_steps is None and self._checkpointer.when is None and args.save_strategy == "no":
            raise ConfigError("nothing says when to save: give every_steps, the Checkpointer's when=, or save_strategy")
        if self._trainable is not None and self._trainable.model is not self._trainer.model:
            raise ConfigError("trainable_only: train() made another model (model_init) than resume() was given")
        if args.save_strategy == "best":
            raise ConfigError(
                'save_strategy="best": Trainer would save by itself after the evaluation; leave it "no", and make the '
                "Checkpointer with when=tierd.When(best=..., best_only=True)"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._discard()
        self._epoch = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._epoch = max(round(state.epoch) - 1, 0)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        metrics = self._metrics.usable(parts.get("metrics") or {}, [_best(args)])
        when = self._checkpointer.when
        if when is None or (when.best is not None and when.best not in metrics):
            return
        self._evaluation_asked = True
        if self._checkpointer.due(state.global_step, self._epoch, metrics):
            self._save_step = state.global_step
            if not self._trainer.is_in_train:
                self._save()

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._discard()
        if self._saves_the_end:
            self._save()
        if args.load_best_model_at_end and (metric := _best(args)) is not None:
            mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
            model = self._trainable or parts["model"]
            self._checkpointer.restore({"model": model}, best=metric, mode=mode, only="model")

    @property
    def _saves_the_end(self) -> bool:
        when = self._checkpointer.when
        return when is None or not when.best_only

    def _follow(self, trainer: Any) -> None:
        """Have `_decide` called around what `Trainer` does at the end of a step and of an epoch.

        No event of a callback comes after Trainer has logged, evaluated, stepped a scheduler by the result, and found
        the best metric. It saves by itself after that, in the same method.
        """
        log_evaluate = trainer._maybe_log_save_evaluate

        def log_evaluate_save(*args: Any, **options: Any) -> None:
            self._decide(lambda: log_evaluate(*args, **options))

        trainer._maybe_log_save_evaluate = log_evaluate_save

    def _decide(self, log_evaluate: Callable[[], None]) -> None:
        """Save if a save is due, after `log_evaluate`. `Trainer` itself saves nothing."""
        state, control, when = self._trainer.state, self._trainer.control, self._checkpointer.when
        step = state.global_step
        if control.should_save or (self._every_steps is not None and step % self._every_steps == 0):
            self._save_step = step
        control.should_save = self._evaluation_asked = False
        evaluates = control.should_evaluate
        log_evaluate()
        if evaluates and not self._evaluation_asked:
            self._metrics.decisive(_logged_metrics(state))
        if when is not None and not self._evaluation_asked and self._checkpointer.due(step, self._epoch):
            self._save_step = step
        ends = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if self._epoch is not None:
            if self._saves_the_end and (control.should_training_stop or step >= state.max_steps):
                self._save_step = step
            ends = False
        if self._save_step == step and not ends:  # else when the epoch has ended, which is at the same step
            self._save()
        if self._checkpointer.notice is not None:  # on every rank at the same step
            control.should_training_stop = True

    def _save(self) -> None:
        trainer, handler = self._trainer, self._trainer.callback_handler
        if trainer.hp_search_backend is None:
            trainer.store_flos()  # on every rank, because it is a collective
        state = trainer.state
        if not self._last.needs_save(state.global_step):
            return
        callbacks = [*handler.callbacks, trainer.control]
        members = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        states, left_out = as_plain_numbers({**members, "stateful_callbacks": _export_states(callbacks)})
        self._metrics.warn(left_out, "JSON, in which TrainerState is saved, has no form for them")
        self._last.save(
            self._checkpointer,
            state.global_step,
            {
                "model": self._trainable or handler.model,
                "optimizer": handler.optimizer,
                "scheduler": handler.lr_scheduler,
                "scaler": trainer.accelerator.scaler,
                "rng": RngState(),
                "trainer_state": json.dumps(states, sort_keys=True),
            },
            self._metrics.usable(_logged_metrics(state), [_best(trainer.args), "loss"]),
        )

    def _discard(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _is_data_parallel(trainer: Any) -> bool:
    """Whether every rank holds the same model and optimizer."""
    accelerator = trainer.accelerator
    return bool(accelerator.distributed_type.value in ("MULTI_CPU", "MULTI_GPU") and accelerator.num_processes > 1)


def _best(args: Any) -> str | None:
    """Return the metric that decides which model is the best, with the name that an evaluation gives it."""
    name: str | None = args.metric_for_best_model
    return name if name is None or name.startswith("eval_") else f"eval_{name}"


def _logged_metrics(state: Any) -> dict[str, Any]:
    """Return what was logged at this step: earlier entries were measured with other weights."""
    entries = [entry for entry in state.log_history if entry.get("step") == state.global_step]
    return {name: value for entry in entries for name, value in entry.items() if name != "step"}


def _warn_of_callbacks(trainer: Any) -> None:
    states = [type(callback).__name__ for callback in trainer.callback_handler.callbacks if _has_state(callback)]
    if states and not trainer.args.restore_callback_states_from_checkpoint:
        log.warning(
            "Trainer resumes without the saved states of %s: set "
            "TrainingArguments(restore_callback_states_from_checkpoint=True)",
            ", ".join(states),
        )


def _has_state(callback: Any) -> bool:
    return isinstance(callback, _callbacks.ExportableState)


def _export_states(callbacks: list[Any]) -> dict[str, Any]:
    """Return the callbacks' states as `Trainer._save_checkpoint` has them: by class name, as a list if there are
    several.
    """
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if _has_state(callback):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: class_states[0] if len(class_states) == 1 else class_states for name, class_states in states.items()}


def _write(directory: Path, trainer: Any, state: dict[str, Any]) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.should_save:
        trainer._save(str(directory))
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)  # of PEFT, the adapter alone
    # Each rank loads its own directory, but `save_pretrained` of transformers 5 writes on rank 0 alone.
    if trainer.args.process_index and not any(directory.rglob("*model*")):
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
    torch.save(state["optimizer"], directory / "optimizer.pt")
    torch.save(state["scheduler"], directory / "scheduler.pt")
    if state["scaler"] is not None:
        torch.save(state["scaler"], directory / "scaler.pt")
    (directory / "trainer_state.json").write_text(state["trainer_state"])
    if not isinstance(rng := state["rng"], dict):  # another number of ranks saved, and this one begins its own
        return
    states = {"python": rng["python"], "numpy": rng["numpy"], "cpu": rng["torch"]}
    if "cuda" in rng:  # all devices if ranks share a node, else the current one
        distributed = trainer.args.world_size > 1
        states["cuda"] = rng["cuda"] if distributed else rng["cuda"][torch.cuda.current_device()]
    name = f"rng_state_{trainer.args.process_index}.pth" if trainer.args.world_size > 1 else "rng_state.pth"
    torch.save(states, directory / name)
