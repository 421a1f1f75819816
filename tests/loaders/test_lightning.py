"""What a Lightning training does after a resume, beside one that was not interrupted, and of what it warns."""

from __future__ import annotations

from pathlib import Path

import pytest

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
