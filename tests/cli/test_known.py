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
from tierd.daemon.daemon_service import open_tiers
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
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
                await flush(spool, one, TierUploadContext(next(iter(stores.values()))))

    asyncio.run(work())
    return str(spool.root), str(tier)


def commands(spool: str, tier: str, home: Path, name: str, step: str) -> list[tuple[str, ...]]:
    """Commands that name a run and a step."""
    to, at = ["--run", name, "--to", str(home / "out")], ["--step", step]
    return [
        ("show", name, step, tier),
        ("show", name, step, "--spool", spool),
        ("verify", tier, "--run", name, *at),
        ("restore", tier, *to, *at),
        ("restore", tier, "--run", name, "--into", str(home / "in"), *at),
        ("export", tier, *to, *at),
        ("pin", name, step, tier),
        ("unpin", name, step, tier),
    ]


def without_steps(tier: str, home: Path, name: str) -> list[tuple[str, ...]]:
    follow = ["--exec", "true", "--to", str(home / "follower"), "--once"]
    return [
        ("ls", tier, "--run", name),
        ("du", tier, "--run", name),
        ("prune", tier, "--run", name, "--keep-last", "1", "--dry-run"),
        ("rm", name, tier, "--dry-run"),
        ("disown", name, "018000000000-00000001", tier, "--dry-run"),
        ("advise", "--from-run", tier, name, "--sync", "1s"),
        ("follow", tier, "--run", name, *follow),
    ]


def test_an_unknown_run(places, tmp_path: Path, capsys) -> None:
    spool, tier = places
    asked = commands(spool, tier, tmp_path, "brt", "10") + without_steps(tier, tmp_path, "brt")
    for command in asked:
        assert run(list(command)) == 4, command
        assert capsys.readouterr().err.count(RUNS) == 1, command


def test_an_unknown_step(places, tmp_path: Path, capsys) -> None:
    spool, tier = places
    for command in commands(spool, tier, tmp_path, "bert", "15"):
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
