"""A directory whose name is nothing but a number, and that holds the saves of a run: its seed, its job, its fold.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.watched_run import Home, files, take
from support.whole_layouts import pt, text, write

from tierd.watching.checkpoint_names import series_of
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units


def steps(root: Path, names: Iterable[str]) -> dict[str, int | None]:
    write(root, dict.fromkeys(names, b"{}"), 1_000_000)
    with DirectoryTree(root) as tree:
        return {unit.path: unit.step for unit in units(tree.listing())}


def speechbrain(root: Path, day: int) -> None:
    """SpeechBrain, utils/checkpoints.py: `results/<name>/<seed>/save/CKPT+<date>`; it keeps the last two."""
    save = root / "1986/save"
    here = f"1986/save/CKPT+2024-01-0{day}+12-00-00+00"
    saved = {f"{here}/{name}.ckpt": pt(day) for name in ("model", "optimizer", "brain")}
    log = {"1986/train_log.txt": text(day), "1986/hyperparams.yaml": text({}), "1986/save/label_encoder.txt": text({})}
    write(root, saved | {f"{here}/CKPT.yaml": text({"unixtime": day})} | log, 1_000_000 + day)
    for old in sorted(save.glob("CKPT+*"))[:-2]:
        shutil.rmtree(old)


@pytest.mark.parametrize("days", [1, 2, 4])
def test_save_below_a_seed_is_restored_with_the_newest_date(home: Home, capsys, days: int) -> None:
    for day in range(1, days + 1):
        speechbrain(home.root, day)
        home.taken()
    last = {name: content for name, content in files(home.root).items() if "/CKPT+" in name}
    shutil.rmtree(home.root)
    home.root.mkdir()
    home.prepare(capsys)
    assert {name: content for name, content in files(home.root).items() if "/CKPT+" in name} == last


def test_prepare_leaves_saves_below_a_seed_that_are_newer_than_the_watch(home: Home, capsys) -> None:
    for day in (1, 2):
        speechbrain(home.root, day)
    home.taken()
    for day in (3, 4):
        speechbrain(home.root, day)
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == before


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["42/checkpoints/epoch=1-step=10.ckpt", "42/checkpoints/epoch=2-step=20.ckpt", "42/hparams.yaml"], {10, 20}),
        (["0/epoch_1.pt", "0/epoch_2.pt"], {1, 2}),
        (["7/best.pt", "7/checkpoint-5/m.pt", "7/checkpoint-10/m.pt"], {None, 5, 10}),
        (["42/net_100.pth", "42/net_200.pth", "42/net_300.pth"], {100, 200, 300}),
        (["3407/checkpoints/last.ckpt", "3407/metrics.csv"], {None}),
        (["3407/2024-01-01_10/m.pt", "3407/2024-01-02_10/m.pt"], {None}),
    ],
)
def test_number_of_a_directory_with_several_saves_is_no_step(root: Path, names: list[str], found: set) -> None:
    assert {*steps(root, names).values()} == found


@pytest.mark.parametrize(
    "names",
    [
        ["pretrained_model/m.safetensors", "pretrained_model/config.json", "training_state/o.safetensors"],
        ["params/a.npy"],
        ["rank_0/m.pt", "rank_1/m.pt"],
        ["net_0.pt", "net_1.pt", "net_2.pt"],
        ["policy_0/a.pt", "policy_1/a.pt"],
        ["unet_256.pt", "unet_512.pt"],
        ["model_epoch_5.pt", "optimizer_epoch_5.pt"],
    ],
)
def test_number_of_a_directory_with_one_save_is_its_step(root: Path, names: list[str]) -> None:
    found = steps(root, [f"{step}/{name}" for step in (5000, 6000) for name in names])
    assert found == {"5000": 5000, "6000": 6000}


@pytest.mark.parametrize(
    "directory",
    ["runs/CartPole-v1__ppo__{}__170000000{}", "{}/checkpoints", "{}", "lr_0.{}", "runs/seed{}"],
    ids=["cleanrl", "hydra", "number", "sweep", "seed"],
)
def test_newest_of_each_run_in_one_directory_is_restored(home: Home, capsys, directory: str) -> None:
    for step in (1000, 2000, 3000):
        for number in (1, 2):
            write(
                home.root, {f"{directory.format(number, number)}/net_{step}.pth": pt(step + number)}, 1_000_000 + step
            )
        home.taken()
    last = {name: content for name, content in files(home.root).items() if "3000" in name}
    shutil.rmtree(home.root)
    home.root.mkdir()
    home.prepare(capsys)
    assert files(home.root) == last and len(last) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("version_0/epoch=1.ckpt", "version_1/epoch=2.ckpt"),
        ("run-20240101_120000/step_10/m.pt", "run-20240203_130000/step_20/m.pt"),
        ("2024-01-01/12-00-00/0/epoch_1.pt", "2024-01-02/13-10-00/0/epoch_3.pt"),
        ("agent_100.pth", "agent_2300.pth"),
        ("5000/net_1.pt", "6000/net_1.pt"),
        ("CartPole-v1__ppo__1__1700000001/net_1.pth", "CartPole-v1__ppo__1__1700000777/net_2.pth"),
    ],
)
def test_launches_and_steps_are_of_one_series(one: str, other: str) -> None:
    assert series_of([one]) == series_of([other])


def test_checkpoints_named_agent_and_step_are_not_pinned_as_series_of_their_own(home: Home) -> None:
    for step in range(100, 1000, 100):
        write(home.root, {f"agent_{step}.pth": pt(step), f"opt_{step}.pth": pt(step)}, 1_000_000 + step)
        take(home.spool, home.root)
    assert home.spool.pins() == set()
