"""`Reader.follow` and `tierd follow`: each complete checkpoint is delivered once, over restarts, in order."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support.following import RUN, arrive, put
from support.waiting import wait_until
from support.world import commit, content, part

import tierd
from tierd.cli import run
from tierd.core.errors import ConfigError, SpoolFull, StoreUnavailable
from tierd.daemon.transfer import download, restore_to_directory
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.reading import command_follower
from tierd.reading.command_follower import fill_placeholders, parse_command
from tierd.reading.run_on_tiers import RunOnTiers
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Two ranks' checkpoints at steps 1 to 4."""
    return put(tmp_path, range(1, 5), world=2)


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


def seen(tier: Path, state: Path | None, **more: bool) -> list[int]:
    with tierd.open(f"file://{tier}", RUN) as reader:
        return [one.step for one in reader.follow(state, once=True, **more)]


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_each_is_delivered_once_oldest_first_over_restarts(full, tier, tmp_path):
    state = tmp_path / "state.json"
    arrive(full, tier, 3)
    arrive(full, tier, 1)
    assert seen(tier, state) == [1, 3]
    assert seen(tier, state) == []
    arrive(full, tier, 4)
    arrive(full, tier, 2)  # an older one that arrives late
    assert seen(tier, state) == [2, 4]
    assert seen(tier, state) == []
    assert seen(tier, None) == [1, 2, 3, 4]  # without a state the next follower knows of nothing
    assert json.loads(state.read_text())["delivered"] == {part(1).checkpoint.attempt: [1, 2, 3, 4]}


def test_checkpoint_that_vanishes_and_returns_is_not_delivered_again(full, tier, tmp_path):
    state = tmp_path / "state.json"
    arrive(full, tier, 1)
    assert seen(tier, state) == [1]
    (gone,) = (tier / RUN / "manifests").iterdir()
    gone.rename(tmp_path / "aside")
    assert seen(tier, state) == []
    (tmp_path / "aside").rename(gone)
    assert seen(tier, state) == []


def test_checkpoint_counts_as_delivered_when_the_loop_asks_for_the_next(full, tier, tmp_path):
    state = tmp_path / "state.json"
    for step in (1, 2, 3):
        arrive(full, tier, step)
    with tierd.open(f"file://{tier}", RUN) as reader:
        for one in reader.follow(state, once=True):
            if one.step == 2:
                break
        with pytest.raises(ZeroDivisionError):
            for one in reader.follow(state, once=True):
                assert one.step == 2
                1 / 0  # noqa: B018
        assert [one.step for one in reader.follow(state, once=True)] == [2, 3]


def test_only_the_latest(full, tier, tmp_path):
    state = tmp_path / "state.json"
    arrive(full, tier, 1)
    arrive(full, tier, 3)
    assert seen(tier, state, latest=True) == [3]
    arrive(full, tier, 2)  # late, and not the latest
    assert seen(tier, state, latest=True) == []
    arrive(full, tier, 4)
    assert seen(tier, state, latest=True) == [4]


def test_checkpoint_that_lacks_a_rank_or_has_a_bad_manifest_is_not_delivered_yet(full, tier, tmp_path):
    state = tmp_path / "state.json"
    arrive(full, tier, 1)
    arrive(full, tier, 2)
    _, other = sorted((tier / RUN / "manifests" / part(1).checkpoint.name).iterdir())
    other.rename(tmp_path / "late")
    manifest = sorted((tier / RUN / "manifests" / part(2).checkpoint.name).iterdir())[1]
    right = manifest.read_bytes()
    manifest.write_bytes(right.replace(b'"rank":1', b'"rank":0'))
    assert seen(tier, state) == []
    (tmp_path / "late").rename(other)
    manifest.write_bytes(right)
    assert seen(tier, state) == [1, 2]


def test_the_tiers_are_listed_once_in_a_period_at_most(full, tier, tmp_path, monkeypatch):
    listed: list[float] = []
    observe = RunOnTiers.observe

    def counted(self):
        listed.append(time.monotonic())
        arrive(full, tier, len(listed))
        if len(listed) == 2:
            raise StoreUnavailable("a tier rests")  # the follower goes on
        return observe(self)

    monkeypatch.setattr(RunOnTiers, "observe", counted)
    with tierd.open(f"file://{tier}", RUN) as reader:
        found = reader.follow(period_s=0.2)
        assert [next(found).step for _ in range(4)] == [1, 2, 3, 4]
    assert len(listed) == 4
    assert all(after - before >= 0.2 for before, after in pairwise(listed))


