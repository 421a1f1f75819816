"""Disks that fail: full at any byte, out of inodes, EIO at any call, read-only, gone; under the spool and under a tier.

A trial is some faults in the life of a node, one after the other: a trainer saves twice, or restores, or has copies
scrubbed, while the disk of its spool or of one of its tiers fails; then the disk is well again. Required, each time:

- training goes on: `save` returns, and a failure is a value, a log line and a count that say where and why;
- no error counts as corruption: nothing is quarantined, stepped back from, or deleted on its account;
- an fsync that failed is never called again on that file (P7);
- the other tier gets every save meanwhile, and no tier worker tries without resting;
- then, in bounded time: every acknowledged checkpoint that retention wants lies on each place bit for bit, nothing is
  left over, and the next save goes everywhere.

A quota is EDQUOT, answered by what stands between tierd and the system: tierd sees no more of a kernel's.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

from faults.disk import failures as faults
from faults.disk.calls import Calls
from faults.disk.node import Node, hurry
from faults.disk.volumes import Volume
from faults.hands import in_child, spread
from faults.mounts import own_mounts
from faults.rounds import Lost, Round
from support.waiting import holds

UNIT, SHORT, GATE = "disk faults", 45, 1_000
_SORTS = ("a call fails", "so many bytes", "full", "out of inodes", "no larger file", "read-only", "vanished")
MET = (
    *(f"{sort}: {place}" for sort in _SORTS for place in ("spool", "tier")),
    "EIO on a read",
    "EDQUOT on a write",
)

_AT_ONCE = 4  # trials at a time: they mostly wait
_LIFE = 4  # faults in a trial, one after the other
_LIMIT_S = 720  # of a trial
_BASE = 3  # steps that were saved before
_KINDS = ("calls",) * 6 + ("bytes", "bytes", "full", "ext4", "ext4")
_KINDS += ("inodes", "size", "read-only", "vanished", "calls")
_ON_TMPFS = ("calls",) * 8 + ("bytes", "bytes", "bytes", "full", "inodes", "size", "vanished", "vanished")
_ON_EXT4 = ("full", "full", "inodes", "read-only", "vanished")


def missing() -> str | None:
    if os.geteuid():
        return "mounting needs root"
    lacking = [name for name in ("mkfs.ext4", "mount") if not shutil.which(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def run(work: Round) -> None:
    for large in (False, True):
        in_child(lambda large=large: _prepare(work.room, large))
    with (work.room / "ext4.img").open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-qF", "-m0", "-N128", str(work.room / "ext4.img")], check=True, timeout=120)

    def trial(seed: int) -> tuple[int, list[str]]:
        room = work.room / str(seed)
        try:
            met = _trial(seed, room, work.room)
            return len(met), [note for notes in met for note in notes]
        finally:
            shutil.rmtree(room, ignore_errors=True)

    spread(work, lambda: trial, deadline_s=_LIMIT_S, batch=1, hands=_AT_ONCE, anew=True)


# -- a trial ----------------------------------------------------------------------------------------------------------


def _prepare(room: Path, large: bool) -> None:
    """A node that has saved some steps, all of them on both tiers."""
    hurry()
    home = room / f"node-{large}"
    for path in (home / "nvme", home / "nfs" / "tier", home / "disk" / "other"):
        path.mkdir(parents=True)
    node = Node(home, large=large, saved=0)
    node.start()
    for step in range(1, _BASE + 1):
        assert node.save() == step and not node.failed
    node.converge()
    node.stop()


def _trial(seed: int, room: Path, prepared: Path) -> list[tuple[str, ...]]:
    """What was done to what: the notes of each fault that was met."""
    import torch

    torch.set_num_threads(1)
    rng, kind = random.Random(seed), _KINDS[seed % len(_KINDS)]
    room.mkdir()
    own_mounts()
    home = Volume(room / "home", size=256 << 20).point
    hurry()
    large, where = rng.random() < 0.4, rng.choice(("nvme", "nfs"))
    # A tmpfs turns read-only only when nothing is open for writing, as the daemon's lock in the spool is.
    ext4 = kind == "ext4" or (kind == "read-only" and where == "nvme")
    volume = _mounted(home, prepared, where, large=large, ext4=ext4, root=rng.random() < 0.5)
    calls = Calls(volume.point)
    calls.hook()
    kinds = [kind, *(rng.choice(_ON_EXT4 if ext4 else _ON_TMPFS) for _ in range(_LIFE - 1))]
    node = Node(home, large=large, saved=_BASE, alone=where == "nvme" and rng.random() < 0.2)
    node.start()
    met = []
    for kind in kinds:
        doing = rng.choice(("save", "save", "restore", "save" if node.alone else "scrub"))
        alone = " alone" if node.alone else ""
        fault = _fault(kind, volume, calls, rng, 1_300_000 if large else 30_000, doing)
        _suffer(node, fault, doing, rng)
        if calls.retried:
            raise Lost(f"fsync was called again after it had failed on {calls.retried}")
        place = "spool" if where == "nvme" else "tier"
        if fault.hit:
            met.append((f"{fault.kind}: {place}, {doing}{alone}", f"{fault.sort}: {place}", *fault.notes))
    _end(node)
    return met


def _mounted(home: Path, prepared: Path, where: str, *, large: bool, ext4: bool, root: bool) -> Volume:
    """The node that was prepared, with a file system of its own at one place; `root`: the tier is all of it."""
    image = home / "image" if ext4 else None
    if image:
        subprocess.run(["cp", "--sparse=always", str(prepared / "ext4.img"), str(image)], check=True, timeout=120)
    volume = Volume(home / where, image)
    for name in ("nvme", "nfs", "disk"):
        source = prepared / f"node-{large}" / name
        shutil.copytree(source / "tier" if name == "nfs" and root else source, home / name, dirs_exist_ok=True)
    volume.sync()
    return volume


def _fault(kind: str, volume: Volume, calls: Calls, rng: random.Random, size: int, doing: str) -> faults.Fault:
    if kind == "ext4":
        kind = rng.choice(_ON_EXT4)
    match kind:
        case "bytes":
            return faults.Bytes(volume, calls, rng, size)
        case "full":
            return faults.Full(volume, rng, 2 * size // 4096)
        case "inodes":
            return faults.Inodes(volume, rng)
        case "size":
            return faults.FileSize(volume, rng, size)
        case "read-only":
            return faults.ReadOnly(volume, calls, rng)
        case "vanished":
            return faults.Vanished(volume, calls, rng)
        case _:
            return faults.Refused(volume, calls, rng, reading=doing == "scrub" or rng.random() < 0.4)


def _suffer(node: Node, fault: faults.Fault, doing: str, rng: random.Random) -> None:
    """A fault begins, meets what is being done, and ends; then all comes right."""
    if doing == "restore" and not node.alone and rng.random() < 0.7:
        _lose_newest(node)
    newest, copies = max(node.saved), node.copies()
    node.begin()
    fault.begin()
    try:
        match doing:
            case "save":
                _save(node, fault)
            case "restore":
                node.restore_or_raise(newest)
            case "scrub":
                node.scrub(copies)
        if fault.place.name == "nfs":
            node.ask_tier(newest)
        if doing == "save" and not node.alone:  # that it meets the flush, too, however busy the machine is
            holds(lambda: fault.hit or node.recent or node.is_on("other", max(node.saved)), 5.0)
        if fault.lasting:
            holds(lambda: fault.hit or node.recent, 0.2)
            time.sleep(rng.uniform(0.02, 0.3))
    finally:
        fault.end()
    node.check_rests()
    node.check_failures(fault.texts)
    fault.hit |= bool(node.recent) or any(text in line for line in node.lines for text in fault.texts)
    if fault.renew or node.alone:
        node.stop()
        _let_go(node)
        if fault.renew:
            fault.volume.mount_anew()
        node.alone = False
        node.start()
    node.restore(max(node.saved), or_newer=node.failed)
    node.converge()
    node.check()


def _save(node: Node, fault: faults.Fault) -> None:
    for _ in range(2):
        step = node.save()
        if fault.place.name == "nfs" and not isinstance(fault, faults.FileSize):
            if step in node.failed:
                raise Lost(f"a tier failed, and so did the save of step {step}: {node.recent}")
            node.wait_for(step, "other")


def _lose_newest(node: Node) -> None:
    """As on a node that took another one's place."""
    newest = max(node.spool.glob("run/*.*"), key=lambda path: path.name)
    node.taken.add(int(newest.name.partition(".")[0]))
    shutil.rmtree(newest)


def _end(node: Node) -> None:
    """The disk is well: all goes on."""
    step = node.save()
    if step in node.failed:
        raise Lost(f"the next save failed, too: {node.recent}")
    for tier in node.tiers:
        node.wait_for(step, tier)
    node.converge()
    node.check()
    node.stop()
    _let_go(node)


def _let_go(node: Node) -> None:
    """That nothing is open which nobody closes any more."""
    home = str(node.spool.parent.parent)

    def held() -> list[str]:
        gc.collect()  # a file that nobody knows any more is closed
        return [link for fd in Path("/proc/self/fd").iterdir() for link in [_link(fd)] if home in link]

    if not holds(lambda: not held(), 60):  # the thread of a call that was cancelled ends by itself
        raise Lost(f"still open: {held()}")


def _link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""
