"""Decide whether the daemon outlives this process, or ends with it because their pid namespace ends.

When the first process of a pid namespace (a container's PID 1) ends, the kernel kills every other process in it. A
daemon that a container's trainer started is then killed before it has flushed.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_FIRST_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO: the inode of the machine's own pid namespace
_DEPTH = 100  # ancestors that are read at most
# Commands that, as PID 1 of a container, outlive the processes started in it.
_LASTING = {"systemd", "init", "s6-svscan", "runsvdir", "supervisord", "pause", "sleep", "tail"}
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh"}


def ends_with_us(connection: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket ends when this process ends.

    The kernel translates that process's pid to this namespace. The pid is 0 for a process of another namespace, which
    lives on.
    """
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", answer)[0]
    return pid != 0 and namespace_ends_with_us()


def namespace_ends_with_us() -> bool:
    """Whether this process's pid namespace ends when this process ends."""
    pid = os.getpid()
    try:
        own_namespace = Path("/proc/self/ns/pid").stat().st_ino != _FIRST_NAMESPACE
        first = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        return would_end(pid, _ancestors(pid), first, own_namespace=own_namespace)
    except (OSError, ValueError):  # no /proc, or another user's: answer only what is certain
        return pid == 1


def would_end(pid: int, ancestors: Sequence[int], first: Sequence[str], *, own_namespace: bool) -> bool:
    """Whether PID 1 of the namespace ends with process `pid`.

    Args:
        ancestors: the pids of its parent, its parent's parent, and so on, as far as they are in the namespace.
        first: the command line of PID 1.
        own_namespace: whether the namespace is another one than the machine's own.
    """
    if pid == 1:
        return True
    if not own_namespace or 1 not in ancestors or not first:
        return False  # PID 1 did not start this process, as with `docker exec`
    name = first[0].rsplit("/", 1)[-1].removeprefix("-")
    if name in _SHELLS:  # an interactive shell lives on; a shell that runs a command or a script does not
        flags = [word for word in first[1:] if word.startswith("-")]
        return len(flags) < len(first) - 1 or any("c" in flag for flag in flags if not flag.startswith("--"))
    return name not in _LASTING


def _ancestors(pid: int) -> list[int]:
    ancestors: list[int] = []
    while pid > 1 and len(ancestors) < _DEPTH:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.append(pid)
    return ancestors