def test_a_state_that_cannot_be_used_is_refused(full, tier, tmp_path):
    state = tmp_path / "state.json"
    arrive(full, tier, 1)
    state.write_text("{")
    with pytest.raises(ConfigError, match="not a follower's state"):
        seen(tier, state)
    state.write_text('{"version": 1, "run": "other", "delivered": {}}')
    with pytest.raises(ConfigError, match="the state of run 'other'"):
        seen(tier, state)
    state.unlink()
    with tierd.open(f"file://{tier}", RUN) as reader:
        first = reader.follow(state)
        next(first)
        with pytest.raises(ConfigError, match="another follower"):
            seen(tier, state)
        first.close()
    assert seen(tier, state) == [1]
    with pytest.raises(ConfigError, match="cannot be made"):
        seen(tier, tmp_path / "none" / "state")


# -- the command ------------------------------------------------------------------------------------------------------


def followed(tier: Path, home: Path, command: str, *more: str) -> int:
    return run(["follow", f"file://{tier}", "--run", RUN, "--to", str(home), "--exec", command, "--once", *more])


def test_a_command_gets_each_checkpoints_files(full, tier, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    command = f"cp -r {{directory}} {out}/{{step}}-{{run}}"
    arrive(full, tier, 1)
    arrive(full, tier, 2)
    assert followed(tier, tmp_path / "home", command) == 0
    assert followed(tier, tmp_path / "home", command) == 0
    assert sorted(path.name for path in out.iterdir()) == [f"1-{RUN}", f"2-{RUN}"]
    for step in (1, 2):
        for rank in (0, 1):
            for path, data in content(step, rank=rank).items():
                assert (out / f"{step}-{RUN}" / part(step, rank=rank, world=2).name / path).read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["delivered.json", "delivered.json.lock"]
    assert capsys.readouterr().out.count(": delivered") == 2


def test_nothing_in_a_path_is_run(full, tier, tmp_path):
    arrive(full, tier, 1)
    home = tmp_path / "a b; touch pwned $(touch pwned) 'x' {step}"
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert followed(tier, home, "test -d {directory}") == 0
    finally:
        os.chdir(before)
    assert not list(tmp_path.rglob("pwned"))
    words = parse_command("eval.sh --dir={directory} '{step} x' {other} {}")
    values = {"directory": "/a b/{step};rm", "step": "7", "attempt": "a", "run": "r"}
    assert fill_placeholders(words, values) == ["eval.sh", "--dir=/a b/{step};rm", "7 x", "{other}", "{}"]


def test_a_command_that_fails_is_tried_again_and_keeps_no_other_back(full, tier, tmp_path, capsys):
    arrive(full, tier, 1)
    arrive(full, tier, 2)
    log, home = tmp_path / "log", tmp_path / "home"
    command = f"sh -c 'echo $1 >> {log}; test $1 = 2 -o -e {tmp_path}/go' sh {{step}}"
    assert followed(tier, home, command) == 12
    assert "step 1" in capsys.readouterr().out
    assert followed(tier, home, command) == 12
    (tmp_path / "go").touch()
    assert followed(tier, home, command) == 0
    assert followed(tier, home, command) == 0
    assert log.read_text().split() == ["1", "2", "1", "1"]
    assert followed(tier, tmp_path / "other", "/nowhere/none {step}") == 12


def test_a_corrupt_checkpoint_is_not_given_to_a_command(full, tier, tmp_path):
    arrive(full, tier, 1)
    chunk = next(path for path in (tier / RUN / "chunks").rglob("*") if path.is_file())
    right = chunk.read_bytes()
    chunk.write_bytes(bytes([right[0] ^ 1]) + right[1:])
    log, home = tmp_path / "log", tmp_path / "home"
    command = f"sh -c 'echo $1 >> {log}' sh {{directory}}"
    assert followed(tier, home, command) == 12
    assert not log.exists()
    chunk.write_bytes(right)  # repaired
    assert followed(tier, home, command) == 0
    assert len(log.read_text().split()) == 1


@pytest.mark.parametrize("word", ["{step}", "{directory}"])
def test_parts_of_two_histories_are_not_given_to_a_command(full, tier, tmp_path, capsys, word):
    arrive(full, tier, 1)

    async def work() -> None:
        store = FileStore(tier)
        for rank, origin in enumerate((part(1).checkpoint, None)):
            commit(spool := Spool(tmp_path / "apart"), part(5, 2, rank, 2), origin=origin)
            await flush(spool, part(5, 2, rank, 2), TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())
    assert followed(tier, tmp_path / "home", f"test -n {word}") == 12
    out = capsys.readouterr().out
    assert out.count(": delivered") == 1 and "do not belong together" in out


@pytest.mark.parametrize("silent", [False, True])
def test_a_partial_download_is_kept_while_its_checkpoint_may_be_due(full, tier, tmp_path, monkeypatch, silent):
    home = tmp_path / "home"
    gone, broken = (home / f".{part(step).checkpoint.name}.partial" for step in (1, 2))
    for path in (gone, broken):
        path.mkdir(mode=0o700, parents=True)
        (path / "some").write_bytes(b"bytes")
    arrive(full, tier, 2)
    for chunk in [path for path in (tier / RUN / "chunks").rglob("*") if path.is_file()]:
        chunk.write_bytes(b"decayed")
    observe = RunOnTiers.observe

    def observed(self):
        found = observe(self)
        self.unreached = {"other": "it rests"} if silent else {}
        return found

    monkeypatch.setattr(RunOnTiers, "observe", observed)
    assert followed(tier, home, "test -d {directory}") == 12
    assert broken.exists() and gone.exists() == silent


def test_a_full_disk_ends_no_follower(full, tier, tmp_path, monkeypatch, capsys):
    arrive(full, tier, 1)
    arrive(full, tier, 2)
    export_one = command_follower.restore_candidate

    def full_once(stores, candidate, *rest):
        if candidate.checkpoint.step == 1:
            raise SpoolFull("no space is left")
        return export_one(stores, candidate, *rest)

    monkeypatch.setattr(command_follower, "restore_candidate", full_once)
    assert followed(tier, tmp_path / "home", "test -d {directory}") == 12
    out = capsys.readouterr().out
    assert "no space is left" in out and out.count(": delivered") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["clear_path", "write_at", "write_file"])  # files are laid out, filled and described
