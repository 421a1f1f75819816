"""Layouts that people who did not know the rules read in the sources of public programs: whole, or not taken.

Judged by the words of docs/explanation/watching.md. Each test names the program's source.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.watched_run import Home, files, flush, take
from support.whole_layouts import Files, pt, tensors, write

LAYOUTS = {
    "monodepth2, trainer.py": (
        "models/weights_{}/encoder.pth",
        "models/weights_{}/depth.pth",
        "models/weights_{}/adam.pth",
    ),
    "pfrl, experiments/evaluator.py": ("out/{}_checkpoint/model.pt", "out/{}_checkpoint/optimizer.pt"),
    "allennlp, training/checkpointer.py": ("model_state_e2_b{}.th", "training_state_e2_b{}.th"),
    "BigGraph, checkpoint_manager.py": ("embeddings_user_0.v{}.pt", "embeddings_user_1.v{}.pt", "model.v{}.pt"),
    "HugeCTR, snapshots": ("wdl_dense_{}.model", "wdl0_sparse_{}.model/key", "wdl0_sparse_{}.model/emb_vector"),
    "OneTrainer, GenericTrainer.py": (
        "backup/2024-01-01_12-01-00-backup-{}-1-0/lora/lora.safetensors",
        "backup/2024-01-01_12-01-00-backup-{}-1-0/meta.json",
        "backup/2024-01-01_12-01-00-backup-{}-1-0/optimizer/optimizer.pt",
    ),
    "graphstorm, trainers": (
        "epoch-1-iter-{}/config.json",
        "epoch-1-iter-{}/model.bin",
        "epoch-1-iter-{}/optimizers.bin",
    ),
}
layouts = pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)


def save(names: tuple[str, ...], step: int) -> Files:
    kinds = {"safetensors": tensors(step), "json": b'{"a": 1}'}
    return {name.format(step): kinds.get(name.rpartition(".")[2], pt(step, at)) for at, name in enumerate(names)}


@layouts
def test_newest_save_is_restored_and_a_part_of_the_next_is_not_taken(
    home: Home, names: tuple[str, ...], capsys
) -> None:
    for step in (1000, 2000):
        write(home.root, save(names, step), 1_000_000 + step)
    assert len(take(home.spool, home.root).parts) == 2
    begun = dict([*save(names, 3000).items()][:1])
    write(home.root, begun, 1_003_000)
    assert take(home.spool, home.root).parts == []
    flush(home.spool, home.tier)
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == before
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == save(names, 2000)


@pytest.mark.parametrize(
    "below", ["save/2024-01-01_12-0{}-30-save-{}00-{}-0.safetensors", "00/training_checkpoints/ckpt_mp0_v{}.tar"]
)
def test_numbers_after_a_date_are_steps_and_a_run_directory_has_none(home: Home, below: str) -> None:
    """OneTrainer, GenericTrainer.py; makani, utils/driver.py, whose `00/` has a configuration beside checkpoints."""
    for step in (1, 2, 3):
        write(home.root, {below.format(*[step] * 3): tensors(step) if "save" in below else pt(step)}, 1_000_000 + step)
    write(home.root, {"00/config.json": b"{}"}, 1_000_000)
    reported = take(home.spool, home.root)
    assert len(reported.parts) == (3 if "save" in below else 1) and not reported.reasons


def test_epoch_that_was_saved_between_iterations_is_taken(home: Home) -> None:
    """graphstorm names the last save of an epoch without an iteration."""
    for number, name in enumerate(("epoch-0", "epoch-1", "epoch-1-iter-500")):
        saved = {"config.json": b"{}", "model.bin": pt(number), "optimizers.bin": pt(number, 1)}
        write(home.root, {f"{name}/{file}": data for file, data in saved.items()}, 1_000_000 + number)
    reported = take(home.spool, home.root)
    assert len(reported.parts) == 3 and not reported.reasons


def dcp_save(root: Path, step: int, *beside: str) -> None:
    """fms-fsdp, checkpointing_utils.py: DCP's files, then the loaders' states and metadata.pth."""
    home = root / f"checkpoints/step_{step}_ckp"
    dcp.save({"weight": torch.full((20,), float(step))}, checkpoint_id=home, no_dist=True)
    for path in home.iterdir():
        os.utime(path, ns=(0, (1_000_000 + step) * 10**9))
    write(root, {f"checkpoints/step_{step}_ckp/{name}": pt(step, 3) for name in beside}, 1_000_000 + step)


def test_part_of_a_loop_that_writes_more_files_after_those_of_dcp_is_not_taken(home: Home) -> None:
    for step in (1000, 2000):
        dcp_save(home.root, step, "loader_state_0.pth", "metadata.pth")
    dcp_save(home.root, 3000, "loader_state_0.pth")
    assert sorted(part.checkpoint.step for part in take(home.spool, home.root).parts) == [1000, 2000]


# The saves of a program, and whether a file of them is of its newest checkpoint or has no step.
RESTORED: dict[str, tuple[list[Files], Callable[[str], bool]]] = {
    "RotatE, codes/run.py: torch.save to `checkpoint`": (
        [{"checkpoint": pt(1, 5000), "config.json": b"{}"}],
        lambda name: name == "checkpoint",
    ),
    "PaddleDetection, utils/checkpoint.py: .pdema is the moving average": (
        [
            {f"{name}.{ending}": pt(number) for number, ending in enumerate(("pdparams", "pdema", "pdopt"))}
            for name in ("9", "19", "best_model", "model_final")
        ],
        lambda name: not name.startswith("9."),
    ),
    "GraphGym, checkpoint.py: the directory is the seed's, and one checkpoint is left in it": (
        [{f"cora/{seed}/ckpt/399.ckpt": pt(seed), f"cora/{seed}/train/stats.json": b"{}"} for seed in (0, 1)],
        lambda name: "ckpt" in name,
    ),
    "TD-MPC2, common/logger.py": (
        [
            {f"logs/walker-run/{seed}/default/models/{name}.pt": pt(seed) for seed in (1, 2)}
            for name in ("50000", "100000", "final")
        ],
        lambda name: "50000" not in name,
    ),
    "a best file beside others in a numbered directory": (
        [{f"{epoch}/{name}": pt(epoch) for name in ("net.pt", "best.pt")} for epoch in (1, 2, 3)],
        lambda name: name.startswith("3/"),
    ),
}


@pytest.mark.parametrize("program", RESTORED)
def test_newest_checkpoint_and_files_without_a_step_are_restored(home: Home, program: str, capsys) -> None:
    saves, is_restored = RESTORED[program]
    for second, saved in enumerate(saves):
        write(home.root, saved, 1_000_000 + second)
    home.taken()
    newest = {name: data for name, data in files(home.root).items() if is_restored(name)}
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == newest


def test_pointers_of_ranks_name_one_checkpoint_after_a_kill_between_ranks(home: Home, capsys) -> None:
    """dinov2, fsdp: each rank has a file and a pointer of its own."""

    def rank(step: int, number: int) -> Files:
        name = f"model_{step:07}.rank_{number}.pth"
        return {name: pt(step, number), f"last_checkpoint.rank_{number}": name.encode()}

    for step in (1249, 2499):
        for number in range(4):
            write(home.root, rank(step, number), 1_000_000 + step)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    whole = files(home.root)
    for number in range(2):
        write(home.root, rank(3749, number), 1_003_749)
    home.prepare(capsys)
    assert {name: data for name, data in files(home.root).items() if "3749" not in name} == whole


def test_temporary_directory_of_a_number_is_moved(home: Home, capsys) -> None:
    """openpi, train_pytorch.py: `tmp_3000/` is renamed to `3000/`."""
    write(home.root, {"2000/net.safetensors": tensors(1), "tmp_3000/net.safetensors": tensors(2)}, 1_000_000)
    home.taken()
    verdicts = {path: unit["verdict"] for path, unit in home.prepare(capsys).items()}
    assert verdicts == {"2000": "verified", "tmp_3000": "unfinished"}


def test_numbered_directories_whose_files_steps_grow_with_them_are_checkpoints(home: Home) -> None:
    for epoch in (1, 2, 3):
        write(home.root, {f"{epoch}/model_{epoch}00.pt": pt(epoch), f"{epoch}/state.pt": pt(epoch)}, 1_000_000 + epoch)
    assert sorted(part.checkpoint.step for part in take(home.spool, home.root).parts) == [1, 2, 3]


def test_numbers_of_shards_make_no_step_of_a_numbered_directory(home: Home) -> None:
    """Seed 7501693 of the kind watched."""
    names = ("actor/trainer.ckpt", *(f"shard-{number:05}-of-00003.bin" for number in range(3)))
    for step in (2, 3):
        saved = {f"epoch_1/{step:07}/{name}": pt(step, number) for number, name in enumerate(names)}
        write(home.root, saved, 1_000_000 + step)
    assert sorted(part.checkpoint.step for part in take(home.spool, home.root).parts) == [2, 3]


def test_directory_with_the_name_of_a_pointer_is_taken_again(home: Home, capsys) -> None:
    """Seed 8101019 of the kind watched."""
    for number in (1, 2):
        write(home.root, {"latest/model.pt": pt(number), "optimizer.pt": pt(number, 1)}, 1_000_000 + number)
        home.taken()
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == {"latest/model.pt": pt(2), "optimizer.pt": pt(2, 1)}
