"""What a Lightning training does after a resume, beside one that was not interrupted, and of what it warns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierd.spool.spool import Spool

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(300)]


@pytest.mark.parametrize("resume", [4, 8, 12])
def test_resume_from_an_epochs_end_steps_plateau_at_epochs_of_its_frequency(resume: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.launch_lightning import Module, launch

    def rates(step: int | None) -> dict[int, float]:
        module = Module(frequency=2)
        saving = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)
        launch(tmp_path, module, step, saving, max_epochs=6)
        return dict(module.rates)

    whole = rates(None)
    assert [whole[step] for step in (0, 12, 16)] == pytest.approx([1, 1, 0.1])
    assert rates(resume) == {step: rate for step, rate in whole.items() if step >= resume}


def test_resume_with_accumulated_gradients_saves_no_step_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.launch_lightning import Module, launch

    def saved(step: int | None, **options: Any) -> list[tuple[int, str]]:
        saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
        launch(tmp_path, Module(), step, saving, accumulate_grad_batches=2, **options)
        parts = Spool(tmp_path / "spool").parts("run")
        return sorted((part.checkpoint.step, part.checkpoint.attempt) for part in parts)

    first = saved(None, max_epochs=1)
    assert [step for step, _ in first] == [2]
    second = saved(2, max_epochs=3)
    assert [step for step, _ in second] == [2, 4, 6] and second[0] == first[0]
    assert "is saved again" not in caplog.text
    named = json.loads((tmp_path / "saved" / "step=2.ckpt").read_text())["tierd"]
    assert (named["step"], named["attempt"]) == first[0]


@pytest.mark.parametrize(("saves", "stateful"), [("steps", False), ("steps", True), ("epochs", False)])
def test_lightning_warns_once_of_saves_without_position_in_data(
    saves: str, stateful: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.launch_lightning import Module, launch

    often = {"every_n_train_steps": 1} if saves == "steps" else {"every_n_epochs": 1}
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, **often)
    launch(tmp_path, Module(), None, saving, stateful=stateful, max_epochs=2)
    warnings = [text for text in caplog.messages if "position in the data" in text]
    assert len(warnings) == (saves == "steps" and not stateful)
    assert all("DataLoader" in text and "StatefulDataLoader" in text for text in warnings)


@pytest.mark.parametrize("averaging", ["stochastic", "exponential"])
def test_lightning_warns_of_stochastic_weight_averaging(
    averaging: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
    from loaders.launch_lightning import Module, launch

    callback = StochasticWeightAveraging(0.05) if averaging == "stochastic" else EMAWeightAveraging()
    launch(tmp_path, Module(), None, callback, max_epochs=1)
    assert sum("StochasticWeightAveraging is not exact" in text for text in caplog.messages) == (
        averaging == "stochastic"
    )


@pytest.mark.parametrize("length", [{"max_epochs": 5}, {"max_epochs": -1, "max_steps": 20}], ids=["epochs", "steps"])
@pytest.mark.parametrize("saves", ["at its last batch", "at its end"])
@pytest.mark.parametrize("validates", [True, False], ids=["validated", "not validated"])
def test_resumes_from_an_epochs_end_repeat_uninterrupted_training(
    validates: bool, saves: str, length: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from loaders.launch_lightning import Module, launch

    often: dict[str, Any] = {"every_n_train_steps": 2}
    if saves == "at its end":
        often = {"every_n_epochs": 1, "save_on_train_epoch_end": True}

    def steps(home: str, *resumed: int | None) -> dict[int, tuple[float, list[float]]]:
        for step in resumed:
            module = Module(frequency=int(validates))
            saving = ModelCheckpoint(tmp_path / home / "saved", save_top_k=-1, **often)
            launch(tmp_path / home, module, step, saving, stateful=True, validates=validates, **length)
        return {step: (rate, module.samples[step]) for step, rate in module.rates.items()}

    whole = steps("whole", None)
    for last in (8, 12):  # each resumes from what the launch before saved
        first: list[int | None] = [None, 4] if last == 8 else []
        assert steps("killed", *first, last) == {step: each for step, each in whole.items() if step >= last}
