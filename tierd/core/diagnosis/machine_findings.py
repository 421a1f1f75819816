"""Which finding the observations of a spool, of its machine and of what ends the daemon there amount to."""

from __future__ import annotations

import errno
import math
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from tierd.core.diagnosis.findings import NODE, SYSTEM, Finding, finding
from tierd.core.units import format_size

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_LAYERS = {"overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "ceph", "gpfs", "9p", "virtiofs", "glusterfs", "afs"}
_LOCAL = {"ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"}
_SLOW_SYNC_S = 1.0  # a commit waits for four syncs or more
_DAEMON = 512 << 20  # bytes that the daemon's budgets keep it below
_FILES = 1024  # descriptors: 128 connections, 64 of each tier, and files
_THREADS = 2048  # as TasksMax= in systemd/tierd.service


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system, as the kernel names it: its type, such as `ext4`, and its device or server."""

    kind: str
    source: str
    read_only: bool = False


def is_in_memory(mount: Mount) -> bool:
    """Whether a reboot empties it."""
    return mount.kind in _IN_MEMORY


def file_system(mount: Mount | None) -> Finding:
    """Judge the file system of the spool; None: the kernel did not say."""
    if mount is None:
        return finding(NODE, "other file system", "its type is not known here")
    text = f"{mount.kind} on {mount.source}"
    if mount.read_only:
        return finding(NODE, "read-only", f"{text}, mounted read-only")
    if is_in_memory(mount):
        return finding(NODE, "in memory", f"{text}: a reboot empties it, and it takes memory from training")
    if mount.kind in _LAYERS:
        return finding(NODE, "container's layer", f"{text}: the layer of a container, or of a live system")
    if mount.kind in _NETWORK or mount.kind.startswith("fuse."):
        return finding(NODE, "network file system", f"{text}: a network file system, or one in a process")
    return finding(NODE, "local disk" if mount.kind in _LOCAL else "other file system", text)


def direct_write(direct: bool, rate: float) -> Finding:
    """Judge the write of some MB past the page cache; `rate` is in bytes a second."""
    speed = f"{rate / 1e6:,.0f} MB/s over 16 MiB"
    if direct:
        return finding(NODE, "direct", f"accepted; {speed}")
    return finding(NODE, "not direct", f"refused: writes take the page cache; {speed}")


def failed_write(number: int | None, why: str) -> Finding:
    """Judge the failure of that write, by its errno; a full disk proves nothing about direct I/O."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return finding(NODE, "room too small", f"16 MiB cannot be written: {why}")
    return finding(NODE, "not direct", f"the write fails: {why}")


def sync_time(seconds: float) -> Finding:
    """Judge how long fsync took for a small file and its directory."""
    return finding(NODE, "syncs" if seconds < _SLOW_SYNC_S else "slow sync", f"{1000 * seconds:.1f} ms")


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns the spool's directory, and who may write there: uids, and permission bits with the sticky bit.

    `filled` says whether it has any entry; `above` are the bits of the directory above.
    """

    owner: int
    user: int
    mode: int
    filled: bool
    above: int


def ownership(observed: Ownership) -> Finding:
    text = f"uid {observed.owner}, mode {observed.mode:03o}"
    if observed.owner != observed.user:
        return finding(NODE, "another's", f"{text}; this is uid {observed.user}")
    if observed.mode & stat.S_IWOTH and observed.filled:
        return finding(NODE, "writable by others", f"{text}: what lies there may be others'")
    if observed.above & stat.S_IWOTH and not observed.above & stat.S_ISVTX:
        return finding(NODE, "replaceable", f"{text}; everybody may rename what is in the directory above it")
    return finding(NODE, "readable by others" if observed.mode & 0o077 else "private", text)


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the spool's disk, in bytes.

    `used` is what the run with the largest state takes, which retention will delete. `state` is that of all ranks of
    this node together; None if the spool has no checkpoint yet.
    """

    free: int
    total: int
    used: int
    state: int | None
    run: str
    keep_last: int


def space(disk: Space) -> Finding:
    free = f"{format_size(disk.free)} of {format_size(disk.total)} free"
    if disk.state is None:
        return finding(NODE, "state unknown", f"{free}; the spool has no checkpoint yet")
    count = disk.keep_last + 1
    needed_bytes = count * disk.state
    text = f"{free}; {count} states of {format_size(disk.state)} (run {disk.run}) need {format_size(needed_bytes)}"
    if disk.total < needed_bytes:
        return finding(NODE, "room too small", text)
    if disk.free + disk.used < needed_bytes:
        return finding(NODE, "room short", f"{text}, and its checkpoints have {format_size(disk.used)}")
    return finding(NODE, "room", text)


def memory(total: int, available: int, limit: int | None, state: int | None) -> Finding:
    """Judge the memory of the machine and of this process's control group, in bytes. Without a `limit` it has none."""
    text = f"{format_size(available)} of {format_size(total)} available"
    text += (
        f"; the control group's limit is {format_size(limit)}" if limit is not None else "; no control group limits it"
    )
    usable = min(total, limit) if limit is not None else total
    if usable < _DAEMON:
        return finding(NODE, "memory too small", text)
    if state is not None and usable < 2 * state + _DAEMON:
        return finding(
            NODE, "memory short", f"{text}; training and one snapshot need {format_size(2 * state)} together"
        )
    return finding(NODE, "memory", text)


def limits(soft_limits: Mapping[str, int | None]) -> Finding:
    """Judge the soft limits of this process, by name (`files`, `threads`, `address space`, `file size`); None: none."""
    text = ", ".join(f"{name} {'unlimited' if limit is None else limit}" for name, limit in soft_limits.items())
    if soft_limits.get("file size") is not None:
        return finding(NODE, "file size limit", text)
    minimums = {"files": _FILES, "threads": _THREADS, "address space": 64 << 30}
    low = any(limit is not None and limit < minimums.get(name, 0) for name, limit in soft_limits.items())
    return finding(NODE, "low limits" if low else "limits", text)


_POD_DEFAULT_S = 30.0  # terminationGracePeriodSeconds, where a pod's manifest does not set it
# systemd.time(7), as systemctl prints a span
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w)")


