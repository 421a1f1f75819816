"""A save of `TrainableState` holds the trained part; a restore is exact, and refuses a model with another base."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from check.bed.forked import check_forked
from torch import nn

import tierd
from tierd.adapters.trainable import TrainableState
from tierd.core.errors import ConfigError, StateMismatch


class Net(nn.Module):
    """A frozen base with a norm that counts, below a trained head; `tied` is the base's weight by another name."""

    def __init__(self, seed: int = 0, width: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 64)
        self.norm = nn.BatchNorm1d(64)
        self.tied = self.base.weight
        torch.manual_seed(seed + 100)
        self.head = nn.Linear(64, width)
        self.base.requires_grad_(False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.base(values)))


def train(model: Net, steps: int, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def saved(home: Path, entry: Any, step: int = 1) -> int:
    """Save, and return the bytes of the checkpoint's tensors."""
    with tierd.Checkpointer(home, "run", to=[]) as ckpt:
        ckpt.save(step, {"model": entry})
    return max(path.stat().st_size for path in home.glob("run/*/*/tensors.safetensors"))


def restored(home: Path, entry: Any) -> None:
    with tierd.Checkpointer(home, "run", to=[]) as ckpt:
        assert ckpt.restore({"model": entry})


def test_model_that_was_built_anew_is_restored_exactly(tmp_path):
    model = Net()
    entry = TrainableState(model)
    train(model, 3)
    size = saved(tmp_path, entry)
    again = Net()
    again.head.reset_parameters()
    restored(tmp_path, TrainableState(again))
    assert is_equal(model, again), "head, and the norm's running mean"
    assert size < saved(tmp_path / "whole", model) and set(entry.state_dict()["frozen"]) == {
        "base.weight",
        "base.bias",
        "tied",
    }


OTHERS: dict[str, tuple[Callable[[], Net], str]] = {
    "another base": (
        lambda: Net(seed=1),
        r"3 of 3 frozen parameters are not those .*: \S+ was float32\[64, 4\] \w+",
    ),
    "another dtype": (
        lambda: Net().bfloat16(),
        r"norm\.weight: float32\[64\] in the checkpoint, bfloat16\[64\] here",
    ),
    "another head": (lambda: Net(width=3), r"head\.weight: float32\[2, 64\] in the checkpoint, float32\[3, 64\] here"),
    "a layer more": (lambda: added(Net()), r"extra\.bias, extra\.weight not in the checkpoint"),
    "a layer fewer": (lambda: removed(Net()), r"norm\.bias, .* and 2 more in the checkpoint, but not in the model"),
}


def added(model: Net) -> Net:
    model.extra = nn.Linear(1, 1)
    return model


def removed(model: Net) -> Net:
    model.norm = nn.Identity()
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_other_model_is_refused_before_anything_is_loaded(tmp_path, name):
    model = Net()
    entry = TrainableState(model)
    train(model, 3)
    saved(tmp_path, entry)
    build, message = OTHERS[name]
    other = build()
    before = copy.deepcopy(other)
    with pytest.raises(StateMismatch, match=message):
        restored(tmp_path, TrainableState(other))
    assert is_equal(other, before)


def test_plain_model_does_not_take_the_trained_part_alone(tmp_path):
    saved(tmp_path, TrainableState(Net()))
    with pytest.raises(StateMismatch):
        restored(tmp_path, Net())


def test_parameter_that_was_trained_for_a_while_is_in_every_later_save(tmp_path):
    """Unfrozen, trained and frozen again, before a save and after a resume: its bytes are not the base's."""
    model = Net()
    entry = TrainableState(model)
    model.base.requires_grad_(True)
    train(model, 2)
    model.base.requires_grad_(False)
    saved(tmp_path, entry, 1)
    second = Net()
    entry = TrainableState(second)
    restored(tmp_path, entry)
    assert is_equal(model, second)
    train(second, 2)
    saved(tmp_path, entry, 2)
    third = Net()
    restored(tmp_path, TrainableState(third))
    assert is_equal(second, third)


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data, as a moving average"])
def test_parameter_that_was_written_in_place_is_saved(tmp_path, caplog, through_data):
    model = Net()
    entry = TrainableState(model)
    with torch.no_grad():
        (model.base.bias.data if through_data else model.base.bias).add_(1)
    saved(tmp_path, entry)
    assert "1 parameters were frozen and are saved from now on, as base.bias is" in caplog.text
    again = Net()
    restored(tmp_path, TrainableState(again))
    assert is_equal(model, again)


def test_base_that_moved_or_was_written_with_the_same_bytes_is_still_left_out(tmp_path):
    model = Net()
    entry = TrainableState(model)
    with torch.no_grad():
        model.base.weight.copy_(model.base.weight.clone())
    model.base.bias.data = model.base.bias.data.clone()
    assert set(entry.state_dict()["frozen"]) == {"base.weight", "base.bias", "tied"}


def test_run_that_saved_whole_models_continues_with_the_trained_part(tmp_path):
    """What the whole model had that the base as it is built has not, is saved from then on."""
    model = Net()
    with torch.no_grad():
        model.base.bias.add_(1)
    train(model, 2)
    saved(tmp_path, model, 1)
    second = Net()
    entry = TrainableState(second)
    restored(tmp_path, entry)
    assert is_equal(model, second)
    train(second, 2)
    saved(tmp_path, entry, 2)
    assert set(entry.state_dict()["frozen"]) == {"base.weight", "tied"}
    third = Net()
    restored(tmp_path, TrainableState(third))
    assert is_equal(second, third)


def test_parameters_without_bytes_here_are_refused():
    with pytest.raises(ConfigError, match="weight: on the meta device"):
        TrainableState(nn.Linear(2, 2, device="meta"))


# -- PEFT in Trainer --------------------------------------------------------------------------------------------------


@pytest.mark.loaders
@pytest.mark.timeout(1800)
def test_killed_lora_training_resumes_exactly() -> None:
    """Killed in the middle of an epoch, at its end, and during a save."""
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    report, _ = check_forked("loaders.loops_peft:train", steps=24, kill_at=("4", "12", "17+save"), patience=300)
    assert report.ok and report.exact, str(report)
    assert tuple(launch.began for launch in report.launches) == (0, 3, 12, 15), str(report)


@pytest.mark.loaders
def test_lora_saves_hold_the_adapter_alone_and_refuse_another_base(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    from loaders.loops_peft import built, trainer_of

    from tierd.adapters.transformers import TierdCallback

    def trained(home: Path, model: Any, steps: int, **options: Any) -> int:
        """Train to a step. Returns the bytes of the newest checkpoint's tensors."""
        with tierd.Checkpointer(home, "run", to=[]) as ckpt:
            saving = TierdCallback(ckpt, every_steps=4, **options)
            trainer = trainer_of(model, home, saving, max_steps=steps)
            trainer.train(resume_from_checkpoint=saving.resume(trainer))
            assert trainer.state.global_step == steps
        return sorted(home.glob("run/*/*/tensors.safetensors"))[-1].stat().st_size

    parts = trained(tmp_path / "parts", built(1, 2), 8, trainable_only=True)
    whole = trained(tmp_path / "whole", built(1, 2), 8)
    base = sum(value.nbytes for value in built(1, 2).parameters() if not value.requires_grad)
    assert whole - parts > 0.9 * base
    with pytest.raises(StateMismatch, match=r"frozen parameters are not those .* Build the model from the same base"):
        trained(tmp_path / "parts", built(7, 2), 12, trainable_only=True)
    with pytest.raises(StateMismatch):
        trained(tmp_path / "parts", built(1, 2), 12)
    model, wanted = built(1, 98), built(1, 99)  # with adapters that are drawn anew
    for home, entry in (("parts", TrainableState(model)), ("whole", wanted)):
        with tierd.Checkpointer(tmp_path / home, "run", to=[]) as ckpt:
            assert ckpt.restore({"model": entry}, step=8, only="model")
    assert is_equal(model, wanted)


@pytest.mark.loaders
def test_model_that_train_makes_itself_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    from loaders.loops_peft import Texts, built
    from transformers import Trainer, TrainingArguments

    from tierd.adapters.transformers import TierdCallback

    with tierd.Checkpointer(tmp_path, "run", to=[]) as ckpt:
        saving = TierdCallback(ckpt, every_steps=4, trainable_only=True)
        args = TrainingArguments(output_dir=str(tmp_path / "out"), save_strategy="no", report_to=[], use_cpu=True)
        trainer = Trainer(model_init=lambda: built(1, 2), args=args, train_dataset=Texts(), callbacks=[saving])
        with pytest.raises(ConfigError, match="model_init"):
            trainer.train(resume_from_checkpoint=saving.resume(trainer))
