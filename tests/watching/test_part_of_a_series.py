"""A part is never taken as the newest checkpoint, because another one lacks the same file.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import pt, write

from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units

LAYOUTS = {
    "directories": ("step_{}/model.pt", "step_{}/sched.pt", "step_{}/opt.pt"),
    "files": ("model_{}.pt", "sched_{}.pt", "opt_{}.pt"),
    "files of ranks": ("model_{:06}.pt", "optim_{:06}_rank0.pt", "optim_{:06}_rank1.pt"),
    "nested": ("epoch_{0}/step_{0}/model.pt", "epoch_{0}/step_{0}/sched.pt", "epoch_{0}/step_{0}/opt.pt"),
}
layouts = pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)


def save(home: Home, names: tuple[str, ...], step: int, count: int = 3) -> None:
    """Write so many files of a save."""
    saved = {name.format(step): pt(step, number) for number, name in enumerate(names[:count])}
    write(home.root, saved, 1_000_000 + step)


def complete(home: Home) -> set[int | None]:
    with DirectoryTree(home.root) as tree:
        return {unit.step for unit in units(tree.listing()) if not unit.missing_reason}


@layouts
def test_part_is_not_taken_although_older_checkpoints_lost_the_same_file(home: Home, names: tuple[str, ...]) -> None:
    for step in (100, 200, 300):
        save(home, names, step)
    for step in (100, 200):  # by its program, or by the disk
        (home.root / names[2].format(step)).unlink()
    save(home, names, 400, 2)
    assert 400 not in complete(home) and 300 in complete(home)


@layouts
def test_late_watch_takes_neither_the_half_deleted_nor_the_half_written(home: Home, names: tuple[str, ...]) -> None:
    for step in (100, 200, 300):
        save(home, names, step)
    (home.root / names[2].format(100)).unlink()
    save(home, names, 400, 2)
    reported = take(home.spool, home.root)
    assert sorted(part.checkpoint.step for part in reported.parts) == [200, 300] and len(reported.reasons) == 2


def test_file_with_another_name_in_each_save_is_not_absent(home: Home) -> None:
    for step, digest in ((100, "a91f"), (200, "07bc"), (300, "e55d")):
        names = (f"step_{step}/model.pt", f"step_{step}/d/{digest}", f"step_{step}/log.{digest}.pt")
        write(home.root, {name: pt(step) for name in names}, 1_000_000 + step)
        assert len(take(home.spool, home.root).parts) == 1
    assert complete(home) == {100, 200, 300}


def test_best_is_not_needed(home: Home) -> None:
    for step, names in ((100, ("last", "best")), (200, ("last",))):
        write(home.root, {f"{name}_{step}.pt": pt(step) for name in names}, 1_000_000 + step)
        write(home.root, {f"v/step_{step}/{name}.pt": pt(step) for name in names}, 1_000_000 + step)
    assert complete(home) == {100, 200}


def test_save_from_an_earlier_step_on_is_not_taken_in_part(home: Home, capsys) -> None:
    for step in (100, 200, 300):
        save(home, LAYOUTS["directories"], step)
    home.taken()
    (home.root / "step_100/opt.pt").unlink()
    write(home.root, {"step_250/model.pt": pt(250), "step_250/sched.pt": pt(251)}, 2_000_000)
    reported = take(home.spool, home.root)
    assert reported.parts == [] and "step_250" in reported.reasons
    flush(home.spool, home.tier)
    before = files(home.root)
    home.prepare(capsys)
    assert before.items() <= files(home.root).items()


@layouts
@pytest.mark.parametrize("lost", [0, 2], ids=["first file", "last file"])
def test_prepare_calls_a_part_unknown_from_the_first_call_on(
    home: Home, names: tuple[str, ...], lost: int, capsys
) -> None:
    save(home, names, 100)
    home.taken()
    before = files(home.root)
    save(home, names, 200, 1)
    (home.root / names[lost].format(100)).unlink()
    for _ in range(2):
        units_there = home.prepare(capsys)
        assert [unit["verdict"] for unit in units_there.values() if unit["step"] == 200] == ["unknown"]
        assert before.items() <= files(home.root).items()


@layouts
def test_prepare_calls_a_new_whole_checkpoint_sound(home: Home, names: tuple[str, ...], capsys) -> None:
    save(home, names, 100)
    home.taken()
    save(home, names, 200)
    (home.root / names[2].format(100)).unlink()
    verdicts = [unit["verdict"] for unit in home.prepare(capsys).values() if unit["step"] == 200]
    assert verdicts == ["sound"]
