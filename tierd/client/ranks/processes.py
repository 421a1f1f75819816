"""The processes that are a launch's ranks: who they are, and which of them on this node have ended."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from tierd.client.ranks.launchers import all_here, environment_ranks, launch_variables
from tierd.core.errors import ConfigError


class RankProcess(msgspec.Struct, frozen=True):
    """A process that joined as a rank.

    Attributes:
        token: a random name that this process made for this meeting.
        host: the host's name, for messages.
        scope: boot id and pid namespace. A process with the same scope can see this process.
        pid: the process id.
        born: when the process started, in clock ticks since boot (proc(5), field 22 of `stat`); None if unknown.
    """

    token: str
    host: str
    scope: str
    pid: int
    born: int | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def has_ended(self, scope: str) -> bool:
        """Whether this process is known to have ended. Only a process with the same `scope` knows."""
        if not self.scope or self.scope != scope:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process belongs to another user
            return False
        return _born(self.pid) not in (self.born, None)


def this_process() -> RankProcess:
    pid, scope = os.getpid(), ""
    with suppress(OSError):
        scope = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return RankProcess(secrets.token_hex(8), socket.gethostname(), scope, pid, _born(pid))


class Siblings:
    """The processes of a launch's ranks on this node, also of ranks that have not made their `Checkpointer` yet.

    The kernel shows the environment with which a process was started (proc(5), `environ`), and a launcher writes the
    rank there. So a rank that still imports its modules differs from a rank that has ended. Child processes of a rank
    inherit its environment, so a rank counts as running while one of them runs.

    Invariant: a rank does not count as ended because this process cannot see it, as on another node, or in another
    container. It counts as ended if it was seen before, or if the launcher started all ranks in this process's view.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._name, self._shared = b"", frozenset[bytes]()
        self._expected: set[int] = set()
        self._last: dict[int, tuple[int, int | None]] = {}  # by rank: the last process seen, and when it started
        with suppress(ConfigError):  # the rank was given, and the environment's makes no sense
            variables = launch_variables() if environment_ranks() == (rank, world) else None
            if variables is not None:
                self._name = f"{variables[0]}=".encode()
                self._shared = frozenset(f"{key}={os.environ[key]}".encode() for key in variables[1])
            if all_here() and self._launcher_is_visible(rank):
                self._expected = set(range(world))
        # A process may have written its title over its environment; then this launch's processes cannot be recognised.
        if self._rank(os.getpid()) != rank:
            self._expected, self._name = set(), b""

    def ended(self) -> set[int]:
        """Return the ranks that have no process on this node any more."""
        if not self._name:
            return set()
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        running = {rank: (pid, _born(pid)) for pid in pids if (rank := self._rank(pid)) is not None}
        for rank, (pid, born) in self._last.items():  # it may have written a title over its environment
            if born is not None and _born(pid) == born:
                running.setdefault(rank, (pid, born))
        self._last |= running
        self._expected |= running.keys()
        return self._expected - running.keys()

    def _rank(self, pid: int) -> int | None:
        """Return the rank of a process; None if it has ended, cannot be seen, or is none of this launch's."""
        try:
            fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return None
        if not self._name or not self._shared <= set(fields):
            return None
        values = [field.removeprefix(self._name) for field in fields if field.startswith(self._name)]
        return int(values[0]) if values and values[0].isdigit() and len(values[0]) < 8 else None

    def _launcher_is_visible(self, rank: int) -> bool:
        """Whether the process that started this rank is in this process's pid namespace, and so are the other ranks."""
        pid = os.getpid()
        while pid and self._rank(pid) == rank:
            pid = _parent(pid)
        return pid > 0


def _born(pid: int) -> int | None:
    """Return when a process started; -1 if it has ended, None if that cannot be seen."""
    fields = _stat(pid)
    return None if fields is None else -1 if fields[0] in "ZX" else int(fields[19])


def _parent(pid: int) -> int:
    """Return the process that started a process; 0 if it is in another pid namespace, or cannot be seen."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/<pid>/stat` from the third on (proc(5)): state, parent, …; None if there are none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return fields if len(fields) > 19 else None
