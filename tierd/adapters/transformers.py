"""Save and resume Hugging Face `Trainer` training through tierd.

    saving = tierd.adapters.transformers.TierdCallback(ckpt, every_steps=100)
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[saving])
    trainer.train(resume_from_checkpoint=saving.resume(trainer))

The callback snapshots model, optimizer, scheduler, scaler, generators and `TrainerState` at the end of a step, or after
its evaluation, whose metrics it then has; each rank saves its own. `Trainer` resumes from a directory, so `resume`
writes one from the bytes that it has just verified. The callback removes it at the first training step. `Trainer`
itself then skips to the very next sample (leave `ignore_data_skip` off).

Invariant: this process wrote the files that `Trainer` loads, from verified bytes; no file of an earlier process is
unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tierd.adapters import framework
from tierd.adapters.last_save import LastSave
from tierd.core.errors import ConfigError
from tierd.state.kinds.rng import RngState

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer

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

    Raises:
        ConfigError: `every_steps` is no positive number.
    """

    def __init__(self, checkpointer: Checkpointer, every_steps: int | None = None) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise ConfigError(f"every_steps={every_steps!r}: a number from 1")
        self._checkpointer = checkpointer
        self._every = every_steps
        self._trainer: Any = None
        self._last = LastSave(0)
        self._wanted = False  # a save that waits for this step's evaluation
        self._epoch: int | None = None  # the epoch that has just ended
        self._directory: Path | None = None

    def resume(self, trainer: Any) -> str | None:
        """Restore the newest verified checkpoint, and return the value for `resume_from_checkpoint`.

        The value is None on a fresh start.

        Call it before each `train()`, on every rank. It writes the directory ``tierd-resume-<rank>`` in `output_dir`.

        Raises:
            As `Checkpointer.restore`.
        """
        self._trainer = trainer
        names = ("optimizer", "scheduler", "scaler", "rng", "trainer_state")
        state: dict[str, Any] = {"model": trainer.model, **dict.fromkeys(names)}
        found = self._checkpointer.restore(state)
        if found is None:
            return None
        self._last = LastSave(found.step)
        self._directory = Path(trainer.args.output_dir) / f"tierd-resume-{trainer.args.process_index}"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        _write(self._directory, trainer, state)
        return str(self._directory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise ConfigError("call resume(trainer), and pass what it returns to train(resume_from_checkpoint=...)")
        if self._every is None and self._checkpointer.when is None and args.save_strategy == "no":
            raise ConfigError("nothing says when to save: give every_steps, the Checkpointer's when=, or save_strategy")
        if args.save_strategy == "best":
            raise ConfigError(
                'save_strategy="best": Trainer would save by itself after the evaluation; leave it "no", and make the '
                "Checkpointer with when=tierd.When(best=..., best_only=True)"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._discard()
        self._epoch = None
        self._ask(state, control, parts)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._epoch = max(round(state.epoch) - 1, 0)
        self._ask(state, control, parts)

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        when = self._checkpointer.when
        metrics = parts.get("metrics")
        wanted, self._wanted = self._wanted, False
        if when is not None and metrics is not None and (when.best is None or when.best in metrics):
            wanted = self._checkpointer.due(state.global_step, self._epoch, metrics) or wanted
        if wanted:
            self._save(state, control, parts)
        self._heed(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._discard()
        when = self._checkpointer.when
        if when is None or not when.best_only:
            self._save(state, control, parts)
        if args.load_best_model_at_end and args.metric_for_best_model is not None:
            name = args.metric_for_best_model
            metric = name if name.startswith("eval_") else f"eval_{name}"
            mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
            self._checkpointer.restore({"model": parts["model"]}, best=metric, mode=mode, only="model")

    def _ask(self, state: Any, control: Any, parts: dict[str, Any]) -> None:
        """Save now, or after this step's evaluation, if a save is due. `Trainer` itself saves nothing."""
        wanted, control.should_save = control.should_save, False
        when = self._checkpointer.when
        if self._every is not None:
            wanted = wanted or state.global_step % self._every == 0
        if when is not None and not control.should_evaluate:
            wanted = self._checkpointer.due(state.global_step, self._epoch) or wanted
        self._wanted = wanted and control.should_evaluate
        if wanted and not self._wanted:
            self._save(state, control, parts)
        self._heed(control)

    def _heed(self, control: Any) -> None:
        if self._checkpointer.notice is not None:  # on every rank at the same step
            control.should_training_stop = True

    def _save(self, state: Any, control: Any, parts: dict[str, Any]) -> None:
        if not self._last.is_due(state.global_step):
            return
        callbacks = [*self._trainer.callback_handler.callbacks, control]
        states = {**dataclasses.asdict(state), "stateful_callbacks": _exported(callbacks)}
        self._last.save(
            self._checkpointer,
            state.global_step,
            {
                "model": parts["model"],
                "optimizer": parts["optimizer"],
                "scheduler": parts["lr_scheduler"],
                "scaler": self._trainer.accelerator.scaler,
                "rng": RngState(),
                "trainer_state": json.dumps(states, sort_keys=True),
            },
            _logged(state),
        )

    def _discard(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _logged(state: Any) -> dict[str, float]:
    """Return the latest number that was logged under each name; of an evaluation's, those of this step alone.

    An earlier evaluation's numbers are those of other weights, and `best` would take one checkpoint for another.
    """
    return {
        name: float(value)
        for entry in state.log_history
        for name, value in entry.items()
        if type(value) in (int, float) and (not name.startswith("eval_") or entry.get("step") == state.global_step)
    }


def _exported(callbacks: list[Any]) -> dict[str, Any]:
    """Return the callbacks' states in the form of `TrainerState`: by class name, as a list if a class has several.

    `Trainer._save_checkpoint` uses the same form.
    """
    states: dict[str, list[Any]] = {}
    for one in callbacks:
        if isinstance(one, _callbacks.ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _save_model(directory: Path, model: Any) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(directory)
    else:
        torch.save(model.state_dict(), directory / "pytorch_model.bin")


def _write(directory: Path, trainer: Any, state: dict[str, Any]) -> None:
    """Write a directory of the same form as `Trainer._save_checkpoint` does."""
    if trainer.args.should_save:
        trainer._save(str(directory))
    else:  # `Trainer._save` writes nothing on other ranks, and each rank loads its own directory
        _save_model(directory, trainer.accelerator.unwrap_model(trainer.model))
    torch.save(state["optimizer"], directory / "optimizer.pt")
    torch.save(state["scheduler"], directory / "scheduler.pt")
    if state["scaler"] is not None:
        torch.save(state["scaler"], directory / "scaler.pt")
    rng = state["rng"]
    states = {"python": rng["python"], "numpy": rng["numpy"], "cpu": rng["torch"]}
    if "cuda" in rng:  # all devices if ranks share a node, else the current one
        distributed = trainer.args.world_size > 1
        states["cuda"] = rng["cuda"] if distributed else rng["cuda"][torch.cuda.current_device()]
    name = f"rng_state_{trainer.args.process_index}.pth" if trainer.args.world_size > 1 else "rng_state.pth"
    torch.save(states, directory / name)
    (directory / "trainer_state.json").write_text(state["trainer_state"])
