"""Run a command for each checkpoint that arrives, as `tierd follow` does.

The command is started by a keeper, a small process that also writes how the command ended. Both outlive a follower
that is killed or interrupted, and the keeper holds the follower's lock. So the next follower waits for the command, and
learns how it ended.

Invariant: a command that ended with status 0, and whose keeper wrote that down, is never run again for its checkpoint.
A command whose end is not written down, because it or its keeper was killed, is run again.
"""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, ObjectNotFound, SpoolFull
from tierd.core.ids import CheckpointId
from tierd.core.timeline.restore_order import Candidate
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.restore_to_directory import restore_candidate
from tierd.reading.checkpoint_deliveries import (
    DELIVERY_ERRORS,
    DeliveryLog,
    ListedCheckpoint,
    check_manifests,
    delivery_rounds,
    listed_id,
)
from tierd.reading.run_on_tiers import RunOnTiers, error_if_pruned
from tierd.spool.file_io import remove

log = logging.getLogger("tierd")

STATE_FILE = "delivered.json"
_STATUS_FILE = "ended"  # `<checkpoint> <status>`, from the keeper
_MOST_ROUNDS = 64  # between two tries of a checkpoint that could not be delivered
_PLACE = re.compile(r"\{(directory|step|attempt|run)\}")

# Its arguments: the file to write, the checkpoint's name, the command. SIGINT from a terminal reaches the command, and
# the keeper stays to write its status. A handler, unlike SIG_IGN, is not inherited by the command.
_KEEPER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: None)
path, name, *command = sys.argv[1:]
try:
    status = subprocess.call(command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    status = 127
with open(path + ".new", "w") as file:
    file.write(f"{name} {status}")
    file.flush()
    os.fsync(file.fileno())
os.rename(path + ".new", path)
home = os.open(os.path.dirname(path), os.O_RDONLY)
os.fsync(home)
"""


def parse_command(text: str) -> list[str]:
    """Split a command as a shell does, without running one; `fill_placeholders` fills in its places later."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--exec {text!r}: {error}") from error
    if not words:
        raise ConfigError("--exec: it names no command")
    return words


