"""`tierd watch --explain`: which units a watch sees, why, their steps, and what it would not take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import layouts
from support.watched_run import files, take

from tierd.cli import run
from tierd.spool.spool import Spool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def explained(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["watch", str(root), "--explain", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def of(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {unit["path"]: unit for unit in explained(root, capsys)["units"]}


def test_explain_takes_and_makes_nothing(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root)
    before = files(root)
    explained(root, capsys)
    assert files(root) == before and [path.name for path in root.parent.iterdir()] == ["out"]


def test_explain_names_program_and_the_file_that_proves_it(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.trainer(root)
    layouts.plain_dcp(root / "dcp")
    found = of(root, capsys)
    trainer = found["checkpoint-500"]
    assert (trainer["program"], trainer["step"], trainer["order"]) == ("HF Trainer", 500, "its name")
    assert trainer["why"] == "checkpoint-500/trainer_state.json is there, which HF Trainer writes"
    assert trainer["files"] == 11 and trainer["bytes"] > 1000 and trainer["not_taken"] == ""
    (dcp,) = (unit for path, unit in found.items() if path.startswith("dcp"))
    assert dcp["program"] == "DCP" and "/.metadata is there" in dcp["why"]


def test_explain_says_why_files_that_no_program_identifies_are_one_checkpoint(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.pt(root / "G_100.pth")
    layouts.pt(root / "D_100.pth")
    layouts.pt(root / "runs" / "step_7" / "model.pt")
    layouts.pt(root / "runs" / "step_7" / "optim.pt")
    layouts.pt(root / "solo" / "net_epoch3.pt")
    layouts.pt(root / "apart" / "last.pt")
    layouts.pt(root / "apart" / "best.pt")
    (root / "apart" / "a.log").write_text("")
    found = {path: (unit["why"], unit["step"], unit["order"]) for path, unit in of(root, capsys).items()}
    assert found == {
        "D_100.pth": ("what has this step in its name, together", 100, "its name"),
        "runs/step_7": ("a directory with a step in its name", 7, "its name"),
        "solo/net_epoch3.pt": ("a file with the name of weights", 3, "its name"),
        "apart/*": (
            "what lies in one directory and has no step in its name, together",
            None,
            "the time of its last write, in a run of its own: its name has no step, and others there have one",
        ),
    }


def test_explain_reads_a_step_that_a_file_says(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.trainer(root).rename(root / "final")
    found = of(root, capsys)["final"]
    assert (found["step"], found["order"]) == (500, "a file in it")


def test_explain_shows_files_without_a_step_beside_steps_as_a_run_of_their_own(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.pt(root / "model_step3.pt")
    layouts.pt(root / "last.ckpt")
    found = of(root, capsys)
    assert (found["model_step3.pt"]["step"], found["model_step3.pt"]["order"]) == (3, "its name")
    (last,) = (unit for path, unit in found.items() if path != "model_step3.pt")
    assert last["step"] is None and "in a run of its own" in last["order"] and last["not_taken"] == ""


def test_explain_names_units_that_would_not_be_taken_and_why(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (layouts.trainer(root) / "checkpoint-is-incomplete.txt").write_text("")
    layouts.pt(root / "step_9" / "model.pt")
    (root / "step_9" / "link").symlink_to("model.pt")
    layouts.pt(root / "logs" / "step_4" / "model.pt")
    with open(os.fsencode(root) + b"/logs/step_4/\xfe.bin", "wb"):
        pass
    (root / "weights.bag").write_text("")
    found = explained(root, capsys)
    assert {unit["path"]: unit["not_taken"] for unit in found["units"]} == {
        "checkpoint-500": "it is not complete: checkpoint-is-incomplete.txt is there",
        "step_9": "step_9/link is a link, or is neither a file nor a directory that can be read",
        "logs/step_4": "the name of a file in it is not UTF-8",
    }
    assert found["unnamed"] == ["logs/step_4/\\xfe.bin"]
    assert [(group["names"], group["count"]) for group in found["passed_over"]] == [(["weights.bag"], 1)]
    assert run(["watch", str(root), "--explain"]) == 0
    shown = capsys.readouterr().out
    assert f"{root}: 0 of 3 checkpoints would be taken; 1 files belong to none" in shown
    assert "checkpoint-500 would not be taken: it is not complete: checkpoint-is-incomplete.txt is there" in shown
    assert "passed over: weights.bag: no layout" in shown


def test_explain_agrees_with_watch_about_the_taken_units(root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.trainer(root)
    layouts.pt(root / "best.pt")
    layouts.pt(root / "a" / "step_3" / "model.pt")
    torch.save({"global_step": 100, "w": torch.ones(2)}, root / "last.ckpt")
    torch.save({"global_step": 100, "w": torch.ones(2)}, root / "epoch=0-step=100.ckpt")
    wanted = {path for path, unit in of(root, capsys).items() if not unit["not_taken"]}
    spool = Spool(tmp_path / "spool")
    reported = take(spool, root)
    taken = {json.loads((spool.path(part) / "unit.json").read_text())["path"] for part in reported.parts}
    assert taken == wanted


def test_explain_of_directory_that_does_not_exist_is_refused(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert run(["watch", str(root / "absent"), "--explain"]) == 3
    assert "does not exist" in capsys.readouterr().err


def test_watch_needs_a_run_unless_it_explains(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert run(["watch", str(root), "--to", "file:///tmp"]) == 3
    assert "--run" in capsys.readouterr().err
