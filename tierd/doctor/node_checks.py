"""Try this node: the spool's directory, what limits the machine's processes, its daemon, and what ends the daemon.

The directory in which the disk is tried is removed again.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierd import __version__
from tierd.codec import byte_planes, numpy_loops
from tierd.core.diagnosis import machine_findings
from tierd.core.diagnosis.findings import NODE, Finding, finding
from tierd.core.diagnosis.machine_findings import Ownership, Space
from tierd.core.errors import DaemonAbsent, TierdError, VersionMismatch
from tierd.core.ids import CheckpointId
from tierd.core.manifest import TENSORS
from tierd.core.replicas.shares import stored_by_all
from tierd.core.retention.policy import parse_duration
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.arena import Arena, limited_groups
from tierd.spool.direct_io import set_direct, write_all
from tierd.spool.spool import Spool
from tierd.stores.mounted_directories import mount_of
from tierd.threads import command_output

_WRITE_BYTES = 16 << 20  # bytes
_LEFT_S = 3600.0  # a doctor that was killed has left its directory
_MUCH = 64 << 20  # bytes that are worth storing once
_MAX_CHECKPOINTS = 100  # checkpoints of a run whose sizes are added up


@dataclass(frozen=True, slots=True)
class StateSize:
    """The largest state that the spool knows: of all of this node's ranks together, in bytes.

    `size` is that of its newest checkpoint, `used` that of all checkpoints of its run. `repeated` are the bytes of the
    newest one that each of several ranks stores, the same and undeclared; None if only one rank saves here.
    """

    run: str
    size: int
    used: int
    repeated: int | None = None


def examine_spool(root: Path, keep_last: int, state: StateSize | None) -> Iterator[Finding]:
    """Yield the findings about the spool in `root`, which may be absent."""
    try:
        home = nearest_existing(root)
    except OSError as error:  # a directory above it is closed to this account
        yield finding(NODE, "spool unusable", f"{root}: {error.strerror}")
        return
    if home == root and not root.is_dir():
        yield finding(NODE, "spool unusable", f"{root} is not a directory")
        return
    yield machine_findings.file_system(mount_of(home))
    if home == root:
        yield _ownership(root)
    try:
        with _directory(home, root) as room:
            yield _presence_finding(root, home)
            yield from _try_operations(room)
    except OSError as error:
        yield finding(NODE, "spool unusable", f"{home}: nothing can be written there: {error.strerror}")
    disk = os.statvfs(home)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    yield machine_findings.space(
        Space(
            free=free,
            total=total,
            used=state.used if state else 0,
            state=state.size if state else None,
            run=state.run if state else "",
            keep_last=keep_last,
        )
    )
    if state is not None and state.repeated is not None:
        name = "stored by each" if state.repeated >= _MUCH else "stored once"
        megabytes = f"{state.repeated / 1e6:.0f} MB of the newest checkpoint of {state.run}"
        yield finding(NODE, name, f"{megabytes} are the same on all ranks of this node, and stored by each")


def nearest_existing(root: Path) -> Path:
    """Return `root`, or the nearest directory above it that exists."""
    return next(path for path in (root, *root.parents) if path.exists())


def _presence_finding(root: Path, home: Path) -> Finding:
    if home != root:
        return finding(NODE, "spool absent", f"{root}; {home} is there, and this account may write to it")
    return finding(NODE, "spool found", str(root))


def _ownership(root: Path) -> Finding:
    status, above = root.stat(), root.parent.stat()
    try:
        with os.scandir(root) as entries:
            filled = any(entries)
    except PermissionError:  # another account's
        filled = True
    return machine_findings.ownership(
        Ownership(status.st_uid, os.geteuid(), stat.S_IMODE(status.st_mode), filled, stat.S_IMODE(above.st_mode))
    )


@contextmanager
def _directory(home: Path, root: Path) -> Iterator[Path]:
    """Make a private directory that no listing of the spool shows, and remove it; also those of killed doctors."""
    control = home / ".tierd"
    above, prefix = (control, "doctor-") if home == root and control.is_dir() else (home, ".tierd-doctor-")
    for leftover in above.glob(f"{prefix}*"):
        with suppress(OSError):
            if leftover.lstat().st_uid == os.geteuid() and time.time() - leftover.lstat().st_mtime > _LEFT_S:
                shutil.rmtree(leftover)
    room = tempfile.mkdtemp(prefix=prefix, dir=above)
    try:
        yield Path(room)
    finally:
        shutil.rmtree(room)


def _try_operations(room: Path) -> Iterator[Finding]:
    yield _time_write(room / "direct")
    try:
        (room / "staged").mkdir()
        (room / "staged").rename(room / "committed")
        yield finding(NODE, "renames", "a directory was renamed")
    except OSError as error:
        yield finding(NODE, "rename fails", str(error.strerror))
    try:
        yield machine_findings.sync_time(_time_sync(room))
    except OSError as error:
        yield finding(NODE, "sync fails", str(error.strerror))


def _time_write(path: Path) -> Finding:
    with mmap.mmap(-1, _WRITE_BYTES) as memory:  # whole pages, as O_DIRECT needs them
        memory.write(os.urandom(1 << 20) * (_WRITE_BYTES >> 20))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        view = memoryview(memory)
        try:
            is_direct = set_direct(fd, True)
            began = time.monotonic()
            is_direct = write_all(fd, view, 0) and is_direct
            os.fsync(fd)
            return machine_findings.direct_write(is_direct, _WRITE_BYTES / max(time.monotonic() - began, 1e-6))
        except OSError as error:  # here, because its traceback holds a slice of the memory, which could not be closed
            path.unlink()  # room for the other checks
            return machine_findings.failed_write(error.errno, str(error.strerror))
        finally:
            view.release()
            os.close(fd)


def _time_sync(room: Path) -> float:
    path = room / "synced"
    began = time.monotonic()
    with path.open("xb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.monotonic() - began


def largest_state(root: Path) -> StateSize | None:
    """Return the largest state of which the spool has a checkpoint; None if it has none that can be read."""
    if not (root / ".tierd").is_dir():
        return None
    states = list[StateSize]()
    with suppress(OSError, TierdError):
        spool = Spool(root, write=False)
        for run in spool.runs():
            newest = spool.newest(run, _MAX_CHECKPOINTS)
            sizes = [_size(spool, checkpoint) for checkpoint in newest]
            if sizes and sizes[0]:
                states.append(StateSize(run, sizes[0], sum(sizes), _repeated_bytes(spool, newest[0])))
    return max(states, key=lambda state: state.size, default=None)


def _size(spool: Spool, checkpoint: CheckpointId) -> int:
    total = 0
    for part in spool.parts_of(checkpoint):
        with suppress(TierdError):  # a manifest that is damaged, or of a newer version
            total += spool.manifest(part).size
    return total


def _repeated_bytes(spool: Spool, checkpoint: CheckpointId) -> int | None:
    manifests = [spool.manifest(part) for part in sorted(spool.parts_of(checkpoint))]
    if len(manifests) < 2:
        return None
    files = [file for file in manifests[0].files if file.path == TENSORS]
    return sum(end - begin for file in files for begin, end in stored_by_all(file, manifests[1:]))


_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "threads": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
}
_SHM_BYTES = 1 << 20  # bytes of shared memory


def examine_machine(state: int | None) -> Iterator[Finding]:
    """Yield the findings about this machine; `state` is the size of a node's state in bytes, if it is known."""
    yield _shared_memory()
    memory = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE))
    total = int(memory.get("MemTotal", 0)) << 10
    limit = min((group.limit for group in limited_groups()), default=None)
    yield machine_findings.memory(total, int(memory.get("MemAvailable", 0)) << 10, limit, state)
    yield machine_findings.limits({name: _soft(number) for name, number in _LIMITS.items()})
    yield _codec()


