"""`tierd check-resume` on real processes: what is right passes, what was planted is found, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from check.bed.forked import check_forked

import tierd
from tierd import observing
from tierd.check import Report, assert_resumes, check_resume
from tierd.check.launch_records import RecordLine
from tierd.check.witness import WitnessOrders
from tierd.cli import run
from tierd.core.errors import ConfigError, LoopFailed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Whatever a check makes, it makes here, and leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="tck-", dir="/tmp") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which torch._dynamo makes, and leaves
        yield Path(name)
        assert list(Path(name).iterdir()) == []


def kinds(report: Report) -> list[str]:
    return [one.kind for one in report.causes]


def test_observe_does_nothing_outside_of_a_check():
    assert observing._record is None
    tierd.observe(1, iter([1, 2]), "no number at all")


# -- what is right ----------------------------------------------------------------------------------------------------


def test_exact_loop_passes_at_every_kill_point():
    report = assert_resumes("support.loops:read", steps=23, kill_at=(3, "11+5ms", 15))
    assert report.exact and not report.causes
    assert [(one.began, one.resumed, one.killed_at) for one in report.launches[:2]] == [
        (1, False, "3"),
        (3, True, "11+5ms"),
    ]
    assert report.launches[0].ended == 3  # the observing process killed itself: exactly there
    assert "every sample and every loss as uninterrupted, bit for bit" in str(report)
    assert json.loads(report.to_json())["ranks"][0]["samples"] == 23 * 4


def test_ranks_are_killed_together_and_compared_each():
    report = assert_resumes("support.loops:by_rank", steps=12, kill_at=(3, 7), ranks=2)
    assert report.exact and [one.rank for one in report.ranks] == [0, 1]


def test_an_allowance_is_honoured_and_shown():
    report = check_resume("support.loops:shards", steps=15, kill_at=(5, 11), allowance=6)
    assert report.ok and not report.exact and kinds(report) == []
    assert "4 of 12 allowed were used (6 for each of 2 resumes)" in str(report)
    assert not check_resume("support.loops:shards", steps=15, kill_at=(5, 11), allowance=1).ok


@pytest.mark.timeout(400)
def test_the_quickstart_resumes_exactly():
    """From the middle of an epoch of 10 steps, and from its edge, when the save of step 15 was cut short."""
    report, _ = check_forked("examples.quickstart:train", steps=22, kill_at=(8, "14+save"))
    assert report.ok and report.exact
    assert [one.began for one in report.launches] == [1, 6, 11]


@pytest.mark.timeout(400)
def test_a_save_that_the_daemon_has_survives_the_kill():
    """Killed while the daemon writes the checkpoint of step 6: launch 3 goes on from it. The daemon is gone as well."""
    report, _ = check_forked("support.loops:handed_over", steps=9, kill_at=(3, "6+save"))
    assert report.ok and report.exact and [one.began for one in report.launches] == [1, 3, 7]


def test_tutorial_shows_the_loop_that_is_checked():
    shown = (ROOT / "examples" / "quickstart.py").read_text().split("# -- the docs show from here\n")[1]
    lines = [line.removeprefix("    ") for line in shown.rstrip().splitlines()]
    assert (
        "```python\nimport tierd\n\n" + "\n".join(lines) + "\n```"
        in (ROOT / "docs" / "tutorial" / "quickstart.md").read_text()
    )
    for wanted in ("model", "optimizer", "scheduler", "scaler", "data", "rng", "step", "epoch", "losses", "best"):
        assert f'"{wanted}": ' in shown


@pytest.mark.timeout(400)
def test_the_state_is_that_after_the_last_step_however_long_it_takes_to_look_at():
    """A launch was stopped as soon as its last step was told; where its state came later, another moment's stood in."""
    report, _ = check_forked("support.loops:adapted_slow_at_step_9", steps=9, kill_at=(4,))
    assert report.ok and report.exact and report.entries == 4  # drift, its two values, and the note


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("loop", "entries"), [("adapted", 0), ("adapted_other", 0), ("adapted_itself", 4)])
def test_state_that_a_loop_restores_into_is_not_taken_for_the_state_it_trains(loop, entries):
    """It has saved nothing since it was resumed when the last step comes, so what it would save is not known; unless
    an uninterrupted run saves the very thing that it restores into."""
    report, _ = check_forked(f"support.loops:{loop}", steps=8, kill_at=(7,))
    assert report.ok and [one.began for one in report.launches] == [1, 7] and report.entries == entries


@pytest.mark.timeout(400)
def test_difference_between_launches_is_no_finding_though_a_rank_was_killed_before_it_could_show():
    """Rank 1 died with rank 0 before its state was captured, so only a second uninterrupted run tells what varies."""
    report, lines = check_forked("support.loops:late_rank", steps=8, kill_at=(4,), ranks=2)
    assert report.ok and report.exact and [one.began for one in report.launches] == [1, 3]
    assert any(line.startswith("uninterrupted again") for line in lines)


def test_launch_that_runs_past_the_last_step_names_the_step_of_its_state(room: Path):
    (room / "state").write_text('{"step": 2, "position": 8}')
    orders = WitnessOrders("support.loops:ends_early", str(room), str(room / "record"), os.getpid(), steps=2)
    code = "import sys; sys.path[:] = {path!r}; from tierd.check.witness import main; main(sys.argv[1])"
    command = [sys.executable, "-c", code.format(path=sys.path), msgspec.json.encode(orders).decode()]
    subprocess.run(command, cwd=ROOT, check=True)
    record = (room / "record").read_bytes()
    for name in ("state", "record"):
        (room / name).unlink()
    lines = [msgspec.json.decode(one, type=RecordLine) for one in record.splitlines()]
    assert [(one.capture.step, one.capture.moment) for one in lines if one.capture] == [(3, "end")]


