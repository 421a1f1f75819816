"""A run or a step that does not exist is answered with those that do, by every command that takes one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.doubles import Double
from support.world import Daemon, commit, part

from tierd.cli import run
from tierd.core.config import from_urls
from tierd.daemon.service import open_tiers
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.route import Route
from tierd.spool.spool import Spool

RUNS, STEPS = "the runs there are: bert, other", "the steps there are: 10, 20"


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """A spool and a tier that hold the same runs."""
    spool, tier = Spool(tmp_path / "spool"), tmp_path / "tier"
    for step in (10, 20):
        commit(spool, part(step, run="bert"))
    commit(spool, part(1, run="other"))
    tier.mkdir()

    async def work() -> None:
        async with AsyncExitStack() as stack:
            stores = await open_tiers(from_urls(str(spool.root), [str(tier)]), stack)
            for one in spool.parts():
                await flush(spool, one, Route(next(iter(stores.values()))))

    asyncio.run(work())
    return str(spool.root), str(tier)


def commands(tier: str, home: Path, name: str, step: str) -> dict[tuple[str, ...], int]:
    """Commands that name a run and a step, with their exit codes for a run that does not exist."""
    to, at = ["--run", name, "--to", str(home / "out")], ["--step", step]
    return {
        ("show", name, step, tier): 4,
        ("verify", tier, "--run", name, *at): 4,
        ("restore", tier, *to, *at): 4,
        ("restore", tier, "--run", name, "--into", str(home / "in"), *at): 4,
        ("export", tier, *to, *at): 4,
        ("pin", name, step, tier): 4,
        ("unpin", name, step, tier): 4,
    }


def without_steps(tier: str, home: Path, name: str) -> dict[tuple[str, ...], int]:
    follow = ["--exec", "true", "--to", str(home / "follower"), "--once"]
    return {
        ("ls", tier, "--run", name): 4,
        ("du", tier, "--run", name): 4,
        ("prune", tier, "--run", name, "--keep-last", "1", "--dry-run"): 4,
        ("rm", name, tier, "--dry-run"): 4,
        ("disown", name, "018000000000-00000001", tier, "--dry-run"): 4,
        ("advise", "--from-run", tier, name, "--sync", "1s"): 4,
        ("follow", tier, "--run", name, *follow): 4,
    }


def test_an_unknown_run(places, tmp_path: Path, capsys) -> None:
    _, tier = places
    asked = commands(tier, tmp_path, "brt", "10") | without_steps(tier, tmp_path, "brt")
    for command, code in asked.items():
        assert run(list(command)) == code, command
        assert capsys.readouterr().err.count(RUNS) == 1, command


def test_an_unknown_step(places, tmp_path: Path, capsys) -> None:
    _, tier = places
    for command in commands(tier, tmp_path, "bert", "15"):
        assert run(list(command)) == 4, command
        said = capsys.readouterr().err
        assert said.count(STEPS) == 1 and "the runs there are" not in said, command


def test_of_a_daemon(places, tmp_path: Path, capsys) -> None:
    spool, _ = places
    with Daemon(spool, {"disk": Double()}) as daemon:
        daemon.settle()
        for command in (["wait", "brt", "10"], ["wait", "brt"], ["pin", "brt", "10"], ["show", "brt", "10"]):
            assert run([*command, "--spool", spool]) == 4, command
            assert capsys.readouterr().err.count(RUNS) == 1, command
        for command in (["wait", "bert", "15"], ["pin", "bert", "15"], ["show", "bert", "15"]):
            assert run([*command, "--spool", spool]) == 4, command
            assert capsys.readouterr().err.count(STEPS) == 1, command
