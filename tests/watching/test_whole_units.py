"""A checkpoint of a program that tierd does not know is taken whole or refused aloud, and never moved while it is good.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import SERIES, Files, directory_of_states, pt, text, write

from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.step_in_name import directory_step, step_in
from tierd.watching.unit import Unit
from tierd.watching.unit_detection import units

STEPS = (20, 30, 40)
series = pytest.mark.parametrize("layout", SERIES, ids=lambda layout: layout.__name__)


def saved(root: Path, layout: Callable[[int], Files], steps: tuple[int, ...] = STEPS) -> None:
    for step in steps:
        write(root, layout(step), 1_000_000 + step)


def listed(root: Path) -> list[Unit]:
    with DirectoryTree(root) as tree:
        return units(tree.listing())


@series
def test_unit_is_all_files_of_one_step(root: Path, layout: Callable[[int], Files]) -> None:
    saved(root, layout)
    found = {unit.step: unit for unit in listed(root)}
    assert {step: set(unit.files) for step, unit in found.items()} == {step: set(layout(step)) for step in STEPS}
    assert [unit.missing_reason for unit in found.values()] == [None] * len(STEPS)


@pytest.fixture
def home_with_tier(home: Home) -> Home:
    """A home whose tier has no checkpoint."""
    flush(home.spool, home.tier)
    return home


@series
def test_prepare_moves_no_good_file_of_a_run_that_no_tier_has(home_with_tier: Home, layout, capsys) -> None:
    home = home_with_tier
    saved(home.root, layout)
    before = files(home.root)
    verdicts = {unit["verdict"] for unit in home.prepare(capsys).values()}
    assert verdicts <= {"sound", "unknown"} and files(home.root) == before
    assert not (home.root / ".tierd-quarantine").exists()


@series
def test_newest_checkpoint_is_restored_byte_for_byte(home: Home, layout, capsys) -> None:
    saved(home.root, layout)
    home.taken()
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"verified"}
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == layout(STEPS[-1])


@series
def test_first_checkpoint_of_a_series_that_lacks_a_file_is_not_taken_and_not_moved(
    home_with_tier: Home, layout, capsys
) -> None:
    home = home_with_tier
    saved(home.root, layout, STEPS[:2])
    whole = layout(STEPS[-1])
    if len(whole) == 1 or not any("/" in name or "rank" in name for name in whole):
        pytest.skip("of files beside each other nothing says which are one save's")
    lacks = next((name for name in whole if name.endswith(("random_states_0.pkl", "trainer_state.json"))), max(whole))
    write(home.root, {name: data for name, data in whole.items() if name != lacks}, 1_000_100)
    before = files(home.root)
    reported = take(home.spool, home.root)
    assert sorted(part.checkpoint.step for part in reported.parts) == sorted(STEPS[:2])
    unit = next(unit for unit in listed(home.root) if unit.step == STEPS[-1])
    assert unit.missing_reason
    home.prepare(capsys)
    assert unit.is_unfinished or files(home.root) == before


def test_unknown_program_is_not_named(root: Path) -> None:
    """Names that HF Trainer and Accelerate use as well prove nothing."""
    write(root, {"checkpoint-5/optimizer.pt": pt(5), "checkpoint-5/w.pt": pt(5), "checkpoint-6/w.pt": pt(6)}, 10)
    assert {unit.layout.program for unit in listed(root)} == {"directory"}


def test_prepare_moves_the_save_in_which_a_known_program_was_killed(home_with_tier: Home, capsys) -> None:
    """Its other checkpoints name the program, and this one lacks the file that it writes last."""
    home = home_with_tier
    for step in (1, 2):
        whole = {"optimizer.pt": pt(step), "trainer_state.json": text({"global_step": step})}
        write(home.root, {f"checkpoint-{step}/{name}": data for name, data in whole.items()}, step)
    write(home.root, {"checkpoint-3/optimizer.pt": pt(3)}, 3)
    found = home.prepare(capsys)
    assert {path: unit["verdict"] for path, unit in found.items()} == {
        "checkpoint-1": "sound",
        "checkpoint-2": "sound",
        "checkpoint-3": "unfinished",
    }
    assert not (home.root / "checkpoint-3").exists()


def test_files_without_a_step_in_one_directory_are_one_checkpoint(home: Home, capsys) -> None:
    write(home.root, {"last.pt": pt(1), "best.pt": pt(2)}, 10)
    home.taken()
    write(home.root, {"last.pt": pt(3)}, 30)
    home.taken()
    right = files(home.root)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == right


def test_prepare_moves_only_the_damaged_one_of_files_without_a_step(home_with_tier: Home, capsys) -> None:
    home = home_with_tier
    write(home.root, {"last.pt": pt(1), "best.pt": pt(2)[:-40]}, 10)
    home.prepare(capsys)
    assert sorted(files(home.root)) == ["last.pt"]


def test_prepare_leaves_the_sound_file_beside_a_damaged_file(home: Home, capsys) -> None:
    write(home.root, {"a_10.pt": pt(10), "b_10.pt": pt(11)}, 10)
    home.taken()
    right, inode = files(home.root), (home.root / "a_10.pt").stat().st_ino
    write(home.root, {"b_10.pt": pt(11)[:-40]}, 10)
    (unit,) = home.prepare(capsys).values()
    assert (unit["verdict"], unit["replaced"]) == ("damaged", True) and files(home.root) == right
    assert (home.root / "a_10.pt").stat().st_ino == inode
    assert [path.name for path in (home.root / ".tierd-quarantine").iterdir()] == ["b_10.pt"]


def test_directory_of_results_without_steps_is_not_one_checkpoint(root: Path) -> None:
    """Its log changes for as long as the program runs, so it would never rest."""
    write(root, {"run/weights/last.pt": pt(1), "run/weights/best.pt": pt(2), "run/events.out.tfevents.1": b"log"}, 10)
    (unit,) = listed(root)
    assert unit.files == ("run/weights/best.pt", "run/weights/last.pt")


def test_directory_with_subdirectories_and_without_steps_is_one_checkpoint(root: Path) -> None:
    write(root, {"best/unet/w.safetensors": b"", "best/vae/w.safetensors": b"", "best/index.json": b"{}"}, 10)
    (unit,) = listed(root)
    assert (unit.path, unit.step, len(unit.files)) == ("best", None, 3)


def test_numbered_directory_of_runs_is_no_checkpoint(root: Path) -> None:
    saved(root / "run_3", directory_of_states)
    assert [unit.step for unit in listed(root)] == [*STEPS]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(
            ("epoch=1-step=20.ckpt", 20),
            ("ep0-ba10-rank0.pt", 10),
            ("ckpt-05-1.0659.weights.h5", 5),
            ("epoch10.pt", 10),
        ),
        *(("checkpoint-10.pth.tar", 10), ("ckpt_500_rank_1.pt", 500), ("model_world_size_2_rank_1.pt", None)),
        *(("lora-000004-state", 4), ("rl_model_10000_steps.zip", 10000), ("5_net_G.pth", 5), ("resnet50.pth", None)),
        *(("llama-7b.safetensors", None), ("model-00001-of-00002.safetensors", None), ("step10k.pt", None)),
        *(("step_20241123.pt", 20241123), ("model_20241123.pt", None), ("checkpoint_epoch_12_loss_0.34.pth", 12)),
        *(("model010000.pt", 10000), ("ema_0.9999_010000.pt", 10000), ("resnet152.pt", None), ("10000.state", 10000)),
        *(("mp_rank_00_model_states.pt", None), ("val_loss=0.25-step=7.ckpt", 7), ("epoch_latest.pt", None)),
    ],
)
def test_step_in_name_is_no_rank_size_date_or_fraction(name: str, step: int | None) -> None:
    assert step_in(name) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("005000", 5000),
        ("iter_0000040", 40),
        ("run_3", None),
        ("version_0", None),
        ("a-5", None),
    ],
)
def test_step_of_a_directory_needs_a_word_or_stands_alone(name: str, step: int | None) -> None:
    assert directory_step(name) == step


@pytest.mark.parametrize("name", ["model_epoch_{}_iter_{}.pth", "epoch{}_step{}/model.pt", "recovery-{}-{}.pth.tar"])
def test_steps_that_begin_anew_in_each_epoch_are_checkpoints_of_their_own(home: Home, name: str, capsys) -> None:
    for number, (epoch, step) in enumerate([(1, 100), (1, 900), (2, 100)]):
        write(home.root, {name.format(epoch, step): pt(number)}, 1_000_000 + number)
        assert len(take(home.spool, home.root).parts) == 1
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == {name.format(2, 100): pt(2)}


def test_newest_checkpoint_of_each_fold_is_restored_if_folds_are_trained_in_turn(home: Home, capsys) -> None:
    for number, (fold, epoch) in enumerate([(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]):
        write(home.root, {f"fold{fold}_epoch_{epoch}.pt": pt(number)}, 1_000_000 + number)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == {"fold1_epoch_2.pt": pt(4), "fold0_epoch_3.pt": pt(2)}
