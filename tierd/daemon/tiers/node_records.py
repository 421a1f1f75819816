"""What this node records of itself on tiers: its id and its policies' records, and the notes that ranks exchange.

    <run>/meetings/<launch>/<name>                  a note; the client decides its content (client/ranks/boards.py)
    <run>/meetings/<launch>/since.<when>-<who>      empty: when a node began to write notes of this launch

Invariants: of two daemons with one id, as of a copied volume, at least the one that was there first takes a new id, and
records anew what it had recorded. Before any note, a node puts a mark with the time at which it began, so that a sweep
knows the notes' age.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tierd.core.errors import ConfigError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import note_key, rank_notes_prefix, retention_key
from tierd.core.retention.policy import StoredRetention
from tierd.daemon.concurrency import gather_limited
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.ipc.messages import NotesRequest
from tierd.spool.spool_directory import may_be_copied_volume, new_node_id, node_id, record_place
from tierd.stores.base import Store, delete_if_permitted

log = logging.getLogger("tierd.daemon")

_Key = tuple[str, str, str]  # tier, run, origin of the policy
_MAX_REQUESTS = 16  # notes put or read concurrently
_STALE_MS = 86_400_000  # milliseconds after its last mark when a launch has ended, even if clocks differ
_HELLO, _FIRST = "hello.", "hello.0"  # the first note of each rank, and of rank 0
_LAST = "welcome"  # the note that the last rank removes when it leaves
_SINCE = re.compile(r"since\.([0-9a-f]{12})-[0-9a-f]{8}")


class NodeIdentity:
    """The id of one daemon's node. `on_shared`: called with the reason when this node takes a new id."""

    def __init__(
        self, root: Path, timings: DaemonTimings = USUAL, on_shared: Callable[[str], None] = lambda why: None
    ) -> None:
        self._root, self._hold_s, self._on_shared = root, timings.shared_id_s, on_shared
        self.id = node_id(root)
        self._elsewhere, self._begun_s = may_be_copied_volume(root), time.monotonic()
        self._own_records: dict[_Key, StoredRetention] = {}  # this node's records as last observed or put
        # When they were written: of all that this daemon observed first, or put.
        self._known_timestamps: set[str] = set()
        self._observed: set[tuple[str, str]] = set()  # tiers and runs
        # Records of an earlier daemon of this id -> until when they count as another node's, monotonic seconds.
        self._held_until: dict[_Key, float] = {}
        self._records_to_renew: dict[_Key, StoredRetention] = {}  # records to put under the new id

    def mark_contested(self, tier: str, run: str, records: tuple[StoredRetention, ...]) -> tuple[StoredRetention, ...]:
        """Return the records of a run that an observation of a tier found, with those marked that are `contested`."""
        own_records = [record for record in records if record.by == self.id and record.retention is not None]
        if (tier, run) in self._observed:
            strange = [record for record in own_records if record.written not in self._known_timestamps]
            if strange:
                self._renew(tier, strange[0])
                return records
        self._observed.add((tier, run))
        for record in own_records:
            key = tier, run, record.given
            if self._elsewhere and key not in self._own_records:
                self._held_until[key] = math.inf
            self._own_records[key] = record
            self._known_timestamps.add(record.written)
        self._settle()
        return tuple(
            replace(record, contested=record in own_records and self._is_on_hold((tier, run, record.given)))
            for record in records
        )

    def note_put(self, tier: str, record: StoredRetention) -> StoredRetention:
        """Note that this daemon is about to put a record of its own; return it as `mark_contested` would."""
        key = tier, record.run, record.given
        self._known_timestamps.add(record.written)
        self._own_records[key] = record
        self._records_to_renew.pop(key, None)
        if self._held_until.get(key) == math.inf:
            self._held_until[key] = time.monotonic() + self._hold_s
        return replace(record, contested=self._is_on_hold(key))

    def _is_on_hold(self, key: _Key) -> bool:
        return self._held_until.get(key, -math.inf) > time.monotonic()

    def records_to_put(self, tier: str) -> list[StoredRetention]:
        """Return the records to put on a tier although their content is there: so that another daemon with this id
        recognises that it is not alone, or because it may replace those under the former id.
        """
        now = datetime.now(UTC).isoformat()
        unseen = [
            record
            for key, record in self._own_records.items()
            if key[0] == tier and self._held_until.get(key) == math.inf
        ]
        return [
            replace(record, written=now)
            for record in (*unseen, *(self._records_to_renew[key] for key in self._records_to_renew if key[0] == tier))
        ]

    def _settle(self) -> None:
        """Record the place of the spool once this daemon has lived here for long enough."""
        has_waited = time.monotonic() - self._begun_s >= self._hold_s
        if self._elsewhere and has_waited and not any(map(self._is_on_hold, self._held_until)):
            try:
                record_place(self._root)
            except OSError as error:
                log.info("local: where the spool is used is not recorded: %s", error)

    def _renew(self, tier: str, strange: StoredRetention) -> None:
        former = self.id
        try:
            self.id = new_node_id(self._root)
        except OSError as error:  # such as a full disk: tried again at the next observation
            log.error("local: another node has this node's id, and a new one cannot be recorded: %s", error)
            return
        why = (
            f"another node has the id {former} of this one, because one spool is a copy of the other: it wrote "
            f"{retention_key(strange.run, strange.by, strange.given)} on {tier} ({strange.host}, {strange.written}). "
            f"This node is {self.id} now"
        )
        log.error("local: %s", why)
        self._on_shared(why)
        self._records_to_renew = {key: replace(record, by=self.id) for key, record in self._own_records.items()}
        self._own_records, self._held_until, self._observed = {}, {}, set()


