"""`python confined.py UNIT UID WRITABLE[:...] COMMAND...`: a command as systemd runs it under a unit, without systemd.

Invariant: every directive of the unit is either carried out here, by the same means of the kernel (mount namespace,
seccomp, bounding set, prctl), or named in `ELSEWHERE`; one that is in neither ends this with an error. Where it differs
it is
stricter: a system call that the unit would refuse ends the process by SIGSYS, so that nothing is refused unnoticed, and
nothing but what may be written is writable, not even /tmp.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

# Carried out by systemd's own process, or a wish that confines nothing.
ELSEWHERE = {
    "Type",
    "ExecStart",
    "ExecReload",
    "EnvironmentFile",
    "User",
    "Group",
    "Restart",
    "RestartSec",
    "RestartPreventExitStatus",
    "WatchdogSec",
    "KillMode",
    "TimeoutStopSec",
    "CPUWeight",
    "MemoryHigh",
    "MemoryMax",
    "TasksMax",
    "StateDirectory",
    "StateDirectoryMode",
    "ReadWritePaths",  # the caller's instead
    "SystemCallErrorNumber",  # a signal instead
    "PrivateTmp",  # nothing writable there instead
    "DevicePolicy",  # a control group's; /dev holds nothing else here
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EQ, MASKED = 4, 7  # of scmp_compare
NAMESPACES = 0x7E020080 | 0x80  # CLONE_NEW*
WRITE_EXECUTE = 2 | 4  # PROT_*


def directives(unit: Path) -> dict[str, list[str]]:
    """What the unit's [Service] says; a directive may stand there more than once."""
    found: dict[str, list[str]] = {}
    section = unit.read_text().split("[Service]")[1].split("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def expand(names: str) -> set[str]:
    """System calls by name, from names and sets as systemd writes them."""
    calls, asked = set[str](), names.split()
    while asked:
        name = asked.pop()
        if not name.startswith("@"):
            calls.add(name)
            continue
        done = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
        asked += [line.strip() for line in done.stdout.splitlines() if line.startswith("    ") and "#" not in line]
    return calls


def allowed(filters: list[str]) -> set[str]:
    """What a unit's lines `SystemCallFilter=` leave, the first of them an allow list."""
    calls = expand("@default")
    for line in filters:
        calls = calls - expand(line[1:]) if line.startswith("~") else calls | expand(line)
    return calls


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


def untraversable(path: Path) -> Path | None:
    """The topmost directory above `path` that an ordinary user may not enter."""
    above = [one for one in (*reversed(path.parents), path) if not one.stat().st_mode & stat.S_IXOTH]
    return above[0] if above else None


def show(paths: list[Path]) -> None:
    """Let an ordinary user get to what the interpreter needs, where that lies in a private home directory."""
    held = {path: os.open(path, os.O_PATH) for path in paths}
    for home in {home for path in paths if (home := untraversable(path))}:
        mount("tmpfs", home, "tmpfs", 0, "mode=755")
        for path, fd in held.items():
            if path.is_relative_to(home):
                path.mkdir(parents=True, exist_ok=True)
                mount(f"/proc/self/fd/{fd}", path, "", MS_BIND | MS_REC)


def own_mounts(writable: list[Path]) -> None:
    """A mount namespace in which nothing but `writable` is."""
    check(_libc.unshare(0x00020000), "unshare")
    os.umask(0o022)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    show([Path(path).resolve() for path in {sys.prefix, sys.base_prefix, Path(__file__).parents[2]}])
    for path in writable:
        mount(str(path), path, "", MS_BIND)


def private_devices() -> None:
    made = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
    mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755")
    for name, minor in made.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.chmod(f"/dev/{name}", 0o666)


class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def rules(unit: dict[str, list[str]]) -> Iterator[tuple[int, str, list[tuple[int, int, int, int]]]]:
    """The seccomp filter that the unit amounts to: action, system call, conditions (argument, comparison, values)."""
    calls = allowed(unit["SystemCallFilter"])
    if unit["RestrictAddressFamilies"]:
        calls.discard("socket")
        families = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
        for name in unit["RestrictAddressFamilies"][0].split():
            yield ALLOW, "socket", [(0, EQ, families[name], 0)]
    if unit["MemoryDenyWriteExecute"] == ["yes"]:
        calls -= {"mmap", "mprotect", "pkey_mprotect", "shmat"}
        yield ALLOW, "mmap", [(2, MASKED, 4, 0)]
        yield ALLOW, "mmap", [(2, MASKED, WRITE_EXECUTE, 4)]
        yield ERRNO | 1, "mmap", [(2, MASKED, WRITE_EXECUTE, WRITE_EXECUTE)]  # a library may try, and do without
        yield ALLOW, "mprotect", [(2, MASKED, 4, 0)]
        yield ERRNO | 1, "mprotect", [(2, MASKED, 4, 4)]
    if unit["RestrictNamespaces"] == ["yes"]:
        calls -= {"clone", "clone3", "unshare", "setns"}
        yield ALLOW, "clone", [(0, MASKED, NAMESPACES, 0)]
        yield ERRNO | 38, "clone3", []  # as systemd does: its flags cannot be seen
    if unit["RestrictRealtime"] == ["yes"]:
        calls.discard("sched_setscheduler")
        for policy in (0, 3, 5):
            yield ALLOW, "sched_setscheduler", [(1, EQ, policy, 0)]
    if unit["RestrictSUIDSGID"] == ["yes"]:
        calls -= {"openat2", "mknod", "mknodat", "creat"}
        yield ERRNO | 38, "openat2", []
        for name, argument in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2)):
            calls.discard(name)
            yield ALLOW, name, [(argument, MASKED, 0o6000, 0)]
        for name, argument in (("open", 1), ("openat", 2)):
            calls.discard(name)
            yield ALLOW, name, [(argument, MASKED, os.O_CREAT, 0)]
            yield ALLOW, name, [(argument, MASKED, os.O_CREAT, os.O_CREAT), (argument + 1, MASKED, 0o6000, 0)]
    if unit["LockPersonality"] == ["yes"]:
        calls.discard("personality")
    for names, directive in (("@clock", "ProtectClock"), ("@module", "ProtectKernelModules")):
        if unit[directive] == ["yes"]:
            calls -= expand(names)
    if unit["ProtectKernelLogs"] == ["yes"]:
        calls.discard("syslog")
    if unit["ProtectHostname"] == ["yes"]:
        calls -= {"sethostname", "setdomainname"}
    for name in sorted(calls):
        yield ALLOW, name, []


