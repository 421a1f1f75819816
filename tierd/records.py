"""Small facts about runs that a node's spool remembers, in `.tierd/`: who saved here, and what the trainer wants kept.

    saved/<run>/<attempt>           empty: a part of that launch was saved here, not only restored; touched at each save
    saved/<run>/<attempt>.<part>    this rank's was; holds the newest step that it committed here, twelve digits, if any
    retention/<run>.json            the trainer's policy, as core/run_retention.py has it
    timeline/<run>.json             the run's head, as core/head.py has it: what was seen in any place

Law: a record is durable before anything relies on it, and is written only when it says something new.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tierd.core.errors import CorruptChunk, TierdError
from tierd.core.head import MAX_SIZE as HEAD_SIZE
from tierd.core.head import Head
from tierd.core.head import decode as decode_head
from tierd.core.head import encode as encode_head
from tierd.core.ids import PartId, is_attempt
from tierd.core.retention import RetentionPolicy
from tierd.core.run_retention import MAX_SIZE, StoredRetention, decode, encode, unreadable
from tierd.core.world import Launch
from tierd.persist import open_plain, sync_directory
from tierd.trust import check_room

SAVED, RETENTION, TIMELINE = "saved", "retention", "timeline"  # rooms of `.tierd/`
_MARK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a mark's place is refused, not waited for


def mark_saved(control: Path, part: PartId) -> None:
    """Record, once for an attempt and a rank, that this node saves it. A restore records nothing.

    Args:
        control: the spool's `.tierd/`.
    """
    checkpoint = part.checkpoint
    marks = control / SAVED / checkpoint.run
    both = checkpoint.attempt, f"{checkpoint.attempt}.{part.name}"
    if all((marks / name).exists() for name in both):
        with suppress(FileNotFoundError):
            os.utime(marks / checkpoint.attempt)
        return
    check_room(control / SAVED)
    with suppress(FileExistsError):
        marks.mkdir(mode=0o700)
    _sync_room(control, SAVED)
    for name in both:
        os.close(os.open(marks / name, os.O_WRONLY | os.O_CREAT | _MARK, 0o600))
    sync_directory(marks)


def saved(control: Path, runs: Iterable[str]) -> dict[str, frozenset[str]]:
    """By run, of these, the attempts of which a part was saved in this spool: the newest that committed something, and
    those after it. Raises OSError."""
    found = {run: frozenset(filter(is_attempt, _names(control / SAVED / run))) for run in runs}
    return {run: attempts for run, attempts in found.items() if attempts}


def note_committed(control: Path, part: PartId) -> None:
    """Record that a part is durable here, and forget launches before its own: not sooner, because a launch may end
    before its first commit. It is only ever told of, so it need not be durable itself; raises nothing."""
    marks, attempt = control / SAVED / part.checkpoint.run, part.checkpoint.attempt
    with suppress(OSError):
        for older in _names(marks):
            if older < attempt:
                (marks / older).unlink(missing_ok=True)
        name = marks / f"{attempt}.{part.name}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | _MARK, 0o600)
        try:
            os.pwrite(fd, f"{part.checkpoint.step:012}".encode(), 0)
        finally:
            os.close(fd)


def forget_committed(control: Path, part: PartId) -> None:
    """Forget that a part was committed here, because tierd itself deletes it; raises nothing."""
    path = control / SAVED / part.checkpoint.run / f"{part.checkpoint.attempt}.{part.name}"
    step = f"{part.checkpoint.step:012}".encode()
    with suppress(OSError), os.fdopen(os.open(path, os.O_RDWR | _MARK), "r+b", buffering=0) as file:
        if file.read(len(step) + 1) == step:
            file.truncate(0)  # that this node saves the rank stays known


def committed(control: Path) -> frozenset[PartId]:
    """The newest part that each rank of each run's newest launch committed here, whether it is still there or not.

    To be asked before the parts are listed, because what comes between the two would look like a loss. Raises OSError.
    """
    found = set()
    for run in _names(control / SAVED):
        for name in _names(control / SAVED / run):
            attempt, _, rank = name.partition(".")
            with suppress(CorruptChunk), os.fdopen(open_plain(control / SAVED / run / name), "rb") as file:
                if rank and (part := PartId.parse(run, f"{file.read(12).decode('ascii', 'replace')}.{attempt}", rank)):
                    found.add(part)
    return frozenset(found)


def launches(control: Path, runs: Iterable[str] | None = None) -> dict[str, Launch]:
    """By run, of these or of all, the newest launch that was saved in this spool, and its ranks here. Raises OSError.

    A save that fails has begun a launch, too: whether there is anything of it, the places tell.
    """
    found = {}
    for run in _names(control / SAVED) if runs is None else runs:
        ranks: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in _names(control / SAVED / run):
            attempt, _, pair = name.partition(".")
            if part := PartId.parse(run, f"{0:012}.{attempt}", pair):
                ranks[attempt][part.world].add(part.rank)
        if ranks:
            newest = max(ranks)
            found[run] = Launch(newest, {world: frozenset(some) for world, some in ranks[newest].items()})
    return found


def saved_at(control: Path, run: str, attempt: str) -> int:
    """When a part of a launch was last begun to be saved here: nanoseconds since 1970, 0 where nothing says it."""
    try:
        return (control / SAVED / run / attempt).lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def set_policy(control: Path, run: str, policy: RetentionPolicy) -> None:
    """Remember what the trainer of `run` wants kept.

    Raises:
        SpoolUnusable, OSError: it could not be made durable.
    """
    if any(one.retention == policy for one in policies(control, [run]).get(run, ())):
        (control / RETENTION / f"{run}.json").touch()  # so that `forget` sees that it was given again
        return
    stored = StoredRetention(run, "", "trainer", socket.gethostname(), datetime.now(UTC).isoformat(), policy)
    _write(control, RETENTION, run, encode(stored))


def remember(control: Path, head: Head) -> None:
    """Remember what was seen of a run's launches. Raises SpoolUnusable, OSError: it could not be made durable."""
    _write(control, TIMELINE, head.run, encode_head(head))


