"""What a run's names, manifests and heads say together, and what a resume must give by that: for `faults.corruption`.

None of tierd's code is used, and what is required is said by FORMAT.md and the docs: names tell what is complete; a
launch's origin is told by any manifest of it that can be read, in any place, or else by any head; a launch of which
nothing can be read is a name. Whatever was remembered and is not restored must be told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from faults.corruption.judge import Judge, said
from faults.corruption.places import RUN, TIERS, WORLD, Places
from support.by_hand import sealed

from tierd.core.ids import CheckpointId, PartId

LOCAL = "local"
HEAD = f".tierd/timeline/{RUN}.json"
YEAR_2200_MS = int(datetime(2200, 1, 1, tzinfo=UTC).timestamp()) * 1000
_NAME = r"([0-9]{12})\.([0-9a-f]{12}-[0-9a-f]{8})/([0-9]{5})-of-([0-9]{5})"
_MANIFEST = re.compile(rf"{RUN}/(manifests|quarantine)/{_NAME}\.json")
_TIER_HEAD = re.compile(rf"{RUN}/timeline/([0-9a-f]{{8}})\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")
_MOST = 1 << 20  # bytes of a head, FORMAT.md
_MARK = re.compile(r"([0-9a-f]{12}-[0-9a-f]{8})\.[0-9]{5}-of-[0-9]{5}")

Origins = dict[str, "CheckpointId | None"]


def is_launch(attempt: str) -> bool:
    return bool(_ATTEMPT.fullmatch(attempt)) and int(attempt[:12], 16) < YEAR_2200_MS


def head_says(data: bytes | None, by: str) -> dict[str, Any] | None:
    """The launches in a head that can be read where the one of `by` belongs."""
    found = sealed(data) if data is not None and len(data) <= _MOST else None
    if found is None or found.get("version") != 1 or (found.get("run"), found.get("by")) != (RUN, by):
        return None
    launches: dict[str, Any] = found["launches"]
    return launches if all(map(is_launch, launches)) else None


@dataclass
class Known:
    """What all places that answer show of the run now.

    Attributes:
        names: place -> the parts whose manifests are there by name.
        quarantined: the parts that are quarantined, by name.
        reported: launch -> what it resumed from, where anything tells.
        whole: launch -> the newest step that any head says was complete.
        here: the checkpoints that the spool remembers to have committed.
    """

    names: dict[str, set[PartId]] = field(default_factory=dict)
    quarantined: set[PartId] = field(default_factory=set)
    reported: Origins = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    here: set[CheckpointId] = field(default_factory=set)

    @property
    def shown(self) -> set[PartId]:
        return set().union(*self.names.values())

    @property
    def checkpoints(self) -> set[CheckpointId]:
        return {part.checkpoint for part in self.shown | self.quarantined}

    @property
    def newest(self) -> str | None:
        """The newest launch of which anything can be read, or else the newest name."""
        return max(self.reported or {one.attempt for one in self.checkpoints}, default=None)

    def complete(self, world: int) -> set[CheckpointId]:
        ranks: dict[CheckpointId, set[int]] = {}
        for part in self.shown:
            if part.world == world:
                ranks.setdefault(part.checkpoint, set()).add(part.rank)
        return {one for one, found in ranks.items() if len(found) == world}

    def way(self) -> dict[str, float]:
        """The launches of the timeline, each with the last step of it that counts."""
        found: dict[str, float] = {}
        at, limit = self.newest, float("inf")
        while at is not None:
            found[at] = limit
            origin = self.reported.get(at)
            at, limit = (origin.attempt, origin.step) if origin else (None, 0.0)
        return found

    def candidates(self) -> list[CheckpointId]:
        """The complete checkpoints of the timeline, newest first."""
        way = self.way()
        return sorted((one for one in self.complete(WORLD) if one.step <= way.get(one.attempt, -1)), reverse=True)

    def unvouched(self) -> set[CheckpointId]:
        """What is newer by name than every launch of which anything can be read."""
        newest = self.newest or ""
        return {one for one in self.checkpoints if one.attempt > newest}

    def remembered(self) -> set[CheckpointId]:
        """What was complete, or committed, once: the newest that all heads together tell, and the spool's own."""
        newest = max((CheckpointId(RUN, launch, step) for launch, step in self.whole.items()), default=None)
        return {*self.here, *([newest] if newest else [])}


def observe_all(places: Places, judge: Judge) -> Known:
    """Read everything, by the formats alone."""
    known = Known()
    local = {part for part in places.parts if part.checkpoint.run == RUN and judge.is_local(part)}
    known.names[LOCAL] = local
    found: list[tuple[PartId, dict[str, Any]]] = []
    found += [(part, reported) for part in local if (reported := judge.readable(LOCAL, part))]
    heads = [head_says(places.read(HEAD), "")]
    for tier in TIERS:
        names = known.names[tier] = set()
        for key, data in places.contents(tier):
            if match := _MANIFEST.fullmatch(key):
                rank, world = int(match[4]), int(match[5])
                if rank >= world or not is_launch(match[3]):
                    continue
                part = PartId(CheckpointId(RUN, match[3], int(match[2])), rank, world)
                (names if match[1] == "manifests" else known.quarantined).add(part)
                if reported := said(data, part):
                    found.append((part, reported))
            elif match := _TIER_HEAD.fullmatch(key):
                heads.append(head_says(data, match[1]))
    for launches in (one for one in heads if one):
        for launch, one in launches.items():
            known.reported[launch] = _origin(one["resumed_from"])
            if one["newest"] is not None:
                known.whole[launch] = max(one["newest"], known.whole.get(launch, -1))
    known.reported |= {part.checkpoint.attempt: _origin(reported["resumed_from"]) for part, reported in found}
    marks = places.spool.root / ".tierd" / "saved" / RUN
    for mark in sorted(marks.iterdir()) if marks.exists() else ():
        if (match := _MARK.fullmatch(mark.name)) and (text := mark.read_text()):
            known.here.add(CheckpointId(RUN, match[1], int(text)))
    return known


def _origin(reported: dict[str, Any] | None) -> CheckpointId | None:
    return CheckpointId(RUN, reported["attempt"], reported["step"]) if reported else None


def is_foreign(places: Places, tier: str, part: PartId) -> bool:
    """Whether an intact manifest lies there that is of another version, or of another key: nobody without that key
    can say whether it is right, so a restore neither takes nor passes over it."""
    data = places.raw(tier, part.manifest_key)
    reported = sealed(data) if data else None
    if reported is None:
        return False
    if tier == "near" and places.cipher:
        return reported.get("key_id") != places.cipher.id
    return reported.get("version") != 1