def load(found: list[tuple[int, str, list[tuple[int, int, int, int]]]]) -> None:
    """Put this process under the filter; what no rule names ends it, and so does a foreign architecture's call."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = context = ctypes.c_void_p
    seccomp.seccomp_init.argtypes = [ctypes.c_uint32]
    context = ctypes.c_void_p(seccomp.seccomp_init(KILL))
    for action, name, conditions in found:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue  # of another architecture
        array = (Compare * max(1, len(conditions)))(*(Compare(*one) for one in conditions))
        done = seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(conditions), array)
        if done:
            raise OSError(-done, f"seccomp rule for {name}: {os.strerror(-done)}")
    if done := seccomp.seccomp_load(context):
        raise OSError(-done, f"seccomp_load: {os.strerror(-done)}")


def confine(unit: dict[str, list[str]], uid: int, writable: list[Path]) -> None:
    """Do to this process, which is root's, what the unit says."""
    on = {name for name, values in unit.items() if values == ["yes"]}
    protect = {"PrivateMounts", "ProtectKernelTunables", "ProtectControlGroups", "ProtectHome", "ProtectSystem"}
    # The values that what is below stands for; another one is not carried out yet.
    known = {
        "UMask": "0077",
        "LimitCORE": "0",
        "ProtectSystem": "strict",
        "ProtectHome": "read-only",
        "ProtectProc": "invisible",
        "ProcSubset": "pid",
        "CapabilityBoundingSet": "",
        "SystemCallArchitectures": "native",
    }
    done = {"PrivateDevices", "NoNewPrivileges", "RestrictSUIDSGID", "RestrictRealtime", "RestrictNamespaces"}
    done |= {"MemoryDenyWriteExecute", "LockPersonality", "ProtectClock", "ProtectHostname", "ProtectKernelLogs"}
    done |= {"ProtectKernelModules"} | protect - set(known)
    assert done <= on, done - on
    assert {name: unit[name][0] for name in known} == known
    rest = set(unit) - done - set(known) - ELSEWHERE - {"RestrictAddressFamilies", "SystemCallFilter"}
    assert not rest, f"nobody carries out {rest}"
    filters = list(rules(unit))  # before there is nothing to run any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own_mounts(writable)
    private_devices()
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible,subset=pid")
    set_read_only("/", True, recursive=True)
    for path in writable:
        set_read_only(path, False, recursive=False)
    for capability in range(64):
        if _libc.prctl(24, capability, 0, 0, 0) < 0:  # PR_CAPBSET_DROP
            break
    become(uid)
    os.umask(0o077)
    check(_libc.prctl(65, 1, 0, 0, 0), "PR_SET_MDWE")
    check(_libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    load(filters)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main() -> None:
    """UNIT may be `-`: an ordinary process of that user, in the same place."""
    unit, uid, writable, *command = sys.argv[1:]
    paths = [Path(path) for path in writable.split(":")]
    if unit == "-":
        own_mounts(paths)
        become(int(uid))
    else:
        confine(directives(Path(unit)), int(uid), paths)
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