def heads(control: Path) -> dict[str, tuple[Head, ...]]:
    """By run, what is remembered of its launches, where that can be read, whatever else is left of it here. Raises
    OSError."""
    found: dict[str, tuple[Head, ...]] = {}
    for run in (name.removesuffix(".json") for name in _names(control / TIMELINE) if not name.startswith(".")):
        path = control / TIMELINE / f"{run}.json"
        if path.exists():
            with suppress(CorruptChunk, TierdError), os.fdopen(open_plain(path), "rb") as file:
                found[run] = (decode_head(file.read(HEAD_SIZE + 1), run, ""),)
    return found


def policies(control: Path, runs: Iterable[str]) -> dict[str, tuple[StoredRetention, ...]]:
    """By run, of these, what its trainer wants kept. One that cannot be read is among them, and says why. Raises
    OSError."""
    found: dict[str, tuple[StoredRetention, ...]] = {}
    for run in runs:
        path = control / RETENTION / f"{run}.json"
        if not path.exists():
            continue
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                found[run] = (decode(file.read(MAX_SIZE + 1), run, "", "trainer"),)
        except (CorruptChunk, TierdError) as error:
            found[run] = (unreadable(run, "", "trainer", error),)
    return found


def recorded(control: Path, run: str) -> list[Path]:
    """The files that remember something of a run, which may have nothing else in the spool."""
    marks, files = control / SAVED / run, [control / room / f"{run}.json" for room in (RETENTION, TIMELINE)]
    return [marks / name for name in _names(marks)] + [path for path in files if path.exists()]


def forget(control: Path, run: str, before_ns: int) -> None:
    """Delete what was recorded of a run before a moment: it left the spool then.

    Args:
        before_ns: nanoseconds since 1970; what was recorded later is of a launch that has just begun.
    """
    for path in recorded(control, run):
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime_ns < before_ns:
                path.unlink()
    with suppress(OSError):  # there was none, or a new launch has saved
        (control / SAVED / run).rmdir()


def forget_launch(control: Path, run: str, attempt: str) -> None:
    """Delete what was recorded of a launch whose run has left the spool, and with it what is older."""
    before_ns, marks = saved_at(control, run, attempt), control / SAVED / run
    for name in sorted(_names(marks)):
        if name.partition(".")[0] == attempt:
            (marks / name).unlink(missing_ok=True)
    forget(control, run, before_ns)


def _write(control: Path, room: str, run: str, data: bytes) -> None:
    check_room(control / room)
    path = control / room / f"{run}.json"
    fresh = path.with_name(f".{run}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    _sync_room(control, room)


def _sync_room(control: Path, room: str) -> None:
    """Make the entries of a room durable, and the room itself, because nobody else synced the directories above it."""
    for directory in (control.parent, control, control / room):
        sync_directory(directory)


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
