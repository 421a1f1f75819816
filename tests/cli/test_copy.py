"""`tierd copy` from the command line: what it says, how it ends, and that a killed process costs nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.chunk_keys import chunk_files
from support.doubles import damage
from support.waiting import wait_until
from support.world import RUN, commit, content, part

from tierd.cli import run
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

KILLS = int(os.environ.get("TIERD_COPY_PROCESS_KILLS", "2"))


@pytest.fixture
def tiers(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """A tier with five checkpoints of six chunks, or as many as the test says, and an empty one."""
    spool = Spool(tmp_path / "spool")
    for name in ("from", "to"):
        (tmp_path / name).mkdir()

    async def work() -> None:
        store = FileStore(tmp_path / "from")
        for step in range(1, 6):
            commit(spool, part(step), content(step, chunks=getattr(request, "param", 6)))
            await flush(spool, part(step), TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())
    return str(tmp_path / "from"), str(tmp_path / "to")


def steps(tier: str, capsys: pytest.CaptureFixture[str], name: str = RUN) -> list[int]:
    capsys.readouterr()
    assert run(["verify", tier, "--run", name, "--json"]) == 0
    return [one["step"] for one in json.loads(capsys.readouterr().out)["checks"]]


def test_copy_reports_its_copies_and_the_prunes_of_the_policy_there(tiers, capsys) -> None:  # type: ignore[no-untyped-def]
    source, target = tiers
    assert run(["copy", source, target, "--run", RUN]) == 0
    out = capsys.readouterr().out
    assert f"copied {RUN}: 5 checkpoints" in out and "0 were there" in out
    assert "would prune 2 of them" in out  # nobody gave a policy, and the default keeps three
    assert run(["copy", source, target, "--run", RUN, "--as", "fork", "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert f"copied {RUN} as fork: 1 checkpoints" in out and "pinned there: step 2" in out and "prune" not in out
    assert run(["pin", RUN, "1", target]) == 0
    assert run(["copy", source, target, "--run", RUN, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert answer["unkept"] == [2] and [one["sent"] for one in answer["copy"]["checkpoints"]] == [0] * 5
    assert steps(target, capsys) == [5, 4, 3, 2, 1] and steps(target, capsys, "fork") == [2]


def test_a_copied_tier_has_an_identity_of_its_own_and_is_not_copied_to_itself(tiers, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    source, target = tiers
    assert run(["copy", source, target, "--run", RUN]) == 0
    identity, copied = ((Path(tier) / "README.md.id").read_text() for tier in tiers)
    assert identity != copied
    shutil.copytree(source, tmp_path / "whole")  # as `cp -a` of the whole tier, which has the identity of its original
    assert run(["copy", source, str(tmp_path / "whole"), "--run", RUN]) == 0
    assert (Path(source) / "README.md.id").read_text() == identity
    (tmp_path / "alias").mkdir()
    (tmp_path / "alias" / "tier").symlink_to(source)
    capsys.readouterr()
    assert run(["copy", source, str(tmp_path / "alias" / "tier"), "--run", RUN]) == 3
    assert "FROM and TO are one place under two names" in capsys.readouterr().err


def test_copy_names_corrupt_checkpoint_and_copies_the_others(tiers, capsys) -> None:  # type: ignore[no-untyped-def]
    source, target = tiers
    damage(chunk_files(Path(source), RUN, 3)[0], "flip")
    assert run(["copy", source, target, "--run", RUN]) == 5
    said = capsys.readouterr()
    assert "corrupt: step 3 " in said.err and "4 checkpoints" in said.out
    assert steps(target, capsys) == [5, 4, 2, 1]


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["FROM", "FROM", "--run", RUN], 3, "--as"),
        (["FROM", "TO", "--run", "other"], 4, f"the runs there are: {RUN}"),
        (["FROM", "TO", "--run", RUN, "--step", "9"], 4, "the steps there are: 1, 2, 3, 4, 5"),
        (["FROM", "TO/none", "--run", RUN], 6, "mkdir"),
        (["FROM", "TO", "--run", RUN, "--as", "a/b"], 3, "a run's name"),
        (["TO", "FROM", "--run", RUN], 4, "there is no run at all"),
    ],
)
def test_copy_refusal_names_a_remedy(more, code, says, tiers, capsys) -> None:  # type: ignore[no-untyped-def]
    source, target = tiers
    words = [one.replace("FROM", source).replace("TO", target) for one in more]
    assert run(["copy", *words]) == code
    said = "".join(capsys.readouterr().err.splitlines())
    assert "".join(says.split()) in "".join(said.split())
    assert list(Path(target).iterdir()) == []


@pytest.mark.parametrize("tiers", [100], indirect=True)
def test_a_process_that_is_killed_costs_nothing(tiers, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """SIGKILL as soon as some chunks are there; then the same command again."""
    source, target = tiers
    command = [sys.executable, "-m", "tierd", "copy", source, target, "--run", RUN]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    chance = random.Random(7)
    for _ in range(KILLS):
        wanted = len(list(Path(target).rglob("*/chunks/*/*/*/*"))) + chance.randrange(1, 90)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(
            lambda: len(list(Path(target).rglob("*/chunks/*/*/*/*"))) >= wanted or process.poll() is not None,  # noqa: B023
            pause_s=0.001,
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        if list(Path(target).glob(f"{RUN}/manifests/*/*")):
            steps(target, capsys)
    assert run(["copy", source, target, "--run", RUN]) == 0
    assert steps(target, capsys) == [5, 4, 3, 2, 1]
