"""`prepare` brings nothing back that the program deleted of its older checkpoints; the newest gets its lost files back.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from support.watched_run import Home, files
from support.whole_layouts import Files, pt, write

from tierd.cli import run


def verl(step: int) -> Files:
    """verl, ray_trainer.py `_save_checkpoint`; `max_actor_ckpt_to_keep` deletes `actor/` and `critic/`."""
    names = [f"{model}/model_world_size_2_rank_{rank}.pt" for model in ("actor", "critic") for rank in (0, 1)]
    return {f"global_step_{step}/{name}": pt(step) for name in (*names, "data.pt")}


def olmo(step: int) -> Files:
    """OLMo, checkpoint.py: the last sharded directories are kept, and all unsharded ones."""
    return {f"step{step}{name}": pt(step) for name in ("/model/rank0.pt", "/optim/rank0.pt", "-unsharded/model.pt")}


def beside(step: int) -> Files:
    return {f"model_{step}.pt": pt(step), f"optim_{step}.pt": pt(step)}


DELETED = {
    "verl": (verl, ("global_step_{}/actor", "global_step_{}/critic")),
    "OLMo": (olmo, ("step{}",)),
    "files": (beside, ("optim_{}.pt",)),
}
layouts = pytest.mark.parametrize(("layout", "names"), DELETED.values(), ids=DELETED)
Layout = Callable[[int], Files]


def saved(home: Home, layout: Layout, *steps: int) -> None:
    for step in steps:
        write(home.root, layout(step), 1_000_000 + step)
    home.taken()


def delete(home: Home, names: tuple[str, ...], *steps: int) -> None:
    for path in (home.root / name.format(step) for name in names for step in steps):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@layouts
def test_deleted_files_of_older_checkpoints_are_not_put_back(
    home: Home, layout: Layout, names: tuple[str, ...], capsys
) -> None:
    saved(home, layout, 10, 20, 30, 40)
    delete(home, names, 10, 20)
    before = files(home.root)
    for _ in range(2):
        verdicts = {unit["step"]: unit["verdict"] for unit in home.prepare(capsys).values()}
        assert verdicts == {10: "unknown", 20: "unknown", 30: "verified", 40: "verified"}
        assert files(home.root) == before and not (home.root / ".tierd-quarantine").exists()


@layouts
def test_lost_files_of_the_newest_checkpoint_alone_are_put_back(
    home: Home, layout: Layout, names: tuple[str, ...], capsys
) -> None:
    saved(home, layout, 10, 20, 30)
    before = files(home.root)
    delete(home, names, 30)
    home.prepare(capsys)
    assert files(home.root) == before
    delete(home, names, 10)
    before = files(home.root)
    delete(home, names, 30)
    home.prepare(capsys)
    assert files(home.root) == before


@layouts
def test_lost_file_of_an_older_checkpoint_is_put_back_if_no_newer_checkpoint_is_whole(
    home: Home, layout: Layout, names: tuple[str, ...], capsys
) -> None:
    saved(home, layout, 10)
    before = files(home.root)
    write(home.root, dict([*layout(20).items()][:1]), 1_000_020)
    delete(home, names, 10)
    home.prepare(capsys)
    assert before.items() <= files(home.root).items()


def test_damaged_file_of_an_older_checkpoint_is_still_replaced(home: Home, capsys) -> None:
    saved(home, beside, 10, 20)
    before = files(home.root)
    write(home.root, {"model_10.pt": pt(11)}, 1_000_010)
    home.prepare(capsys)
    assert files(home.root) == before


def test_best_is_left_without_its_twin_and_put_back_itself(home: Home, capsys) -> None:
    for epoch in (3, 4, 5):
        best = {"best_acc_epoch_3.pth": pt(3)} if epoch == 3 else {}
        write(home.root, {f"epoch_{epoch}.pth": pt(epoch)} | best, 1_000_000 + epoch)
    home.taken()
    (home.root / "epoch_3.pth").unlink()
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == before
    write(home.root, {"epoch_3.pth": pt(3)}, 1_000_003)
    before = files(home.root)
    (home.root / "best_acc_epoch_3.pth").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


@pytest.mark.parametrize("text", ["global_step_10", "10", "link"])
def test_lost_files_that_a_pointer_names_are_put_back(home: Home, text: str, capsys) -> None:
    saved(home, verl, 10, 20)
    before = files(home.root)
    if text == "link":
        (home.root / "last").symlink_to("global_step_10")
    else:
        (home.root / "latest_checkpointed_iteration.txt").write_text(text)
    shutil.rmtree(home.root / "global_step_10/actor")
    home.prepare(capsys)
    assert before.items() <= files(home.root).items()


def test_lost_file_of_another_run_is_put_back(home: Home, capsys) -> None:
    for number, step in ((1, 30), (2, 40)):
        write(home.root, {f"run_{number}/{name}": data for name, data in beside(step).items()}, 1_000_000 + step)
    home.taken()
    before = files(home.root)
    (home.root / "run_1/optim_30.pt").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


def test_chosen_step_is_restored_with_its_deleted_files(home: Home, capsys) -> None:
    saved(home, verl, 10, 20)
    before = files(home.root)
    shutil.rmtree(home.root / "global_step_10/actor")
    assert run(["restore", str(home.tier), "--run", "r", "--into", str(home.root), "--step", "10"]) == 0
    assert files(home.root) == before
