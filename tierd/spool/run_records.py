"""Small durable records about runs, in a spool's `.tierd/`: launches that saved here, and trainers' retention policies.

    saved/<run>/<attempt>           empty: a part of that launch was saved here, not only restored; touched at each save
    saved/<run>/<attempt>.<part>    this rank's was; holds the newest step that it committed here, twelve digits, if any
    retention/<run>.json            the trainer's policy, in the format of core/retention/policy.py
    timeline/<run>.json             the run's head as observed in any place, as in core/timeline/launch_chain.py
    local-only/<run>.json           the first of the run's launches that name no tier, as long as no launch names tiers

Invariant: a record is durable before any code relies on it, and is written only if it adds information.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from tierd.core.errors import CorruptChunk, ManifestError, TierdError
from tierd.core.ids import CheckpointId, PartId, is_attempt
from tierd.core.planning.place import LocalLaunch
from tierd.core.retention.policy import (
    MAX_POLICY_SIZE,
    RetentionPolicy,
    StoredRetention,
    decode_policy,
    encode_policy,
    unreadable_policy,
)
from tierd.core.storage_faults import Reading, ReadVerdict, judge_readings, read_until_proven, unstable_error
from tierd.core.timeline.launch_chain import MAX_HEAD_SIZE, Head, decode_head, encode_head
from tierd.spool.file_io import digest, exists, names_in, open_plain, sync_directory
from tierd.spool.spool_access import check_own_directory

# subdirectories of `.tierd/`
SAVED, RETENTION, TIMELINE, LOCAL_ONLY = "saved", "retention", "timeline", "local-only"
NEAR_NS = 2_000_000_000  # changes this close may have the same time, because file times are coarse
CommittedCache = dict[tuple[str, str], tuple[int, PartId | None]]  # by run and name: when it changed, 0: read again
_Stamp = tuple[int, int, int]  # a file's inode, size and time of its last change
_MAX_LOCAL_ONLY = 4096  # bytes of a record of LOCAL_ONLY that are read
HeadCache = dict[str, tuple[_Stamp, Head]]  # by run
KnownPolicies = dict[str, tuple[_Stamp, StoredRetention]]  # by run
_MARK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a record's place is refused without blocking

T = TypeVar("T")


def mark_saved(control: Path, part: PartId) -> None:
    """Record, once for an attempt and a rank, that this node saves it. A restore records nothing."""
    checkpoint = part.checkpoint
    marks = control / SAVED / checkpoint.run
    mark_names = checkpoint.attempt, f"{checkpoint.attempt}.{part.name}"
    if all((marks / name).exists() for name in mark_names):
        with suppress(FileNotFoundError):
            os.utime(marks / checkpoint.attempt)
        return
    check_own_directory(control / SAVED)
    with suppress(FileExistsError):
        marks.mkdir(mode=0o700)
    _sync_room(control, SAVED)
    for name in mark_names:
        os.close(os.open(marks / name, os.O_WRONLY | os.O_CREAT | _MARK, 0o600))
    sync_directory(marks)


def saved_attempts(control: Path, runs: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, by run, the attempts that saved a part in this spool.

    They are the newest attempt that committed a part, and later attempts. Raises OSError.
    """
    by_run = {run: frozenset(filter(is_attempt, names_in(control / SAVED / run))) for run in runs}
    return {run: attempts for run, attempts in by_run.items() if attempts}


def record_committed(control: Path, part: PartId) -> None:
    """Record that a part is durable here, and delete the records of earlier launches.

    Earlier launches are not deleted sooner, because a launch may end before its first commit. The record is used for
    reports only, so it need not be durable. Raises nothing.
    """
    marks, attempt = control / SAVED / part.checkpoint.run, part.checkpoint.attempt
    with suppress(OSError):
        for older in names_in(marks):
            if older < attempt:
                (marks / older).unlink(missing_ok=True)
        name = marks / f"{attempt}.{part.name}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | _MARK, 0o600)
        try:
            os.pwrite(fd, f"{part.checkpoint.step:012}".encode(), 0)
        finally:
            os.close(fd)


def forget_committed(control: Path, part: PartId) -> None:
    """Delete the record that a part was committed here, because tierd itself deletes the part. Raises nothing."""
    path = control / SAVED / part.checkpoint.run / f"{part.checkpoint.attempt}.{part.name}"
    step = f"{part.checkpoint.step:012}".encode()
    with suppress(OSError), os.fdopen(os.open(path, os.O_RDWR | _MARK), "r+b", buffering=0) as file:
        if file.read(len(step) + 1) == step:
            file.truncate(0)  # the file is kept, because it also records that this node saves the rank


