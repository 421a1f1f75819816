"""Notes that ranks on several nodes exchange over the first tier, in launches without another channel.

    <run>/meetings/<launch>/<name>                  a note; the client decides its content (client/ranks/tier_board.py)
    <run>/meetings/<launch>/since.<when>-<who>      empty: when a node began to write notes of this launch

Invariant: before any note, this node puts a mark with the time at which it began. So a sweep knows the age of notes
from names alone. Any daemon that saves the run deletes the notes of killed daemons and trainers a day after their last
mark.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from tierd.core.errors import ConfigError, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import note_key, rank_notes_prefix
from tierd.daemon.transfer.concurrency import together
from tierd.ipc.messages import NotesRequest
from tierd.stores.base import Store, clear

_MAX_REQUESTS = 16  # notes put or read concurrently
_STALE_MS = 86_400_000  # milliseconds after its last mark when a launch has ended, even if clocks differ
_HELLO, _FIRST = "hello.", "hello.0"  # the first note of each rank, and of rank 0
_LAST = "welcome"  # the note that the last rank removes when it leaves
_SINCE = re.compile(r"since\.([0-9a-f]{12})-[0-9a-f]{8}")


class RankNotes:
    """Answer `NotesRequest` requests.

    Args:
        who: this node's id, 8 hex digits.
        marked_s: seconds after which a launch that still writes notes is marked again.
    """

    def __init__(self, who: str, marked_s: float) -> None:
        self._who, self._marked_s = who, marked_s
        # (tier, run, launch) -> monotonic seconds, key of the mark.
        self._marked: dict[tuple[str, str, str], tuple[float, str]] = {}

    async def handle(self, request: NotesRequest, stores: Mapping[str, Store]) -> dict[str, Any]:
        """Put, remove, read and list notes on the first of `stores` as a request demands.

        Args:
            request: the notes to put, to remove and to read.
            stores: tier name -> open store, in order of preference.

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
        await together(_MAX_REQUESTS, puts)
        if request.remove:
            await clear(store, [note_key(run, launch, name) for name in request.remove])
            if any(name.startswith(_HELLO) for name in request.remove):
                self._marked.pop((tier, run, launch), None)  # the last rank that leaves deletes it
            if _LAST in request.remove:
                await _unmark(store, run, launch)
        notes = await together(_MAX_REQUESTS, [_read(store, note_key(run, launch, name)) for name in request.read])
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
            await clear(store, [former])


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
        await clear(store, stale)


async def _unmark(store: Store, run: str, launch: str) -> None:
    """Delete the marks of a launch that has no notes left."""
    keys = [info.key async for info in store.scan(note_key(run, launch, ""))]
    if all(_is_mark(key) for key in keys):
        await clear(store, keys)


def _is_mark(key: str) -> bool:
    return _SINCE.fullmatch(key.rpartition("/")[2]) is not None
