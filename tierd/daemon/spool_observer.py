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
from tierd.core.ids import CheckpointId, PartId, checkpoint_order
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts
from tierd.core.planning.place import Place
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.spool.leases import ended_launches, living_trainers
from tierd.spool.run_records import (
    NEAR_NS,
    CommittedCache,
    HeadCache,
    KnownPolicies,
    committed_parts,
    local_only_launches,
    newest_launches,
    recorded_heads,
    recorded_policies,
    saved_attempts,
)
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_error


@dataclass(slots=True)
class _RunDirectory:
    stamp_ns: int  # its modification time; 0 if it must be read again
    names: dict[str, CheckpointId | None]  # the names of directories in it, each with the checkpoint that it names
    observed: list[_CheckpointDirectory]  # the directories of checkpoints, oldest first
    newest_ns: int = 0  # when its newest part was committed
    # The places in `observed` that a sparing observation asks about; None if they must be found.
    open: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _CheckpointDirectory:
    id: CheckpointId
    path: str
    stamp_ns: int = 0  # its modification time; 0 if it must be read again
    copy: CheckpointCopy | None = None
    newest_ns: int = 0
    childless: bool = False
    # By part and the stamp of its manifest, what the manifest says.
    facts: Mapping[tuple[PartId, int], ManifestFacts] = field(default_factory=dict)

    @property
    def is_closed(self) -> bool:
        """Whether its checkpoint is complete, and a change would show in `stamp_ns`."""
        return self.stamp_ns > 0 and self.copy is not None and self.copy.complete


