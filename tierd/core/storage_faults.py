"""What failures of storage prove: whether successive reads of a place show corruption, and what a full disk lacks.

Invariant: one right read proves that the bytes are right, because a wrong read cannot match a digest by chance. Reads
that differ from each other prove a bad reader (disk, memory, network) or a changing file, which is an error and no
corruption. docs/explanation/attackers.md lists for each place which reads these are.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar

from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable

MOST_READS = 6  # reads of one place before it counts as unstable

T = TypeVar("T")


class UnstableRead(StoreUnavailable, OSError):
    """Each read of a place gave other wrong bytes, so nothing is known about the stored bytes.

    It is an OSError as well, because readers of the spool treat it as they treat a disk that cannot be read. It is not
    in `core.errors`, so that an older client receives it as `StoreUnavailable`, whose name it knows.
    """


class ReadVerdict(Enum):
    """The conclusion from all reads of one place so far."""

    RIGHT = auto()
    CORRUPT = auto()
    UNSTABLE = auto()
    READ_AGAIN = auto()


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one read: the digest of the bytes, or what else identifies it ("missing"), and by which path it
    came.
    """

    digest: str
    path: str = ""
    is_right: bool = False


def judge_readings(readings: Sequence[Reading], paths: int = 1) -> ReadVerdict:
    """Judge a place by all its reads so far.

    It is corrupt if two reads, by `paths` different paths, gave the same wrong bytes and none gave the right ones.
    """
    if any(reading.is_right for reading in readings):
        return ReadVerdict.RIGHT
    for digest in {reading.digest for reading in readings}:
        ways = [reading.path for reading in readings if reading.digest == digest]
        if len(ways) > 1 and len(set(ways)) >= paths:
            return ReadVerdict.CORRUPT
    return ReadVerdict.UNSTABLE if len(readings) >= MOST_READS else ReadVerdict.READ_AGAIN


def reading_of(error: CorruptChunk | ManifestError) -> Reading:
    """Return the reading that ended in an error."""
    return Reading(error.read_digest or str(error))


def unstable_error(place: str) -> UnstableRead:
    """Return the error for a place whose reads differ from each other."""
    return UnstableRead(
        f"{place}: {MOST_READS} reads gave different wrong bytes, so the stored bytes may be right: a disk, memory or "
        "network that flips bits, or a file that is being written. Nothing was quarantined or deleted. Check that "
        "device (smartctl, dmesg, memtest), replace it, and read again"
    )


def read_until_proven(read: Callable[[], T], place: str) -> T:
    """Return the result of `read`, called again until its errors prove corruption. It reads past memory that it filled.

    Raises:
        CorruptChunk, ManifestError: proven corruption.
        UnstableRead: the reads differ from each other.
    """
    readings: list[Reading] = []
    while True:
        try:
            return read()
        except (CorruptChunk, ManifestError) as error:
            readings.append(reading_of(error))
            verdict = judge_readings(readings)
            if verdict is ReadVerdict.CORRUPT:
                raise
            if verdict is ReadVerdict.UNSTABLE:
                raise unstable_error(place) from error


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
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


def disk_full_remedy(number: int | None, place: str, room: DiskRoom | None = None) -> str:
    """Return the way out of an errno that means a lack of room, or of a permitted size; empty for other errors.

    `place` is where to keep less, such as `in the spool`; `room` is the file system's answer to statvfs, if it gave
    one.
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
