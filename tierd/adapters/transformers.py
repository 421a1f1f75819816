"""Save and resume Hugging Face `Trainer` training through tierd.

    saving = tierd.adapters.transformers.TierdCallback(ckpt, every_steps=100)
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[saving])
    trainer.train(resume_from_checkpoint=saving.resume(trainer))

The callback snapshots model, optimizer, scheduler, scaler, generators and `TrainerState` at the end of a step; each
rank saves its own. `Trainer` resumes from a directory, so `resume` writes one from the bytes that it has just verified.
The callback removes it at the first training step. `Trainer` itself then skips to the very next sample (leave
`ignore_data_skip` off).

Invariant: this process wrote the files that `Trainer` loads, from verified bytes; no file of an earlier process is
unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierd.adapters import framework
from tierd.core.errors import ConfigError
from tierd.state.kinds.rng import RngState

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer

_callbacks = framework("transformers.trainer_callback", "transformers accelerate")


class TierdCallback(_callbacks.TrainerCallback):  # type: ignore[misc,name-defined]
    """Save every `every_steps` optimizer steps and at the end of training, as step `global_step`.

    If the `Checkpointer` has a `when`, also save where `due` says so. After a notice of preemption, training stops.

    Do not use it with FSDP, DeepSpeed or tensor parallelism, because a rank holds a shard there: use `tierd.dcp` or
    `Checkpointer.stage`.

    Raises:
        ConfigError: `every_steps` is no positive number.
    """

    def __init__(self, checkpointer: Checkpointer, every_steps: int) -> None:
        if type(every_steps) is not int or every_steps < 1:
            raise ConfigError(f"every_steps={every_steps!r}: a number from 1")
        self._checkpointer = checkpointer
        self._every = every_steps
        self._trainer: Any = None
        self._last = 0
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
        self._last = found.step
        self._directory = Path(trainer.args.output_dir) / f"tierd-resume-{trainer.args.process_index}"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        _write(self._directory, trainer, state)
        return str(self._directory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer is None:
            raise ConfigError("call resume(trainer), and pass what it returns to train(resume_from_checkpoint=...)")

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._discard()
        due = self._checkpointer.when is not None and self._checkpointer.due(state.global_step)
        if due or state.global_step % self._every == 0:
            self._save(state, control, parts)
        if self._checkpointer.notice is not None:  # on every rank at the same step
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._discard()
        if state.global_step > self._last:
            self._save(state, control, parts)

    def _save(self, state: Any, control: Any, parts: dict[str, Any]) -> None:
        callbacks = [*self._trainer.callback_handler.callbacks, control]
        told = {**dataclasses.asdict(state), "stateful_callbacks": _exported(callbacks)}
        self._checkpointer.save(
            state.global_step,
            {
                "model": parts["model"],
                "optimizer": parts["optimizer"],
                "scheduler": parts["lr_scheduler"],
                "scaler": self._trainer.accelerator.scaler,
                "rng": RngState(),
                "trainer_state": json.dumps(told, sort_keys=True),
            },
            metrics=_logged(state.log_history),
        )
        self._last = state.global_step

    def _discard(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _logged(history: list[dict[str, Any]]) -> dict[str, float]:
    """Return the latest number that was logged under each name."""
    return {name: float(value) for entry in history for name, value in entry.items() if type(value) in (int, float)}


def _exported(callbacks: list[Any]) -> dict[str, Any]:
    """Return the callbacks' states in the form of `TrainerState`: by class name, as a list if a class has several.

    `Trainer._save_checkpoint` uses the same form.
    """
    states: dict[str, list[Any]] = {}
    for one in callbacks:
        if isinstance(one, _callbacks.ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _write(directory: Path, trainer: Any, state: dict[str, Any]) -> None:
    """Write a directory of the same form as `Trainer._save_checkpoint` does."""
    trainer._save(str(directory))
    torch.save(state["optimizer"], directory / "optimizer.pt")
    torch.save(state["scheduler"], directory / "scheduler.pt")
    if state["scaler"] is not None:
        torch.save(state["scaler"], directory / "scaler.pt")
    rng = state["rng"]
    told = {"python": rng["python"], "numpy": rng["numpy"], "cpu": rng["torch"]}
    if "cuda" in rng:  # all devices if ranks share a node, else the current one
        distributed = trainer.args.world_size > 1
        told["cuda"] = rng["cuda"] if distributed else rng["cuda"][torch.cuda.current_device()]
    name = f"rng_state_{trainer.args.process_index}.pth" if trainer.args.world_size > 1 else "rng_state.pth"
    torch.save(told, directory / name)
    (directory / "trainer_state.json").write_text(state["trainer_state"])
