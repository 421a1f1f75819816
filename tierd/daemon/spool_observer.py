"""Observation of the spool, which reads again only the directories that have changed.

Invariant: a directory is read again if its modification time differs, or is so recent that a later change could have
the same time. Once a minute everything is read, because some file systems keep no modification times.

A sparing observation does not ask about checkpoints that were complete and settled before. No writer adds to these, and
this process counts what it removes. So only a part that something else removed is missed, until the next observation
that is not sparing. It therefore suffices to find parts to send, and for no deletion.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tierd.core.errors import FormatTooNew, ManifestError, ObjectNotFound, TierdError
from tierd.core.ids import CheckpointId, PartId, in_order
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts
from tierd.core.planning.place import Place
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.spool.conditions import condition
from tierd.spool.leases import ended, trainers
from tierd.spool.records import NEAR_NS, Known, KnownHeads, committed, heads, launches, local_only, policies, saved
from tierd.spool.spool import Spool


@dataclass(slots=True)
class _Home:
    """A run's directory.

    Attributes:
        stamp_ns: its modification time; 0 if it must be read again.
        names: the names of directories in it, each with the checkpoint that it names.
        observed: the directories of checkpoints, oldest first.
        newest_ns: when its newest part was committed.
        open: the places in `observed` that a sparing observation asks about; None if they must be found.
    """

    stamp_ns: int
    names: dict[str, CheckpointId | None]
    observed: list[_Observed]
    newest_ns: int = 0
    open: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Observed:
    """A checkpoint's directory.

    Attributes:
        id: the checkpoint.
        path: the directory's path.
        stamp_ns: its modification time; 0 if it must be read again.
        seen: the copy in it, if any.
        newest_ns: when its newest part was committed.
        childless: whether it is empty.
        facts: by part and the stamp of its manifest, what the manifest says.
    """

    id: CheckpointId
    path: str
    stamp_ns: int = 0
    seen: CheckpointCopy | None = None
    newest_ns: int = 0
    childless: bool = False
    facts: Mapping[tuple[PartId, int], ManifestFacts] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether its checkpoint is complete, and a change would show in `stamp_ns`."""
        return self.stamp_ns > 0 and self.seen is not None and self.seen.complete


