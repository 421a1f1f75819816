"""What adapters refuse, and how they say it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tierd
from tierd.core.errors import ConfigError, StateMismatch, StateRefused


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
def test_keras_on_jax_is_refused_with_a_remedy() -> None:
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


@pytest.mark.loaders
@pytest.mark.parametrize("seedable", [False, True])
def test_accelerate_warns_of_an_order_that_is_not_repeated(
    seedable: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from tierd.adapters.accelerate import TierdStates

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), 2, shuffle=True))
    with tierd.Checkpointer(tmp_path, "run", rank=0, world_size=1, to=[]) as ckpt:
        states = TierdStates(accelerator, ckpt)
        for step in (1, 2):
            states.save(step)
    assert len(list(loader)) == 4
    assert sum("use_seedable_sampler=True" in text for text in caplog.messages) == (0 if seedable else 1)
