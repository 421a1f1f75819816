"""When a framework saves, and which of its checkpoints is the best, are the framework's own words for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierd
from tierd.core.errors import ConfigError
from tierd.spool.spool import Spool

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(600)]


def steps(spool: Path) -> list[int]:
    return sorted(part.checkpoint.step for part in Spool(spool).parts("run"))


# -- Trainer: a weight that grows with each step, so that the first evaluation is the best ----------------------------


class Rows(torch.utils.data.Dataset[dict[str, float]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": 1.0, "labels": 1.0}


class Grows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (-self.weight if self.training else self.weight).sum()}


def trained(home: Path, when: tierd.When | None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from tierd.adapters.transformers import TierdCallback

    args = TrainingArguments(
        output_dir=str(home / "out"),
        max_steps=9,
        per_device_train_batch_size=2,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        logging_strategy="no",
        eval_strategy="steps",
        eval_steps=3,
        metric_for_best_model="loss",
        prediction_loss_only=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    with tierd.Checkpointer(home / "spool", "run", to=[], when=when) as ckpt:
        saving = TierdCallback(ckpt)
        trainer = Trainer(model=Grows(), args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[saving])
        trainer.train(resume_from_checkpoint=saving.resume(trainer))
        return trainer


def test_trainers_own_strategy_decides_and_its_best_model_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = trained(tmp_path, None, save_strategy="steps", save_steps=3, load_best_model_at_end=True)
    assert steps(tmp_path / "spool") == [3, 6, 9] and not list((tmp_path / "out").glob("checkpoint-*"))
    assert trainer.state.best_metric == pytest.approx(2.5)
    assert trainer.model.weight.item() == pytest.approx(trainer.state.best_metric)


def test_a_rule_saves_the_best_evaluation_of_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = trained(tmp_path, tierd.When(best="eval_loss", best_only=True), save_strategy="no")
    assert steps(tmp_path / "spool") == [3] and trainer.state.global_step == 9


# -- Lightning --------------------------------------------------------------------------------------------------------


def test_lightnings_best_and_last_are_tierds_checkpoints(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.loops_lightning import quiet_trainer

    from tierd.adapters.lightning import TierdCheckpointIO

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return -self.weight.sum()

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val", self.weight.sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def fit(run: str, most: int, path: str | None) -> tuple[Any, Any, Any, Any]:
        ckpt = tierd.Checkpointer(tmp_path / "spool", run, to=[])
        io, module = TierdCheckpointIO(ckpt), Module()
        saving = ModelCheckpoint(tmp_path / "out", monitor="val", save_top_k=2, save_last=True, filename="{step}")
        trainer = quiet_trainer(io, tmp_path, saving, max_steps=most, val_check_interval=2)
        data = torch.utils.data.DataLoader(torch.ones(8, 1), 1)
        trainer.fit(module, data, data, ckpt_path=path)
        return ckpt, io, trainer, saving

    ckpt, io, trainer, saving = fit("run", 6, None)
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert all(one.stat().st_size < 300 for one in (tmp_path / "out").iterdir())
    assert saving.best_model_path.endswith("step=2.ckpt")
    trainer.validate(dataloaders=torch.ones(1, 1), ckpt_path="best", verbose=False)
    assert trainer.lightning_module.weight.item() == 2.0
    assert Module.load_from_checkpoint(io.file(saving.best_model_path)).weight.item() == 2.0
    assert io.file("tierd:4").read(2) == b"PK"
    ckpt.close()
    ckpt, io, trainer, _ = fit("run", 8, "last")
    assert trainer.global_step == 8 and trainer.lightning_module.weight.item() == 5.0
    ckpt.close()
    with pytest.raises(ConfigError, match="a checkpoint of run 'run', and this is 'other'"):
        fit("other", 8, str(tmp_path / "out" / "step=4.ckpt"))
    sharded = SimpleNamespace(strategy=SimpleNamespace(_state_dict_type="sharded"))
    with pytest.raises(ConfigError, match="tierd watch"):
        io.callback.setup(sharded, None, "fit")


# -- Keras ------------------------------------------------------------------------------------------------------------


def test_keras_saves_the_best_and_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    from tierd.adapters.keras import TierdCallback

    keras.utils.set_random_seed(7)
    x = torch.linspace(-1, 1, 32)[:, None].numpy()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.9, momentum=0.9), loss="mse")  # it swings
    rule = tierd.When(best="val_loss", best_only=True)
    with tierd.Checkpointer(tmp_path, "run", to=[], when=rule) as ckpt:
        saving = TierdCallback(ckpt)
        seen = model.fit(x, 3 * x, 8, epochs=6, verbose=0, validation_data=(x, 3 * x), callbacks=[saving])
        losses = seen.history["val_loss"]
        better = [at for at, loss in enumerate(losses) if all(loss < one for one in losses[:at])]
        found = saving.load_best("val_loss")
        assert found is not None and found.metrics["val_loss"] == pytest.approx(min(losses))
        assert model.evaluate(x, 3 * x, verbose=0) == pytest.approx(min(losses), rel=1e-3)
    assert steps(tmp_path) == [4 * (at + 1) for at in better] and len(better) < 6, losses
