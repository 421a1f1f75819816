"""Each framework's page says that a resume is exact: with kills in the middle of an epoch, at its end and in an
evaluation, and with schedulers and callbacks that have state.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from support.killed import trained

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("loop", "moments"),
    [
        ("by_steps", {"step 7": 6, "evaluation 9": 6, "step 9": 9, "epoch 12": 9, "step 12": 12, "step 19": 18}),
        ("by_epochs", {"step 6": 4, "step 12": 12, "evaluation 24": 20, "step 24": 24}),
    ],
)
def test_trainer_resumes_exactly_with_plateau_and_early_stopping(
    loop: str, moments: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    whole, killed, resumed = trained(f"loaders.killed_transformers:{loop}", tmp_path, *moments)
    assert whole["end"][1] > 0 and len({values[2] for name, values in whole.items() if name.startswith("step")}) > 1
    assert killed == whole and resumed == [0, *moments.values()]


@pytest.mark.parametrize(
    ("loop", "moments"),
    [
        ("by_batches", {"step 7": 5, "evaluation 12": 10, "epoch 12": 12, "step 26": 25, "evaluation 48": 45}),
        ("by_epochs", {"step 14": 12, "evaluation 24": 12, "epoch 24": 24, "epoch 48": 48}),
    ],
)
def test_keras_resumes_exactly_with_plateau_early_stopping_and_a_schedule(
    loop: str, moments: dict[str, int], tmp_path: Path
) -> None:
    assert find_spec("keras"), "the program imports it, with its backend"
    whole, killed, resumed = trained(f"loaders.killed_keras:{loop}", tmp_path, *moments)
    assert killed == whole and resumed == [0, *moments.values()]


@pytest.mark.parametrize(
    ("loop", "moments"),
    [
        (
            "within_epochs",
            {"step 7": 6, "evaluation 8": 6, "step 11": 9, "epoch 12": 12, "evaluation 24": 21, "step 26": 24},
        ),
        ("at_epochs", {"step 7": 6, "evaluation 12": 9, "epoch 12": 12, "epoch 24": 24, "evaluation 36": 33}),
        ("on_plateau", {"step 16": 15, "step 31": 30, "evaluation 36": 33}),
        ("on_plateau", {"epoch 24": 24, "evaluation 36": 33}),
        ("by_steps", {"step 11": 9, "step 26": 24, "evaluation 36": 33}),
    ],
)
def test_lightning_resumes_exactly_with_schedulers_and_early_stopping(
    loop: str, moments: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    whole, killed, resumed = trained(f"loaders.killed_lightning:{loop}", tmp_path, *moments)
    assert len({values[2] for name, values in whole.items() if name.startswith("step")}) > 2, "the rate changes"
    assert killed == whole and resumed == [0, *moments.values()]


def test_accelerate_resumes_exactly_with_a_seedable_sampler_and_a_generator(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    moments = {"step 7": 5, "step 10": 10, "step 12": 10, "step 26": 25}
    whole, killed, resumed = trained("loaders.killed_accelerate:seedable", tmp_path, *moments)
    assert killed == whole and resumed == [0, *moments.values()]


def test_accelerate_resumes_as_the_page_says_without_them(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    differs = {}
    for loop in ("unseeded", "without_generator"):
        whole, killed, _ = trained(f"loaders.killed_accelerate:{loop}", tmp_path / loop, "step 26")
        differs[loop] = [whole["step 26"][number] != killed["step 26"][number] for number in (0, 1)]
    assert differs == {"unseeded": [True, True], "without_generator": [False, True]}