class SpoolObserver:
    """Observe the spool.

    A manifest is parsed only when its part is new, because parts are immutable. Unchanged results are the same objects
    as before.
    """

    def __init__(self, spool: Spool, timings: DaemonTimings = USUAL) -> None:
        self._spool, self._full_s = spool, timings.full_observation_s
        # Run -> when its newest part was committed, by the spool's disk, seconds since 1970. If no copy is left of the
        # checkpoints saved here, when one was last saved.
        self.touched: dict[str, float] = {}
        self.childless: list[CheckpointId] = []
        self.odd_places: dict[CheckpointId, str] = {}  # as `Spool.odd_places`, at the last full observation
        self._homes: dict[str, _RunDirectory] = {}
        self._records: CommittedCache = {}  # of committed parts
        self._heads: HeadCache = {}
        self._policies: KnownPolicies = {}
        self._doubted: set[CheckpointId] = set()
        self._removals = 0  # of the spool, at the last observation
        self._full_at = 0.0  # when everything was last read, monotonic seconds
        self._is_stale = True  # whether `_homes` changed since `_place` was made of it
        self._place = Place()

    def invalidate(self, checkpoint: CheckpointId) -> None:
        """Have a checkpoint read again, because one of its files may be replaced, which its directory does not show."""
        self._doubted.add(checkpoint)

    def observe(self, *, sparing: bool = False) -> Place:
        """Return the spool's present inventory, or what a sparing observation shows of it."""
        full = not self._full_at or time.monotonic() - self._full_at >= self._full_s
        started_s = time.monotonic()
        if full:
            self._records.clear()
        before = committed_parts(self._spool.control, self._records)
        doubted, self._doubted = self._doubted, set()
        removals = self._spool.removals
        sparing = sparing and not doubted and not full and removals == self._removals
        try:
            runs = sorted(self._spool.runs())
            self._is_stale |= runs != list(self._homes)
            self._homes = {run: self._observe_run(run, full=full) for run in runs}
            for home in self._homes.values():
                self._observe_below(home, doubted, full=full, sparing=sparing)
            if full:
                self.odd_places = {
                    odd_place: why for run in runs for odd_place, why in self._spool.odd_places(run).items()
                }
            self._spool.check_mounted()
        except OSError:
            self._doubted |= doubted
            raise
        self._full_at, self._removals = started_s if full else self._full_at, removals
        place = self._build_place(before)
        self._place = self._place if place == self._place else place  # the same object keeps its cached properties
        self._is_stale = False
        return self._place

    def _observe_run(self, run: str, *, full: bool) -> _RunDirectory:
        home, now_ns = self._homes.get(run) or _RunDirectory(0, {}, []), time.time_ns()
        stamp_ns = self._spool.stamp(self._spool.directory_path(run))
        if stamp_ns and home.stamp_ns == stamp_ns and not full:
            return home
        names = self._spool.names(run, () if full else home.names)
        settled_ns = stamp_ns if now_ns - stamp_ns > NEAR_NS else 0
        if len(names) == len(home.names) and all(map(home.names.__contains__, names)):
            home.stamp_ns = settled_ns
            return home
        self._is_stale = True
        ids = {name: home.names[name] if name in home.names else CheckpointId.parse(run, name) for name in names}
        same = {entry.id: entry for entry in home.observed}
        checkpoints = sorted((checkpoint for checkpoint in ids.values() if checkpoint), key=checkpoint_order)
        observed = [
            same.get(checkpoint) or _CheckpointDirectory(checkpoint, self._spool.directory_path(run, checkpoint.name))
            for checkpoint in checkpoints
        ]
        return _RunDirectory(settled_ns, ids, observed, max((entry.newest_ns for entry in observed), default=0))

    def _observe_below(
        self, home: _RunDirectory, doubted: Collection[CheckpointId], *, full: bool, sparing: bool
    ) -> None:
        """Read the directories of checkpoints that may have changed."""
        stamp, reread, has_shrunk = self._spool.stamp, set[int](), False
        is_open = home.open
        if is_open is None:
            is_open = home.open = [at for at, entry in enumerate(home.observed) if not entry.is_closed]
        for at in is_open if sparing else range(len(home.observed)):
            previous = home.observed[at]
            stamp_ns = stamp(previous.path)
            if stamp_ns and stamp_ns == previous.stamp_ns and not full and (not doubted or previous.id not in doubted):
                continue
            home.observed[at] = fresh = self._observe_one(previous, stamp_ns)
            reread.add(at)
            home.open = None  # found below, or by the next observation if this one fails
            home.newest_ns = max(home.newest_ns, fresh.newest_ns)
            if fresh.copy is not previous.copy or fresh.childless != previous.childless:
                self._is_stale = True
            has_shrunk |= previous.newest_ns > fresh.newest_ns
        if reread:
            home.open = sorted(at for at in reread.union(is_open) if not home.observed[at].is_closed)
        if has_shrunk:  # perhaps the newest part of all
            home.newest_ns = max(entry.newest_ns for entry in home.observed)

    def _observe_one(self, previous: _CheckpointDirectory, stamp_ns: int) -> _CheckpointDirectory:
        checkpoint, now_ns = previous.id, time.time_ns()
        parts, childless = self._spool.list_parts(checkpoint)
        cache = dict[tuple[PartId, int], ManifestFacts]()
        read = {part: self._read(part, previous.facts, cache) for part in parts}
        facts = {part: outcome for part, outcome in read.items() if isinstance(outcome, ManifestFacts)}
        defects = {part: outcome for part, outcome in read.items() if isinstance(outcome, TierdError)}
        ranks: dict[int, set[int]] = {}
        for part in (*facts, *defects):
            ranks.setdefault(part.world, set()).add(part.rank)
        frozen = {world: frozenset(world_ranks) for world, world_ranks in ranks.items()}
        copy = CheckpointCopy(checkpoint, frozen, facts, defects) if ranks else None
        settled = now_ns - stamp_ns > NEAR_NS and not defects
        return _CheckpointDirectory(
            checkpoint,
            previous.path,
            stamp_ns if settled else 0,
            previous.copy if previous.copy == copy else copy,
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
            return spool_error(error, f"manifest of {part}")
        return cache[key]

    def _build_place(self, before: frozenset[PartId]) -> Place:
        """Return the place with the copies that were read, and with its pins, policies, launches, leases and heads."""
        spool, control = self._spool, self._spool.control
        if self._is_stale:
            observed = [entry for home in self._homes.values() for entry in home.observed]
            self.childless = [entry.id for entry in observed if entry.childless]
            bare = Place({entry.id: entry.copy for entry in observed if entry.copy})
        else:
            bare = Place(self._place.checkpoints).with_values_of(self._place)
        touched = {run: home.newest_ns / 1e9 for run, home in self._homes.items() if home.newest_ns}
        own_launches = newest_launches(control)
        for run in own_launches.keys() - touched.keys():
            touched[run] = spool.saved_stamp(run, own_launches[run].attempt) / 1e9
        self.touched = touched
        quarantined = {
            part: ManifestFacts.of(manifest) if manifest else None for part, manifest in spool.quarantined().items()
        }
        newest = {run: max(copies.attempts) for run, copies in bare.runs.items()}
        marks = saved_attempts(control, newest)
        restored = frozenset(run for run, attempt in newest.items() if attempt not in marks.get(run, ()))
        alive = living_trainers(control, newest)
        return replace(
            bare,
            pins=frozenset(spool.pins()),
            quarantined=quarantined,
            policies=recorded_policies(control, newest | own_launches, self._policies),
            restored=restored,
            launches=own_launches,
            alive=alive,
            ended_launches=ended_launches(control, alive, alive),
            committed=before,
            heads=recorded_heads(control, self._heads),
            local_only=local_only_launches(control),
        ).with_values_of(bare)
