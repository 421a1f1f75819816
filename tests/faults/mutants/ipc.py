"""Mutants of `tierd/ipc/`."""

from __future__ import annotations

from faults.rounds import Mutant

_CLIENT = "tierd/ipc/client.py"
_MESSAGES = "tierd/ipc/messages.py"
_TEST_SILENT_DAEMON = "pytest tests/client/restoring/test_silent_daemon.py"
_TEST_MESSAGES = "pytest tests/ipc/test_messages.py"

MUTANTS = (
    Mutant(
        "a client trusts any daemon",
        _CLIENT,
        "if (uid := stranger(connection, os.fstat(directory).st_uid)) is not None:",
        "if (uid := None) is not None:",
        "pytest tests/spool/test_permissions.py -k client_trusts",
    ),
    Mutant(
        "who finds no daemon is not told of the unit that starts it",
        "tierd/ipc/starting.py",
        "if any((at / name).exists() for at in directories)",
        "if False",
        "pytest tests/ipc/test_starting.py",
    ),
    Mutant(
        "no daemon counts as one that does not answer",
        _CLIENT,
        "(DaemonAbsent if absent else DaemonUnavailable)",
        "DaemonUnavailable",
        "pytest tests/daemon/test_control.py -k ls_shows_the_spool",
    ),
    Mutant(
        "a daemon that does not greet is waited for as one that works",
        _CLIENT,
        "self._line(end, min(self._silence_s, _GREETING))",
        "self._line(end, self._silence_s)",
        f"{_TEST_SILENT_DAEMON} -k names_it_after_seconds",
    ),
    Mutant(
        "a stopped daemon whose queue is full counts as absent",
        _CLIENT,
        "            if isinstance(error, BlockingIOError):",
        "            if False:",
        f"{_TEST_SILENT_DAEMON} -k no_more_callers",
    ),
    Mutant(
        "a daemon that was stopped before it listened is waited for",
        "tierd/ipc/daemon_start.py",
        "                if _is_stopped(pid := holder(spool)):",
        "                if False and (pid := 0):",
        f"{_TEST_SILENT_DAEMON} -k before_it_listened",
    ),
    Mutant(
        "chunks are named without end",
        "tierd/ipc/decoding.py",
        "end > first >= before for",
        "end > first for",
        f"{_TEST_MESSAGES} -k run_of",
    ),
    Mutant(
        "a member that is not set is sent",
        _MESSAGES,
        'tag_field="op", omit_defaults=True)',
        'tag_field="op", omit_defaults=False)',
        f"{_TEST_MESSAGES} -k not_sent",
    ),
    Mutant(
        "a member that is not known is refused",
        _MESSAGES,
        'tag_field="op", omit_defaults=True)',
        'tag_field="op", omit_defaults=True, forbid_unknown_fields=True)',
        f"{_TEST_MESSAGES} -k is_ignored",
    ),
    Mutant(
        "two minor versions apart are taken to work together",
        "tierd/ipc/protocol.py",
        "abs(mine.minor - other.minor) <= 1:",
        "abs(mine.minor - other.minor) <= 2:",
        "pytest tests/ipc/test_protocol.py -k who_has_to_be_upgraded",
    ),
)
