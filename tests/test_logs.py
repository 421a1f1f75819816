"""The log is written for its reader: a person, journald, or a program. `test_planted_names.py` has what it escapes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from tierd import logs

EVIL = "\u202e\x9b31m\u2028"


def shown(formatter: logging.Formatter, level: int, message: str, error: Exception | None = None) -> str:
    reported = (type(error), error, None) if error else None
    return formatter.format(logging.LogRecord("a.library", level, "", 0, message, (), reported))


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2), (25, 6)],
)
def test_each_level_has_the_priority_of_syslog(level: int, number: int) -> None:
    assert shown(logs.JournalFormatter(), level, "text") == f"<{number}>text"


def test_each_line_for_journald_has_its_priority_and_no_text_can_forge_a_priority() -> None:
    lines = shown(logs.JournalFormatter(), logging.ERROR, f"a\n<7>b{EVIL}", ValueError("x\n<7>y")).split("\n")
    assert lines[0] == "<3>a\\n<7>b\\u202e\\x9b31m\\u2028"
    assert len(lines) > 1 and all(line.startswith("<3>  ") for line in lines[1:])


def test_a_line_for_a_program_is_one_object() -> None:
    line = shown(logs.JsonFormatter(), logging.WARNING, f"a\n{EVIL}", ValueError("no"))
    assert line.isprintable()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("warning", "a.library", f"a\n{EVIL}")
    assert "ValueError: no" in found["exception"]
    assert datetime.fromisoformat(found["time"]).utcoffset() is not None
    assert "exception" not in json.loads(shown(logs.JsonFormatter(), logging.INFO, "fine"))


def said(tmp_path: Path, *command: str, journal: bool = False) -> tuple[int, list[str]]:
    """The exit code and the standard error of a process of its own; `journal`: as if journald read it."""
    ours, theirs = os.pipe()
    found = os.fstat(theirs)
    environment = dict(os.environ, JOURNAL_STREAM=f"{found.st_dev}:{found.st_ino + (not journal)}")
    child = [sys.executable, "-m", "tierd", *command]
    with os.fdopen(ours) as reader:
        done = subprocess.Popen(child, stderr=theirs, stdout=subprocess.DEVNULL, env=environment, cwd=tmp_path)
        os.close(theirs)
        text = reader.read()
        return done.wait(60), text.splitlines()


def test_a_daemon_says_everything_in_the_format_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    command = ("run", "--spool", str(tmp_path / "spool"), "--to", str(tmp_path / "tier"), "--until-idle")
    code, lines = said(tmp_path, *command, "--log-format", "json", journal=True)
    assert code == 0 and {json.loads(line)["level"] for line in lines} >= {"info"}
    code, lines = said(tmp_path, *command, journal=True)
    assert code == 0 and lines and all(line.startswith("<6>") for line in lines)
    code, lines = said(tmp_path, *command)
    assert code == 0 and all(line[:4].isdigit() and " INFO " in line for line in lines)


@pytest.mark.parametrize("journal", [False, True])
def test_an_error_that_ends_a_daemon_is_an_error_in_each_format(tmp_path: Path, journal: bool) -> None:
    command = ("run", "--config", "none.toml")
    code, (line,) = said(tmp_path, *command, journal=journal)
    assert code == 3 and line.startswith(
        "<3>tierd: configuration none.toml" if journal else "tierd: configuration none.toml"
    )
    code, (line,) = said(tmp_path, *command, "--log-format", "json", journal=journal)
    found = json.loads(line)
    assert (code, found["level"]) == (3, "error") and found["message"].startswith("configuration none.toml")


@pytest.mark.parametrize(
    ("configuration", "is_shown"),
    [
        ("", True),
        ("logging.basicConfig(level=logging.WARNING)", False),
        ("logging.getLogger('tierd').setLevel(logging.WARNING)", False),
        ("logging.basicConfig(level=logging.INFO)", True),
    ],
)
def test_program_without_logging_sees_the_lines(configuration: str, is_shown: bool) -> None:
    code = f"import logging\nfrom tierd import logs\n{configuration}\nlogs.announce('restored step %d', 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert ("restored step 3" in done.stderr) == is_shown and done.stdout == ""