def _codec() -> Finding:
    if byte_planes.loops is not numpy_loops:
        return finding(NODE, "compiled codec", "its inner loops are compiled")
    try:
        from tierd.codec import _plane_loops  # noqa: F401
    except ImportError:
        return finding(NODE, "NumPy codec", "its inner loops are NumPy's, because none were compiled")
    return finding(NODE, "no vector codec", "its inner loops are NumPy's, which are faster here than compiled ones")


def _shared_memory() -> Finding:
    try:
        Arena(_SHM_BYTES).close()
    except MemoryError as error:
        return finding(NODE, "no shared memory", str(error))
    return finding(NODE, "shared memory", "a sealed memfd was made and mapped")


def _soft(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


UNIT = "tierd.service"
GRACE = "TIERD_GRACE_PERIOD"  # what a pod's manifest may tell, because Kubernetes tells a pod nothing of it


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """How the spool's daemon, with process id `pid` or 0, answered, and the finding of it.

    `failures` has each tier that it has observed, by URL, with its last error; empty: the tier answers.
    """

    finding: Finding
    pid: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)


def ask_daemon(root: Path) -> DaemonAnswer:
    """Ask the spool's daemon for its status."""
    if not (root / ".tierd").is_dir():
        return DaemonAnswer(finding(NODE, "no daemon", f"none has run: this is tierd {__version__}"))
    try:
        with DaemonConnection(Spool(root, write=False)) as link:
            status = message_codec.read_member(link.ask(messages.StatusRequest()), "status", dict[str, Any])
    except DaemonAbsent:
        return DaemonAnswer(finding(NODE, "no daemon", f"none runs; this is tierd {__version__}"))
    except VersionMismatch as error:
        return DaemonAnswer(finding(NODE, "versions apart", str(error)))
    except (TierdError, TimeoutError) as error:
        return DaemonAnswer(finding(NODE, "silent daemon", str(error)))
    version, pid = str(status.get("version", "of an unknown version")), int(status.get("pid", 0))
    name = "daemon answers" if version == __version__ else "other version"
    text = f"tierd {version} answers (pid {pid}); this is tierd {__version__}"
    return DaemonAnswer(finding(NODE, name, text), pid, _failures(status))