def test_a_disk_that_fills_in_a_delivery_ends_no_follower(full, tier, tmp_path, monkeypatch, capsys, call, code):
    arrive(full, tier, 1)
    arrive(full, tier, 2)
    module = restore_to_directory if call == "write_file" else download
    real, failed = getattr(module, call), []

    def full_once(*arguments):
        if not failed:
            failed.append(True)
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(module, call, full_once)
    if code == errno.EIO:  # another error of the disk is not waited for
        assert followed(tier, tmp_path / "home", "test -d {directory}") != 12
        assert ": delivered" not in capsys.readouterr().out
        return
    assert followed(tier, tmp_path / "home", "test -d {directory}") == 12
    out = capsys.readouterr().out
    assert os.strerror(code) in out and out.count(": delivered") == 1
    assert followed(tier, tmp_path / "home", "test -d {directory}") == 0
    assert capsys.readouterr().out.count(": delivered") == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--run", "r", "--exec", "'", "--to", "d"], "No closing quotation"),
        (["--run", "r", "--exec", "x", "--to", "d", "--period", "soon"], "--period"),
    ],
)
def test_a_command_line_that_is_wrong_says_so(tier, more, says, capsys):
    assert run(["follow", f"file://{tier}", *more]) == 3
    assert says in capsys.readouterr().err


def test_a_follower_of_a_run_that_begins_later_says_so_and_waits(full, tier, tmp_path):
    """It is started before the training's first save; the run is delivered when it comes."""
    log, home = tmp_path / "log", tmp_path / "home"
    words = ["follow", f"file://{tier}", "--run", RUN, "--to", str(home), "--period", "1s"]
    command = ["--exec", f"sh -c 'echo $1 >> {log}' sh {{step}}"]
    follower = subprocess.Popen([sys.executable, "-m", "tierd", *words, *command], stderr=subprocess.PIPE, text=True)
    try:
        assert "no place has a checkpoint of it" in follower.stderr.readline()
        arrive(full, tier, 1)
        wait_until(lambda: log.exists() and log.read_text() == "1\n")
        assert follower.poll() is None
    finally:
        follower.terminate()
        follower.wait()
        follower.stderr.close()


def test_follow_names_the_existing_runs_for_a_run_that_no_tier_has(full, tier, tmp_path, capsys):
    arrive(full, tier, 1)
    words = ["follow", f"file://{tier}", "--exec", "true", "--to", str(tmp_path / "own"), "--once", "--run"]
    assert run([*words, "nope"]) == 4
    said = capsys.readouterr().err
    assert "run 'nope': no place has a checkpoint of it" in said and f"the runs there are: {RUN}" in said
    assert run([*words[:-3], str(tmp_path / "other"), "--once", "--run", RUN]) == 0
    assert "no place" not in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "follower"])
def test_a_follower_keeps_its_state_in_no_tier(full, tier, below, capsys):
    arrive(full, tier, 1)
    before = sorted(tier.rglob("*"))
    words = ["follow", f"file://{tier}", "--run", RUN, "--exec", "true", "--to", str(tier / below), "--once"]
    assert run(words) == 3
    assert "it lies in the tier" in capsys.readouterr().err and sorted(tier.rglob("*")) == before