class RankNotes:
    """Answer `NotesRequest` requests.

    Args:
        marked_s: seconds after which a launch that still writes notes is marked again.
    """

    def __init__(self, who: str, marked_s: float) -> None:
        self._who, self._marked_s = who, marked_s
        # (tier, run, launch) -> monotonic seconds, key of the mark.
        self._marked: dict[tuple[str, str, str], tuple[float, str]] = {}

    async def handle(self, request: NotesRequest, stores: Mapping[str, Store]) -> dict[str, Any]:
        """Put, remove, read and list notes on the first of `stores` as a request demands.

        Raises:
            ConfigError: there is no tier.
            StoreUnavailable, StoreRefused: the tier failed; the message names node and tier.
            ManifestError, WrongKey: a note on an encrypted tier was not made with its key.
        """
        if not stores:
            raise ConfigError("the daemon has no tier on which ranks could leave notes for each other")
        tier, store = next(iter(stores.items()))
        try:
            return await self._handle(request, tier, store)
        except (StoreUnavailable, StoreRefused) as error:
            raise type(error)(f"node {socket.gethostname()}: {tier}: {error}") from error

    async def _handle(self, request: NotesRequest, tier: str, store: Store) -> dict[str, Any]:
        run, launch = request.run, request.launch
        if request.put:
            await self._mark(tier, store, run, launch)
            if _FIRST in request.put:  # so that only one rank of a launch sweeps
                await sweep_rank_notes(store, run)
        puts = [store.put(note_key(run, launch, name), data) for name, data in request.put.items()]
        await gather_limited(_MAX_REQUESTS, puts)
        if request.remove:
            await delete_if_permitted(store, [note_key(run, launch, name) for name in request.remove])
            if any(name.startswith(_HELLO) for name in request.remove):
                self._marked.pop((tier, run, launch), None)  # the last rank that leaves deletes it
            if _LAST in request.remove:
                await _unmark(store, run, launch)
        notes = await gather_limited(
            _MAX_REQUESTS, [_read(store, note_key(run, launch, name)) for name in request.read]
        )
        answer: dict[str, Any] = {
            "notes": {name: data for name, data in zip(request.read, notes, strict=True) if data is not None}
        }
        if request.under is not None:
            home = note_key(run, launch, "")
            listed = [info.key.removeprefix(home) async for info in store.scan(home + request.under)]
            answer["names"] = listed
        return answer

    async def _mark(self, tier: str, store: Store, run: str, launch: str) -> None:
        """Record since when this node writes notes of a launch, unless it did so lately."""
        at, former = self._marked.get((tier, run, launch), (0.0, ""))
        now = time.monotonic()
        if former and now - at < self._marked_s:
            return
        mark = note_key(run, launch, f"since.{time.time_ns() // 1_000_000:012x}-{self._who}")
        await store.put(mark, b"")
        self._marked = {key: since for key, since in self._marked.items() if now - since[0] < 2 * self._marked_s}
        self._marked[tier, run, launch] = now, mark
        if former:
            await delete_if_permitted(store, [former])


async def _read(store: Store, key: str) -> bytes | None:
    try:
        return bytes(await store.get(key))
    except ObjectNotFound:
        return None


async def sweep_rank_notes(store: Store, run: str) -> None:
    """Delete the notes of launches that no node has marked for a day; costs one listing if there are none."""
    prefix, now_ms = rank_notes_prefix(run), time.time_ns() // 1_000_000
    by_launch: dict[str, list[str]] = {}
    alive: set[str] = set()
    async for info in store.scan(prefix):
        launch, _, name = info.key.removeprefix(prefix).partition("/")
        by_launch.setdefault(launch, []).append(info.key)
        since = _SINCE.fullmatch(name)
        if since and abs(now_ms - int(since[1], 16)) < _STALE_MS:
            alive.add(launch)
    # Marks last, because they alone show the age of the other notes.
    stale = [key for launch in by_launch.keys() - alive for key in sorted(by_launch[launch], key=_is_mark)]
    if stale:
        await delete_if_permitted(store, stale)


async def _unmark(store: Store, run: str, launch: str) -> None:
    """Delete the marks of a launch that has no notes left."""
    keys = [info.key async for info in store.scan(note_key(run, launch, ""))]
    if all(_is_mark(key) for key in keys):
        await delete_if_permitted(store, keys)


def _is_mark(key: str) -> bool:
    return _SINCE.fullmatch(key.rpartition("/")[2]) is not None