def fill_placeholders(words: Sequence[str], values: dict[str, str]) -> list[str]:
    """Replace `{directory}`, `{step}`, `{attempt}` and `{run}` within each word; a word stays one argument."""
    return [_PLACE.sub(lambda match: values[match[1]], word) for word in words]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The end of one try to deliver a checkpoint.

    Attributes:
        delivered: whether it counts as delivered.
        status: the command's exit status; null if the command was killed with its keeper, or not started.
        reason: why it does not count, for people; empty if it does.
    """

    run: str
    step: int
    attempt: str
    delivered: bool
    status: int | None
    reason: str


@dataclass
class CommandFollower:
    """Deliver checkpoints to a command.

    Args:
        home: a directory of the follower's own, for its state and for the files of the checkpoint in delivery.
        words: of `parse_command`. Files are fetched only if a word contains `{directory}`.
        on_delivery: called after each try.
    """

    tiers: RunOnTiers
    home: Path
    words: Sequence[str]
    on_delivery: Callable[[Delivery], None]
    _tries: dict[CheckpointId, tuple[int, int]] = field(default_factory=dict)  # failures, and the round of the next try
    _pruned: bool = False  # whether a checkpoint of this round was pruned before it was delivered

    def run(self, *, latest: bool, period_s: float, once: bool) -> bool:
        """Deliver until the process is ended, or what is there now; return whether all that was due last was delivered.

        Raises `ConfigError` if `home` is not usable, and `StoreUnavailable` if, with `once`, no tier answered.
        """
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--to {self.home}: {error.strerror}") from error
        all_delivered = True
        with DeliveryLog(self.home / STATE_FILE, self.tiers.run, self._wait) as delivered:
            self._settle(delivered)
            due_rounds = delivery_rounds(
                self.tiers, delivered, latest=latest, period_s=period_s, once=once, pruned=lambda: self._pruned
            )
            for number, due_checkpoints in enumerate(due_rounds):
                all_delivered, self._pruned = True, False
                self._clear({listed_id(self.tiers.run, listed) for listed in due_checkpoints})
                for listed in due_checkpoints:
                    checkpoint = listed_id(self.tiers.run, listed)
                    failures, next_try = self._tries.get(checkpoint, (0, 0))
                    if number < next_try or (once and failures) or not self._deliver(listed, delivered):
                        all_delivered = False
                        if number >= next_try and not (once and failures):
                            self._tries[checkpoint] = failures + 1, number + min(2**failures, _MOST_ROUNDS)
                    else:
                        self._tries.pop(checkpoint, None)
        return all_delivered

    def _wait(self) -> None:
        log.info("waiting for the follower of %s to end, or for the command that it started", self.home)

    def _settle(self, delivered: DeliveryLog) -> tuple[CheckpointId, int] | None:
        """Record how the last command ended, if that is written down and not recorded yet."""
        path = self.home / _STATUS_FILE
        try:
            name, _, status = path.read_text().partition(" ")
        except FileNotFoundError:
            return None
        checkpoint = CheckpointId.parse(self.tiers.run, name)
        if checkpoint is None or not status.lstrip("-").isdigit():
            raise ConfigError(f"{path}: not what a keeper writes; remove it, and its checkpoint is delivered again")
        if status == "0":
            delivered.add(checkpoint)
        path.unlink()
        return checkpoint, int(status)

    def _clear(self, due_checkpoints: Collection[CheckpointId]) -> None:
        """Remove the files of a delivery that was interrupted, but for a partial download of one that is still due.

        A checkpoint that was pruned, or passed over for a newer one, is not. A tier that does not answer may have one.
        """
        for path in self.home.iterdir():
            hidden = path.name.startswith(".") and path.name.endswith(".partial")
            checkpoint = CheckpointId.parse(self.tiers.run, path.name.removeprefix(".").removesuffix(".partial"))
            if checkpoint is not None and not (hidden and (checkpoint in due_checkpoints or self.tiers.unreached)):
                remove(path)

    def _deliver(self, listed: ListedCheckpoint, delivered: DeliveryLog) -> bool:
        checkpoint = listed_id(self.tiers.run, listed)
        directory = self.home.absolute() / checkpoint.name
        try:
            if any("{directory}" in word for word in self.words):
                self._fetch(Candidate(checkpoint, listed.world_size), directory)
            else:
                check_manifests(self.tiers, listed)
        except (*DELIVERY_ERRORS, SpoolFull) as error:
            self._pruned |= isinstance(error, ObjectNotFound)
            return self._report(checkpoint, None, str(error))
        step, attempt = str(checkpoint.step), checkpoint.attempt
        values = {"directory": str(directory), "step": step, "attempt": attempt, "run": checkpoint.run}
        keeper = [sys.executable, "-I", "-S", "-c", _KEEPER, str(self.home.absolute() / _STATUS_FILE), checkpoint.name]
        # Not `subprocess.run`, which kills the keeper at KeyboardInterrupt. Then nobody writes the status or holds the
        # lock, and the next follower starts the command again while it still runs.
        command = [*keeper, *fill_placeholders(self.words, values)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[delivered.lock])
        process.wait()
        outcome = self._settle(delivered)
        if directory.exists():
            remove(directory)
        if outcome is None:
            return self._report(checkpoint, None, "the command was killed; it is tried again")
        failed = f"the command ended with status {outcome[1]}; it is tried again" if outcome[1] else ""
        return self._report(checkpoint, outcome[1], failed)

    def _fetch(self, candidate: Candidate, directory: Path) -> None:
        """Fetch a checkpoint's files. Raises as `restore_candidate`; `ObjectNotFound` if it was pruned meanwhile."""
        work = restore_candidate(self.tiers.stores, candidate, directory, Progress(), self.tiers.budget)
        try:
            self.tiers.loop.run(work)
        except (CorruptChunk, ManifestError) as error:
            raise error_if_pruned(self.tiers, candidate, error) from None

    def _report(self, checkpoint: CheckpointId, status: int | None, reason: str) -> bool:
        self.on_delivery(Delivery(checkpoint.run, checkpoint.step, checkpoint.attempt, not reason, status, reason))
        return not reason
