"""A run's own policy, with real processes: who only reads deletes nothing, and who has no policy obeys the run's."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.waiting import wait_until
from support.world import RUN, attempt, commit, converge, hurry, part

import tierd
from tierd.cli import run
from tierd.core.errors import ConfigError, TierdError
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tier = tmp_path / "tier"
    tier.mkdir()
    return tier


@pytest.fixture
def trained(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    """A spool whose configured daemon keeps 10 on the tier, where there are 8."""
    hurry(monkeypatch)
    spool = Spool(tmp_path / "training")
    for step in range(1, 9):
        commit(spool, part(step))
    asyncio.run(converge(spool, {"file": FileStore(place)}, keep=10))
    return spool


def steps(place: Path) -> list[int]:
    """The step of each manifest on a tier. A directory may go while it is listed, which `glob` takes for an error."""
    return sorted(
        int(Path(home).name[:12])
        for home, _, names in os.walk(place)
        for name in names
        if Path(home).parent.name == "manifests" and name.endswith(".json")
    )


def tree(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def status(spool: Spool) -> dict | None:
    try:
        with DaemonConnection(spool) as link:
            return link.ask(StatusRequest())["status"]
    except TierdError:
        return None


def is_idle(spool: Spool) -> bool:
    found = status(spool)
    return bool(found) and all(
        one["reached"] and one["doing"] is None and not one["pending_parts"] for one in found["tiers"]
    )


def test_an_evaluation_elsewhere_deletes_nothing(trained: Spool, tmp_path: Path, place: Path) -> None:
    before = tree(place)
    other = tmp_path / "evaluation"
    with tierd.Checkpointer(other, run=RUN, to=[str(place)]) as ckpt:
        for step in (None, 3):
            assert ckpt.restore(step=step) is not None
        end = time.monotonic() + 2
        while time.monotonic() < end:  # its daemon looks at each of these events
            (other / ".tierd" / "stage" / "event").mkdir(exist_ok=True)
            time.sleep(0.1)
            assert tree(place) == before
        wait_until(lambda: is_idle(Spool(other)))
    assert tree(place) == before


class Daemon:
    """`tierd run` with these options, until the end of the block."""

    def __init__(self, spool: Spool, place: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool.root), "--to", str(place), *options]
        self.spool, self.process = spool, subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


def test_a_trainers_policy_without_any_file(tmp_path: Path, place: Path) -> None:
    spool = tmp_path / "spool"
    keep = tierd.Retention(keep_last=1, keep_best=tierd.Best(metric="loss"))
    with tierd.Checkpointer(spool, run="r", to=[str(place)], retention=keep) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, {"step": step}, metrics={"loss": abs(step - 2)}).wait("file", timeout=60)
        wait_until(lambda: steps(place) == [2, 5])
        (path,) = place.glob("r/retention/*.trainer.json")
        stored = json.loads(path.read_text())
        assert stored["retention"]["keep_best"]["metric"] == "loss" and stored["host"] == os.uname().nodename
    wait_until(lambda: status(Spool(spool)) is None)
    with Daemon(Spool(spool), place):  # another daemon, without a trainer
        wait_until(lambda: is_idle(Spool(spool)))
        assert steps(place) == [2, 5]


def test_a_policy_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        tierd.Checkpointer(tmp_path / "spool", run="r", to=[], retention=tierd.Retention(keep_last=0))
    with pytest.raises(ConfigError, match=r"tierd\.Retention"):
        tierd.Checkpointer(tmp_path / "spool", run="r", to=[], retention={"keep_last": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"when": 5}, r"^when=5: a tierd\.When"),
        ({"when": {"steps": 5}}, r"^when=\{'steps': 5\}: a tierd\.When"),
        ({"keep_within": 5}, "^keep_within=5: a time is a text such as '90s'"),
        ({"keep_within": 0}, "^keep_within=0: a time"),
        ({"keep_within": "5"}, "^keep_within='5': a time"),
        ({"keep_every": ("1h", 5)}, "^keep_every=5: a time"),
        ({"keep_every_steps": ("10", 5)}, "^keep_every_steps='10': a number of steps"),
        ({"keep_best": "loss"}, r"^keep_best='loss': .*tierd\.Best\(metric="),
        ({"keep_best": {"count": 2}}, r"^keep_best=\{'count': 2\}: .*metric.*tierd\.Best\(metric="),
        ({"keep_best": [tierd.Best(metric="a"), tierd.Best(metric=5)]}, r"^keep_best=Best\(metric=5.*tierd\.Best\("),  # type: ignore[arg-type]
        (
            {"keep_best": [tierd.Best(metric=str(i)) for i in range(17)]},
            "^retention: keep_best has 17 values, at most 16$",
        ),
    ],
)
def test_each_argument_that_cannot_be_used_is_named(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        if "when" not in arguments:
            arguments = {"retention": tierd.Retention(**arguments)}
        tierd.Checkpointer(tmp_path / "spool", run="r", to=[], **arguments)


def test_keep_best_takes_the_members_of_best_as_a_dict() -> None:
    best = tierd.Best(metric="loss", mode="max", count=2)
    assert tierd.Retention(keep_best={"metric": "loss", "mode": "max", "count": 2}).keep_best == best  # type: ignore[arg-type]
    assert tierd.Retention(keep_best=[{"metric": "loss", "mode": "max", "count": 2}, best]).keep_best == best  # type: ignore[arg-type, list-item]


# -- the command line -------------------------------------------------------------------------------------------------


def verdicts(place: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[int, bool]:
    assert run(["prune", str(place), "--json", *options]) == 0
    return {one["step"]: one["keep"] for one in json.loads(capsys.readouterr().out)["verdicts"]}


def test_prune_applies_the_runs_own_policy_unless_a_person_decides(
    trained: Spool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(verdicts(place, capsys).values()) and len(steps(place)) == 8
    few = verdicts(place, capsys, "--keep-last", "2", "--dry-run")
    assert [step for step, keep in few.items() if keep] == [8, 7] and len(steps(place)) == 8
    verdicts(place, capsys, "--keep-last", "2")
    assert steps(place) == [7, 8]


def test_prune_refuses_while_a_tier_of_the_run_is_not_named(
    trained: Spool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the other one still wants from here cannot be known."""
    (path,) = place.glob(f"{RUN}/retention/*.json")
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tiers": ["file", "s3"], "retention": {"keep_last": 1}})
    )
    assert run(["prune", str(place)]) == 3
    said = capsys.readouterr().err
    assert "kept on file, s3" in said and "--config FILE" in said and len(steps(place)) == 8


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_prune_without_any_policy_names_the_way_out(
    trained: Spool, place: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    (path,) = place.glob(f"{RUN}/retention/*.json")
    path.unlink() if harm == "gone" else path.write_bytes(b"garbage")
    assert run(["prune", str(place)]) == 3
    assert "--keep-last N" in capsys.readouterr().err and len(steps(place)) == 8
    verdicts(place, capsys, "--keep-last", "7")
    assert len(steps(place)) == 7


def test_ls_shows_the_verdicts_of_the_runs_own_policy(
    trained: Spool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> list[tuple[str, ...]]:
        assert run(["ls", str(place), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        return [tuple(one["copies"][0]["reasons"]) for one in found]

    assert shown()[1] == ("last 2 of 10",)
    (path,) = place.glob(f"{RUN}/retention/*.json")
    stored = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**stored, "retention": {"keep_last": 1}}))  # a person may
    assert shown()[1] == ("older than the last 1, and no rule keeps it",)
    path.unlink()
    assert shown()[1] == ()


def test_status_shows_policies_that_disagree(
    trained: Spool, tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Spool(tmp_path / "other")
    commit(other, part(9, 2), origin=part(8).checkpoint)
    with Daemon(other, place, "--keep-last", "2"):
        wait_until(lambda: len(list(place.glob(f"{RUN}/retention/*.json"))) == 2)
        wait_until(lambda: is_idle(other))
        assert run(["status", "--spool", str(other.root)]) == 0
    said = capsys.readouterr().out
    assert "keeps {'keep_last': 10}" in said and "keeps {'keep_last': 2}" in said and "delete the object" in said
    assert steps(place) == list(range(1, 10)) and attempt(2) in " ".join(tree(place))
