"""Decide whether successive reads of one place prove that its bytes are corrupt.

Invariant: one right read proves that the bytes are right, because a wrong read cannot match a digest by chance. Reads
that differ from each other prove a bad reader (disk, memory, network) or a changing file, which is an error and no
corruption. docs/explanation/attackers.md lists for each place which reads these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

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
    """The result of one read.

    Attributes:
        digest: the digest of the bytes that were read, or what else identifies the result ("missing").
        path: how the bytes were read, for example past the page cache.
        is_right: whether the bytes are as recorded.
    """

    digest: str
    path: str = ""
    is_right: bool = False


def judge(readings: Sequence[Reading], paths: int = 1) -> ReadVerdict:
    """Judge a place by its reads.

    Args:
        readings: all reads so far.
        paths: the number of different paths by which the same wrong bytes must be read.

    Returns:
        `CORRUPT` if two reads, by `paths` different paths, gave the same wrong bytes and none gave the right ones.
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


def unstable(place: str) -> UnstableRead:
    """Return the error for a place whose reads differ from each other."""
    return UnstableRead(
        f"{place}: {MOST_READS} reads gave different wrong bytes, so the stored bytes may be right: a disk, memory or "
        "network that flips bits, or a file that is being written. Nothing was quarantined or deleted. Check that "
        "device (smartctl, dmesg, memtest), replace it, and read again"
    )


def proven(read: Callable[[], T], place: str) -> T:
    """Return the result of `read`, which is called again until its errors prove corruption.

    Args:
        read: reads the place, past memory that an earlier call filled.
        place: the place, for messages.

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
            verdict = judge(readings)
            if verdict is ReadVerdict.CORRUPT:
                raise
            if verdict is ReadVerdict.UNSTABLE:
                raise unstable(place) from error