class SpoolObserver:
    """Observe the spool.

    A manifest is parsed only when its part is new, because parts are immutable. Unchanged results are the same objects
    as before.

    Attributes:
        touched: run -> when its newest part was committed, by the spool's disk, seconds since 1970. If no copy is left
            of the checkpoints saved here, when one was last saved.
        childless: the checkpoints whose directories are empty.
        odd: as `Spool.odd_places`, at the last full observation.
    """

    def __init__(self, spool: Spool, timings: DaemonTimings = USUAL) -> None:
        self._spool, self._full_s = spool, timings.full_observation_s
        self.touched: dict[str, float] = {}
        self.childless: list[CheckpointId] = []
        self.odd: dict[CheckpointId, str] = {}
        self._homes: dict[str, _Home] = {}
        self._records: Known = {}  # of committed parts
        self._heads: KnownHeads = {}
        self._doubted: set[CheckpointId] = set()
        self._removals = 0  # of the spool, at the last observation
        self._full_at = 0.0  # when everything was last read, monotonic seconds
        self._is_stale = True  # whether `_homes` changed since `_place` was made of it
        self._place = Place()

    def doubt(self, checkpoint: CheckpointId) -> None:
        """Have a checkpoint read again, because one of its files may be replaced, which its directory does not show."""
        self._doubted.add(checkpoint)

    def observe(self, *, sparing: bool = False) -> Place:
        """Return the spool's present inventory, or what a sparing observation shows of it.

        Raises:
            OSError: the spool cannot be read.
        """
        full = not self._full_at or time.monotonic() - self._full_at >= self._full_s
        begun = time.monotonic()
        if full:
            self._records.clear()
        before = committed(self._spool.control, self._records)
        doubted, self._doubted = self._doubted, set()
        removals = self._spool.removals
        sparing = sparing and not doubted and not full and removals == self._removals
        try:
            found = sorted(self._spool.runs())
            self._is_stale |= found != list(self._homes)
            self._homes = {run: self._home(run, full=full) for run in found}
            for home in self._homes.values():
                self._observe_below(home, doubted, full=full, sparing=sparing)
            if full:
                self.odd = {one: why for run in found for one, why in self._spool.odd_places(run).items()}
            self._spool.check_mounted()
        except OSError:
            self._doubted |= doubted
            raise
        self._full_at, self._removals = begun if full else self._full_at, removals
        place = self._described(before)
        self._place = self._place if place == self._place else place  # the same object keeps its cached properties
        self._is_stale = False
        return self._place

    def _home(self, run: str, *, full: bool) -> _Home:
        known, now_ns = self._homes.get(run) or _Home(0, {}, []), time.time_ns()
        stamp_ns = self._spool.stamp(self._spool.where(run))
        if stamp_ns and known.stamp_ns == stamp_ns and not full:
            return known
        names = self._spool.names(run, () if full else known.names)
        settled_ns = stamp_ns if now_ns - stamp_ns > NEAR_NS else 0
        if len(names) == len(known.names) and all(map(known.names.__contains__, names)):
            known.stamp_ns = settled_ns
            return known
        self._is_stale = True
        ids = {name: known.names[name] if name in known.names else CheckpointId.parse(run, name) for name in names}
        same = {one.id: one for one in known.observed}
        found = sorted((one for one in ids.values() if one), key=in_order)
        observed = [same.get(one) or _Observed(one, self._spool.where(run, one.name)) for one in found]
        return _Home(settled_ns, ids, observed, max((one.newest_ns for one in observed), default=0))

    def _observe_below(self, home: _Home, doubted: Collection[CheckpointId], *, full: bool, sparing: bool) -> None:
        """Read the directories of checkpoints that may have changed."""
        stamp, again, gone = self._spool.stamp, set[int](), False
        is_open = home.open
        if is_open is None:
            is_open = home.open = [at for at, one in enumerate(home.observed) if not one.is_closed]
        for at in is_open if sparing else range(len(home.observed)):
            known = home.observed[at]
            stamp_ns = stamp(known.path)
            if stamp_ns and stamp_ns == known.stamp_ns and not full and (not doubted or known.id not in doubted):
                continue
            home.observed[at] = fresh = self._observe_one(known, stamp_ns)
            again.add(at)
            home.open = None  # found below, or by the next observation if this one fails
            home.newest_ns = max(home.newest_ns, fresh.newest_ns)
            if fresh.seen is not known.seen or fresh.childless != known.childless:
                self._is_stale = True
            gone |= known.newest_ns > fresh.newest_ns
        if again:
            home.open = sorted(at for at in again.union(is_open) if not home.observed[at].is_closed)
        if gone:  # perhaps the newest part of all
            home.newest_ns = max(one.newest_ns for one in home.observed)

    def _observe_one(self, known: _Observed, stamp_ns: int) -> _Observed:
        one, now_ns = known.id, time.time_ns()
        parts, childless = self._spool.list_parts(one)
        cache = dict[tuple[PartId, int], ManifestFacts]()
        read = {part: self._read(part, known.facts, cache) for part in parts}
        facts = {part: found for part, found in read.items() if isinstance(found, ManifestFacts)}
        defects = {part: found for part, found in read.items() if isinstance(found, TierdError)}
        ranks: dict[int, set[int]] = {}
        for part in (*facts, *defects):
            ranks.setdefault(part.world, set()).add(part.rank)
        seen = (
            CheckpointCopy(one, {world: frozenset(some) for world, some in ranks.items()}, facts, defects)
            if ranks
            else None
        )
        settled = now_ns - stamp_ns > NEAR_NS and not defects
        return _Observed(
            one,
            known.path,
            stamp_ns if settled else 0,
            known.seen if known.seen == seen else seen,
            max((at for _, at in cache), default=0),
            childless,
            cache,
        )

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

    def _described(self, before: frozenset[PartId]) -> Place:
        """Return the place with the copies that were read, and with its pins, policies, launches, leases and heads."""
        spool, control = self._spool, self._spool.control
        if self._is_stale:
            observed = [one for home in self._homes.values() for one in home.observed]
            self.childless = [one.id for one in observed if one.childless]
            bare = Place({one.id: one.seen for one in observed if one.seen})
        else:
            bare = Place(self._place.checkpoints).like(self._place)
        touched = {run: home.newest_ns / 1e9 for run, home in self._homes.items() if home.newest_ns}
        own = launches(control)
        for run in own.keys() - touched.keys():
            touched[run] = spool.saved_stamp(run, own[run].attempt) / 1e9
        self.touched = touched
        quarantined = {
            part: ManifestFacts.of(manifest) if manifest else None for part, manifest in spool.quarantined().items()
        }
        newest = {run: max(copies.attempts) for run, copies in bare.runs.items()}
        marks, wanted = saved(control, newest), policies(control, newest | own)
        restored = frozenset(run for run, attempt in newest.items() if attempt not in marks.get(run, ()))
        alive = trainers(control, newest)
        return replace(
            bare,
            pins=frozenset(spool.pins()),
            quarantined=quarantined,
            policies=wanted,
            restored=restored,
            launches=own,
            alive=alive,
            ended=ended(control, alive, alive),
            committed=before,
            heads=heads(control, self._heads),
            local_only=local_only(control),
        ).like(bare)
