"""Observation of the spool, which reads again only the directories that have changed.

Invariant: a directory is read again if its modification time differs, or is so recent that a later change could have
the same time. Once a minute everything is read, because some file systems keep no modification times.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts
from tierd.core.planning.place import Place
from tierd.spool.conditions import condition
from tierd.spool.leases import ended, trainers
from tierd.spool.records import committed, heads, launches, policies, saved
from tierd.spool.spool import Spool

_FULL_S = 60.0  # seconds between full observations
_NEAR_NS = 2_000_000_000  # changes this close may have the same time, because file times are coarse


@dataclass(frozen=True, slots=True)
class _Home:
    """A run's directory: its checkpoints, oldest first. `stamp_ns` is 0 if it must be read again."""

    stamp_ns: int
    checkpoints: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class _Looked:
    """A checkpoint's directory.

    Attributes:
        stamp_ns: its modification time; 0 if it must be read again.
        seen: the copy in it, if any.
        newest_ns: when its newest part was committed.
        childless: whether it is empty.
    """

    stamp_ns: int
    seen: CheckpointCopy | None
    newest_ns: int
    childless: bool


class SpoolObserver:
    """Observe the spool.

    A manifest is parsed only when its part is new, because parts are immutable. Unchanged results are the same objects
    as before.

    Attributes:
        touched: run -> when its newest part was committed, by the spool's disk, seconds since 1970. If no copy is left
            of the checkpoints saved here, when one was last saved.
        childless: the checkpoints whose directories are empty.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.touched: dict[str, float] = {}
        self.childless: list[CheckpointId] = []
        self._homes: dict[str, _Home] = {}
        self._looked: dict[CheckpointId, _Looked] = {}
        self._facts: dict[CheckpointId, dict[tuple[PartId, int], ManifestFacts]] = {}
        self._doubted: set[CheckpointId] = set()
        self._full_at = 0.0  # when everything was last read, monotonic seconds
        self._place = Place()

    def doubt(self, checkpoint: CheckpointId) -> None:
        """Have a checkpoint read again, because one of its files may be replaced, which its directory does not show."""
        self._doubted.add(checkpoint)

    def look(self) -> Place:
        """Return the spool's present inventory.

        Raises:
            OSError: the spool cannot be read.
        """
        before = committed(self._spool.control)
        full = not self._full_at or time.monotonic() - self._full_at >= _FULL_S
        begun = time.monotonic()
        doubted, self._doubted = self._doubted, set()
        looked: dict[CheckpointId, _Looked] = {}
        homes = {run: self._home(run, full=full) for run in sorted(self._spool.runs())}
        for home in homes.values():
            for one in home.checkpoints:
                looked[one] = self._look_into(one, full=full or one in doubted)
        self._spool.check_mounted()
        self._homes, self._looked = homes, looked
        self._facts = {one: facts for one, facts in self._facts.items() if one in looked}
        self._full_at = begun if full else self._full_at
        self.childless = [one for one, found in looked.items() if found.childless]
        place = self._described({one: found.seen for one, found in looked.items() if found.seen}, before)
        self._place = self._place if place == self._place else place  # the same object keeps its cached properties
        return self._place

    def _home(self, run: str, *, full: bool) -> _Home:
        known, now_ns = self._homes.get(run), time.time_ns()
        stamp_ns = self._spool.stamp(run)
        if known and stamp_ns and known.stamp_ns == stamp_ns and not full:
            return known
        same = {one: one for one in known.checkpoints} if known else {}
        found = sorted(same.get(one, one) for one in self._spool.checkpoints(run))
        return _Home(stamp_ns if now_ns - stamp_ns > _NEAR_NS else 0, tuple(found))

    def _look_into(self, one: CheckpointId, *, full: bool) -> _Looked:
        known, now_ns = self._looked.get(one), time.time_ns()
        stamp_ns = self._spool.stamp(one.run, one.name)
        if known and stamp_ns and known.stamp_ns == stamp_ns and not full:
            return known
        parts, childless = self._spool.look_into(one)
        before, cache = self._facts.get(one, {}), dict[tuple[PartId, int], ManifestFacts]()
        read = {part: self._read(part, before, cache) for part in parts}
        facts = {part: found for part, found in read.items() if isinstance(found, ManifestFacts)}
        defects = {part: found for part, found in read.items() if isinstance(found, TierdError)}
        ranks: dict[int, set[int]] = {}
        for part in (*facts, *defects):
            ranks.setdefault(part.world, set()).add(part.rank)
        self._facts[one] = cache
        seen = (
            CheckpointCopy(one, {world: frozenset(some) for world, some in ranks.items()}, facts, defects)
            if ranks
            else None
        )
        if known and known.seen == seen:
            seen = known.seen
        settled = now_ns - stamp_ns > _NEAR_NS and not defects
        return _Looked(stamp_ns if settled else 0, seen, max((at for _, at in cache), default=0), childless)

    def _read(
        self,
        part: PartId,
        before: Mapping[tuple[PartId, int], ManifestFacts],
        cache: dict[tuple[PartId, int], ManifestFacts],
    ) -> ManifestFacts | TierdError | None:
        try:
            key = part, self._spool.manifest_stamp(part)
            cache[key] = before.get(key) or ManifestFacts.of(self._spool.manifest(part))
        except ObjectNotFound:
            return None  # removed between the listing and now
        except (ManifestError, FormatTooNew) as error:
            return error
        except OSError as error:  # concerns this file only, and says nothing about its bytes
            return condition(error, f"manifest of {part}")
        return cache[key]

    def _described(self, checkpoints: Mapping[CheckpointId, CheckpointCopy], before: frozenset[PartId]) -> Place:
        """Return the place with these checkpoints, and with its pins, policies, launches, leases and heads."""
        spool, control = self._spool, self._spool.control
        touched: dict[str, float] = {}
        for one, found in self._looked.items():
            if found.newest_ns:
                touched[one.run] = max(found.newest_ns / 1e9, touched.get(one.run, 0.0))
        own = launches(control)
        for run in own.keys() - touched.keys():
            touched[run] = spool.saved_stamp(run, own[run].attempt) / 1e9
        self.touched = touched
        aside = {
            part: ManifestFacts.of(manifest) if manifest else None for part, manifest in spool.quarantined().items()
        }
        place = Place(checkpoints, frozenset(spool.pins()), quarantined=aside)
        newest = {run: max(copies.attempts) for run, copies in place.runs.items()}
        marks, wanted = saved(control, newest), policies(control, newest | own)
        restored = frozenset(run for run, attempt in newest.items() if attempt not in marks.get(run, ()))
        alive = trainers(control, newest)
        return replace(
            place,
            policies=wanted,
            restored=restored,
            launches=own,
            alive=alive,
            ended=ended(control, alive, alive),
            committed=before,
            heads=heads(control),
        )
