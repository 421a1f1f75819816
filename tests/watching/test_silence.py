"""A watch that takes nothing says so: in its exit code, in an event, and in the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import layouts
from support.timed import timed
from support.waiting import wait_until
from support.watched_run import watched, watching

from tierd.cli import run
from tierd.daemon.daemon_status import make_status
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_description import UnmatchedFiles, group_unmatched_files
from tierd.watching.unit_detection import units

pytestmark = pytest.mark.usefixtures("quick", "tier")


def unknown(root: Path) -> None:
    """What a program wrote that no layout knows, beside its logs."""
    (root / "flax").mkdir()
    for number in range(5):
        (root / "flax" / f"weights{number}.bag").write_bytes(b"x" * 100)
    for number in range(30):
        (root / "flax" / f"{number}.log").write_text("")


# -- the end ---------------------------------------------------------------------------


def test_watch_of_files_that_no_layout_knows_ends_with_13_and_names_some(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    unknown(root)
    assert watched(root) == 13
    said = capsys.readouterr().err
    assert "weights0.bag, weights1.bag, weights2.bag and 2 more in flax" in said
    assert f"tierd watch --explain {root}" in said


def test_watch_of_empty_directory_ends_with_13(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert watched(root) == 13
    assert f"{root}: nothing was taken: it has no file" in capsys.readouterr().err


def test_watch_of_incomplete_checkpoint_ends_with_13_and_names_it(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (layouts.trainer(root) / "checkpoint-is-incomplete.txt").write_text("")
    assert watched(root) == 13
    assert "checkpoint-500: checkpoint-is-incomplete.txt is there" in capsys.readouterr().err


def test_watch_ends_with_0_if_everything_was_taken_earlier(root: Path) -> None:
    path = layouts.torch_save(root)
    assert watched(root) == 0
    assert watched(root) == 0
    path.unlink()
    assert watched(root) == 0


def test_watch_ends_with_0_if_another_node_took_everything(root: Path) -> None:
    layouts.torch_save(root)
    assert watched(root) == 0
    assert watched(root, "--spool", str(root.parent / "second")) == 0


# -- a daemon that goes on ---------------------------------------------------------------------------


def problems(daemon: object) -> list[str]:
    return [one.why for one in make_status(daemon.reconciler, 0, 0).problems if "nothing was taken" in one.why]  # type: ignore[attr-defined]


def events(daemon: object) -> list[str]:
    return [one.what for one in daemon.reconciler.journal.events if one.what == "nothing taken"]  # type: ignore[attr-defined]


def test_watch_that_takes_nothing_for_long_warns_once_until_it_takes_something(root: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, untaken_s=0.3)
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        assert problems(daemon) == []
        unknown(root)
        wait_until(lambda: problems(daemon) != [])
        assert "weights0.bag" in problems(daemon)[0] and "--explain" in problems(daemon)[0]
        assert events(daemon) == ["nothing taken"]
        layouts.torch_save(root)
        wait_until(lambda: problems(daemon) == [])
        assert events(daemon) == ["nothing taken"]


def test_watch_does_not_warn_of_an_empty_directory_or_before_the_time(root: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, untaken_s=0.0)
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        assert problems(daemon) == []
    timed(monkeypatch, untaken_s=600.0)
    unknown(root)
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        assert problems(daemon) == []


def test_status_shows_passed_over_files_and_why(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    unknown(root)
    (layouts.trainer(root) / "checkpoint-is-incomplete.txt").write_text("")
    layouts.torch_save(root)
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        assert run(["status", "--spool", str(root.parent / "spool")]) == 0
        shown = capsys.readouterr().out
        assert run(["status", "--spool", str(root.parent / "spool"), "--json"]) == 0
        (watch,) = json.loads(capsys.readouterr().out)["watches"]
    assert f"watching {root} as run r: 2 checkpoints there, 1 of them not taken; 35 files belong to none" in shown
    assert "checkpoint-500 is not taken: checkpoint-is-incomplete.txt is there" in shown
    assert "passed over: weights0.bag, weights1.bag, weights2.bag and 2 more in flax: no layout" in shown
    assert [(group["directory"], group["ending"], group["count"]) for group in watch["passed_over"]] == [
        ("flax", ".bag", 5),
        ("flax", ".log", 30),
    ]


def test_status_shows_no_watch_that_was_taken_out(root: Path) -> None:
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: len(make_status(daemon.reconciler, 0, 0).watches) == 1)
    assert make_status(daemon.reconciler, 0, 0).watches == ()


# -- groups ---------------------------------------------------------------------------


def test_groups_are_bounded_and_unknown_names_are_first(root: Path) -> None:
    for number in range(40):
        (root / f"d{number}").mkdir()
        (root / f"d{number}" / "x.log").write_text("")
    (root / "events.out.tfevents.1.host.0").write_text("")
    (root / "weird.bag").write_text("")
    (root / "link").symlink_to("weird.bag")
    (root / ".part").write_text("")
    torch.save({"w": torch.ones(2)}, root / "m_step1.pt")
    with DirectoryTree(root) as tree:
        listing = tree.listing()
    count, groups = group_unmatched_files(listing, units(listing))
    assert count == 44 and len(groups) == 20
    assert groups[0] == UnmatchedFiles("", ".bag", 1, ("weird.bag",), "no layout that tierd knows has such names")
    assert ("link",) in [group.names for group in groups] and "links are not followed" in str(groups)


# -- prepare ---------------------------------------------------------------------------


def prepared(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert run(["prepare", str(root), "--run", "r", "--to", f"file://{root.parent}/tier"]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_prepare_of_files_that_no_layout_knows_says_so(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    unknown(root)
    out, err = prepared(root, capsys)
    assert "PATH" not in out and "no checkpoint" in out
    assert "35 files were left as they are: weights0.bag" in err and "--explain" in err


def test_prepare_of_empty_directory_says_that_nothing_was_done(root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out, _ = prepared(root, capsys)
    assert "PATH" not in out and "nothing was done" in out
