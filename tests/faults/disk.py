"""Disks that fail: full at any byte, out of inodes, EIO at any call, read-only, gone; under the spool and under a tier.

A trial is one fault in the life of a node: a trainer resumes, saves twice or restores or has copies scrubbed, while the
disk of its spool or of one of its tiers fails; then the disk is well again. Required, in each:

- training goes on: `save` returns, and a failure is a value, a log line and a count that say where and why;
- no error counts as corruption: nothing is quarantined, stepped back from, or deleted on its account;
- an fsync that failed is never called again on that file (P7);
- the other tier gets every save meanwhile, and no lane tries without resting;
- then, in bounded time: every acknowledged checkpoint that retention wants lies on each place bit for bit, nothing is
  left over, and the next save goes everywhere.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from faults import disk_faults as faults
from faults import disk_traced as traced
from faults.disk_calls import Calls
from faults.disk_node import DEADLINE, Node, hurry, until
from faults.disk_volumes import Volume, own_mounts
from faults.rounds import Lost, Mutant, Round

UNIT, SHORT, GATE = "disk faults", 60, 2_000

_AT_ONCE = 4  # trials at a time: they mostly wait
_LIMIT = 4 * DEADLINE  # seconds that a trial may take
_BASE = 3  # steps that were saved before
_KINDS = ("calls",) * 8 + ("bytes",) * 3 + ("full",) * 2
_KINDS += ("inodes", "size", "read-only", "vanished", "traced", "traced")

MUTANTS: tuple[Mutant, ...] = ()


def missing() -> str | None:
    if os.geteuid():
        return "mounting needs root"
    lacking = [name for name in ("mkfs.ext4", "strace", "mount") if not shutil.which(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def run(work: Round) -> None:
    for large in (False, True):
        child = _fork(lambda large=large: _prepare(work.room, large) or "", work.room / f"prepared-{large}")
        os.waitpid(child.pid, 0)
        if said := child.said():
            raise RuntimeError(f"no node to begin with: {said}")
    for name, more in (("ext4", []), ("few", ["-N", "128"])):
        image = work.room / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-qF", "-m0", *more, str(image)], check=True, timeout=60)
    work.notes["SKIPPED quota of a file system: the kernel has no quota format, EDQUOT is injected"] = 0
    running: dict[int, _Trial] = {}
    for seed in work.seeds():
        room = work.room / str(seed)
        running[seed] = _fork(lambda seed=seed, room=room: _trial(seed, room, work.room), room)
        while len(running) >= _AT_ONCE or (running and work.only is not None):
            _reap(work, running)
    while running:
        _reap(work, running)


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """A child at work in `room`; what it has to say, it leaves in a file beside that."""

    pid: int
    room: Path
    begun: float

    def said(self) -> str:
        try:
            return self.room.with_suffix(".said").read_text()
        except FileNotFoundError:
            return "LOST it ended without a word"


def _fork(work, room: Path) -> _Trial:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException as error:
            said = "LOST " + "".join(traceback.format_exception(error))
        with open(room.with_suffix(".said"), "w") as file:
            file.write(said)
        os._exit(0)
    return _Trial(pid, room, time.monotonic())


def _reap(work: Round, running: dict[int, _Trial]) -> None:
    for seed, trial in list(running.items()):
        late = time.monotonic() - trial.begun > _LIMIT
        if late:
            os.kill(trial.pid, signal.SIGKILL)
        if os.waitpid(trial.pid, 0 if late else os.WNOHANG)[0]:
            said = "LOST it hangs" if late else trial.said()
            del running[seed]
            if said.startswith("LOST"):
                work.lost(seed, said)
            else:
                note, reached = said.rsplit(" ", 1)
                work.passed(int(reached), note if int(reached) else "not reached")
            shutil.rmtree(trial.room, ignore_errors=True)
            trial.room.with_suffix(".said").unlink(missing_ok=True)
    time.sleep(0.01)


# -- a trial ----------------------------------------------------------------------------------------------------------


def _prepare(room: Path, large: bool) -> None:
    """A node that has saved some steps, all of them on both tiers."""
    hurry()
    home = room / f"node-{large}"
    for path in (home / "nvme", home / "nfs" / "tier", home / "disk" / "other"):
        path.mkdir(parents=True)
    node = Node(home, large=large)
    node.start()
    for step in range(1, _BASE + 1):
        assert node.save(step)
    node.converge()
    node.stop()
    node.daemon = None


def _trial(seed: int, room: Path, prepared: Path) -> str:
    """What was done to what, and whether it was reached."""
    import torch

    torch.set_num_threads(1)
    rng = random.Random(seed)
    kind = _KINDS[seed % len(_KINDS)]
    room.mkdir()
    own_mounts()
    home = Volume(room / "home", size=256 << 20).point
    hurry()
    large = rng.random() < 0.4
    if kind == "traced":
        return traced.trial(rng, home)
    where = rng.choice(("nvme", "nfs"))
    doing = rng.choice(("save", "save", "restore", "scrub"))
    system = rng.choice(("tmpfs", "ext4")) if kind in ("full", "inodes", "read-only") else "tmpfs"
    if kind == "read-only" and where == "nvme":
        system = "ext4"  # the daemon's lock is open for writing: a tmpfs would refuse
    volume = None
    for name in ("nvme", "nfs", "disk"):
        image = None
        if name == where and system == "ext4":
            image = home / "image"
            source = prepared / ("few.img" if kind == "inodes" else "ext4.img")
            subprocess.run(["cp", "--sparse=always", str(source), str(image)], check=True, timeout=60)
        if name == where:
            volume = Volume(home / name, image)
        shutil.copytree(prepared / f"node-{large}" / name, home / name, dirs_exist_ok=True)
    assert volume
    volume.sync()
    calls = Calls(volume.point)
    calls.hook()
    size = 1_300_000 if large else 30_000
    fault: faults.Fault
    match kind:
        case "calls":
            fault = faults.Refused(volume, calls, rng, reading=doing == "scrub" or rng.random() < 0.4)
        case "bytes":
            fault = faults.Bytes(volume, calls, rng, 2 * size)
        case "full":
            fault = faults.Full(volume, system, rng, 2 * size // 4096)
        case "inodes":
            fault = faults.Inodes(volume, system, rng)
        case "size":
            fault = faults.FileSize(volume, rng, size)
        case "read-only":
            fault = faults.ReadOnly(volume, system, calls, rng)
        case _:
            fault = faults.Vanished(volume, calls, rng)
    alone = where == "nvme" and doing == "save" and rng.random() < 0.3
    node = Node(home, large=large, alone=alone)
    _live(node, fault, doing, rng)
    if calls.retried:
        raise Lost(f"fsync was called again after it had failed on {calls.retried}")
    place = "spool" if where == "nvme" else "tier"
    return f"{fault.kind}: {place}, {doing}{' alone' if alone else ''} {int(fault.hit)}"


def _live(node: Node, fault: faults.Fault, doing: str, rng: random.Random) -> None:
    newest, before = _BASE, set(range(1, _BASE + 1))
    if doing == "restore" and rng.random() < 0.7:
        _lose_newest(node)
    node.start()
    if doing != "restore":
        node.restore(newest)
    if node.daemon:
        node.converge()
    copies, begun = node.copies(), time.monotonic()
    fault.begin()
    try:
        match doing:
            case "save":
                _save(node, fault)
            case "restore":
                node.restore_or_raise(newest)
            case "scrub":
                node.scrub(copies)
        if fault.lasting:
            until(lambda: fault.hit or node.failed, 0.5)
            time.sleep(rng.uniform(0.05, 0.4))
    finally:
        fault.end()
    node.check_tries(time.monotonic() - begun)
    node.check_failures(fault.texts)
    fault.hit |= bool(node.failed) or any(text in line for line in node.lines for text in fault.texts)
    if fault.renew or node.alone:
        node.stop()
        _let_go(node)
        if fault.renew:
            fault.volume.mount_anew()
        node.alone = False
        node.start()
    node.restore(max({newest} | node.saved), or_newer=set(node.failed))
    _afterwards(node, before)


def _save(node: Node, fault: faults.Fault) -> None:
    for step in (4, 5):
        well = node.save(step)
        if fault.place.name == "nfs" and not isinstance(fault, faults.FileSize):
            if not well:
                raise Lost(f"a tier failed, and so did the save of step {step}: {node.failed}")
            node.wait_for(step, "other")


def _lose_newest(node: Node) -> None:
    newest = max(node.spool.glob("run/*.*"), key=lambda path: path.name)
    shutil.rmtree(newest)


def _afterwards(node: Node, before: set[int]) -> None:
    """The disk is well: everything comes right by itself, and goes on."""
    node.converge()
    node.check(before)
    if not node.save(9):
        raise Lost(f"the next save failed, too: {node.failed[9]}")
    for tier in node.tiers:
        node.wait_for(9, tier)
    node.converge()
    node.check(before)
    node.stop()
    _let_go(node)


def _let_go(node: Node) -> None:
    """That nothing is open which nobody closes any more."""
    links = [_link(fd) for fd in Path("/proc/self/fd").iterdir()]
    held = [link for link in links if str(node.spool.parent.parent) in link]
    if held:
        raise Lost(f"still open: {held}")


def _link(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""