def _failures(status: dict[str, Any]) -> dict[str, str]:
    """Read each tier's last error; a tier that was not observed yet, or an older daemon's, is left out."""
    errors = {}
    for tier_status in status.get("tiers", []):
        failed = tier_status.get("failures") or not tier_status.get("reached")
        if not failed or tier_status.get("last_error"):
            errors[str(tier_status.get("url"))] = str(tier_status["last_error"]) if failed else ""
    return errors


def examine_endings(pid: int, drain_s: float) -> Iterator[Finding]:
    """Yield the findings about everything that may end the daemon with process id `pid` (0: none runs) too soon."""
    name = unit_of(pid)
    yield machine_findings.stop_timeout(name, _stop_s(name), drain_s)
    if os.environ.get("SLURM_JOB_ID"):
        yield machine_findings.job_end(
            machine_findings.kill_wait_s(command_output(["scontrol", "show", "config"])), drain_s
        )
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        try:
            grace_s = parse_duration(os.environ[GRACE])
        except (KeyError, ValueError):
            grace_s = None
        yield machine_findings.pod_end(grace_s, drain_s)


def unit_of(pid: int, groups: str = "") -> str:
    """Return the unit that a process belongs to, by the name of its control group; else the unit that tierd ships."""
    try:
        groups = groups or Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return UNIT
    match = re.search(r"/(tierd[\w@.:\\-]*\.service)$", groups, re.MULTILINE)
    return match[1] if match else UNIT


def _stop_s(unit: str) -> float | None:
    if shutil.which("systemctl") is None:
        return None
    text = command_output(["systemctl", "show", "--property=LoadState,TimeoutStopUSec", unit])
    members = dict(line.partition("=")[::2] for line in text.splitlines())
    return machine_findings.span_s(members.get("TimeoutStopUSec", "")) if members.get("LoadState") == "loaded" else None
