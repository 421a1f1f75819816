"""One `[[watch]]` at work: its state, calls in its thread, and the identity of its directory.

Invariants: a call has ended when `run_in_watch_thread` returns or raises, unless it hangs, as on a dead mount; then it
is left behind. A directory is known by its file system's inode number, because nodes mount one file system in different
places.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import msgspec

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError, StoreRefused, TierdError
from tierd.stores.mounted_directories import mount_of
from tierd.threads import in_own_thread

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}


class DirectoryId(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, as one node sees it."""

    node: str
    boot: str  # the kernel's id of this boot, which the machine's containers share; empty: unknown
    path: str  # absolute, on that node
    device: int  # the number of its file system on that machine
    inode: int
    kind: str  # the type of its file system, as `ext4`; empty: unknown

    def __str__(self) -> str:
        return f"{self.node}:{self.path}"


class DirectoryAbsent(StoreRefused):
    """A watched directory does not exist: its program has yet to make it, or its mount is missing."""


def identify_directory(directory: Path) -> DirectoryId:
    """Describe a directory. Raises `DirectoryAbsent` if it does not exist, `OSError` if it cannot be reached."""
    try:
        status = directory.stat()
    except FileNotFoundError:
        raise DirectoryAbsent("it does not exist; mount it, make it again, or end this watch") from None
    mount, boot = mount_of(directory), ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return DirectoryId(
        node=socket.gethostname(),
        boot=boot,
        path=os.fspath(directory),
        device=status.st_dev,
        inode=status.st_ino,
        kind=mount.kind if mount else "",
    )


def compare_directories(first: DirectoryId, second: DirectoryId) -> Literal["same", "different", "unknown"]:
    """Tell whether two descriptions are of one directory, as far as that is certain."""
    same_boot = first.boot == second.boot != ""
    if same_boot and (first.device, first.inode) == (second.device, second.inode):
        return "same"
    if not same_boot and (first.node, first.path, first.inode) == (second.node, second.path, second.inode):
        return "same"  # the machine was started again, which may give a file system another number
    if _is_numbered_by_mount(first) or _is_numbered_by_mount(second):
        return "unknown"
    if first.inode != second.inode:
        return "different"
    if first.kind in _LOCAL and second.kind in _LOCAL:
        return "different"  # two disks, which begin to number alike
    return "unknown" if same_boot else "same"  # a machine may mount one export twice


def _is_numbered_by_mount(directory: DirectoryId) -> bool:
    return not directory.kind or directory.kind.startswith("fuse")


log = logging.getLogger("tierd.daemon")

P = ParamSpec("P")
T = TypeVar("T")

MAX_FAILED_TRIES = 3  # failed tries in a row after which nothing waits for a directory
SILENT_S = 60.0  # seconds without a sign of life after which a call counts as a failed try
_SLOWEST = 20e6  # bytes a second that a busy disk writes
_TICK_S = 2.0  # the most that counts between two questions: the daemon was stopped for the rest
_END_S = 20.0  # seconds for which the end of a watch waits for its call


class RunNotWatched(ConfigError):
    """The run that a watch names is a trainer's, or that of another directory."""


class NothingTaken(TierdError):
    """No checkpoint of a watched directory was ever taken."""


class WatchStopped(Exception):
    """The daemon ends, or the watch was removed from its configuration."""


@dataclass(slots=True)
class ActiveWatch:
    """A watch at work."""

    watch: WatchConfig
    stepless: bool = False  # whether it takes only the units without a step
    leaves_stepless: bool = False  # whether its last listing left such units to another watch of the directory
    ending: bool = False  # whether its thread has to end soon
    idle: bool = False
    failed_tries: int = 0  # how many times in a row the directory could not be watched
    error: Exception | None = None
    is_untaken: bool = False  # whether the last listing was made and nothing of the directory was ever taken
    untaken_s: float | None = None  # since when it has files and nothing of it was taken
    untaken_reported: bool = False  # whether an event reported that
    series_reported: bool = False  # whether the log has said that the pins of many series last
    directory_existed: bool = False  # whether the directory existed at an earlier try
    awaited_s: float | None = None  # since when it waits for the directory, or then for a first unit in it
    refused: Mapping[str, str] = field(default_factory=dict)  # the units that are not taken as they are, and why
    # Seconds since the last sign of life, or failed try, without time in which the daemon was stopped. Negative while
    # the call may be silent for longer; None if none runs.
    silent_s: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def is_at_rest(self, appear_s: float) -> bool:
        """Whether nothing is left to take, or the directory cannot be watched.

        A directory that does not exist, and then its first unit, are waited for during `appear_s`.
        """
        return self.has_failed(appear_s) or (self.idle and not self._is_awaiting(appear_s))

    def has_failed(self, appear_s: float) -> bool:
        """Whether no further try is waited for; `appear_s` as for `is_at_rest`."""
        if isinstance(self.error, DirectoryAbsent):
            return not self._is_awaiting(appear_s)
        has_tried = self.error is not None and self.failed_tries >= MAX_FAILED_TRIES
        return has_tried or isinstance(self.error, RunNotWatched)

    def _is_awaiting(self, appear_s: float) -> bool:
        return self.awaited_s is not None and time.monotonic() - self.awaited_s < appear_s

    def has_hung(self, passed_s: float) -> bool:
        """Count the time since the last question, and return whether a call runs that may hang."""
        if self.silent_s is None:
            return False
        self.silent_s += min(passed_s, _TICK_S)
        return self.silent_s >= SILENT_S

    def give_sign(self) -> None:
        """Give a sign of life. Raises `WatchStopped` if the call has to end."""
        if self.ending:
            raise WatchStopped
        self.silent_s = min(self.silent_s or 0.0, 0.0)

    def allow_silence(self, size: int) -> None:
        """Let the call be silent for as long as an fsync of so many bytes may take at idle priority."""
        self.silent_s = -size / _SLOWEST


async def run_in_watch_thread(active_watch: ActiveWatch, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call in a thread of its own. If cancelled, have it end, and wait `_END_S` for that."""
    active_watch.silent_s = 0.0
    work = in_own_thread(partial(call, *args, **kwargs), "tierd-watch")
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        active_watch.ending = True
        await asyncio.wait([work], timeout=_END_S)
        if not work.done():
            log.warning("%s does not answer: a thread that waits for it is left behind", active_watch.watch.directory)
        work.add_done_callback(_retrieve)
        raise
    finally:
        active_watch.silent_s = None


def _retrieve(work: asyncio.Future[T]) -> None:
    if not work.cancelled():
        work.exception()
