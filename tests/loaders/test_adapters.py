"""What adapters refuse, and how they say it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierd
from tierd.client.saving.pipeline import Pipeline
from tierd.core.errors import ConfigError, StateMismatch, StateRefused
from tierd.spool.spool import Spool


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("lightning", "lightning.pytorch.callbacks"),
        ("transformers", "transformers.trainer_callback"),
        ("keras", "keras"),
    ],
)
def test_a_framework_that_is_not_there_is_named(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"tierd.adapters.{name}", raising=False)
    with pytest.raises(ImportError, match=f"{module} cannot be imported .*pip install {name}"):
        importlib.import_module(f"tierd.adapters.{name}")


class Pipe:
    """As much of a DALI pipeline as the adapter calls."""

    def __init__(self, checkpoint: bytes | None) -> None:
        self.at = int(checkpoint or b"0")
        self.built = False

    def build(self) -> None:
        self.built = True

    def run(self) -> int:
        assert self.built
        self.at += 1
        return self.at

    def checkpoint(self) -> bytes:
        return b"%d" % self.at


def test_a_pipeline_is_made_anew_where_it_was(tmp_path: Path) -> None:
    from tierd.adapters.dali import Restorable

    data = Restorable(Pipe)
    assert [data.pipeline.run() for _ in range(3)] == [1, 2, 3]
    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        ckpt.save(1, {"data": data})
        again = Restorable(Pipe)
        assert ckpt.restore({"data": again})
    assert again.pipeline.run() == 4
    with pytest.raises(StateMismatch, match="not the state of a DALI pipeline"):
        again.load_state_dict({"epoch": 1})
    with pytest.raises(StateMismatch, match="DALI does not take its checkpoint: invalid literal"):
        again.load_state_dict({"checkpoint": b"no number"})


@pytest.mark.loaders
def test_lightnings_dictionary_is_refused_by_its_key(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tierd.adapters.lightning import TierdCheckpointIO

    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        assert io.latest() is None
        checkpoint = {"global_step": 3, "optimizer_states": [], "hyper_parameters": {"act": Pipe}}
        with pytest.raises(StateRefused, match=r'state\["lightning"\]\["hyper_parameters"\]\["act"\]'):
            io.save_checkpoint(checkpoint, tmp_path / "any.ckpt")
        checkpoint["hyper_parameters"] = {"width": 8}
        io.save_checkpoint(checkpoint, tmp_path / "any.ckpt")
        io.save_checkpoint(checkpoint, tmp_path / "last.ckpt")  # the same step, at its epoch's end
        assert io.latest() == "tierd:3" and io.load_checkpoint("tierd:3") == checkpoint
        assert io.load_checkpoint("tierd:3") == checkpoint, "asked for by its step"
        with pytest.raises(ConfigError, match="tierd:newest"):
            io.load_checkpoint("tierd:newest")
        assert io.load_checkpoint(tmp_path / "last.ckpt") == checkpoint, "asked for by its path"
        with pytest.raises(FileNotFoundError):
            io.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="rank=0, world_size=1"):
        TierdCheckpointIO(
            tierd.Checkpointer(tmp_path / "two", "run", rank=0, world_size=2, attempt=tierd.new_attempt())
        )


@pytest.mark.loaders
def test_a_state_that_lightning_loaded_in_part_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel
    from loaders.loops_lightning import quiet_trainer

    from tierd.adapters.lightning import TierdCheckpointIO

    def refuses(*args: object) -> None:
        raise RuntimeError("not with this shape")

    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)

        def fit(path: str | None, steps: int) -> lightning.Trainer:
            trainer = quiet_trainer(io, tmp_path, max_steps=steps, limit_val_batches=0, enable_checkpointing=False)
            trainer.fit(BoringModel(), ckpt_path=path)
            return trainer

        fit(io.latest(), 2).save_checkpoint(tmp_path / "a.ckpt")
        for path in (io.latest(), "tierd:2", tmp_path / "a.ckpt"):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not with this shape"):
                patch.setattr(torch.optim.SGD, "load_state_dict", refuses)
                fit(path, 4)
            with pytest.raises(ConfigError, match="nothing is saved, because tierd:2 was restored, and no fit"):
                ckpt.save(9, {})
        fit(None, 1)
        with pytest.raises(ConfigError, match="pass it to fit as ckpt_path"):
            ckpt.save(9, {})
        fit(io.latest(), 3).save_checkpoint(tmp_path / "b.ckpt")
        assert io.latest() == "tierd:3"
        io.file("tierd:3")  # to look at it
        ckpt.save(9, {})
        fit("tierd:3", 3)  # with nothing left to train
        ckpt.save(9, {})


def checkpoints(spool: Path) -> list[tuple[str, int]]:
    """The attempt and the step of each checkpoint."""
    return sorted((part.checkpoint.attempt, part.checkpoint.step) for part in Spool(spool).parts("run"))


@pytest.fixture
def skipped_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Have the first save of a step find the slot busy; the list has the steps of all calls of `save`."""

    def arrange(step: int) -> list[int]:
        save, asked = tierd.Checkpointer.save, []

        def first_finds_it_busy(self: tierd.Checkpointer, at: int, *args: Any, **options: Any) -> Any:
            asked.append(at)
            with monkeypatch.context() as patch:
                if at == step and asked.count(at) == 1:
                    patch.setattr(Pipeline, "busy", True)
                return save(self, at, *args, **options)

        monkeypatch.setattr(tierd.Checkpointer, "save", first_finds_it_busy)
        return asked

    return arrange


