"""Hosts: what a node runs on, and does to it. Spools in memory and on overlayfs, file systems that are remounted
read-only and writable again, a control group whose limit kills the daemon, a wall clock that is set back a day.

A trial is one life of a node on one of these: a daemon as its command line starts it, a trainer, and two tiers, each of
them a real process or directory. The trainer saves while the fault comes, and goes on when it is over. Required:

- `save` returns, and what cannot be saved fails by one error, one log line and one count, which say where and why;
- what was acknowledged is restored, and nothing older, however late the node's clock says that it was made;
- no error counts as corruption, and a tier that cannot be written holds up neither saves nor the other tier;
- when the fault is over, the next save succeeds, `tierd drain` succeeds, and the spool and each tier hold the newest
  checkpoints that were acknowledged, bit for bit, and of the older ones none.

NFS is not played: its client and server are the kernel's, and most kernels of virtual machines have none.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults.hands import Trial, in_child, spread
from faults.host import places
from faults.host.lives import GROUPS, HOSTS
from faults.host.node import nfs
from faults.host.places import Memory, Overlay
from faults.mounts import mount_memory, own_mounts
from faults.power.loopfs import KINDS, LoopFs
from faults.rounds import Round

UNIT, SHORT, GATE = "lives on odd hosts", 10, 60

_LIMIT_S = 600  # of one trial

MET = (*HOSTS, "daemon killed by its memory limit: in the middle of a flush")


def missing() -> str | None:
    if os.geteuid():
        return "mounting needs root"
    lacking = [name for name in ("mkfs.ext4", "mkfs.xfs", "mount", "fallocate") if not shutil.which(name)]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    try:
        in_child(own_mounts)
    except OSError as error:
        return str(error)
    return None


def run(work: Round) -> None:
    work.notes[nfs()] += 1
    refused = in_child(lambda: _refused(work.room / "tried"))
    for name, why in refused.items():
        work.skip(f"{name}: {why}")

    def prepare() -> Trial:
        import torch

        torch.set_num_threads(1)  # a forked trainer has none of OpenMP's others
        own_mounts()

        def trial(seed: int) -> tuple[int, list[str]]:
            name = list(HOSTS)[seed % len(HOSTS)]
            if name in refused:
                return 0, []
            return 1, [name, *(f"{name}: {note}" for note in _play(name, seed, work.room / str(seed)))]

        return trial

    mine = f"{GROUPS}{os.getpid()}-"
    try:
        spread(work, prepare, deadline_s=_LIMIT_S, batch=1)
    finally:
        in_child(lambda: places.sweep_groups(work.room / "groups", mine))


def _play(name: str, seed: int, home: Path) -> list[str]:
    home.mkdir()
    mount_memory(home)
    try:
        (home / "disk" / "other").mkdir(parents=True)
        return HOSTS[name](random.Random(f"host {seed}"), home)
    finally:
        places.clear(home)


def _refused(room: Path) -> dict[str, str]:
    """What of the hosts this machine cannot be, and why."""
    room.mkdir()
    own_mounts()
    mount_memory(room)
    for name in ("home", "lower", "groups"):
        (room / name).mkdir()

    def group() -> None:
        memory = Memory(room / "groups", f"{GROUPS}{os.getppid()}-tried")
        memory.remove()

    tries: dict[str, Callable[[], object]] = {
        "overlayfs spool": lambda: Overlay(room / "overlay", room / "home", room / "lower"),
        "daemon killed by its memory limit": group,
        "overlayfs over an older spool": lambda: Overlay(room / "again", room / "home", room / "lower"),
        **{name: _mounts(name, room) for name in HOSTS if name.startswith(KINDS)},
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except OSError as error:
            found[name] = str(error)
    return found


def _mounts(name: str, room: Path) -> Callable[[], object]:
    """Mount the file system that the host of this name has."""
    return lambda: LoopFs(name.split()[0], room, name).mount()
