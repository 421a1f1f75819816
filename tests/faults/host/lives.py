"""The lives that are played: a node on one sort of host each, and what the host does to it meanwhile."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from faults.host import clock, places
from faults.host.node import DEADLINE_S, KEEP, Node
from faults.host.places import Memory, Overlay
from faults.host.trainer import Trainer
from faults.mounts import mount_memory, unmount
from faults.power.loopfs import LoopFs
from faults.rounds import Lost
from support.waiting import holds

GROUPS = "tierd-faults-host-"  # what control groups' names begin with

_SIZES = (0, 300_000)  # of a state's large tensor; the second goes past the page cache
_BIG = 6_000_000  # float32: a checkpoint of 24 MB, which no daemon flushes in the memory that it had before
_MORE = 8 << 20  # bytes that a limited daemon has for it
_TMPFS = "size=64m,mode=700"

Play = Callable[[random.Random, Path], list[str]]


def _tmpfs(rng: random.Random, home: Path) -> list[str]:
    """A spool in memory: processes are killed, and it is lost with a reboot."""
    (home / "nvme").mkdir()
    mount_memory(home / "nvme", _TMPFS)

    def reboot(node: Node) -> None:
        node.drain()
        node.kill_daemon()
        node.kill_trainer()
        unmount(home / "nvme")
        mount_memory(home / "nvme", _TMPFS)

    return _live(rng, Node(home, rng.choice(_SIZES)), {"reboot": reboot})


def _overlay(rng: random.Random, home: Path, *, older: bool = False) -> list[str]:
    """A spool on overlayfs, mounted again or made anew; `older`: over one that lies in its lower layer."""
    lower = home / "lower"
    lower.mkdir()
    node = Node(home, rng.choice(_SIZES))
    if older:
        try:
            node.start_daemon()
            node.start_trainer()
            node.save(rng.randint(1, 5))
            node.drain()
            node.close_trainer()
            node.stop_daemon()
        finally:
            node.let_go()
        shutil.copytree(home / "nvme", lower, dirs_exist_ok=True)
        shutil.rmtree(home / "nvme")
        (home / "nvme").mkdir()
    overlay = Overlay(home / "overlay", home / "nvme", lower)

    def restart(node: Node) -> None:
        node.kill_daemon()
        node.kill_trainer()
        unmount(home / "nvme")
        overlay.mount()

    def renew(node: Node) -> None:
        node.drain()
        node.kill_daemon()
        node.kill_trainer()
        unmount(home / "nvme")
        overlay.renew()

    return _live(rng, node, {"restart": restart, "renewal": renew})


def _live(rng: random.Random, node: Node, upheavals: dict[str, Callable[[Node], None]]) -> list[str]:
    """Save, and be struck by some of `upheavals`, or have a process killed, while saves go on."""

    def both(node: Node) -> None:
        node.kill_daemon()
        node.kill_trainer()

    kills = {"kill of the daemon": Node.kill_daemon, "kill of the trainer": Node.kill_trainer, "kill of both": both}
    chosen = [rng.choice(list(upheavals)), rng.choice([*kills, *upheavals])]
    rng.shuffle(chosen)
    try:
        node.start_daemon()
        node.start_trainer()
        for name in chosen:
            node.save(rng.randint(1, KEEP + 1))
            node.begin(rng.randint(1, 3))
            time.sleep(rng.choice((0.0, 0.02, 0.2)) * rng.random())
            if name in upheavals:
                node.collect()
            (kills | upheavals)[name](node)
            if node.daemon is None:
                node.start_daemon()
            if node.trainer is None:
                node.start_trainer()
            node.collect()
            node.check_none_failed()
        node.end()
    finally:
        node.let_go()
    return chosen


def _spool_read_only(kind: str, *, alone: bool = True) -> Play:
    """The spool's file system turns read-only while a trainer saves, and is writable again later.

    Args:
        alone: without a daemon, whose lock is open for writing. With one, the kernel remounts only where it finds an
            error itself.
    """

    def play(rng: random.Random, home: Path) -> list[str]:
        fs = LoopFs(kind, home, "nvme")
        fs.mount()
        node = Node(home, rng.choice(_SIZES))
        try:
            if not alone:
                node.start_daemon()
            node.start_trainer(alone=alone)
            node.save(rng.randint(1, 4))
            node.begin(3)
            time.sleep(rng.random() * 0.05)
            if alone:
                places.remount(fs, read_only=True)
            else:
                places.fail(fs)
            node.begin(2)
            node.collect()
            if len(node.failures) < 2:
                raise Lost(f"a save on a read-only file system was acknowledged: {sorted(node.saved)}")
            node.check_failures(errno.EROFS, *([] if alone else [errno.EIO]))
            if alone and rng.random() < 0.5:
                _check_another(node)
            if alone:
                places.remount(fs, read_only=False)
            else:
                node.let_go()
                fs.unmount()
                fs.mount()
                node.start_daemon()
                node.start_trainer()
            node.save(KEEP)
            if alone:
                node.close_trainer()
                node.start_daemon()
                node.start_trainer()
            node.end()
        finally:
            node.let_go()
        return []

    return play


def _check_another(node: Node) -> None:
    """A launch that begins while its spool is read-only restores what is there, or raises an error that says so."""
    another = Trainer(node.spool, node.big, alone=True, follows=None)
    found = another.resumed
    another.kill()
    reported = found.error and found.error.startswith("SpoolUnusable") and str(node.spool) in found.error
    if not (reported and "read-only" in found.error.lower()) and found.step != max(node.saved):
        raise Lost(f"on a read-only spool a launch is given {found}, not step {max(node.saved)}")


def _tier_read_only(kind: str) -> Play:
    """A tier's file system is remounted read-only while checkpoints are flushed there."""

    def play(rng: random.Random, home: Path) -> list[str]:
        fs = LoopFs(kind, home, "nfs")
        fs.mount()
        (fs.home / "tier").mkdir()
        node = Node(home, rng.choice(_SIZES))
        try:
            node.start_daemon()
            node.start_trainer()
            node.save(rng.randint(1, 4))
            node.begin(3)
            time.sleep(rng.random() * 0.3)
            places.remount(fs, read_only=True)
            node.save(2)
            newest = max(node.saved)
            if not holds(lambda: node.is_on("other", newest), DEADLINE_S):
                raise Lost(f"a read-only tier holds up the other one: step {newest}\n{node.status()}")
            _check_refused(node)
            places.remount(fs, read_only=False)
            node.end()
        finally:
            node.let_go()
        return []

    return play


