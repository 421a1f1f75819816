"""The log of a daemon that a trainer started keeps to its bound, and nobody else's standard error is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierd.ipc.messages import DAEMON_LOG
from tierd.spool.spool import Spool

LARGEST = 2000  # bytes
MANY = f"""
import logging, os, sys
from pathlib import Path
from tierd.daemon import status_file
status_file.MAX_LOG_BYTES = {LARGEST}
logging.basicConfig(level=logging.INFO, format="%(message)s")
with status_file.bounded_log(Path(sys.argv[1])):
    for number in range(500):
        logging.info("line %d", number)
        os.write(1, b"out %d\\n" % number)
os.write(2, b"the last word\\n")
"""
RUN = f"""
import sys
from tierd.daemon import status_file
status_file.MAX_LOG_BYTES = {LARGEST}
from tierd.cli import run
sys.exit(run(["run", "--spool", sys.argv[1], "--to", sys.argv[1] + ".tier", "--until-idle"]))
"""


@pytest.fixture
def control(tmp_path: Path) -> Path:
    return Spool(tmp_path / "spool").control


def child(code: str, argument: Path, log: Path, **files: object) -> int:
    with log.open("ab") as output:
        command = [sys.executable, "-c", code, str(argument)]
        return subprocess.run(command, **{"stdout": output, "stderr": output, **files}, timeout=250).returncode


def test_log_at_its_bound_loses_only_old_lines(control: Path) -> None:
    log, older = control / DAEMON_LOG, control / f"{DAEMON_LOG}.1"
    assert child(MANY, control, log) == 0
    assert sorted(path.name for path in control.glob(f"{DAEMON_LOG}*")) == [log.name, older.name]
    assert log.stat().st_size < LARGEST + 100 and LARGEST <= older.stat().st_size < LARGEST + 100
    lines = (older.read_text() + log.read_text()).splitlines()
    assert lines.pop() == "the last word"
    expected = [f"{kind} {number}" for number in range(500) for kind in ("line", "out")]
    assert lines == expected[-len(lines) :] and len(lines) > 100


def test_a_log_that_somebody_deleted_is_written_again(control: Path) -> None:
    log = control / DAEMON_LOG
    code = MANY.replace("for number", f"os.unlink({str(log)!r})\n    for number", 1)
    assert child(code, control, log) == 0
    assert log.read_text().endswith("the last word\n")


def test_another_file_may_grow(control: Path, tmp_path: Path) -> None:
    (control / DAEMON_LOG).write_text("of a daemon before\n")
    assert child(MANY, control, tmp_path / "own.log") == 0
    assert (tmp_path / "own.log").stat().st_size > 2 * LARGEST
    assert (control / DAEMON_LOG).read_text() == "of a daemon before\n"
    assert not (control / f"{DAEMON_LOG}.1").exists()


def test_the_daemon_bounds_its_log(control: Path) -> None:
    log = control / DAEMON_LOG
    log.write_text("before\n" * LARGEST)
    assert child(RUN, control.parent, log) == 0
    assert (control / f"{DAEMON_LOG}.1").read_text().startswith("before\n")
    assert log.stat().st_size < LARGEST and "ended" in log.read_text()