def committed_parts(control: Path, cache: CommittedCache | None = None) -> frozenset[PartId]:
    """Return the newest part that each rank of each run's newest launch committed here, even if it was lost since.

    Call this before listing the parts, because a part committed between the two calls would appear lost. The records in
    `cache` are read again only if they changed; it is updated. Raises OSError.
    """
    fresh: CommittedCache = {}
    for run in names_in(control / SAVED):
        for name in names_in(control / SAVED / run):
            if "." not in name:  # a launch's
                continue
            with suppress(FileNotFoundError):  # deleted since it was listed
                path, now_ns = f"{control}/{SAVED}/{run}/{name}", time.time_ns()
                changed_ns = os.lstat(path).st_mtime_ns  # a record for each rank, at each observation
                before = cache.get((run, name)) if cache else None
                if before is None or before[0] != changed_ns:
                    before = changed_ns if now_ns - changed_ns > NEAR_NS else 0, _committed(Path(path), run, name)
                fresh[run, name] = before
    if cache is not None:
        cache.clear()
        cache.update(fresh)
    return frozenset(part for _, part in fresh.values() if part)


def _committed(path: Path, run: str, name: str) -> PartId | None:
    attempt, _, rank = name.partition(".")
    with suppress(CorruptChunk), os.fdopen(open_plain(path), "rb") as file:
        return PartId.parse(run, f"{file.read(12).decode('ascii', 'replace')}.{attempt}", rank)
    return None


def newest_launches(control: Path, runs: Iterable[str] | None = None) -> dict[str, LocalLaunch]:
    """Return, by run, the newest launch that was saved in this spool, and its ranks here. Raises OSError.

    A failed save also records its launch; only the places show whether the launch left a part.
    """
    by_run = {}
    for run in names_in(control / SAVED) if runs is None else runs:
        ranks: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in names_in(control / SAVED / run):
            attempt, _, pair = name.partition(".")
            if numbers := PartId.parse_name(f"{pair}.json"):
                rank, world = numbers
                ranks[attempt][world].add(rank)
        if newest := max((attempt for attempt in ranks if CheckpointId.parse(run, f"{0:012}.{attempt}")), default=None):
            by_run[run] = LocalLaunch(
                newest, {world: frozenset(world_ranks) for world, world_ranks in ranks[newest].items()}
            )
    return by_run


def saved_at(control: Path, run: str, attempt: str) -> int:
    """Return when a save of this launch last began here: nanoseconds since 1970, 0 if there is no record."""
    try:
        return (control / SAVED / run / attempt).lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def record_policy(control: Path, run: str, policy: RetentionPolicy) -> None:
    """Record the policy that the trainer of `run` requests. Raises SpoolUnusable or OSError if it cannot be made
    durable.
    """
    if any(recorded.retention == policy for recorded in recorded_policies(control, [run]).get(run, ())):
        (control / RETENTION / f"{run}.json").touch()  # so that `forget_run` sees that the trainer repeated its request
        return
    stored = StoredRetention(run, "", "trainer", socket.gethostname(), datetime.now(UTC).isoformat(), policy)
    _write(control, RETENTION, run, encode_policy(stored))


def record_head(control: Path, head: Head) -> None:
    """Record the observed head of a run. Raises SpoolUnusable or OSError if the record could not be made durable."""
    _write(control, TIMELINE, head.run, encode_head(head))


def recorded_heads(control: Path, cache: HeadCache | None = None) -> dict[str, tuple[Head, ...]]:
    """Return, by run, the recorded head, if it can be read. A run may have no other trace here. Raises OSError.

    The heads in `cache` are read again only if they changed; it is updated. Finished runs keep theirs, so there may be
    thousands.
    """
    fresh: HeadCache = {}
    for run in (name.removesuffix(".json") for name in names_in(control / TIMELINE) if not name.startswith(".")):
        with suppress(FileNotFoundError, CorruptChunk, TierdError):  # FileNotFoundError: deleted since it was listed
            path, now_ns = f"{control}/{TIMELINE}/{run}.json", time.time_ns()
            now = os.lstat(path)
            stamp = now.st_ino, now.st_size, now.st_mtime_ns
            before = cache.get(run) if cache else None
            if before is None or before[0] != stamp or now_ns - now.st_mtime_ns <= NEAR_NS:
                before = stamp, _read_sealed(Path(path), MAX_HEAD_SIZE, functools.partial(decode_head, run=run, by=""))
            fresh[run] = before
    if cache is not None:
        cache.clear()
        cache.update(fresh)
    return {run: (head,) for run, (_, head) in fresh.items()}


def _read_sealed(path: Path, max_bytes: int, decoded: Callable[[bytes], T]) -> T:
    """Read a record that ends in its own digest. Raises as `decoded`, once two reads gave the same wrong bytes."""

    def read() -> T:
        with os.fdopen(open_plain(path), "rb") as file:
            data = file.read(max_bytes + 1)
            try:
                return decoded(data)
            except ManifestError as error:
                error.read_digest = digest(data)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                raise

    return read_until_proven(read, str(path))


