"""Save and resume Lightning training through tierd.

    io = tierd.adapters.lightning.TierdCheckpointIO(ckpt)
    trainer = L.Trainer(plugins=[io], callbacks=[io.callback, ModelCheckpoint(every_n_train_steps=100)])
    trainer.fit(model, loader, ckpt_path=io.latest())

`ModelCheckpoint` decides when to save. The adapter saves the trainer's own dictionary as step `global_step`: weights,
optimizers, schedulers, loops, callbacks, the state of a `StatefulDataLoader`. It adds the random generators, which
Lightning leaves out. A value without a safe encoding (for example an object among the hyper-parameters) is refused, and
the error names its key. Nothing is pickled.

`io.callback` restores the generators and the epochs of samplers, because Lightning 2.6 calls `set_epoch` too late for
the resumed epoch (https://github.com/Lightning-AI/pytorch-lightning/issues/21938).

At each path that `ModelCheckpoint` names, a small text stands for the checkpoint: it names the run, the step and the
attempt. So `ckpt_path="best"`, `"last"` and `best_model_path` work as without tierd, and `save_top_k` removes these
texts alone. `LightningModule.load_from_checkpoint(io.file(path))` loads a model from one.

Sharded strategies (`FSDPStrategy(state_dict_type="sharded")`, `ModelParallelStrategy`) write their shards without a
`CheckpointIO`. The callback refuses them, because tierd would never get a checkpoint; `tierd watch` takes theirs.

Invariant: a path that begins with ``tierd:``, or whose file is such a text, is one of tierd's checkpoints and was
verified; every other path is Lightning's own file. Lightning writes checkpoints with weights alone
(`save_weights_only`) to their path, because training cannot resume from them.

Lightning passes only rank 0's dictionary to a `CheckpointIO`, and every rank gets it back with rank 0's data state.
That is correct if all ranks have drawn the same number of samples, each from its own share. Generators are restored on
rank 0.
"""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import torch

from tierd.adapters import framework
from tierd.adapters.lightning_callback import DeferredSave, ResumeCallback, Resumption, TrainingStep
from tierd.adapters.step_metrics import LastSave, StepMetrics
from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import CheckpointNotFound, ConfigError
from tierd.state.kinds.random_generators import RngState

log = logging.getLogger("tierd")
_io = framework("lightning.fabric.plugins.io.torch_io", "lightning")

SCHEME = "tierd:"
_MEMBERS = {"run": str, "step": int, "attempt": str}
_METRICS = "tierd_metrics"  # the member of Lightning's dictionary for the newest values of its metrics
_LONGEST = 4096  # bytes of a text that stands for a checkpoint


