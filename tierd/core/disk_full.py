"""What a file system lacks that refused a write for want of room, and the way out. Pure: the caller asks it."""

from __future__ import annotations

import errno
from typing import Protocol

FULL = (errno.ENOSPC, errno.EDQUOT)
_FEW_INODES = 64  # fewer are not enough for a save; the files of the failed one may be deleted again by now
_RAISE_LIMIT = (
    "a limit of this process or of the file system on a file's size; raise it with `ulimit -f unlimited` (LimitFSIZE= "
    "of systemd) before the process starts"
)


class DiskRoom(Protocol):
    """The members of `os.statvfs_result` that count here."""

    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...
    @property
    def f_files(self) -> int: ...
    @property
    def f_favail(self) -> int: ...


def lacks_inodes(room: DiskRoom) -> bool:
    """Whether a file system has blocks left, and next to no inodes. Some file systems count no inodes."""
    inode_reserve = max(_FEW_INODES, room.f_files // 1000)
    return room.f_files > 0 and room.f_favail < inode_reserve and room.f_bavail > room.f_blocks // 100


def remedy(number: int | None, place: str, room: DiskRoom | None = None) -> str:
    """Return the way out of an error that names a lack of room, or of a permitted size; empty for other errors.

    Args:
        number: the errno.
        place: where to keep less, such as `in the spool`.
        room: the file system's answer to statvfs; None if it gave none.
    """
    hint = f"free space on that file system, or keep less {place}"
    if number == errno.EFBIG:
        return _RAISE_LIMIT
    if number == errno.EDQUOT:
        return f"this account's quota there is used up, of space or of files (`quota -s`): {hint}, or have it raised"
    if number != errno.ENOSPC:
        return ""
    if room is None:
        return f"{hint}. If `df` shows free space, `df -i` tells whether its inodes are used up"
    if lacks_inodes(room):
        return (
            "its inodes are used up (`df -i`), and it has space left: delete files there, or make the file system with "
            "more inodes"
        )
    return hint