# -- what was planted -------------------------------------------------------------------------------------------------


def test_a_naive_dataset_is_caught():
    """Nothing is seeded, and the position is saved nowhere: both are said."""
    report = check_resume("support.loops:naive", steps=11, kill_at=(7,))
    assert not report.ok and kinds(report) == ["not deterministic", "position"]
    assert "unseeded shuffling" in report.causes[0].says
    with pytest.raises(AssertionError, match="NOT EXACT"):
        assert report.ok, str(report)


def test_random_numbers_that_are_not_saved_are_caught():
    report, _ = check_forked("support.loops:without_rng", steps=7, kill_at=("3+save",))
    [found] = report.ranks
    assert not report.ok and kinds(report) == ["generator"] and "tierd.RngState()" in report.causes[0].says
    assert (found.divergence.what, found.divergence.launch, found.again, found.skipped) == ("loss", 2, 0, 0)
    assert found.divergence.step == report.launches[1].began == 3  # the save of step 4 was cut short


@pytest.mark.parametrize(
    ("loop", "kind", "again", "skipped"),
    [
        ("prefetched", "prefetch", 0, 8),
        ("unseeded", "not deterministic", None, None),
        ("reshuffled", "shuffle", None, None),
        ("off_by_one", "position", 4, 0),
    ],
)
def test_planted_faults_of_the_data_are_named(loop, kind, again, skipped):
    report = check_resume(f"support.loops:{loop}", steps=9, kill_at=(5,))
    assert not report.ok and kinds(report)[0] == kind
    if again is not None:
        assert (report.ranks[0].again, report.ranks[0].skipped) == (again, skipped)
    assert "likely cause" in str(report) and "first differs at step" in str(report)


def test_a_loop_that_saves_nothing_proves_nothing():
    report = check_resume("support.loops:never_saved", steps=9, kill_at=(5,))
    assert not report.ok and report.exact and kinds(report) == ["never restored"]


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("ends_early", "ended with exit code 0 after step 3, before step 9.*that was all"),
        ("breaks", "ended with exit code 1 after step 1.*RuntimeError: the GPU fell off"),
        ("hangs", "nothing new for 3 s; rank 0 stands after step 1"),
        ("nowhere", "support.loops has no function nowhere"),
    ],
)
def test_a_launch_that_fails_ends_and_hangs(loop, says):
    with pytest.raises(LoopFailed, match=f"(?s)uninterrupted: .*{says}"):
        check_resume(f"support.loops:{loop}", steps=9, kill_at=(5,), patience=3 if loop == "hangs" else 100)


def test_check_refuses_a_kill_that_is_never_reached_and_a_state_from_elsewhere():
    with pytest.raises(LoopFailed, match=r"came to step 9 and could not be killed at 5\+save: it never saved"):
        check_resume("support.loops:read", steps=9, kill_at=("5+save",))
    with pytest.raises(ConfigError, match="restores something from outside of the directory"):
        check_resume("support.loops:leaks", steps=9, kill_at=(5,))


@pytest.mark.parametrize(
    "wrong", [{"kill_at": ()}, {"kill_at": (9,)}, {"kill_at": "5"}, {"ranks": 0}, {"allowance": -1}]
)
def test_arguments_that_cannot_be_used(wrong):
    with pytest.raises(ConfigError):
        check_resume("support.loops:read", **{"steps": 9, "kill_at": (5,), **wrong})


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(capfd: pytest.CaptureFixture[str]):
    arguments = ["check-resume", "support.loops:prefetched", "--steps", "9", "--kill-at", "5"]
    assert run([*arguments, "--json"]) == 8
    out, err = capfd.readouterr()
    assert json.loads(out)["causes"][0]["kind"] == "prefetch"
    assert "launch 1: to be killed at 5" in err
    assert run(["check-resume", "support.loops:read", "--steps", "9", "--kill-at", "3,5"]) == 0
    assert capfd.readouterr().out.startswith("exact: support.loops:read: 9 steps, 2 kills, 1 rank;")
    assert run(["check-resume", "support.loops:breaks", "--steps", "9", "--kill-at", "5"]) == 3
    assert "RuntimeError: the GPU fell off" in capfd.readouterr().err


def test_report_names_the_directory_that_it_keeps(room: Path):
    report = check_resume("support.loops:read", steps=9, kill_at=(5,), keep=True)
    assert report.kept is not None and f"left to look at: {report.kept}" in str(report)
    kept = Path(report.kept)
    assert (kept / "killed" / "spool" / "state").exists() and len(list(kept.glob("launch-*.jsonl"))) == 2
    shutil.rmtree(kept)


def test_the_loop_ends_when_the_check_itself_is_killed(room: Path):
    code = "from tierd.check import check_resume; check_resume('support.loops:hangs', steps=9, kill_at=(5,))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(room)}
    check = subprocess.Popen([sys.executable, "-c", code], env=environment)

    def loops() -> list[str]:
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if str(room).encode() in command.read_bytes():
                    found.append(command.parent.name)
        return found

    try:
        end = time.monotonic() + 60
        while not loops():
            assert time.monotonic() < end and check.poll() is None
            time.sleep(0.1)
    finally:
        check.kill()
        check.wait()
    end = time.monotonic() + 60
    while loops():
        assert time.monotonic() < end
        time.sleep(0.1)
    shutil.rmtree(next(room.iterdir()))
