"""Calls that fail where no hook reaches: made to by strace, one after the other, and looked up in its log.

The log proves P7 from outside: a file whose fsync failed is never synced again, and what is committed after that was
written anew, every byte of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from faults.rounds import Lost
from support.world import part

from tierd.core.errors import StoreRefused, StoreUnavailable
from tierd.core.manifest import VERSION, Manifest
from tierd.spool.commit import write_part
from tierd.spool.spool import Spool
from tierd.stores.file import FileStore

_CALLS = {  # strace's name -> what may meet it
    "fsync": ("write", "put"),
    "pwrite64": ("write",),
    "write": ("put",),
    "rename": ("write", "put"),
    "renameat": ("put",),
    "mkdir": ("write",),
    "mkdirat": ("put",),
    "openat": ("write", "read", "put", "get", "scan"),
    "fallocate": ("write",),
    "preadv": ("read",),
    "read": ("read", "get"),
    "newfstatat": ("write", "read", "put", "scan", "get"),
    "fstat": ("read", "get"),
    "getdents64": ("write", "list", "scan"),
    "fcntl": ("write", "read"),
    "unlinkat": ("delete", "put"),
    "flock": ("write", "put"),
}
_LINE = re.compile(r"^(\d+)\s+(.*)$")
_DONE = re.compile(r"^(\w+)\((.*)\)\s+=\s+(-?\d+|\?)(.*)$")
_PATH = re.compile(r'<(/[^>]*)>|"([^"]*)"')


@dataclass(frozen=True)
class Call:
    """A line of strace's log; `path` is the first that it names."""

    name: str
    args: str
    result: str
    rest: str

    @property
    def injected(self) -> bool:
        return "(INJECTED)" in self.rest

    @property
    def path(self) -> str:
        found = _PATH.search(self.args)
        return (found[1] or found[2]).removesuffix("(deleted)") if found else ""


