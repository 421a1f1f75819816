"""The blocks of the frameworks' pages run, with the real packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.snippets import ROOT, blocks, execute

from tierd.spool.spool import Spool

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(600)]
HOWTO = ROOT / "docs" / "howto"


def steps(home: Path, run: str) -> list[int]:
    return sorted(part.checkpoint.step for part in Spool(home / "spool").parts(run))


def test_block_of_the_page_about_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    monkeypatch.chdir(tmp_path)
    (block,) = blocks(HOWTO / "lightning.md")
    names: dict[str, Any] = {"L": _Quick(lightning), "ModelCheckpoint": ModelCheckpoint, "model": BoringModel()}
    names["loader"] = torch.utils.data.DataLoader(torch.randn(100, 32), 1)
    execute(block, tmp_path, names)
    assert 100 in steps(tmp_path, "llama-7b")


class _Quick:
    """The module `lightning` with a `Trainer` that ends after one epoch and prints nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def Trainer(self, **options: Any) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return self._module.Trainer(**options, **quiet, max_epochs=1, limit_val_batches=0, accelerator="cpu")


def test_block_of_the_page_about_trainer_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import transformers
    from loaders.test_best import Grows, Rows

    def arguments(*_: Any, **options: Any) -> Any:
        return transformers.TrainingArguments(str(tmp_path / "out"), max_steps=3, report_to=[], use_cpu=True, **options)

    def trainer(*_: Any, **options: Any) -> Any:
        return transformers.Trainer(Grows(), train_dataset=Rows(), **options)

    block = blocks(HOWTO / "transformers.md")[0]
    execute(
        block.replace("every_steps=100", "every_steps=2"),
        tmp_path,
        {"Trainer": trainer, "TrainingArguments": arguments},
    )
    assert steps(tmp_path, "bert") == [2, 3]


def test_block_of_the_page_about_keras_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    loader = StatefulDataLoader(torch.utils.data.TensorDataset(torch.ones(30, 1), torch.ones(30, 1)), 2)
    (block,) = blocks(HOWTO / "keras.md")
    execute(block, tmp_path, {"model": model, "loader": loader})
    assert steps(tmp_path, "resnet")[-1] == 150


def test_blocks_of_the_page_about_accelerate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    first, second, third = blocks(HOWTO / "accelerate.md")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names: dict[str, Any] = {
        "accelerate": accelerate,
        "Accelerator": accelerate.Accelerator,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "DataLoader": torch.utils.data.DataLoader,
        "dataset": torch.ones(64, 1),
        "step": 1,
        "EPOCHS": 2,
        "STEPS": 101,
        "loss": torch.ones(()),
        "loader": torch.utils.data.DataLoader(torch.ones(8, 1), 2),
    }
    execute(f"import tierd\n{first}", tmp_path, names)
    names["ckpt"].close()
    (tmp_path / "states").mkdir()
    execute(second, tmp_path / "states", names)
    names["step"] = 1
    execute(third, tmp_path, names)
    assert steps(tmp_path / "states", "bert") == [0, 100] and len(names["batch"]) == 32
