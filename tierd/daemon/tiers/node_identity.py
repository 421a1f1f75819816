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
        self._own: dict[_Key, StoredRetention] = {}  # this node's records as last observed or put
        self._written: set[str] = set()  # when they were written: of all that this daemon observed first, or put
        self._observed: set[tuple[str, str]] = set()  # tiers and runs
        # Records of an earlier daemon of this id -> until when they count as another node's, monotonic seconds.
        self._held: dict[_Key, float] = {}
        self._due: dict[_Key, StoredRetention] = {}  # records to put under the new id

    def observed(self, tier: str, run: str, records: tuple[StoredRetention, ...]) -> tuple[StoredRetention, ...]:
        """Return the records of a run that an observation of a tier found, with those marked that are `contested`."""
        own = [one for one in records if one.by == self.id and one.retention is not None]
        if (tier, run) in self._observed:
            strange = [one for one in own if one.written not in self._written]
            if strange:
                self._renew(tier, strange[0])
                return records
        self._observed.add((tier, run))
        for one in own:
            key = tier, run, one.given
            if self._elsewhere and key not in self._own:
                self._held[key] = math.inf
            self._own[key] = one
            self._written.add(one.written)
        self._settle()
        return tuple(replace(one, contested=one in own and self._is_held((tier, run, one.given))) for one in records)

    def recorded(self, tier: str, one: StoredRetention) -> StoredRetention:
        """Note that this daemon is about to put a record of its own; return it as `observed` would."""
        key = tier, one.run, one.given
        self._written.add(one.written)
        self._own[key] = one
        self._due.pop(key, None)
        if self._held.get(key) == math.inf:
            self._held[key] = time.monotonic() + self._hold_s
        return replace(one, contested=self._is_held(key))

    def _is_held(self, key: _Key) -> bool:
        return self._held.get(key, -math.inf) > time.monotonic()

    def due(self, tier: str) -> list[StoredRetention]:
        """Return the records to put on a tier although their content is there: so that another daemon with this id
        recognises that it is not alone, or because it may replace those under the former id.
        """
        now = datetime.now(UTC).isoformat()
        unseen = [one for key, one in self._own.items() if key[0] == tier and self._held.get(key) == math.inf]
        return [
            replace(one, written=now) for one in (*unseen, *(self._due[key] for key in self._due if key[0] == tier))
        ]

    def _settle(self) -> None:
        """Record the place of the spool once this daemon has lived here for long enough."""
        has_waited = time.monotonic() - self._begun_s >= self._hold_s
        if self._elsewhere and has_waited and not any(map(self._is_held, self._held)):
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
        self._due = {key: replace(one, by=self.id) for key, one in self._own.items()}
        self._own, self._held, self._observed = {}, {}, set()
