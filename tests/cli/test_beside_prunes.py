"""Commands that read a tier beside a trainer whose retention deletes checkpoints between any two of their requests.

Judged by docs/explanation/restore.md: a checkpoint that is deleted while it is read is not corrupt. The newest one is
taken again, or the command says that it was pruned. An older one that is kept never passes for the newest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import pruned_meanwhile
from support.doubles import contents
from support.saved import put
from support.world import RUN, part

from tierd.cli import run
from tierd.daemon.tiers.tier_prune import prune
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

KEPT, OLD, NEW = 1, (3, 4), (5, 6)  # retention keeps step 1 for good, and the last two


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The objects of a tier before and after two saves."""
    spool, store = Spool(tmp_path_factory.mktemp("spool")), MemoryStore()

    async def save(*steps: int) -> None:
        for step in steps:
            await put(spool, part(step), {"model": torch.arange(300.0) * step}, store, metrics={"loss": 1 / step})

    async def work() -> tuple[dict[str, bytes], dict[str, bytes]]:
        await save(KEPT, *OLD)
        before = await contents(store)
        await save(*NEW)
        await prune(store, [part(step).checkpoint for step in OLD])
        return before, await contents(store)

    return asyncio.run(work())


@pytest.fixture
def moments(tmp_path, states, monkeypatch) -> Iterator[Path]:
    return pruned_meanwhile.moments(tmp_path, *states, monkeypatch)


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_ls_shows_the_newest_checkpoint(moments, capsys):
    for home in moments:
        assert run(["ls", str(home / "tier"), "--run", RUN, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [one["step"] for one in found] in ([4, 3, 1], [6, 5, 1])
        assert all(one["complete"] for one in found) and found[0]["resumes"]


def test_show_is_whole_or_says_that_the_checkpoint_was_pruned(moments, capsys):
    said = set()
    for home in moments:
        code = run(["show", RUN, "4", str(home / "tier"), "--json"])
        shown = capsys.readouterr()
        said.add(code)
        if code == 0:
            found = json.loads(shown.out)
            assert found["checkpoint"]["complete"] and len(found["manifests"]) == 1
        else:
            assert code == 4 and "the steps there are: 1, 5, 6" in shown.err
            said |= {"pruned"} if "it was pruned while it was read" in shown.err else set()
    assert said == {0, 4, "pruned"}


def test_verify_finds_nothing_corrupt(moments, capsys):
    for home in moments:
        assert run(["verify", str(home / "tier"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["checks"]
        assert [one["step"] for one in found] in ([4, 3, 1], [6, 5, 1])
        assert not any(one["wrong"] or one["unchecked"] for one in found)


@pytest.mark.parametrize("best", [(), ("--best", "loss")], ids=["newest", "best"])
@pytest.mark.parametrize("command", [("restore",), ("export", "--format", "safetensors")], ids=["restore", "export"])
def test_the_newest_checkpoint_is_restored_and_exported(moments, capsys, command, best):
    for home in moments:
        name, *more = command
        assert run([name, str(home / "tier"), "--run", RUN, "--to", str(home / "out"), *more, *best, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["step"], found["skipped"]) in ((4, []), (6, []))
        assert sorted(path.name for path in home.iterdir()) == ["out", "tier"]


@pytest.mark.parametrize("command", ["restore", "export", "copy"])
def test_a_step_that_is_pruned_meanwhile_is_said_to_be(moments, capsys, command):
    said = set()
    for home in moments:
        (home / "copied").mkdir()
        if command == "copy":
            code = run(["copy", str(home / "tier"), str(home / "copied"), "--run", RUN, "--step", "4"])
        else:
            code = run([command, str(home / "tier"), "--run", RUN, "--step", "4", "--to", str(home / "out")])
        error = capsys.readouterr().err
        said.add(code)
        assert code in (0, 4) and (code == 0) == (not error)
        if code == 4:
            assert not (home / "out").exists()
            said |= {"pruned"} if "pruned" in error else set()
    assert said == {0, 4, "pruned"}


def test_copy_copies_the_newest_checkpoint_and_names_the_pruned_checkpoints(moments, capsys):
    for home in moments:
        (home / "copied").mkdir()
        assert run(["copy", str(home / "tier"), str(home / "copied"), "--run", RUN, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["copy"]
        copied = [one["step"] for one in found["checkpoints"]]
        assert copied[-1] in (4, 6) and not found["failed"]
        assert copied[-1] == 4 or {*copied} >= {1, 5, 6} - {*found["vanished"]}


@pytest.mark.parametrize("files", ["{directory}", "{step}"])
@pytest.mark.parametrize("latest", [(), ("--latest",)], ids=["each", "latest"])
def test_follow_delivers_the_newest_checkpoint_and_names_the_pruned_checkpoints(moments, capsys, files, latest):
    for home in moments:
        options = ["--run", RUN, "--exec", f"true {files}", "--to", str(home / "follower"), "--once", "--json", *latest]
        assert run(["follow", str(home / "tier"), *options]) == 0
        found = lines(capsys.readouterr().out)
        delivered = [one["step"] for one in found if one["delivered"]]
        assert delivered[-1] in (4, 6) and (not latest or len(delivered) == 1)
        assert all("was pruned" in one["reason"] for one in found if not one["delivered"])
        assert sorted(path.name for path in (home / "follower").iterdir()) == ["delivered.json", "delivered.json.lock"]


def test_pin_says_that_the_checkpoint_is_gone(moments, capsys):
    for home in moments:
        code = run(["pin", RUN, "4", str(home / "tier")])
        assert code in (0, 4) and ("Traceback" not in capsys.readouterr().err)