@contextlib.contextmanager
def failing(call: str, code: str, when: int, log: Path) -> Iterator[None]:
    """Within, the `when`-th of these calls of this process fails."""
    trace = ",".join(sorted({*_CALLS, "fdatasync"}))
    inject = f"inject={call}:error={code}:when={when}"
    what = ["strace", "-f", "-y", "-s", "300", "-o", str(log), "-e", f"trace={trace}", "-e", inject]
    what += ["-p", str(os.getpid())]
    tracer = subprocess.Popen(what, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 120
        while not _traced():
            if time.monotonic() > end or tracer.poll() is not None:
                raise RuntimeError("strace does not attach")
            time.sleep(0.002)
        yield
    finally:
        tracer.terminate()
        tracer.wait(120)


def _traced() -> bool:
    try:
        found = re.search(r"^TracerPid:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:  # the one that was to be met is one of ours
        return True
    return bool(found and int(found[1]))


def calls(log: Path) -> list[Call]:
    """What strace saw, in order; a call that another one interrupts is put together."""
    begun: dict[str, str] = {}
    found = []
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        pid, text = match[1], match[2]
        if text.endswith("<unfinished ...>"):
            begun[pid] = text.removesuffix("<unfinished ...>").rstrip()
            continue
        if text.startswith("<... "):
            text = begun.pop(pid, "") + text.partition(" resumed>")[2]
        done = _DONE.match(text)
        if done:
            found.append(Call(done[1], done[2], done[3], done[4]))
    return found


def check_syncs(seen: list[Call]) -> None:
    """P7: after an fsync of a file has failed, that file is not synced again. (Of a directory it may be: what is made
    in it by then is new.) What is committed all the same was written anew to a new file, every byte of it."""
    for number, lost in enumerate(seen):
        if not (lost.injected and lost.name == "fsync") or Path(lost.path).is_dir():
            continue
        later = seen[number + 1 :]
        if any(call.name in ("fsync", "fdatasync") and call.path == lost.path for call in later):
            raise Lost(f"{lost.path} was synced again after its fsync had failed")


def check_written_anew(seen: list[Call], files: Mapping[str, bytes]) -> bool:
    """That what failed to be synced was written again, whole; whether anything failed so."""
    for number, lost in enumerate(seen):
        name = Path(lost.path).name
        if lost.injected and lost.name == "fsync" and name in files:
            later = [call for call in seen[number + 1 :] if Path(call.path).name == name and call.path != lost.path]
            size = sum(int(call.result) for call in later if call.name == "pwrite64")
            if size != len(files[name]) or not any(call.name == "fsync" and call.result == "0" for call in later):
                raise Lost(f"{name} was committed, and {size} of {len(files[name])} bytes of it were written anew")
            return True
    return False


# -- trials ------------------------------------------------------------------------------------------------------------


def trial(rng: random.Random, home: Path) -> tuple[str, ...]:
    """What was done, and what met it; empty if that did not."""
    doing = rng.choice(("write", "write", "write", "put", "put", "read", "list", "get", "scan", "delete"))
    name = rng.choice([name for name, where in _CALLS.items() if doing in where])
    if doing in _CALLS["fsync"] and rng.random() < 0.3:
        name = "fsync"
    full = name in ("pwrite64", "write", "fallocate", "mkdir", "mkdirat", "openat") and doing in ("write", "put")
    code = rng.choice(("EDQUOT", "ENOSPC")) if full and rng.random() < 0.4 else "EIO"
    home.mkdir()
    when, large = int(2 ** rng.uniform(0, 3.5)), rng.random() < 0.4
    work = {
        **dict.fromkeys(("write", "read", "list"), _spool),
        **dict.fromkeys(("put", "get", "scan", "delete"), _tier),
    }
    log = home.with_name(f"{home.name}.strace")
    seen = work[doing](home, doing, lambda: failing(name, code, when, log), log, getattr(errno, code), large)
    if not any(call.injected and str(home) in call.args for call in seen):
        return ()
    sort = "a write" if name in ("pwrite64", "write") else name
    return f"{code} on {name} by strace: {doing}", f"{code} on {sort} by strace", f"{code} on any call by strace"


Faulty = Callable[[], contextlib.AbstractContextManager[None]]


def _spool(home: Path, doing: str, faulty: Faulty, log: Path, code: int, large: bool) -> list[Call]:
    spool = Spool(home / "spool")
    noise = random.Random(1)
    files = {name: noise.randbytes(1_300_000 if large and name == "a" else 9_000) for name in ("a", "b")}
    write_part(spool, _manifest(1), files)
    error: Exception | None = None
    spool.read(part(1), spool.manifest(part(1))), spool.leftovers()
    with faulty():
        try:
            if doing == "write":
                write_part(spool, _manifest(2), files)
            elif doing == "read":
                found = spool.read(part(1), spool.manifest(part(1)))
            else:
                listed, left = spool.parts(), spool.leftovers()
        except Exception as raised:
            error = raised
    if error is not None and (not isinstance(error, OSError) or error.errno != code):
        raise Lost(f"{doing}: {os.strerror(code)} became {error!r}")
    seen = calls(log)
    check_syncs(seen)
    if doing == "write":
        if error is None:
            check_written_anew(seen, files)
        for name in spool.leftovers():
            spool.discard(name)
        if any((spool.control / "stage").iterdir()) or any((spool.control / "trash").iterdir()):
            raise Lost(f"a stage is left, and locked: {list((spool.control / 'stage').iterdir())}")
        if error is not None and part(2) not in spool.parts():
            write_part(spool, _manifest(2), files)
        for name, data in files.items():
            for number in (1, 2):
                if (spool.path(part(number)) / name).read_bytes() != data:
                    raise Lost(f"{name} of step {number} is not what was written")
    elif doing == "read" and error is None and {name: bytes(data) for name, data in found.items()} != files:
        raise Lost("read what was not written")
    elif doing == "list" and error is None and (listed, left) != ([part(1)], []):
        raise Lost(f"a listing that failed looks like one that did not: {listed} {left}")
    return seen


def _manifest(step: int) -> Manifest:
    one = part(step)
    return Manifest(
        version=VERSION,
        run=one.checkpoint.run,
        step=step,
        attempt=one.checkpoint.attempt,
        resumed_from=None,
        rank=0,
        world_size=1,
        created="2026-01-01T00:00:00+00:00",
        writer="test",
        metrics={},
        files=(),
    )


def _tier(home: Path, doing: str, faulty: Faulty, log: Path, code: int, large: bool) -> list[Call]:
    return asyncio.run(_on_tier(home / "tier", doing, faulty, log, code, random.Random(2).randbytes(9_000)))


async def _on_tier(root: Path, doing: str, faulty: Faulty, log: Path, code: int, data: bytes) -> list[Call]:
    root.mkdir()
    store = FileStore(root)
    keys = [f"run/chunks/{name}/{number}" for name in "ab" for number in range(3)]
    for key in keys:
        await store.put(key, data)
    await store.get(keys[0])
    await store.delete(["run/none"])
    before = [info.key async for info in store.scan("")]
    error: Exception | None = None
    new = "run/chunks/c/0"
    with faulty():
        try:
            if doing == "put":
                await store.put(new, data)
            elif doing == "get":
                found = await store.get(keys[1])
            elif doing == "scan":
                listed = [info.key async for info in store.scan("")]
            else:
                await store.delete(keys[:2])
        except Exception as raised:
            error = raised
    seen = calls(log)
    check_syncs(seen)
    if error is not None:
        said = os.strerror(code) in str(error) and str(root) in str(error)
        if not isinstance(error, StoreUnavailable | StoreRefused) or not said:
            raise Lost(f"{doing}: {os.strerror(code)} became {error!r}")
    elif (doing == "get" and bytes(found) != data) or (doing == "scan" and listed != before):
        raise Lost(f"{doing} answers wrongly under {os.strerror(code)}")
    if doing == "put":
        path = root / new
        if path.exists() and path.read_bytes() != data:
            raise Lost("half of an object is visible")
        await store.put(new, data)
    elif doing == "delete":
        await store.delete(keys[:2])
    left = [info.key async for info in store.scan("")]
    due = sorted({*before, new}) if doing == "put" else before[2:] if doing == "delete" else before
    if left != due or any((root / ".tmp").iterdir()):
        raise Lost(f"{left} are there, not {due}; {list((root / '.tmp').iterdir())}")
    await store.aclose()
    return seen
