"""A systemd that was booted for a test: PID 1 of namespaces of its own, over this machine's files.

Invariant: nothing outside of the namespaces changes: what is written lies in a tmpfs over the root, /proc/sys and /sys
are read-only, and no unit starts but a journal and what the test starts. When `unshare` is killed, the kernel ends it
all. Needs root, a kernel with overlayfs and cgroup2, and Debian's systemd package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.waiting import wait_until

_TARGET = "tierd-test.target"
_UNITS = ("lib/systemd/system", "usr/lib/systemd/system", "etc/systemd/system")
_BOOT_S = 60.0
MNT_DETACH = 2
MS_RDONLY, MS_BIND, MS_REC, MS_SHARED = 1, 4096, 16384, 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, doing: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str | Path, kind: str, flags: int, data: str = "") -> None:
    done = _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(done, f"mount {source} on {target}")


def set_read_only(path: str | Path, on: bool, *, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY * on, MS_RDONLY * (not on), 0, 0)  # struct mount_attr
    done = _libc.syscall(442, -100, os.fsencode(path), 0x8000 * recursive, ctypes.byref(attributes), 32)
    check(done, f"mount_setattr {path}")


def boot(base: Path, binds: Mapping[str, str]) -> None:
    """In fresh namespaces: build the root below `base`, and become systemd."""
    mount("", "/", "", MS_REC | 1 << 18)  # private
    mount("tmpfs", base, "tmpfs", 0)
    root = base / "root"
    for name in ("up", "work", "root"):
        (base / name).mkdir()
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={base}/up,workdir={base}/work")
    mount("proc", root / "proc", "proc", 0)
    mount("/proc/sys", root / "proc/sys", "", MS_BIND | MS_REC)
    set_read_only(root / "proc/sys", True, recursive=True)
    mount("sysfs", root / "sys", "sysfs", MS_RDONLY)
    mount("tmpfs", root / "sys/fs/cgroup", "tmpfs", 0)
    mount("cgroup2", root / "sys/fs/cgroup", "cgroup2", 0)
    for name in ("run", "tmp", "dev"):
        mount("tmpfs", root / name, "tmpfs", 0, "mode=1777" if name == "tmp" else "mode=755")
    for name in ("shm", "pts"):
        (root / "dev" / name).mkdir()
    mount("tmpfs", root / "dev/shm", "tmpfs", 0, "mode=1777")
    mount("devpts", root / "dev/pts", "devpts", 0, "newinstance,ptmxmode=666")
    (root / "dev/ptmx").symlink_to("pts/ptmx")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        (root / "dev" / name).touch()
        mount(f"/dev/{name}", root / "dev" / name, "", MS_BIND)
    for source, target in binds.items():
        place = root / target.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        mount(source, place, "", MS_BIND | MS_REC)
    for units in {(root / units).resolve() for units in _UNITS}:
        assert units.is_relative_to(root), units  # a link that leads out of it would lead to this machine's own
        for wants in units.glob("*.wants"):  # nothing of this machine starts
            shutil.rmtree(wants)
    unit = "[Unit]\nWants=systemd-journald.service\nAfter=systemd-journald.service\n"
    (root / "etc/systemd/system" / _TARGET).write_text(unit)
    os.chdir(root)
    (root / "old").mkdir()
    check(_libc.syscall(155, b".", b"old"), "pivot_root")
    check(_libc.umount2(b"/old", MNT_DETACH), "umount")
    mount("", "/", "", MS_REC | MS_SHARED)  # as at every boot: a unit's own namespace then sees later mounts
    command = ["/lib/systemd/systemd", "--system", f"--unit={_TARGET}", "--log-target=console", "--show-status=no"]
    os.execve(command[0], command, {"container": "tierd-test", "PATH": os.environ["PATH"], "LANG": "C.UTF-8"})


class Machine:
    """The booted systemd, seen from outside; `pid` is its PID 1's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def run(self, command: str, *, ok: bool = True, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a shell command in it, as root."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--root", "--wd"]
        done = subprocess.run(
            [*inside, "/bin/sh", "-c", command], capture_output=True, text=True, timeout=timeout, env=_environment()
        )
        assert not ok or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}{self.log()}"
        return done

    def log(self) -> str:
        """The end of the journal."""
        return self.run("journalctl --no-pager -n 30", ok=False).stdout

    def retry(self, command: str) -> str:
        """Run a command again and again until it ends with 0; its output."""
        outputs: list[str] = []

        def succeeds() -> bool:
            done = self.run(command, ok=False)
            outputs.append(done.stdout)
            return not done.returncode

        wait_until(succeeds, pause_s=0.2)
        return outputs[-1]

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run(f"systemctl show -P {name} {unit}").stdout.strip()


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


@contextlib.contextmanager
def booted(base: Path, binds: Mapping[str, str]) -> Iterator[Machine]:
    """Boot, with directories of this machine bound elsewhere: source -> target."""
    flags = ["--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--cgroup"]
    pairs = [f"{source}={target}" for source, target in binds.items()]
    log = base.with_name(base.name + ".log")
    base.mkdir()
    with log.open("w") as output:
        process = subprocess.Popen(
            ["unshare", *flags, sys.executable, "-m", "support.booted", str(base), *pairs],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
    try:
        end = time.monotonic() + _BOOT_S
        machine = None
        while machine is None or machine.run("systemctl is-active " + _TARGET, ok=False).returncode:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            machine = Machine(int(children[0])) if children else None
        yield machine
    finally:
        process.send_signal(signal.SIGKILL)  # --kill-child: and with PID 1 all else
        process.wait(60)


if __name__ == "__main__":
    boot(Path(sys.argv[1]), dict(pair.split("=", 1) for pair in sys.argv[2:]))
