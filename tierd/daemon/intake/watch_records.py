"""Keep two directories from becoming one run: each watch leaves a record on the run's first tier.

    <run>/watching/<who>.json    a node watches this directory as the run, or did

The record is put anew while the watch runs, and says at last that the watch has ended. A watch that begins compares its
directory with those in other nodes' records. Nodes that watch one directory go on, wherever each has mounted it.

Invariant: of two watches that live, of directories that are certainly two, at most one goes on, because each lists the
records after it put its own. A watch is refused only for another one that was seen to live: its daemon holds the lock
of its spool, or its record changed. If the tier does not answer, nothing is compared until it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import structs

from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import parse_watching, watching_key, watching_prefix
from tierd.daemon.daemon_timings import DaemonTimings
from tierd.daemon.intake.active_watch import DirectoryId, RunNotWatched, compare_directories
from tierd.daemon.tiers.announcements import STALE_MS
from tierd.spool.spool import Spool, is_spool_held
from tierd.stores.base import ObjectInfo, Store, delete_if_permitted
from tierd.threads import in_own_thread

log = logging.getLogger("tierd.daemon")

_ANSWER_S = 20.0  # seconds for which a watch waits for the tier's answer
_HELD_S = 2.0  # seconds for which a watch waits for another spool's lock to be looked at
_MAX_SIZE = 65536  # bytes of a record
_FAILURES = (StoreUnavailable, StoreRefused, TimeoutError)
_OTHER_DIRECTORY_WARNING = (
    "run %r was the run of %s, and %s goes on with it; if that is not the same program's directory, end this watch now "
    "and give --run another name"
)


class WatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one node's watch."""

    version: Literal[1] = 1
    directory: DirectoryId
    spool: str  # the absolute path of its daemon's spool on that node
    lock: tuple[int, int]  # the device and the inode number of the spool's lock, which that daemon holds
    at_ms: int  # when it was put, in milliseconds since 1970 by that node's clock
    every_s: float  # how long it takes at most until it is put again
    ended: bool = False


_Records: TypeAlias = dict[str, tuple[ObjectInfo, WatchRecord]]  # by key


@dataclass(slots=True)
class _ObservedRecord:
    """A node's record as it was last listed, since when, and whether it had changed before that."""

    token: str
    since_s: float
    renewed: bool