def span_s(text: str) -> float | None:
    """Parse a span as systemd prints it, `1min 30s`, into seconds; `infinity` is infinite; None if it is none."""
    if text == "infinity":
        return math.inf
    pairs = [_SPAN.fullmatch(word) for word in text.split()]
    if not pairs or not all(pairs):
        return None
    return sum(float(pair[1]) * _UNITS[pair[2]] for pair in pairs if pair)


def kill_wait_s(config: str) -> float | None:
    """Find KillWait in the output of ``scontrol show config``, ``KillWait  = 30 sec``, in seconds."""
    match = re.search(r"^KillWait\s*=\s*(\d{1,9}) sec", config, re.MULTILINE)
    return float(match[1]) if match else None


def stop_timeout(name: str, stop_s: float | None, drain_s: float) -> Finding:
    """Judge a unit's TimeoutStopSec; None: there is no such unit, or nobody could be asked."""
    if stop_s is None:
        return finding(SYSTEM, "no unit", f"no {name} was found")
    stop_text = "infinity" if math.isinf(stop_s) else f"{stop_s:g} s"
    text = f"{name}: TimeoutStopSec is {stop_text}, drain {drain_s:g} s"
    return finding(SYSTEM, "stops in time" if stop_s > drain_s else "stopped too soon", text)


def job_end(kill_wait: float | None, drain_s: float) -> Finding:
    """Judge the time between SIGTERM and SIGKILL of a SLURM job; None: not known."""
    if kill_wait is None:
        return finding(SYSTEM, "job's end unknown", f"scontrol did not say KillWait; drain is {drain_s:g} s")
    text = f"KillWait is {kill_wait:g} s, drain {drain_s:g} s"
    return finding(SYSTEM, "job ends in time" if kill_wait > drain_s else "job ends too soon", text)


def pod_end(grace_s: float | None, drain_s: float) -> Finding:
    """Judge the grace period of a pod; None: the pod's environment does not say it."""
    if grace_s is None:
        text = f"not known here; the default is {_POD_DEFAULT_S:g} s, drain {drain_s:g} s"
        return finding(SYSTEM, "pod's grace unknown", text)
    text = f"{grace_s:g} s, drain {drain_s:g} s"
    return finding(SYSTEM, "pod ends in time" if grace_s > drain_s else "pod ends too soon", text)
