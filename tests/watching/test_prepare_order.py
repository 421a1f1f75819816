"""`prepare` beside times that lie, and beside several files or units of one step."""

from __future__ import annotations

import os

import pytest
import torch
from support.watched_run import Home, files


def test_prepare_knows_units_of_one_step_and_time_apart(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (home.root / name).mkdir()
        torch.save({"w": torch.ones(3), "name": name}, home.root / name / "a-10.pt")
        os.utime(home.root / name / "a-10.pt", (10, 10))
    home.taken()
    right = files(home.root)
    os.truncate(home.root / "two" / "a-10.pt", 500)
    os.utime(home.root / "two" / "a-10.pt", (10, 10))
    found = home.prepare(capsys)
    assert {path: one["verdict"] for path, one in found.items()} == {
        "one/a-10.pt": "verified",
        "two/a-10.pt": "damaged",
    }
    assert files(home.root) == right


def test_prepare_fetches_nothing_that_is_newer_by_its_time_alone(home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    """The clock was set back by an hour after step 30, whose file the program deleted since."""
    for step, second in ((30, 3600), (40, 40)):
        torch.save({"w": torch.ones(3), "step": step}, home.root / f"a-{step}.pt")
        os.utime(home.root / f"a-{step}.pt", (second, second))
        home.taken()
    (home.root / "a-30.pt").unlink()
    assert {path: one["verdict"] for path, one in home.prepare(capsys).items()} == {"a-40.pt": "verified"}
    assert sorted(files(home.root)) == ["a-40.pt"]


def test_prepare_leaves_a_verified_copy_in_place_each_time_a_file_is_damaged(home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    """The second damaged file lies in quarantine under another name, `b_10.pt.1`."""
    for name in ("a_10.pt", "b_10.pt"):
        torch.save({"w": torch.ones(3), "name": name}, home.root / name)
        os.utime(home.root / name, (10, 10))
    home.taken()
    right = files(home.root)
    for _ in range(2):
        (home.root / "a_10.pt").unlink()
        os.truncate(home.root / "b_10.pt", 500)
        os.utime(home.root / "b_10.pt", (5, 5))  # so that its time does not say as which checkpoint it was taken
        (unit,) = home.prepare(capsys).values()
        assert (unit["verdict"], unit["replaced"]) == ("damaged", True) and files(home.root) == right
