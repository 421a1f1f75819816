"""Which directory a watch watches, so that another watch, here or on another node, can tell whether it is the same one.

Pure but for `identify`. The path says little, because nodes mount one file system in different places. A file system
that nodes share has one inode number for a directory on all of them, except below FUSE, where each mount may number its
own. A disk that one machine alone has is never the one that another machine sees.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from tierd.core.errors import StoreRefused
from tierd.spool.mounts import mount_of

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay"}


class DirectoryId(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, as one node sees it.

    Attributes:
        node: the node's host name.
        boot: the kernel's id of this boot of the machine, which its containers share; empty: unknown.
        path: the directory's absolute path there.
        device: the number of its file system on that machine.
        inode: its inode number.
        kind: the type of its file system, as `ext4`; empty: unknown.
    """

    node: str
    boot: str
    path: str
    device: int
    inode: int
    kind: str

    def __str__(self) -> str:
        return f"{self.node}:{self.path}"


class DirectoryAbsent(StoreRefused):
    """A watched directory does not exist: its program has yet to make it, or its mount is missing."""


def identify(directory: Path) -> DirectoryId:
    """Describe a directory.

    Raises:
        DirectoryAbsent: it does not exist.
        OSError: it cannot be reached.
    """
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


def compare(first: DirectoryId, second: DirectoryId) -> Literal["same", "different", "unknown"]:
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