class RunWatchClaim:
    """What one watch knows of other watches of its run.

    Args:
        who: this node's id among the nodes that share the tier.
        find: returns the store of the first tier, another one after a reload; None if there is none, or if it is not to
            be asked now.

    Attributes:
        awaited: why nothing is taken before another watch gave a sign of life or none for long; empty: it may go on.
    """

    def __init__(
        self, run: str, who: str, spool: Spool, find: Callable[[], Store | None], timings: DaemonTimings
    ) -> None:
        self._run, self._spool, self._find, self._timings = run, spool, find, timings
        self._key = watching_key(run, who)
        self._own: tuple[Store, WatchRecord] | None = None  # set once this watch may go on, and where it is recorded
        self._every_s = timings.silent_s / 2  # seconds from one record to the next
        self._observed_records: dict[str, _ObservedRecord] = {}  # others' records, by key
        self._asked: dict[tuple[str, tuple[int, int]], asyncio.Future[bool | None]] = {}  # by spool and lock
        self.awaited = ""

    async def confirm_alone(self, directory: DirectoryId, now_s: float) -> bool:
        """Return whether the watch may take units; False: it has to be asked again, because `awaited` may live.

        Raises `RunNotWatched` if another directory is being watched as this run.
        """
        store = self._find()
        if self._own is not None and store is not None and store is not self._own[0]:
            await self.renew(self._every_s)  # compares again if a reload made another tier the first one
        if self._own is not None:  # a program may have made its directory anew
            self._own = self._own[0], structs.replace(self._own[1], directory=directory)
            return True
        if store is None:
            return True
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._compare_all(store, directory, now_s)
        except _FAILURES as error:
            log.info("%s: other watches of it are unknown: %s", self._run, error or type(error).__name__)
            return True

    async def _compare_all(self, store: Store, directory: DirectoryId, now_s: float) -> bool:
        records = await self._read(store)
        if await self._is_contested(records, directory, now_s):
            return False
        record, contested = self._record(directory), True
        await self._put_record(store, record)
        try:
            contested = await self._is_contested(await self._read(store), directory, now_s)
        finally:
            if contested:  # it began meanwhile
                await delete_if_permitted(store, [self._key])
        if contested:
            return False
        self._own = store, record
        await self._log_others(store, records, directory)
        return True

    async def _read(self, store: Store) -> _Records:
        """Read the records of all nodes, by key. One that cannot be read counts as absent."""
        records = {}
        async for info in store.scan(watching_prefix(self._run)):
            if parse_watching(self._run, info.key) and info.size <= _MAX_SIZE:
                with suppress(ObjectNotFound, CorruptChunk, ManifestError, msgspec.DecodeError, ValueError):
                    records[info.key] = info, _decoder.decode(await store.get(info.key))
        return records

    async def _is_contested(self, records: _Records, directory: DirectoryId, now_s: float) -> bool:
        """Whether another directory may be being watched; raises `RunNotWatched` if it certainly is."""
        before, self.awaited = self.awaited, ""
        for key, (info, record) in records.items():
            is_different = compare_directories(record.directory, directory) == "different"
            if not is_different or self._is_from_this_spool(key, record, directory):
                continue
            lives = await self._is_watch_alive(info, record, directory, now_s)
            if lives:
                raise RunNotWatched(
                    f"run {self._run!r} is the run of {record.directory}, which a daemon watches (spool {record.spool} "
                    f"there); {directory} is another directory: give --run another name, or end that watch"
                )
            if lives is None:
                other = record.directory
                self.awaited = f"nothing is taken until it is known whether {other} is watched as the same run"
        if self.awaited not in ("", before):
            log.warning("%s: %s", directory, self.awaited)
        return bool(self.awaited)

    def _is_from_this_spool(self, key: str, record: WatchRecord, directory: DirectoryId) -> bool:
        """Whether this daemon, or an earlier one of its spool, put a record. A copy of the whole volume, on another
        machine of this name, has the same id and so the same key; there a daemon may live.
        """
        own_record = self._record(directory)
        is_local = record.directory.boot == directory.boot
        return key == self._key and is_local and (record.spool, record.lock) == (own_record.spool, own_record.lock)

    async def _is_watch_alive(
        self, info: ObjectInfo, record: WatchRecord, directory: DirectoryId, now_s: float
    ) -> bool | None:
        """Whether the watch of a record lives; None if that is not known yet."""
        if record.ended:
            return False
        # On another machine, a spool of that path and number is not the one here.
        is_local = record.directory.boot == directory.boot
        if is_local and (holds_spool := await self._is_spool_held(record)) is not None:
            return holds_spool
        observed = self._observed_records.get(info.key)
        if observed is None or observed.token != info.token:
            observed = _ObservedRecord(info.token, now_s, renewed=observed is not None)
            self._observed_records[info.key] = observed
        if now_s - observed.since_s >= 2 * record.every_s:
            return False
        return True if observed.renewed else None

    async def _is_spool_held(self, record: WatchRecord) -> bool | None:
        """Whether the daemon of a record holds its spool; None if that cannot be told, as of a spool on a dead mount.

        A call on a dead mount does not return. Its thread is left behind, and no other one is started beside it.
        """
        key = record.spool, record.lock
        if (probe := self._asked.get(key)) is not None and not probe.done():
            return None
        answer = in_own_thread(lambda: is_spool_held(Path(record.spool), record.lock), "tierd-is-held")
        self._asked[key] = answer
        done, _ = await asyncio.wait([answer], timeout=_HELD_S)
        return answer.result() if done else None

    async def _log_others(self, store: Store, records: _Records, directory: DirectoryId) -> None:
        """Log which other directories were this run's, and delete the records of watches that are over."""
        over = []
        for key, (_, record) in records.items():
            likeness = compare_directories(record.directory, directory)
            if likeness == "different" or (likeness == "unknown" and record.directory.path != directory.path):
                log.warning(_OTHER_DIRECTORY_WARNING, self._run, record.directory, directory)
            is_over = likeness == "different" or record.ended or self._timings.now_ms() - record.at_ms > STALE_MS
            if is_over and key != self._key:
                over.append(key)
        await delete_if_permitted(store, over)

    async def keep_renewing(self, is_idle: Callable[[], bool]) -> None:
        """Put the record anew until cancelled, so that others see it change.

        Less and less often while the watch is idle, because requests cost money and a run may be over for months.
        """
        every_s = self._timings.silent_s / 2
        while True:
            await asyncio.sleep(every_s)
            every_s = min(2 * every_s, self._timings.idle_renew_s) if is_idle() else self._timings.silent_s / 2
            try:
                await self.renew(every_s)
            except Exception:  # a loop that ended would end without a word, and others take this watch for dead
                log.exception("%s: the record of its watch could not be put again", self._run)

    async def renew(self, every_s: float) -> None:
        """Put the record anew, if there is one and the tier may be asked; a tier that fails raises nothing.

        If another watch deleted it, because this process did not run for long, the others are compared again. So they
        are on another first tier after a reload.
        """
        self._every_s = every_s
        if self._own is None or (store := self._find()) is None:  # never the former store: a reload has closed it
            return
        record = self._own[1]
        try:
            async with asyncio.timeout(_ANSWER_S):
                if not [info async for info in store.scan(self._key) if info.key == self._key]:
                    self._own = None
                    return
                await self._put_record(store, structs.replace(record, at_ms=self._timings.now_ms(), every_s=every_s))
                if self._own is not None:
                    self._own = store, self._own[1]
        except _FAILURES as error:
            log.info("%s: the record of its watch could not be put again: %s", self._run, error or type(error).__name__)

    async def end(self) -> None:
        """Record that the watch has ended; a tier that fails raises nothing."""
        published, self._own = self._own, None
        if published is None or (store := self._find()) is None:
            return
        record = published[1]
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._put_record(store, structs.replace(record, at_ms=self._timings.now_ms(), ended=True))
        except _FAILURES as error:
            log.info("%s: that its watch ended could not be recorded: %s", self._run, error or type(error).__name__)

    async def _put_record(self, store: Store, record: WatchRecord) -> None:
        await store.put(self._key, msgspec.json.encode(record))

    def _record(self, directory: DirectoryId) -> WatchRecord:
        lock = self._spool.lock_path.stat()
        return WatchRecord(
            directory=directory,
            spool=os.fspath(self._spool.root),
            lock=(lock.st_dev, lock.st_ino),
            at_ms=self._timings.now_ms(),
            every_s=self._every_s,
        )


_decoder = msgspec.json.Decoder(WatchRecord)
