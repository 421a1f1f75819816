"""A FIFO or a link in place of a small file of tierd's: nothing waits for ever, and no link's target is written."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tierd.core.errors import ConfigError, DaemonUnavailable, TierdError
from tierd.daemon.intake.taken_units import TakenUnits
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.ipc.daemon_connection import spool_holder_pid
from tierd.ipc.daemon_start import start_daemon
from tierd.ipc.messages import DAEMON_LOG
from tierd.reading.checkpoint_deliveries import DeliveryLog
from tierd.spool.spool import Spool
from tierd.watching.unit import ListedEntry

_LONG_S = 60.0


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("theirs")
    return tmp_path / "outside"


def put(shape: str, path: Path, outside: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if shape == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(outside)


def ended(call: Callable[[], object]) -> BaseException | None:
    """Run a call that may hang; return its error."""
    errors: list[BaseException | None] = []

    def work() -> None:
        try:
            call()
        except TierdError as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONG_S)
    assert not thread.is_alive() and errors, "it hangs"
    return errors[0]


@pytest.mark.parametrize("shape", ["fifo", "link"])
@pytest.mark.parametrize("name", ["r.json", "r.json.new"])
def test_record_of_a_watch_is_written_in_place_of_an_odd_file(
    name: str, shape: str, spool: Spool, outside: Path
) -> None:
    put(shape, spool.control / "watched" / name, outside)

    def record() -> None:
        for _ in range(2):  # the first write removes what lies in the new file's place
            TakenUnits(spool, "r").add("step-1", (("step-1/a", ListedEntry("file", 1, 1)),))

    assert ended(record) is None
    assert TakenUnits(spool, "r").has_taken("step-1", (("step-1/a", ListedEntry("file", 1, 1)),))
    assert outside.read_text() == "theirs"


@pytest.mark.parametrize("shape", ["fifo", "link"])
def test_daemon_whose_log_is_an_odd_file_is_not_started_and_the_log_is_named(
    shape: str, spool: Spool, outside: Path, tmp_path: Path
) -> None:
    put(shape, spool.control / DAEMON_LOG, outside)
    (tmp_path / "tier").mkdir()
    error = ended(lambda: start_daemon(spool, [str(tmp_path / "tier")]))
    assert isinstance(error, DaemonUnavailable) and DAEMON_LOG in str(error)
    assert outside.read_text() == "theirs"


def test_lock_that_is_a_fifo_names_no_holder(spool: Spool, outside: Path) -> None:
    put("fifo", spool.lock_path, outside)
    found: list[int] = []
    assert ended(lambda: found.append(spool_holder_pid(spool))) is None
    assert found == [0]


def test_state_of_a_follower_that_is_a_fifo_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state")
    error = ended(lambda: DeliveryLog(tmp_path / "state", "r"))
    assert isinstance(error, ConfigError) and str(tmp_path / "state") in str(error)


@pytest.mark.parametrize("shape", ["fifo", "link"])
def test_pause_is_written_in_place_of_an_odd_file(shape: str, spool: Spool, outside: Path) -> None:
    put(shape, spool.control / "paused.new", outside)
    assert ended(lambda: asyncio.run(TierPause(spool).begin(60.0))) is None
    assert TierPause(spool).until is not None
    assert outside.read_text() == "theirs"
