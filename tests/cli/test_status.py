"""`tierd status --check`, and `tierd status` after the daemon has ended."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.doubles import Double
from support.web import serving
from support.world import Daemon, commit, part, reconciler, running, settle

from tierd.cli import run
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.cli.commands.status_lines import activity_text
from tierd.core.errors import StoreUnavailable
from tierd.core.event_kinds import EVENT_KINDS
from tierd.core.planning.place import SPOOL
from tierd.core.timeline.concurrent_launches import Rival
from tierd.daemon import status_file
from tierd.daemon.component_status import ScrubStatus
from tierd.daemon.daemon_status import Status, make_status
from tierd.daemon.reconciling.tier_worker import action_subject, action_verb
from tierd.daemon.status_problems import all_problems, status_problems
from tierd.events.journal import AlertStatus
from tierd.spool.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def calm(spool: Spool) -> Status:
    """The status of a daemon that nothing is wrong with."""
    found = make_status(reconciler(spool, {"tier": Double()}), 0, 0)
    return replace(found, spool_free=0.5, tiers=tuple(replace(one, reached=True) for one in found.tiers))


# -- severities -------------------------------------------------------------------------------------------------------


def reported(found: Status) -> list[tuple[str, str]]:
    return [(one.severity, one.place) for one in status_problems(found)]


def test_nothing_is_wrong_with_a_calm_daemon(calm: Status) -> None:
    assert status_problems(calm) == ()


def test_each_problem_has_its_severity(calm: Status) -> None:
    (tier,) = calm.tiers
    alert = AlertStatus("tier", "flush", "run step 1", "", 3, "refused")
    rivals = tuple(Rival("run", attempt, "local", (1,), "") for attempt in "ab")
    assert reported(replace(calm, alerts=(alert,))) == [("alert", "tier")]
    assert reported(replace(calm, launches=rivals)) == [("alert", "local")]
    assert reported(replace(calm, tiers=(replace(tier, reached=False),))) == [("warning", "tier")]
    assert reported(replace(calm, tiers=(replace(tier, failures=1, last_error="why"),))) == [("warning", "tier")]
    assert reported(replace(calm, tiers=(replace(tier, failures=9),), alerts=(alert,))) == [("alert", "tier")]  # once
    assert reported(replace(calm, spool_free=0.01)) == [("alert", "local")]
    assert reported(replace(calm, spool_free=0.04)) == [("warning", "local")]
    assert reported(replace(calm, paused="until resumed")) == [("warning", "local")]
    assert reported(replace(calm, scrub=ScrubStatus(None, 2, None))) == [("warning", "local")]
    both = replace(calm, paused="until resumed", alerts=(alert,))
    assert reported(both) == [("alert", "tier"), ("warning", "local")]  # the worst first


def test_each_problem_has_a_command_with_the_places_it_concerns(calm: Status) -> None:
    (tier,) = calm.tiers
    tier = replace(tier, name="a", url="file:///my tier", failures=1, last_error="why")
    problems = status_problems(replace(calm, spool="/my spool", tiers=(tier,), paused="until resumed"))
    bucket = replace(tier, url="s3://b/p?region=x", last_error="s3://b/p?region=x: put: 403")
    assert [problem.why for problem in status_problems(replace(calm, tiers=(bucket,)))] == ["put: 403"]
    commands = ["tierd doctor --spool '/my spool' 'file:///my tier'", "tierd resume --spool '/my spool'"]
    assert [problem.command for problem in problems] == commands


async def test_run_behind_its_tiers_is_a_problem_of_the_tier(spool: Spool) -> None:
    commit(spool, part(3))
    commit(spool, part(4))
    daemon = reconciler(spool, {"tier": Double()})
    await daemon.observe("tier")
    (problem,) = make_status(daemon, 0, 0).problems
    assert (problem.severity, problem.place) == ("warning", "tier")
    assert "run run: 2 checkpoints are on no tier, waiting for " in problem.why
    assert problem.command == f"tierd doctor --spool {spool.root} file:///tier"
    await daemon.pause.begin(None)
    assert [entry.command.split()[1] for entry in make_status(daemon, 0, 0).problems] == ["resume", "resume"]


async def test_runs_behind_one_tier_are_one_problem(spool: Spool) -> None:
    for number in range(8):
        commit(spool, part(number, run=f"run{number}"))
    daemon = reconciler(spool, {"tier": Double()})
    await daemon.observe("tier")
    (problem,) = make_status(daemon, 0, 0).problems
    assert problem.why.startswith("run run0: 1 checkpoint is on no tier, waiting for ")
    assert problem.why.endswith("; also behind: run1, run2, run3, run4, run5 and 2 more")


async def test_silent_tier_counts_as_last_observed(spool: Spool) -> None:
    """A checkpoint that was sent before the tier fell silent does not wait, and one that was made later does."""
    commit(spool, part(3))
    store = Double()
    daemon = reconciler(spool, {"tier": store})
    await daemon.observe(SPOOL)
    assert [lag.state for lag in daemon.lags.judge()] == ["unknown"]
    async with running(daemon):
        await settle(daemon)
    store.error = StoreUnavailable("503 Slow Down")
    with pytest.raises(StoreUnavailable):
        await daemon.observe("tier")
    assert [lag.text for lag in daemon.lags.judge()] == ["step 3 is on a tier"]
    commit(spool, part(4))
    await daemon.observe(SPOOL)
    ((state, step),) = [(lag.state, lag.oldest_step) for lag in daemon.lags.judge()]
    assert (state, step) == ("late", 4)


async def test_tier_that_falls_silent_costs_no_second_plan_of_each_run(spool: Spool, monkeypatch) -> None:
    for number in range(3):
        commit(spool, part(1, run=f"run{number}"))
    store = Double()
    daemon = reconciler(spool, {"tier": store})
    async with running(daemon):
        await settle(daemon)
    daemon.lags.judge()
    store.error = StoreUnavailable("503 Slow Down")
    with pytest.raises(StoreUnavailable):
        await daemon.observe("tier")
    planned: list[str] = []
    monkeypatch.setattr("tierd.core.planning.plan.RunPlan", lambda *of: planned.append(of[2]))
    assert [lag.text for lag in daemon.lags.judge()] == ["step 1 is on a tier"] * 3
    assert planned == []


async def test_quarantined_copies_of_all_places_are_one_problem(spool: Spool) -> None:
    daemon = reconciler(spool, {"a": Double(), "b": Double()})
    daemon.journal.quarantined.update({"local": 1, "a": 1, "b": 0})
    problems = all_problems(make_status(daemon, 0, 0), daemon.journal)
    (quarantined,) = [problem for problem in problems if "quarantined" in problem.why]
    assert quarantined.why == "2 copies were quarantined since the daemon's start, also on local"
    assert quarantined.command == f"tierd ls --spool {spool.root}"


def test_table_of_tiers_names_the_step_without_the_attempt() -> None:
    tier: dict[str, object] = {"retry_in_s": 0.0}
    tier["doing"] = "flushing r step 5 (attempt 01a22f905f95-1eacc8cc) rank 0 of 1"
    assert activity_text(tier) == "flushing r step 5"
    tier["doing"] = "flushing r step 5 (attempt 01a22f905f95-1eacc8cc) rank 0 of 16"
    assert activity_text(tier) == "flushing r step 5 rank 0 of 16"


@pytest.mark.parametrize("kind", [name for name, kind in EVENT_KINDS.items() if kind.level == "alert"])
def test_check_reports_every_event_that_is_an_alert(spool: Spool, kind: str) -> None:
    """`rolled back` and `given up` were sent as alerts, and the check said OK."""
    one = reconciler(spool, {"tier": Double()})
    if EVENT_KINDS[kind].persists:
        one.journal.record(kind, "tier", "run", "first", run="run")
        one.journal.record(kind, "tier", "run", "second", run="run")
        alerts = [problem for problem in make_status(one, 0, 0).problems if problem.severity == "alert"]
        text = f"{kind} (2 times since the daemon's start, this is the last): run: second; shown until"
        assert [(problem.place, problem.why) for problem in alerts] == [("tier", f"{text} the daemon starts again")]
    else:
        assert kind in (
            "failing",
            "two launches",
            "replicas differ",
        )  # states that end; see `test_each_problem_has_its_severity`


# -- the command ------------------------------------------------------------------------------------------------------


def test_check_exits_by_severity(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--spool", str(spool.root)]
    with Daemon(spool.root, {"tier": Double()}) as daemon:
        daemon.settle()
        assert run(["status", "--check", *where]) == 0
        assert capsys.readouterr().out == f"OK: daemon {os.getpid()} on {spool.root}\n"
        daemon.reconciler.journal.quarantined["tier"] += 1
        assert run(["status", "--check", *where]) == EXIT_WARNING
        assert capsys.readouterr().out == "WARNING tier: 1 copy was quarantined since the daemon's start\n"
        for _ in range(3):
            daemon.reconciler.journal.record_failure(("worker", "x"), "prune", "tier", "backlog", "refused")
        assert run(["status", "--check", *where]) == EXIT_ALERT
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("ALERT tier, for ") and first.endswith("prune backlog failed 3 times in a row: refused")
        assert second.startswith("WARNING")
        for _ in range(3):
            daemon.reconciler.journal.record_failure(
                ("lane", "y"), action_verb(None), "other", action_subject(None), "no route"
            )
        assert run(["status", "--check", *where]) == EXIT_ALERT
        assert ": observing failed 3 times in a row: no route\n" in capsys.readouterr().out
        daemon.reconciler.journal.record_success(("lane", "y"))
        assert run(["status", "--check", "--json", *where]) == EXIT_ALERT
        assert [one["severity"] for one in json.loads(capsys.readouterr().out)["problems"]] == ["alert", "warning"]
        assert run(["status", *where]) == 0  # without --check the state is shown, and nothing is judged


def test_after_the_daemon_has_ended_its_last_state_is_shown(
    spool: Spool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(spool, part(3))

    async def work() -> None:
        async with serving(spool, tmp_path / "tier") as http:
            async with asyncio.timeout(60):
                while "durable" not in [one.what for one in http._views._reconciler.journal.events]:
                    await asyncio.sleep(0.05)

    asyncio.run(work())
    where = ["--spool", str(spool.root)]
    assert run(["status", *where]) == 0
    shown = capsys.readouterr()
    assert "no daemon runs; this is the last known state, of " in shown.err and " s ago (20" in shown.err
    assert ", not running" in shown.out and "durable" in shown.out and "disk" in shown.out
    assert run(["status", "--json", *where]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["running"] is False and found["spool_parts"] == 1
    assert abs(datetime.fromisoformat(found["at"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert run(["status", "--check", *where]) == 6  # a state of the past is no check


def test_without_a_last_state_the_absent_daemon_is_an_error(spool: Spool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--spool", str(spool.root)]) == 6
    assert "no daemon" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, None])
def test_a_damaged_last_state_is_none(spool: Spool, damage: bytes | None, tmp_path: Path) -> None:
    path = spool.control / status_file.LAST_STATUS
    if damage is None:  # a link that leads out of the spool
        (tmp_path / "secret").write_text('{"pid": 1}')
        path.symlink_to(tmp_path / "secret")
    else:
        path.write_bytes(damage)
    assert status_file.read_status(spool.control) is None
    assert run(["status", "--spool", str(spool.root)]) == 6


def test_the_age_of_a_last_state(spool: Spool, calm: Status, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, age in ((5, "5 s ago"), (125, "2 min ago"), (7300, "2 h ago"), (3 * 86400, "3 d ago")):
        at = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
        status_file.write_status(spool.control, replace(calm, at=at))
        assert run(["status", "--spool", str(spool.root)]) == 0
        assert age in capsys.readouterr().err
    status_file.write_status(spool.control, replace(calm, at="never"))
    assert run(["status", "--spool", str(spool.root)]) == 0
    assert "unknown ago" in capsys.readouterr().err


def test_a_last_state_is_private_and_replaced_whole(spool: Spool, calm: Status) -> None:
    path = spool.control / status_file.LAST_STATUS
    status_file.write_status(spool.control, calm)
    first = path.stat()
    recorded = status_file.read_status(spool.control)
    assert recorded is not None and recorded["pid"] is None, "its number may be another process's"
    status_file.write_status(spool.control, calm)
    assert first.st_mode & 0o777 == 0o600 and path.stat().st_ino != first.st_ino
    assert [one.name for one in spool.control.glob("status*")] == [status_file.LAST_STATUS]


def test_a_disk_that_takes_no_state_changes_nothing_else(spool: Spool, calm: Status) -> None:
    (spool.control / f"{status_file.LAST_STATUS}.new").mkdir()
    status_file.write_status(spool.control, calm)
    assert status_file.read_status(spool.control) is None
