"""A checkpoint that was taken and has lost files since, or got other times: its contents say as which it was taken.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import pt, write

NAMES = {
    "directories": ("step_{}/m.pt", "step_{}/o.pt"),
    "files beside each other": ("model_{}.pt", "optim_{}.pt"),
    "Trainer": ("checkpoint-{}/model.safetensors.pt", "checkpoint-{}/trainer_state.json"),
}
layouts = pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
alone = pytest.mark.parametrize("alone", [False, True], ids=["beside older ones", "alone"])


def saves(home: Home, names: tuple[str, ...], *steps: int) -> dict[str, bytes]:
    """Save these steps, a file a second, and take them; return the files of the last one."""
    saved: dict[str, bytes] = {}
    for step in steps:
        saved = {name.format(step): pt(step, number) for number, name in enumerate(names)}
        saved |= {name: b'{"global_step": %d}' % step for name in saved if name.endswith(".json")}
        for second, name in enumerate(saved):
            write(home.root, {name: saved[name]}, 1_000_000 + step + second)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    return saved


def lose_others(root: Path, saved: dict[str, bytes]) -> None:
    for name in files(root).keys() - saved.keys():
        (root / name).unlink()
    for path in root.iterdir():
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def touch(root: Path, second: int) -> None:
    """Give every file a time of now, as `cp -r` does, the oldest checkpoint last."""
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        if path.is_file():
            os.utime(path, (second + number, second + number))


@alone
@layouts
@pytest.mark.parametrize("lost", [0, 1], ids=["first file", "last file"])
def test_lost_file_of_the_newest_checkpoint_is_put_back(
    home: Home, capsys, names: tuple[str, ...], lost: int, alone: bool
) -> None:
    saved = saves(home, names, 100, 200, 300)
    if alone:
        lose_others(home.root, saved)
    before = files(home.root)
    (home.root / names[lost].format(300)).unlink()
    units = home.prepare(capsys).values()
    (damaged,) = (unit for unit in units if unit["verdict"] != "verified")
    assert damaged["verdict"] == "damaged" and damaged["replaced"]
    assert f"{names[lost].format(300)} is not there" in str(damaged["why"])
    assert files(home.root) == before


def test_lost_file_of_a_copy_without_times_is_put_back(home: Home, capsys) -> None:
    saves(home, NAMES["directories"], 100, 200, 300)
    before = files(home.root)
    touch(home.root, 2_000_000)
    (home.root / "step_300/o.pt").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


def test_save_of_the_same_step_that_was_begun_anew_is_left(home: Home, capsys) -> None:
    saves(home, NAMES["directories"], 100, 200, 300)
    shutil.rmtree(home.root / "step_300")
    write(home.root, {"step_300/m.pt": pt(301)}, 2_000_000)
    before = files(home.root)
    units = home.prepare(capsys)
    assert units["step_300"]["verdict"] == "unknown" and files(home.root) == before


def test_file_that_became_a_link_is_left(home: Home, capsys) -> None:
    """Somebody moved the optimizer's state to another disk."""
    saves(home, NAMES["directories"], 100, 200)
    elsewhere = home.root.parent / "o.pt"
    shutil.move(home.root / "step_200/o.pt", elsewhere)
    (home.root / "step_200/o.pt").symlink_to(elsewhere)
    home.prepare(capsys)
    assert (home.root / "step_200/o.pt").is_symlink()


def test_lost_checkpoint_is_restored_into_a_copy_without_times(home: Home, capsys) -> None:
    """The times of the others are later than all checkpoints, and their contents say that they are older."""
    saves(home, NAMES["directories"], 100, 200, 300)
    before = files(home.root)
    touch(home.root, 2_000_000)
    shutil.rmtree(home.root / "step_300")
    units = home.prepare(capsys)
    assert {path: unit["verdict"] for path, unit in units.items()} == {
        "step_100": "verified",
        "step_200": "verified",
        "step_300": "missing",
    }
    assert files(home.root) == before


def test_files_without_a_step_are_known_in_a_copy_without_times(home: Home, capsys) -> None:
    saves(home, ("epoch_{}.pt", "last.pt", "best.pt"), 100, 200)
    before = files(home.root)
    touch(home.root, 2_000_000)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"verified"}
    (home.root / "best.pt").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


def test_rest_without_a_copy_is_left(home: Home, capsys) -> None:
    """Only the spool knows the checkpoint, and its program may have deleted the file on purpose."""
    write(home.root, {"step_10/m.pt": pt(10)}, 10)
    write(home.root, {"step_10/o.pt": pt(11)}, 20)
    flush(home.spool, home.tier)
    take(home.spool, home.root)
    (home.root / "step_10/o.pt").unlink()
    before = files(home.root)
    assert home.prepare(capsys)["step_10"]["verdict"] == "unknown" and files(home.root) == before