class TierdCheckpointIO(_io.TorchCheckpointIO):  # type: ignore[misc,name-defined]
    """A `CheckpointIO` plugin over a `Checkpointer`, which the caller closes.

    The daemon handles retention: `ModelCheckpoint(save_top_k=...)` removes none of tierd's checkpoints.

    Args:
        checkpointer: made with ``rank=0, world_size=1`` if several ranks train.

    Raises:
        ConfigError: the checkpointer waits for parts of other ranks, which Lightning never writes.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        super().__init__()
        if internals(checkpointer).ranks.world > 1:
            raise ConfigError(
                "Lightning saves on rank 0 alone: make the Checkpointer with rank=0, world_size=1 on every rank"
            )
        self._checkpointer = checkpointer
        self._restored: tuple[str, dict[str, Any]] | None = None
        self._last = LastSave(-1)
        self._metrics = StepMetrics(checkpointer)
        self._waiting: tuple[int, str] | None = None  # the step and path of a save that waits for metrics
        self._step = TrainingStep()
        self.callback = ResumeCallback(checkpointer, self._step, DeferredSave(self._step, self._waiting_at))

    def latest(self) -> str | None:
        """Restore the newest verified checkpoint, and return the value for `ckpt_path`; None on a fresh start.

        Saves are refused until `fit` has loaded all of it, because a state that was loaded in part is not the run's.

        Raises:
            As `Checkpointer.restore`.
        """
        return self._restore(None)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save the trainer's dictionary; Lightning calls this.

        A second save of the same step (at a batch's end and at its epoch's) is left out unless the first was skipped or
        has failed. So is a save of the step from which the fit resumed, because nothing was trained since then. A save
        waits for its step's validation and epoch if a `ModelCheckpoint` monitors what they measure, and at an epoch's
        last batch.

        Raises:
            StateRefused: a value in the dictionary cannot be stored; the message names its path.
        """
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        step = checkpoint["global_step"]
        _drop_exhausted_loader(checkpoint)
        if _is_last(checkpoint):
            self._step.set_at_last_batch(checkpoint["loops"]["fit_loop"])
        else:
            self.callback.warn_of_data()
        waits, resumed = False, self._resumed_at(step)
        if resumed is not None:
            log.info("nothing was trained since step %d was restored: %s is the same", step, path)
        elif self._last.is_of_step(step):
            log.info("step %d is saved already: %s is the same", step, path)
        elif waits := self._step.is_incomplete():
            self._waiting = step, str(path)
        else:
            self._waiting = None
            metrics = self._metrics.usable(self._step.measured(), self._step.monitored())
            if values := self._step.newest_values():
                checkpoint = {**checkpoint, _METRICS: values}
            self._last.save(self._checkpointer, step, {"lightning": checkpoint, "rng": RngState()}, metrics)
        if (resumed or waits or self._last.is_of_step(step)) and "://" not in str(path):  # only local paths get a text
            self._name(Path(path), step, resumed.attempt if resumed else self._checkpointer.attempt)

    def _resumed_at(self, step: int) -> Restored | None:
        """Return the checkpoint from which the fit resumed, if it is of this step and has its monitored metrics."""
        resumed = self.callback.resumed
        if resumed is None or resumed.step != step:
            return None
        measured = self._step.measured().keys() & set(self._step.monitored())
        return resumed if measured <= resumed.metrics.keys() else None

    def _waiting_at(self, step: int) -> str | None:
        return self._waiting[1] if self._waiting is not None and self._waiting[0] == step else None

    def _name(self, path: Path, step: int, attempt: str) -> None:
        """Write the text that stands for a checkpoint at the path that Lightning has for it."""
        reference = {"run": self._checkpointer.run, "step": step, "attempt": attempt}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(json.dumps({"tierd": reference}) + "\n")
        fresh.replace(path)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the dictionary that `latest` restored, or that of a step (``tierd:500``), of a file that stands for a
        checkpoint, or of Lightning's own file.

        Raises:
            CheckpointNotFound: there is no verified checkpoint of that step.
            ConfigError: the file stands for a checkpoint of another run.
        """
        checkpoint = self._read(path, *args, **options)
        self.callback.read()
        return checkpoint

    def _read(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        text = str(path)
        reference = None if text.startswith(SCHEME) else _read_reference(Path(text))
        if reference is None and not text.startswith(SCHEME):
            file_checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **options)
            self.callback.restored = None
            return file_checkpoint
        if reference is not None and reference["run"] != self._checkpointer.run:
            raise ConfigError(
                f"{path}: a checkpoint of run {reference['run']!r}, and this is {self._checkpointer.run!r}"
            )
        if reference is not None or self._restored is None or self._restored[0] != text:
            step = str(reference["step"]) if reference else text.removeprefix(SCHEME)
            if not step.isdecimal():
                raise ConfigError(f"{path}: write {SCHEME} and a step, or pass what latest() returns")
            if self._restore(int(step), reference["attempt"] if reference else None) is None:
                raise CheckpointNotFound(f"{path}: this run has no checkpoint anywhere")
        assert self._restored is not None
        (_, checkpoint), self._restored = self._restored, None
        return checkpoint

    def file(self, path: Any) -> io.BytesIO:
        """Return a checkpoint as the file that Lightning would have written: for `load_from_checkpoint`.

        Args:
            path: as for `load_checkpoint`, such as `ModelCheckpoint.best_model_path`.

        Raises:
            As `load_checkpoint`.
        """
        buffer = io.BytesIO()
        torch.save(self.load_checkpoint(path), buffer)
        buffer.seek(0)
        return buffer

    def _restore(self, step: int | None, attempt: str | None = None) -> str | None:
        state: dict[str, Any] = {"lightning": None, "rng": None}
        launch = internals(self._checkpointer).launch
        with launch.restoring():
            restored = self._checkpointer.restore(state, step, attempt=attempt)
            if restored is None:
                return None
            path = f"{SCHEME}{restored.step}"
            launch.loading(
                f"{path} was restored, and no fit has loaded all of it: pass it to fit as ckpt_path; for a fresh start "
                "on purpose make another Checkpointer and do not call latest"
            )
            self.callback.waiting = True
        self._last = LastSave(-1)  # because the attempt that begins has saved none
        self._restored = path, state["lightning"]
        self.callback.generators, self.callback.loaders = state["rng"], _loaders(state["lightning"])
        self.callback.restored = restored
        values, is_last = state["lightning"].get(_METRICS, {}), _is_last(state["lightning"])
        self.callback.resumption = Resumption(values, is_last)
        return path


def _read_reference(path: Path) -> dict[str, Any] | None:
    """Return the run, step and attempt of the checkpoint for which a file stands; None if it is no such file."""
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST)
        members = json.loads(text)["tierd"] if text.startswith(b'{"tierd":') else {}
    except (OSError, ValueError, KeyError):
        return None
    is_valid = isinstance(members, dict) and all(type(members.get(name)) is kind for name, kind in _MEMBERS.items())
    return members if is_valid else None


def _loaders(checkpoint: dict[str, Any]) -> list[Any]:
    states: list[Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    return states


def _is_last(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved at an epoch's last batch."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return bool(fit_loop.get("epoch_loop.batch_progress", {}).get("is_last_batch"))


def _drop_exhausted_loader(checkpoint: dict[str, Any]) -> None:
    """Drop the state of an exhausted loader after an epoch's last batch.

    Lightning resumes with the next epoch then, and the exhausted loader's state would make that epoch empty.
    """
    if _is_last(checkpoint) and _loaders(checkpoint):
        fit_loop = checkpoint["loops"]["fit_loop"]
        fit_loop["state_dict"] = {**fit_loop["state_dict"], "combined_loader": []}
