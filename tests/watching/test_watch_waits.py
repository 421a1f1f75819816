"""A watched directory that does not exist yet is waited for, and taken up when its program has made it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from support import layouts
from support.timed import timed
from support.waiting import wait_until
from support.watched_run import watching

from tierd.cli import run
from tierd.daemon.daemon_status import make_status


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, watch_s=0.02, settle_s=0.05, appear_s=60.0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path


def watched(directory: Path, tier: Path, *more: str) -> int:
    return run(["watch", str(directory), "--run", "r", "--to", f"file://{tier}", "--until-idle", *more])


def manifests(home: Path) -> list[Path]:
    return list(home.glob("tier/r/manifests/*"))


def problems(daemon: object) -> list[tuple[str, str]]:
    return [(one.severity, one.why) for one in make_status(daemon.reconciler, 0, 0).problems if "/out" in one.why]  # type: ignore[attr-defined]


@pytest.mark.parametrize("below", ["out", "job/17/out"])
def test_job_that_starts_watch_and_program_at_once_is_backed_up(below: str, home: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    directory = home / below

    def train() -> None:
        wait_until(lambda: "waiting for it" in caplog.text)
        directory.mkdir(parents=True)
        wait_until(lambda: "is there now" in caplog.text)
        threading.Event().wait(1.0)  # the program trains; a watch that had nothing to wait for would end meanwhile
        layouts.torch_save(directory)

    caplog.set_level("INFO")
    program = threading.Thread(target=train)
    program.start()
    assert watched(directory, home / "tier") == 0
    program.join()
    assert len(manifests(home)) == 1
    assert (directory.parent / ".out.tierd").is_dir(), "the default spool is beside DIR"


def test_watch_makes_no_directory_that_it_waits_for(home: Path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, appear_s=0.2)
    assert watched(home / "out", home / "tier") == 6
    assert f"{home}/out: it cannot be watched: it does not exist" in capsys.readouterr().err
    assert not (home / "out").exists()


def test_directory_that_appears_empty_ends_until_idle(home: Path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, appear_s=2.0)
    caplog.set_level("INFO")

    def make() -> None:
        wait_until(lambda: "waiting for it" in caplog.text)
        (home / "out").mkdir()

    program = threading.Thread(target=make)
    program.start()
    watched(home / "out", home / "tier")
    program.join()
    assert "is there now" in caplog.text


def test_link_whose_target_is_yet_to_be_made_is_waited_for(home: Path) -> None:
    (home / "out").symlink_to(home / "scratch")
    with watching(home, "spool") as daemon:
        wait_until(lambda: problems(daemon) != [])
        (home / "scratch").mkdir()
        layouts.torch_save(home / "scratch")
        wait_until(lambda: len(manifests(home)) == 1)


def test_status_shows_directory_that_is_waited_for_until_it_appears(home: Path) -> None:
    with watching(home, "spool") as daemon:
        wait_until(lambda: problems(daemon) != [])
        assert problems(daemon) == [("warning", f"{home}/out does not exist yet, and is waited for")]
        (home / "out").mkdir()
        wait_until(lambda: problems(daemon) == [])
        layouts.torch_save(home / "out")
        wait_until(lambda: len(manifests(home)) == 1)


def test_directory_that_disappears_is_alert_until_it_returns(home: Path) -> None:
    (home / "out").mkdir()
    layouts.torch_save(home / "out")
    with watching(home, "spool") as daemon:
        wait_until(lambda: len(manifests(home)) == 1)
        (home / "out").rename(home / "elsewhere")
        wait_until(lambda: "alert" in dict(problems(daemon)))
        (home / "elsewhere").rename(home / "out")
        wait_until(lambda: problems(daemon) == [])


def test_directory_that_was_missing_for_a_day_is_taken_up(home: Path) -> None:
    """The pause between two tries is doubled each time, and a product that is no float any more ended the watch."""
    (home / "out").mkdir()
    with watching(home, "spool") as daemon:
        (one,) = daemon.intake._watching.values()  # type: ignore[attr-defined]
        wait_until(lambda: one.directory_existed)
        (home / "out").rmdir()
        wait_until(lambda: one.failed_tries > 0)
        one.failed_tries = 3000
        wait_until(lambda: one.failed_tries > 3000)
        (home / "out").mkdir()
        layouts.torch_save(home / "out")
        wait_until(lambda: len(manifests(home)) == 1)


def test_directory_that_earlier_daemon_watched_is_alert_while_it_is_missing(home: Path) -> None:
    (home / "out").mkdir()
    layouts.torch_save(home / "out")
    with watching(home, "spool"):
        wait_until(lambda: len(manifests(home)) == 1)
    (home / "out").rename(home / "elsewhere")
    with watching(home, "spool") as daemon:
        wait_until(lambda: "alert" in dict(problems(daemon)))


def test_directory_that_appears_as_link_into_spool_is_not_watched(home: Path) -> None:
    with watching(home, "spool") as daemon:
        wait_until(lambda: problems(daemon) != [])
        (home / "out").symlink_to(home / "spool")
        wait_until(lambda: "alert" in dict(problems(daemon)))
        assert "nothing is written to a watched directory" in str(problems(daemon))


@pytest.mark.parametrize("kind", ["file", "fifo", "below a file", "loop"])
def test_path_that_can_be_no_directory_is_refused_at_once(kind: str, home: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = home / "out"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.write_text("")
    assert watched(path / "below" if kind == "below a file" else path, home / "tier") == 3
    assert "name the directory that the program writes to" in capsys.readouterr().err