def _check_refused(node: Node) -> None:
    """`status` says of the tier what failed, and why."""

    def reported() -> bool:
        (tier,) = (one for one in node.status()["tiers"] if one["name"] == "tier")
        return (
            tier["failures"] > 0
            and os.strerror(errno.EROFS) in (tier["last_error"] or "")
            and tier["pending_parts"] > 0
        )

    if not holds(reported, DEADLINE_S, pause_s=0.1):
        raise Lost(f"status does not say that the tier is read-only: {node.status()['tiers']}")


def _memory(rng: random.Random, home: Path) -> list[str]:
    """A control group's limit kills the daemon in the middle of a flush; another one ends likewise, and the next one
    has enough."""
    memory = Memory(home / "cgroup", f"{GROUPS}{os.getppid()}-{rng.randrange(10**9)}")
    node = Node(home, _BIG)
    deaths = rng.randint(1, 2)
    notes = [f"{deaths} kills"]
    try:
        node.start_daemon(memory)
        node.start_trainer()
        memory.limit(_MORE)
        node.begin(2)
        for death in range(1, deaths + 1):
            if not holds(lambda: node.daemon.poll() is not None, DEADLINE_S):
                raise Lost(f"a flush of 24 MB took less than {_MORE} bytes: {node.status()}")
            if node.daemon.returncode != -signal.SIGKILL or memory.kills < death:
                raise Lost(f"the daemon ended with {node.daemon.returncode}, {memory.kills} kills\n{node.log()}")
            if any(not node.is_on("tier", int(path.name[:12])) for path in node.spool.glob("run/*.*")):
                notes.append("in the middle of a flush")
            if death < deaths:
                memory.limit(None)
                node.start_daemon(memory)
                memory.limit(_MORE)
        node.collect()
        node.check_none_failed()
        node.save(rng.randint(1, 2))
        memory.limit(None)
        node.start_daemon(memory)
        node.end()
    finally:
        node.let_go()
        memory.remove()
    return notes


def _clock(rng: random.Random, home: Path) -> list[str]:
    """The wall clock is set back a day while daemon and trainer live; some of them are started again after that."""
    ahead = home / "ahead"
    clock.put(ahead, clock.DAY_S)
    node = Node(home, rng.choice(_SIZES), ahead)
    chosen = rng.choice(("both live on", "another trainer", "another daemon", "both are started again"))
    try:
        node.start_daemon()
        node.start_trainer()
        node.save(rng.randint(1, KEEP + 2))
        if chosen == "both are started again":  # in the middle of what a daemon was doing
            node.begin(2)
            time.sleep(rng.random() * 0.3)
            node.kill_trainer()
            node.kill_daemon()
        elif chosen == "another daemon":
            node.begin(2)
            time.sleep(rng.random() * 0.3)
            node.kill_daemon()
        elif chosen == "another trainer":
            node.kill_trainer()
        clock.age([node.spool, *node.tiers.values()], clock.DAY_S)
        clock.put(ahead, 0.0)
        if node.daemon is None:
            node.start_daemon()
        if node.trainer is None:
            node.start_trainer()
        node.collect()
        node.check_none_failed()
        node.save(rng.randint(1, KEEP))
        _check_latest(node)
        node.close_trainer()
        node.start_trainer()
        node.end()
    finally:
        node.let_go()
    return [chosen]


def _check_latest(node: Node) -> None:
    """The tiers alone give the newest, too, as another node would restore it."""
    node.drain()
    target = node.home / "elsewhere"
    command = [*node.tierd("restore", f"file://{node.tiers['tier']}"), "--run", "run", "--to", str(target), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode or f'"step": {max(node.saved)},' not in done.stdout:
        raise Lost(f"a tier gives {done.stdout}{done.stderr}, not step {max(node.saved)}")


HOSTS: dict[str, Play] = {
    "tmpfs spool": _tmpfs,
    "overlayfs spool": _overlay,
    "overlayfs over an older spool": lambda rng, home: _overlay(rng, home, older=True),
    "ext4 spool remounted read-only": _spool_read_only("ext4"),
    "xfs spool remounted read-only": _spool_read_only("xfs"),
    "ext4 spool in error": _spool_read_only("ext4", alone=False),
    "ext4 tier remounted read-only": _tier_read_only("ext4"),
    "xfs tier remounted read-only": _tier_read_only("xfs"),
    "daemon killed by its memory limit": _memory,
    "clock set back a day": _clock,
}