def recorded_policies(
    control: Path, runs: Iterable[str], cache: KnownPolicies | None = None
) -> dict[str, tuple[StoredRetention, ...]]:
    """Return, by run, the policy that its trainer requested, or why it cannot be read. Raises OSError.

    The policies in `cache` are read again only if they changed; it is updated.
    """
    by_run: dict[str, tuple[StoredRetention, ...]] = {}
    for run in runs:
        path = control / RETENTION / f"{run}.json"
        if not exists(path):
            continue
        try:
            by_run[run] = (_policy(path, run, {} if cache is None else cache),)
        except (CorruptChunk, TierdError) as error:
            by_run[run] = (unreadable_policy(run, "", "trainer", error),)
    return by_run


def _policy(path: Path, run: str, cache: KnownPolicies) -> StoredRetention:
    fd, now_ns = open_plain(path), time.time_ns()
    try:
        now = os.fstat(fd)
        stamp = now.st_ino, now.st_size, now.st_mtime_ns
        if run in cache and cache[run][0] == stamp:
            return cache[run][1]
        policy = decode_policy(_agreed(fd, MAX_POLICY_SIZE, path), run, "", "trainer")
        if now_ns - now.st_mtime_ns > NEAR_NS:
            cache[run] = stamp, policy
        return policy
    finally:
        os.close(fd)


def _agreed(fd: int, max_bytes: int, path: Path) -> bytes:
    """Read a record that has no digest until two reads gave the same bytes. Raises UnstableRead if none did."""
    readings: list[Reading] = []
    while True:
        data = os.pread(fd, max_bytes + 1, 0)
        readings.append(Reading(digest(data)))
        verdict = judge_readings(readings)
        if verdict is ReadVerdict.CORRUPT:  # the same bytes twice, whatever they are
            return data
        if verdict is ReadVerdict.UNSTABLE:
            raise unstable_error(str(path))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def set_local_only(control: Path, run: str, attempt: str) -> None:
    """Record that this launch of `run`, and those after it, are neither sent nor pruned, because they name no tier.

    An earlier launch that named none has recorded itself, and that record is kept. Raises SpoolUnusable or OSError if
    the record cannot be made durable.
    """
    if not exists(control / LOCAL_ONLY / f"{run}.json"):
        _write(control, LOCAL_ONLY, run, json.dumps({"attempt": attempt}).encode())


def unset_local_only(control: Path, run: str) -> None:
    """Delete the record of `set_local_only`, because a launch names tiers. Raises OSError."""
    with suppress(FileNotFoundError):
        (control / LOCAL_ONLY / f"{run}.json").unlink()
        sync_directory(control / LOCAL_ONLY)


def local_only_launches(control: Path) -> dict[str, str]:
    """Return, by run, the first launch that names no tier. Raises OSError.

    A record that cannot be read gives the empty string, which sorts before every launch.
    """
    by_run = {}
    for run in (name.removesuffix(".json") for name in names_in(control / LOCAL_ONLY) if not name.startswith(".")):
        path = control / LOCAL_ONLY / f"{run}.json"
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                attempt = json.loads(file.read(_MAX_LOCAL_ONLY))["attempt"]
            by_run[run] = attempt if isinstance(attempt, str) and is_attempt(attempt) else ""
        except (CorruptChunk, ValueError, KeyError, TypeError):
            if exists(path):  # else it was deleted since it was listed
                by_run[run] = ""
    return by_run


def record_files(control: Path, run: str) -> list[Path]:
    """List the files that hold records of a run. The run may have nothing else in the spool."""
    marks, files = control / SAVED / run, [control / room / f"{run}.json" for room in (RETENTION, TIMELINE, LOCAL_ONLY)]
    return [marks / name for name in names_in(marks)] + [path for path in files if exists(path)]


def forget_run(control: Path, run: str, before_ns: int) -> None:
    """Delete a run's records from before `before_ns`, when the run left the spool, in nanoseconds since 1970.

    Later records belong to a launch that has just begun.
    """
    for path in record_files(control, run):
        with suppress(FileNotFoundError):
            if path.lstat().st_mtime_ns < before_ns:
                path.unlink()
    with suppress(OSError):  # the directory does not exist, or a new launch has saved
        (control / SAVED / run).rmdir()


def forget_launch(control: Path, run: str, attempt: str) -> None:
    """Delete the records of a launch whose run has left the spool, and the run's older records."""
    before_ns, marks = saved_at(control, run, attempt), control / SAVED / run
    for name in sorted(names_in(marks)):
        if name.partition(".")[0] == attempt:
            (marks / name).unlink(missing_ok=True)
    forget_run(control, run, before_ns)


def _write(control: Path, room: str, run: str, data: bytes) -> None:
    check_own_directory(control / room)
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
    """Make a subdirectory of `.tierd/` and its entries durable, because no other code syncs the parent directories."""
    for directory in (control.parent, control, control / room):
        sync_directory(directory)
