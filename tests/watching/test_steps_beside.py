"""Steps that only the names beside a name show. Judged by the table of steps in docs/explanation/watching.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import pt, text, write

from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units


def checkpoints(root: Path, *names: str) -> dict[int | None, set[str]]:
    """The files of each step, of one directory with these names; each ends in two files."""
    write(root, {name: text(name) if name.endswith(".json") else pt(1, len(name)) for name in names}, 1_000_000)
    with DirectoryTree(root) as tree:
        found = [(unit.step, {*unit.files}) for unit in units(tree.listing())]
    assert len({step for step, _ in found}) == len(found)
    return dict(found)


@pytest.mark.parametrize("name", ["checkpoint_{}_{}.pt", "checkpoint_{}_{}/w.pt", "ckpt-{}-{}.ckpt", "epoch{}_{}.pth"])
def test_updates_of_epoch_are_steps(name: str, root: Path) -> None:
    names = {updates: name.format(epoch, updates) for epoch, updates in ((1, 500), (1, 1000), (2, 1500))}
    assert checkpoints(root, *names.values()) == {updates: {path} for updates, path in names.items()}


def test_shards_of_updates_are_one_checkpoint(root: Path) -> None:
    names = [f"checkpoint_1_{updates}-shard{rank}.pt" for updates in (500, 1000) for rank in (0, 1)]
    assert checkpoints(root, *names) == {500: {*names[:2]}, 1000: {*names[2:]}}


@pytest.mark.parametrize(
    ("steps", "ranks"),
    [((100,), (0, 1, 2)), ((100, 200), (0, 1)), ((0,), (0, 8)), ((1,), (0, 8, 16)), ((2,), (8, 9)), ((1, 2), (8, 16))],
)
def test_ranks_behind_step_are_one_checkpoint(steps: tuple[int, ...], ranks: tuple[int, ...], root: Path) -> None:
    expected = {step: {f"ckpt_{step}_{rank}.pt" for rank in ranks} for step in steps}
    assert checkpoints(root, *(name for names in expected.values() for name in names)) == expected


@pytest.mark.parametrize("head", ["", "net."])
def test_parts_behind_step_are_one_checkpoint(head: str, root: Path) -> None:
    expected = {
        step: {f"{head}{step}.{part}" for part in ("json", "model.pt", "optim.pt", "ema.pt")} for step in (1000, 2000)
    }
    assert checkpoints(root, *(name for names in expected.values() for name in names)) == expected


def test_numbered_layers_of_dump_are_one_checkpoint(root: Path) -> None:
    names = {f"{number}.{kind}.npy" for number in (0, 2) for kind in ("weight", "bias")}
    assert checkpoints(root, *names) == {None: names}


def test_updates_of_epoch_are_restored(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for second, updates in enumerate((500, 1000, 1500)):
        write(home.root, {f"checkpoint_1_{updates}.pt": pt(updates)}, 1_000_000 + second)
    assert {part.checkpoint.step for part in take(home.spool, home.root).parts} == {500, 1000, 1500}
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == {"checkpoint_1_1500.pt": pt(1500)}