@pytest.mark.loaders
def test_lightning_saves_a_step_again_after_a_rollback(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tierd.adapters.lightning import TierdCheckpointIO

    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        io = TierdCheckpointIO(ckpt)
        for step in (1, 2):
            io.save_checkpoint({"global_step": step, "optimizer_states": []}, tmp_path / "any.ckpt")
        io.load_checkpoint("tierd:1")
        io.save_checkpoint({"global_step": 2, "optimizer_states": []}, tmp_path / "last.ckpt")
    named = json.loads((tmp_path / "last.ckpt").read_text())["tierd"]
    found = checkpoints(tmp_path / "spool")
    assert [step for _, step in found] == [1, 2, 2] and (named["attempt"], named["step"]) == found[-1]


@pytest.mark.loaders
def test_lightning_saves_a_step_whose_first_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]]
) -> None:
    pytest.importorskip("lightning")
    from tierd.adapters.lightning import TierdCheckpointIO

    asked = skipped_once(2)
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when_busy="skip") as ckpt:
        io = TierdCheckpointIO(ckpt)
        for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
            io.save_checkpoint({"global_step": 2, "optimizer_states": []}, tmp_path / name)
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path / "spool")] == [2]
    assert sorted(one.name for one in tmp_path.glob("*.ckpt")) == ["b.ckpt", "c.ckpt"]


@pytest.mark.loaders
def test_trainer_saves_at_its_end_a_step_whose_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]]
) -> None:
    pytest.importorskip("transformers")
    from loaders.test_best import Grows, Rows
    from transformers import Trainer, TrainingArguments

    from tierd.adapters.transformers import TierdCallback

    asked = skipped_once(2)
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[], when_busy="skip") as ckpt:
        saving = TierdCallback(ckpt, every_steps=2)
        trainer = Trainer(model=Grows(), args=args, train_dataset=Rows(), callbacks=[saving])
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path / "spool")] == [2]


@pytest.mark.loaders
def test_keras_saves_at_an_epochs_end_a_step_whose_save_was_skipped(
    tmp_path: Path, skipped_once: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from tierd.adapters.keras import TierdCallback

    asked = skipped_once(2)
    x = torch.ones(4, 1).numpy()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    with tierd.Checkpointer(tmp_path, "run", to=[], when_busy="skip") as ckpt:
        model.fit(x, x, 2, epochs=1, verbose=0, callbacks=[TierdCallback(ckpt, every_batches=2)])
    assert asked == [2, 2] and [step for _, step in checkpoints(tmp_path)] == [2]


@pytest.mark.loaders
def test_a_state_that_accelerate_loaded_in_part_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from tierd.adapters.accelerate import TierdStates

    def refuses(directory: str) -> None:
        raise RuntimeError("not with this shape")

    accelerator = Accelerator(cpu=True)
    for again in (False, True):
        with tierd.Checkpointer(tmp_path, "run", rank=0, world_size=1, to=[]) as ckpt:
            states = TierdStates(accelerator, ckpt)
            if not again:
                assert states.load() is None
                states.save(3)
                continue
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not with this shape"):
                patch.setattr(accelerator, "load_state", refuses)
                states.load()
            with pytest.raises(ConfigError, match="nothing is saved, because the last restore failed"):
                states.save(1)
            assert (found := states.load()) and found.step == 3
            states.save(4)


@pytest.mark.loaders
def test_a_trainer_that_was_not_asked_to_resume_does_not_begin(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tierd.adapters.transformers import TierdCallback

    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        with pytest.raises(ConfigError, match="every_steps=0"):
            TierdCallback(ckpt, every_steps=0)
        with pytest.raises(ConfigError, match=r"call resume\(trainer\)"):
            TierdCallback(ckpt, every_steps=1).on_train_begin(None, None, None)


@pytest.mark.loaders
def test_keras_on_jax_is_refused_and_told_what_to_set() -> None:
    """The backend is chosen when Keras is imported, once in a process."""
    pytest.importorskip("jax")
    script = """
import sys, keras
from tierd.adapters.keras import TierdCallback
from tierd.core.errors import ConfigError
assert keras.backend.backend() == "jax"
try:
    TierdCallback(None)
except ConfigError as error:
    assert "Keras runs on jax: set KERAS_BACKEND=torch before it is imported" in str(error), error
else:
    raise AssertionError("it was taken")
"""
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
