"""This node's id on the tiers, and its records there that another node with the same id may replace.

A copy of a whole disk or volume, on a host of the same name, has the spool's id (`spool/node_id.py`). It shows when
both daemons live: each record has the time of its writing, so a daemon recognises a record that it did not write.

Invariant: of two daemons with one id, at least the one that was there first takes a new id, and records anew what it
had recorded. The other one, whose spool was last used on another boot or device, replaces no record by one that keeps
less, and counts the former record as another node's, until the first one has had time for that.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tierd.core.ids import retention_key
from tierd.core.retention.stored import StoredRetention
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.spool.node_id import is_elsewhere, new_node_id, node_id, record_place

log = logging.getLogger("tierd.daemon")

_Key = tuple[str, str, str]  # tier, run, origin of the policy


class NodeIdentity:
    """The id of one daemon's node.

    Args:
        root: the spool.
        timings: the daemon's.
        on_shared: called with the reason when this node takes a new id.

    Attributes:
        id: 8 hex digits.
    """

    def __init__(
        self, root: Path, timings: DaemonTimings = USUAL, on_shared: Callable[[str], None] = lambda why: None
    ) -> None:
        self._root, self._hold_s, self._on_shared = root, timings.shared_id_s, on_shared
        self.id = node_id(root)
        self._elsewhere, self._begun_s = is_elsewhere(root), time.monotonic()
        self._own_records: dict[_Key, StoredRetention] = {}  # this node's records as last observed or put
        self._known_timestamps: set[str] = (
            set()
        )  # when they were written: of all that this daemon observed first, or put
        self._observed: set[tuple[str, str]] = set()  # tiers and runs
        # Records of an earlier daemon of this id -> until when they count as another node's, monotonic seconds.
        self._held_until: dict[_Key, float] = {}
        self._records_to_renew: dict[_Key, StoredRetention] = {}  # records to put under the new id

    def observed(self, tier: str, run: str, records: tuple[StoredRetention, ...]) -> tuple[StoredRetention, ...]:
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

    def recorded(self, tier: str, record: StoredRetention) -> StoredRetention:
        """Note that this daemon is about to put a record of its own; return it as `observed` would."""
        key = tier, record.run, record.given
        self._known_timestamps.add(record.written)
        self._own_records[key] = record
        self._records_to_renew.pop(key, None)
        if self._held_until.get(key) == math.inf:
            self._held_until[key] = time.monotonic() + self._hold_s
        return replace(record, contested=self._is_on_hold(key))

    def _is_on_hold(self, key: _Key) -> bool:
        return self._held_until.get(key, -math.inf) > time.monotonic()

    def due(self, tier: str) -> list[StoredRetention]:
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
