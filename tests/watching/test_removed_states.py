"""A program deletes the states of its older checkpoints and keeps their weights: these are whole, and stay so.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import shutil

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import Files, pt, tensors, write


def kohya(step: int) -> Files:
    """sd-scripts, train_network.py `save_model`, train_util.py `save_and_remove_state_on_epoch_end`."""
    state = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    saved = {f"lora-{step:06}-state/{name}": tensors(step) if "safe" in name else pt(step) for name in state}
    return {f"lora-{step:06}.safetensors": tensors(step)} | saved


def olmo(step: int) -> Files:
    """OLMo, checkpoint.py: a sharded directory of each save, and an unsharded one of every second."""
    names = [f"step{step}/{name}/rank{rank}.pt" for name in ("model", "optim") for rank in (0, 1)]
    names += [f"step{step}-unsharded/{name}.pt" for name in ("model", "optim") if step % 2000 == 0]
    return dict.fromkeys(names, pt(step))


def save(home: Home, step: int) -> None:
    """Save a step, and delete the state of the one before it (`--save_last_n_epochs_state 1`)."""
    write(home.root, kohya(step), 1_000_000 + step)
    shutil.rmtree(home.root / f"lora-{step - 1:06}-state", ignore_errors=True)


@pytest.mark.parametrize("watched", [(), (2,), (1, 3), (1, 2, 3)])
def test_weights_without_their_deleted_state_are_taken_and_not_moved(
    home: Home, watched: tuple[int, ...], capsys
) -> None:
    for step in (1, 2, 3, 4):
        save(home, step)
        if step in watched or step == 4:
            assert not take(home.spool, home.root).reasons
    assert {part.checkpoint.step for part in home.spool.parts("r")} == {1, 2, 3, 4}
    flush(home.spool, home.tier)
    before = files(home.root)
    home.prepare(capsys)
    assert before.items() <= files(home.root).items()
    assert not (home.root / ".tierd-quarantine").exists()


def test_prepare_moves_no_weights_that_no_watch_took(home: Home, capsys) -> None:
    flush(home.spool, home.tier)
    for step in (1, 2, 3):
        save(home, step)
    before = files(home.root)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"sound"}
    assert files(home.root) == before


def test_newest_weights_without_a_state_are_reported_and_not_moved(home: Home, capsys) -> None:
    """Their program may have been killed before it wrote the state, from which alone it resumes."""
    for step in (1, 2):
        save(home, step)
    home.taken()
    write(home.root, {"lora-000003.safetensors": tensors(3)}, 1_000_003)
    before = files(home.root)
    assert [*take(home.spool, home.root).reasons] == ["lora-000003.safetensors"]
    assert home.prepare(capsys)["lora-000003.safetensors"]["verdict"] == "unknown"
    assert before.items() <= files(home.root).items()


def test_prepare_leaves_an_older_directory_whose_program_deleted_its_state(home: Home, capsys) -> None:
    flush(home.spool, home.tier)
    names = ("model.safetensors", "optimizer.bin", "random_states_0.pkl")
    for step in (1, 2, 3):
        kept = names if step != 2 else names[:1]
        write(home.root, {f"checkpoint-{step}/{name}": tensors(step) for name in kept}, step)
    before = files(home.root)
    assert home.prepare(capsys)["checkpoint-2"]["verdict"] == "unknown"
    assert files(home.root) == before


@pytest.mark.parametrize("steps", [(1000, 2000), (2000, 3000, 4000)])
def test_directory_without_its_seldom_written_companion_is_taken(home: Home, steps: tuple[int, ...]) -> None:
    for step in steps:
        write(home.root, olmo(step), 1_000_000 + step)
    assert not take(home.spool, home.root).reasons
    assert {part.checkpoint.step for part in home.spool.parts("r")} == {*steps}
