"""Files of a format that tierd does not know, beside weights without a step: one checkpoint, whole.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.watched_run import Home, files, take
from support.whole_layouts import Files, pt, write

from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units

LOGS = ("train.log", "events.out.tfevents.17", "metrics.jsonl", "log", "metrics", "stdout", "solver.log.0", "job.o47")
LOGS += ("mlflow.db", "run.sh", "train.parquet", "README.md", ".lock", "state.tmp", "wandb/run-1.wandb")


def easylm(version: int) -> Files:
    """EasyLM, checkpoint.py `save_all`, if the step is no milestone: written in place."""
    names = ("metadata.pkl", "dataset.pkl")
    return dict.fromkeys(names, pt(version)) | {"streaming_train_state": b"\x82\xa6params" + os.urandom(1000)}


def listed(root: Path) -> list[tuple[str, ...]]:
    with DirectoryTree(root) as tree:
        return [unit.files for unit in units(tree.listing()) if not unit.missing_reason]


@pytest.mark.parametrize("where", ["", "run/"])
def test_file_of_unknown_format_is_restored_with_the_known_files_beside_it(home: Home, where: str, capsys) -> None:
    for version in (1, 2):
        saved = {where + name: data for name, data in easylm(version).items()}
        write(home.root, saved | {f"{where}train.log": b"1"}, 1_000_000 + version)
        home.taken()
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == saved


def test_damaged_file_of_unknown_format_is_replaced(home: Home, capsys) -> None:
    saved = easylm(1)
    write(home.root, saved, 1_000_000)
    home.taken()
    write(home.root, {"streaming_train_state": bytes(1008)}, 1_000_000)
    home.prepare(capsys)
    assert files(home.root) == saved


def test_checkpoint_is_taken_again_if_only_its_file_of_unknown_format_changed(home: Home) -> None:
    write(home.root, easylm(1), 1_000_000)
    home.taken()
    write(home.root, {"streaming_train_state": b"2"}, 1_000_001)
    assert len(take(home.spool, home.root).parts) == 1


@pytest.mark.parametrize("name", LOGS)
def test_log_beside_weights_is_of_no_checkpoint(root: Path, name: str) -> None:
    write(root, {"last.pt": pt(1), name: b"1"}, 10)
    assert listed(root) == [("last.pt",)]


def test_file_of_unknown_format_beside_checkpoints_with_steps_is_of_none(root: Path) -> None:
    write(root, {"step_10.pt": pt(1), "step_20.pt": pt(1), "VERSION": b"1"}, 10)
    assert listed(root) == [("step_10.pt",), ("step_20.pt",)]


def test_very_many_files_of_unknown_format_are_not_taken_and_said_so(home: Home) -> None:
    write(home.root, {"last.pt": pt(1)} | {f"sample{number}": b"1" for number in range(1001)}, 10)
    reported = take(home.spool, home.root)
    (why,) = reported.reasons.values()
    assert len(reported.parts) == 1 and "1001 files whose format is not known" in why and "--unit" in why
