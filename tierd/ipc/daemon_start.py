"""Start the daemon of a spool from the training process. Standard library only.

Invariant: the started daemon outlives this process, until everything is flushed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tierd.core.errors import ConfigError, DaemonSilent, DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection, describe_hung_daemon, spool_holder_pid
from tierd.ipc.messages import DAEMON_LOG, EXIT_BAD_INPUT, EXIT_HELD
from tierd.spool.file_io import open_own
from tierd.spool.spool import Spool

_START = 60.0  # seconds that a daemon may take to answer after its start, because imports from a network disk are slow
_RETRY_S = 1.0  # seconds between attempts to take a spool that another daemon holds
# Kept, because Popen's destructor warns of a running child, and a daemon is meant to outlive this process.
_started: list[subprocess.Popen[bytes]] = []
_serving: dict[Path, subprocess.Popen[bytes]] = {}  # spool -> the last daemon started for it that answered
_EXITING = 0.2  # seconds that a daemon may take to exit after it closed its socket


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    try:  # nothing else in the log's place, because a FIFO would block, and a link lead out of the spool
        output = os.fdopen(open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
    except (OSError, ConfigError) as error:
        raise DaemonUnavailable(f"the daemon's log cannot be opened: {error}") from error
    with output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/"
        )
    _started.append(process)
    return process


def start_daemon(spool: Spool, urls: Sequence[str]) -> None:
    """Start a daemon for `spool` that outlives this process until everything is flushed; wait until it answers.

    Several ranks may call this at the same time: one daemon gets the spool, and serves all ranks. The other daemons end
    with `EXIT_HELD`. They are started again for as long as no daemon answers, because the daemon that holds the spool
    may be about to end.

    Raises:
        DaemonSilent: a daemon exists, and accepts no callers or was stopped before it listened.
        ConfigError: the daemon refused the tiers or the spool; the message is its own.
        DaemonUnavailable: the daemon ended or did not answer; the message holds the end of its log.
    """
    log = spool.control / DAEMON_LOG
    command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool.root), "--until-idle", "--await-trainer"]
    for url in urls:
        command += ["--to", url]
    process = _start(command, log)
    end = time.monotonic() + _START
    while time.monotonic() < end:
        status = process.poll()
        try:
            DaemonConnection(spool).close()
            _serving[spool.root] = process
            return
        except DaemonSilent:  # it holds the spool, so another daemon cannot start
            raise
        except DaemonUnavailable:
            if status == EXIT_HELD:
                if _is_stopped(pid := spool_holder_pid(spool)):
                    raise DaemonSilent(
                        f"spool {spool.root}: {describe_hung_daemon(pid, 'holds it and does not listen')}"
                    ) from None
                time.sleep(_RETRY_S)
                process = _start(command, log)
            elif status is not None:
                break
        time.sleep(0.05)
    text = _log_text(log)
    if status == EXIT_BAD_INPUT:
        raise ConfigError(_last_error(text) or f"spool {spool.root}: the daemon refused its configuration; see {log}")
    tail = text[-2000:].strip()
    raise DaemonUnavailable(f"the daemon for spool {spool.root} did not start; {log} ends with:\n{tail}")


def describe_daemon_end(spool: Spool) -> str:
    """Describe once, with its log's end, the error with which the daemon ended that this process started for `spool`.

    Empty if there was none, or it runs, was killed, or ended without an error.
    """
    process = _serving.get(spool.root)
    if process is None:
        return ""
    try:
        code = process.wait(_EXITING)
    except subprocess.TimeoutExpired:
        return ""
    _serving.pop(spool.root, None)
    if code <= 0 or code == EXIT_HELD:
        return ""
    log = spool.control / DAEMON_LOG
    try:
        text = _log_text(log)
    except (OSError, ConfigError) as error:
        return f"ended with exit status {code}, and {log} cannot be read: {error}"
    return f"ended with exit status {code}; {log} ends with:\n{text[-2000:].strip()}"


def _log_text(log: Path) -> str:
    with os.fdopen(open_own(log), errors="replace") as file:
        return file.read()


def _last_error(text: str) -> str:
    """Return the message with which the command line ended; empty without one."""
    _, mark, message = f"\n{text}".rpartition("\ntierd: ")
    return message.strip() if mark else ""


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False if it has ended, or is in another PID namespace."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
