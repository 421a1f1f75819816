"""A node of real processes: the daemon as its command line starts it, a trainer, two tiers; and what lies on each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from faults.disk.node import in_spool, on_tier
from faults.hands import end_with_parent
from faults.host.places import Memory
from faults.host.trainer import Saved, Trainer
from faults.rounds import Lost
from support.waiting import holds

from tierd.core.errors import DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool

KEEP = 3  # in the spool and on each tier
DEADLINE_S = 120.0  # for whatever has to come; the machine may be busy
_CLOCK = Path(__file__).with_name("clock.py")
_BLOCKED_S = 60.0  # that no save may take from training


class Node:
    """A spool at `home/nvme/spool`, tiers at `home/nfs/tier` and `home/disk/other`.

    Args:
        big: how large a state is, see `disk.node.state`.
        clock: the file that daemon and trainer have their wall clock from.

    Attributes:
        saved: steps whose `wait("local")` has returned.
        begun: all steps that were told to be saved.
        failures: saves that failed since this was cleared.
    """

    def __init__(self, home: Path, big: int = 0, clock: Path | None = None) -> None:
        self.home, self.big, self.clock = home, big, clock
        self.spool = home / "nvme" / "spool"
        self.tiers = {"tier": home / "nfs" / "tier", "other": home / "disk" / "other"}
        self.saved: set[int] = set()
        self.begun: set[int] = set()
        self.failures: list[Saved] = []
        self.daemon: subprocess.Popen[bytes] | None = None
        self.trainer: Trainer | None = None
        self._config = home / "tierd.toml"
        self._pending = 0
        for path in (self.spool.parent, *self.tiers.values()):
            path.mkdir(parents=True, exist_ok=True)

    # -- the daemon ---------------------------------------------------------------------------------------------------

    def tierd(self, *arguments: str) -> list[str]:
        """The command line, by this node's clock."""
        program = [str(_CLOCK), str(self.clock)] if self.clock else ["-m", "tierd"]
        return [sys.executable, *program, *arguments]

    def start_daemon(self, memory: Memory | None = None) -> None:
        """Start one, in a control group if there is one, and wait until it answers."""
        text = f'spool = "{self.spool}"\nrescan = "1s"\nscrub = "0s"\nmin_free_percent = 0\n'
        text += f"retention = {{ keep_last = {KEEP} }}\n"
        for name, path in self.tiers.items():
            text += f'[[tier]]\nname = "{name}"\nurl = "file://{path}"\nretention = {{ keep_last = {KEEP} }}\n'
        self._config.write_text(text)

        def enter() -> None:
            end_with_parent()
            if memory:
                memory.enter()

        with (self.home / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                self.tierd("run", "--config", str(self._config)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=enter,
            )
        if (
            not holds(lambda: self.status() is not None or self.daemon.poll() is not None, DEADLINE_S)
            or self.daemon.poll()
        ):
            raise Lost(f"the daemon does not start: {self.daemon.poll()}\n{self.log()}")

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.wait(DEADLINE_S)
        self.daemon = None

    def stop_daemon(self) -> None:
        """As a service is stopped, when nothing is left to be flushed."""
        self.daemon.send_signal(signal.SIGTERM)
        status = self.daemon.wait(DEADLINE_S)
        self.daemon = None
        if status:
            raise Lost(f"the daemon ended with {status}\n{self.log()}")

    def status(self) -> dict[str, Any] | None:
        """What `tierd status --json` shows; None while nobody answers."""
        try:
            with DaemonConnection(Spool(self.spool)) as link:
                return link.ask(StatusRequest(), DEADLINE_S)["status"]
        except (DaemonUnavailable, OSError):
            return None

    def log(self) -> str:
        return (self.home / "daemon.log").read_text(errors="replace")[-3000:]

    # -- the trainer --------------------------------------------------------------------------------------------------

    def start_trainer(self, *, alone: bool = False) -> None:
        """The newest that was acknowledged is restored, or one that was begun after it; nothing older, and no error."""
        self.trainer = Trainer(self.spool, self.big, alone=alone, follows=self.clock)
        found, newest = self.trainer.resumed, max(self.saved, default=None)
        if found.error:
            raise Lost(f"restore raises {found.error}\n{self.log()}")
        if found.step != newest and (found.step is None or found.step < (newest or 0) or found.step not in self.begun):
            raise Lost(f"restored {found.step}, not {newest}: {found.skipped}\n{self.log()}")
        if found.step is not None:
            self.saved.add(found.step)

    def kill_trainer(self) -> None:
        self.trainer.kill()
        self._pending, self.trainer = 0, None

    def close_trainer(self) -> None:
        self.collect()
        self.trainer.close()
        self.trainer = None

    def begin(self, count: int) -> None:
        """Have the trainer save so often, one after the other."""
        for _ in range(count):
            step = max(self.begun, default=0) + 1
            self.begun.add(step)
            self.trainer.begin(step)
            self._pending += 1

    def collect_one(self) -> Saved:
        self._pending -= 1
        saved = self.trainer.saved()
        if saved.blocked_s > _BLOCKED_S:
            raise Lost(f"save took {saved.blocked_s:.0f} s from training")
        if saved.error is None:
            self.saved.add(saved.step)
        else:
            self.failures.append(saved)
        return saved

    def collect(self) -> None:
        """What became of all saves."""
        while self._pending:
            self.collect_one()

    def save(self, count: int) -> None:
        """Saves that must not fail."""
        self.begin(count)
        self.collect()
        self.check_none_failed()

    def check_none_failed(self) -> None:
        if self.failures:
            raise Lost(f"a save failed: {self.failures[0]}\n{self.log()}")

    def check_failures(self, *codes: int) -> None:
        """Saves that failed have said so by one error, one line and one count, which name the place and the cause."""
        for one in self.failures:
            lines = [line for line in one.lines if "save failed, training goes on" in line]
            reported = any(os.strerror(code) in one.text for code in codes) and str(self.spool) in one.text
            if (one.error, one.cause, one.failed, len(lines)) != ("SaveFailed", "SpoolUnusable", 1, 1) or not reported:
                raise Lost(f"a save that failed is not told by one clear error: {one}")
        self.failures.clear()

    # -- what is required ---------------------------------------------------------------------------------------------

    def is_on(self, tier: str, step: int) -> bool:
        return any((self.tiers[tier] / "run" / "manifests").glob(f"{step:012}.*/*"))

    def drain(self) -> None:
        """`tierd drain` succeeds, so every tier has what it wants."""
        command = self.tierd("drain", "--spool", str(self.spool), f"--deadline={DEADLINE_S:.0f}s")
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE_S)
        if done.returncode:
            raise Lost(f"tierd drain: {done.returncode} {done.stdout}{done.stderr}\n{self.log()}")

    def settle(self) -> None:
        """Each place comes to hold the newest that were acknowledged, bit for bit, and of the older ones none."""
        said = ""

        def right() -> bool:
            nonlocal said
            try:
                self._check_places()
            except (AssertionError, OSError) as error:  # a prune goes on meanwhile
                said = str(error)
                return False
            return True

        self.drain()
        if not holds(right, DEADLINE_S, pause_s=0.2):
            raise Lost(f"{self.log()}\n{self.status()['tiers']}\n{said}")
        self._check_counters()

    def _check_places(self) -> None:
        places = {name: on_tier(root, self.big) for name, root in self.tiers.items()}
        places["spool"] = in_spool(self.spool, self.big)
        for name, steps in places.items():
            wanted = set(sorted(self.saved | steps)[-KEEP:])
            more = {step for step in steps - wanted if not self._is_announced(name, step)}
            if wanted - steps or more & self.saved or steps - self.begun:
                raise Lost(f"{name} has {sorted(steps)}, of {sorted(self.saved)} acknowledged")

    def _is_announced(self, place: str, step: int) -> bool:
        """Whether the put of a manifest that was cut off may still take effect: its announcement stands, and keeps the
        checkpoint, for a quarter of an hour."""
        home = self.tiers.get(place)
        return home is not None and any((home / "run" / "flushing").glob(f"{step:012}.*/*"))

    def _check_counters(self) -> None:
        counters = self.status()["counters"]
        wrong = {name: counters[name] for name in ("quarantined", "corruptions") if counters.get(name)}
        if wrong:
            raise Lost(f"an error counts as corruption: {wrong}\n{self.log()}")

    def end(self) -> None:
        """All is well: everything goes on, comes to rest, and is restored once more from the spool alone."""
        self.save(KEEP)
        self.settle()
        self.close_trainer()
        self.stop_daemon()
        self.start_trainer(alone=True)
        self.close_trainer()

    def let_go(self) -> None:
        """No process is left, however the trial ended."""
        if self.trainer:
            self.kill_trainer()
        if self.daemon:
            self.kill_daemon()


def nfs() -> str:
    """Why no NFS was played, for the round's notes."""
    modules = Path("/lib/modules") / os.uname().release / "kernel" / "fs"
    kinds = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if kinds & {"nfs", "nfs4"} or (modules / "nfs").exists():
        return "NFS was not played: no trial exports one yet"
    return "NFS was not played: this kernel has none"
