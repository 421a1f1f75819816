"""What really happened in a simulated world, and whether that is what lies there. Nothing of tierd is asked.

Invariant: what must hold is said from names, bytes and digests alone. A part is `(launch, step, rank)`; its bytes
follow from its numbers, so that those of two attempts differ.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from faults.rounds import Lost
from faults.simulation.store import Bucket
from support import by_hand
from support.world import CHUNK, RUN

Part: TypeAlias = tuple[int, int, int]
Checkpoint: TypeAlias = tuple[int, int]

_KEY = re.compile(
    rf"{RUN}/(manifests|quarantine)/([0-9]{{12}})\.[0-9a-f]{{12}}-([0-9a-f]{{8}})/([0-9]{{5}})-of-[0-9]{{5}}\.json"
)
_DIRECTORY = re.compile(r"([0-9]{12})\.[0-9a-f]{12}-([0-9a-f]{8})")
_QUARANTINE = ".tierd/quarantine"
HEAD = f".tierd/timeline/{RUN}.json"  # in a spool
_FASTER_S = 60.0  # simulated seconds between finding a copy wrong and setting it aside


@lru_cache(maxsize=4096)
def content(part: Part) -> dict[str, bytes]:
    """A part's files: one never changes, one sometimes, one always. Those of `HOMES` are the same on all ranks."""
    launch, step, rank = part
    noise, common = random.Random(f"{step} {launch} {rank}"), random.Random(f"{step} {launch}")
    return {
        "backbone": bytes([rank]) * (2 * CHUNK),
        "deep/rows": bytes([rank, step // 3 % 251]) * (CHUNK // 2) + bytes([rank, launch % 251]) * (CHUNK // 2),
        "news": noise.randbytes(CHUNK // 2),
        "table": table(f"{rank}", step, launch),
        "common/backbone": b"b" * CHUNK,
        "common/news": common.randbytes(3 * CHUNK),
        "common/table": table("common", step, launch),
        "empty": b"",
    }


HOMES = {"common/backbone": 0, "common/news": 0, "common/table": 0}  # the lowest rank that has these files


def table(name: str, step: int, launch: int) -> bytes:
    """Rows of which each step changes one, and each attempt another: what is stored as patches."""
    data = bytearray(random.Random(f"table {name}").randbytes(CHUNK))
    for change in (*map(str, range(step + 1)), f"{step} {launch}"):
        noise = random.Random(f"row {name} {change}")
        at = noise.randrange(CHUNK // 64) * 64
        data[at : at + 64] = noise.randbytes(64)
    return bytes(data)


def part_of(key: str) -> tuple[str, Part] | None:
    """Where a manifest lies, and whose it is."""
    found = _KEY.fullmatch(key)
    return (found[1], (int(found[3], 16), int(found[2]), int(found[4]))) if found else None


def _describes(manifest: dict[str, Any], part: Part) -> bool:
    """Whether it describes the bytes that were saved."""
    files = content(part)
    if {file["path"] for file in manifest["files"]} != files.keys():
        return False
    for file in manifest["files"]:
        at, data = 0, files[file["path"]]
        for chunk in file["chunks"]:
            if by_hand.digest(data[at : at + chunk["size"]]) != chunk["xxh3_128"]:
                return False
            at += chunk["size"]
        if at != len(data) or file["size"] != len(data):
            return False
    return True


def named(data: bytes) -> set[str]:
    """The keys of the chunks that a manifest on a tier names; none of anything else that is sealed, as a head."""
    return {f"{RUN}/{key}" for key in by_hand.keys(by_hand.sealed(data) or {})}


class Truth:
    """All that was saved, and where it is right.

    Attributes:
        origins: launch -> the checkpoint that it resumed from.
        acked: parts that the trainer was told are durable.
        hurt: keys on tiers that are not as they were put, by the trial's or a line's doing, until they are put again or
            deleted.
        excused: copies, by place and part, that may be lost for that, or be quarantined though somebody was faster and
            repaired them: until then, or until all is at rest. `scarred`: the launches that ever had one. `harms`: by
            copy, how many injuries came before the last one that hurt it.
        orphaned: launches that no tier ever showed, and of which the last manifest went with a node.
        doomed: chunks that nothing else named when the manifest went that named them, or whose name they lie under.
        floor: the newest checkpoint that can be restored; it never goes back by itself.
    """

    def __init__(self, world: int, buckets: list[Bucket], keep: int) -> None:
        self.world, self.buckets, self.keep = world, buckets, keep
        self.origins: dict[int, Checkpoint | None] = {}
        self.begun: set[Part] = set()
        self.acked: set[Part] = set()
        self.hurt: dict[str, set[str]] = {bucket.name: set() for bucket in buckets}
        self.excused: set[tuple[str, Part]] = set()
        self._rewritten: dict[
            tuple[str, Part], float
        ] = {}  # what had been hurt: when it was repaired, simulated seconds
        self.scarred: set[int] = set()
        self.harms: dict[tuple[str, Part], int] = {}
        self.orphaned: set[int] = set()
        self._falls = False  # whether what was just done may take from what can be restored
        self.revenants: dict[str, set[str]] = {bucket.name: set() for bucket in buckets}
        self.deleted: dict[str, set[str]] = {bucket.name: set() for bucket in buckets}
        self.doomed: dict[str, set[str]] = {bucket.name: set() for bucket in buckets}
        self.ever: set[Part] = set()
        self.putters: dict[tuple[str, Part], str] = {}  # who put a manifest last, and whether it was spoiled
        self.injuries = 0
        self.floor: Checkpoint | None = None
        self._raws: dict[tuple[str, ...], str] = {}  # by the digests of a chunk's objects, that of its bytes
        self._tiers: dict[str, tuple[int, dict[Part, bool]]] = {}
        self._spools: dict[Path, tuple[int, set[Part]]] = {}

    # -- what lies where --------------------------------------------------------------------------------------------

    def on_tier(self, bucket: Bucket) -> dict[Part, bool]:
        """Every part whose manifest is there, and whether all is right."""
        version, found = self._tiers.get(bucket.name, (-1, {}))
        if version != bucket.version:
            found = {}
            for key in bucket.keys:
                whose = part_of(key)
                if whose and whose[0] == "manifests":
                    found[whose[1]] = self._is_right(bucket, key, whose[1])
            self._tiers[bucket.name] = bucket.version, found
        return found

    def _is_right(self, bucket: Bucket, key: str, part: Part) -> bool:
        manifest = by_hand.sealed(bucket.objects[key][0])
        return manifest is not None and _describes(manifest, part) and not self.wrong(bucket, key)

    def wrong(self, bucket: Bucket, key: str) -> list[str]:
        """The keys of chunks that a manifest names and that are not what it says."""
        found = []
        for file in (by_hand.sealed(bucket.objects[key][0]) or {"files": ()})["files"]:
            for chunk in file["chunks"]:
                bad = [one["stored"]["key"] for one in by_hand.chain(chunk) if not self._is_as_reported(bucket, one)]
                found += [f"{RUN}/{key}" for key in bad]
                if not bad and not self._is_right_raw(bucket, chunk):
                    found.append(f"{RUN}/{chunk['stored']['key']}")
        return found

    def _is_right_raw(self, bucket: Bucket, chunk: dict[str, Any]) -> bool:
        """Whether a chunk whose objects are as told holds what the manifest says."""
        name = tuple(one["stored"]["xxh3_128"] for one in by_hand.chain(chunk))
        if name not in self._raws:
            raw = by_hand.raw(chunk, lambda key: bucket.objects[f"{RUN}/{key}"][0])
            self._raws[name] = by_hand.digest(raw)
        return self._raws[name] == chunk["xxh3_128"]

    def _is_as_reported(self, bucket: Bucket, chunk: dict[str, Any]) -> bool:
        """Whether a chunk's own object is what the manifest says of it."""
        stored = chunk["stored"]
        data, _ = bucket.objects.get(f"{RUN}/{stored['key']}", (None, 0))
        return data is not None and len(data) == stored["size"] and by_hand.digest(data) == stored["xxh3_128"]

    def in_spool(self, spool: Path, version: int) -> set[Part]:
        """The parts that are right there."""
        known, found = self._spools.get(spool, (-1, set()))
        if known != version:
            found = {part for part, home in committed(spool) if _is_whole(home, part)}
            self._spools[spool] = version, found
        return found

    def whole(self, spools: Iterable[tuple[Path, int]], silent: Collection[str] = ()) -> set[Checkpoint]:
        """The checkpoints of which every part is right somewhere, but for these tiers."""
        ranks: dict[Checkpoint, set[int]] = defaultdict(set)
        places: list[Collection[Part]] = [self.in_spool(spool, version) for spool, version in spools]
        asked = [bucket for bucket in self.buckets if bucket.name not in silent]
        places += [[part for part, right in self.on_tier(bucket).items() if right] for bucket in asked]
        for launch, step, rank in (part for place in places for part in place):
            ranks[launch, step].add(rank)
        return {checkpoint for checkpoint, found in ranks.items() if len(found) == self.world}

    def excuse(self, place: str, parts: Iterable[Part]) -> None:
        """The trial has hurt these parts' copies in a place."""
        parts = list(parts)
        self.excused |= {(place, part) for part in parts}
        self.scarred |= {part[0] for part in parts}
        self.harms |= {(place, part): self.injuries for part in parts}

    def is_hurt_since(self, injuries: int, place: str, part: Part) -> bool:
        """Whether the trial has hurt this copy after so many injuries."""
        return self.harms.get((place, part), -1) >= injuries

    def _is_excused(self, place: str, part: Part) -> bool:
        return (place, part) in self.excused

    def _ended(self, place: str, part: Part) -> None:
        """A copy was quarantined, deleted or written anew: nothing that was done to it before excuses what is there."""
        if self._is_excused(place, part):
            self.excused.discard((place, part))
            self._rewritten[place, part] = asyncio.get_running_loop().time()
            self._falls = True

    def at_rest(self, spools: dict[str, tuple[Path, int]]) -> None:
        """Nobody does anything: whatever is right, or gone, has nothing to be excused for."""
        wrong = {
            name: {part for part, _ in committed(spool)} - self.in_spool(spool, version)
            for name, (spool, version) in spools.items()
        }
        wrong |= {
            bucket.name: {part for part, right in self.on_tier(bucket).items() if not right} for bucket in self.buckets
        }
        self.excused = {(place, part) for place, part in self.excused if part in wrong[place]}

    # -- what must hold ---------------------------------------------------------------------------------------------

    def changed(self, bucket: Bucket, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        """Something was put or deleted on a tier by a node."""
        if new is None:
            self.deleted[bucket.name].add(key)
        whose = part_of(key)
        if whose is None:
            if "/timeline/" in key:
                hurt = self.hurt[bucket.name]
                (hurt.add if new is not None and "spoiled" in who else hurt.discard)(key)
            if "/chunks/" in key:
                self.hurt[bucket.name].discard(key)
                self.doomed[bucket.name].discard(key)
            spoiled = "/chunks/" in key and new is not None and old != new and "spoiled" in who
            if spoiled and ("late" in who or self._namers(bucket, key)):
                self.hurt[bucket.name].add(key)  # over what was right when it was put, and nobody reads back a late put
                self._falls = True
            if "/chunks/" in key:
                self.manifests_hold(bucket, [key], f"{who} {'put' if new is not None else 'deleted'} {key}")
            return
        kind, part = whose
        if kind == "quarantine" and new is not None:
            # What the trial has hurt may be repaired by one node while another that found it wrong quarantines it: it
            # is put there again then, from wherever it was repaired.
            lately = asyncio.get_running_loop().time() - self._rewritten.get((bucket.name, part), -math.inf) < _FASTER_S
            if self.on_tier(bucket).get(part) and not lately and not self._is_excused(bucket.name, part):
                raise Lost(f"{who} sets {part} aside on {bucket.name}, whose copy there is right")
        elif kind == "manifests" and new is not None:
            self.putters[bucket.name, part] = who
            self._ended(bucket.name, part)
            if self.wrong(bucket, key) and key in self.deleted[bucket.name]:
                self.revenants[bucket.name].add(key)  # an earlier put that came late
            elif key in self.revenants[bucket.name] and not self.wrong(bucket, key):
                self.revenants[bucket.name].discard(key)
            if "spoiled" in who:
                self.hurt[bucket.name].add(key)
                self.scarred.add(part[0])
                self._falls = True
            else:
                self.hurt[bucket.name].discard(key)
            self.manifests_hold(bucket, None, f"{who} put {key}")
            if self.on_tier(bucket).get(part):
                self.ever.add(part)
        elif kind == "manifests":
            self.revenants[bucket.name].discard(key)
            self.hurt[bucket.name].discard(key)
            self._ended(bucket.name, part)
            self._falls |= self._is_unnoticed(bucket, part)
            if key.replace("/manifests/", "/quarantine/") not in bucket.objects:
                owner = key.split("/")[2]
                under = {one for one in bucket.keys if "/chunks/" in one and one.split("/")[-3] == owner}
                # A prune spares what others name, also what is quarantined or about to be put and never comes.
                others = [one for one in bucket.keys if "/chunks/" not in one and key.split("/")[2] not in one]
                spared = {chunk for one in others for chunk in named(bucket.objects[one][0])}
                loose = (under | (named(old or b"") & bucket.objects.keys())) - spared
                coming = {one.split("/")[2] for one in others if "/flushing/" in one}  # none of theirs goes
                # What a damaged one named is known to each node that read it before, and spared.
                if all(by_hand.sealed(bucket.objects[one][0]) for one in others if part_of(one)):
                    self.doomed[bucket.name] |= {one for one in loose if one.split("/")[-3] not in coming}

    def _is_unnoticed(self, bucket: Bucket, part: Part) -> bool:
        """Whether the trial has hurt a newer checkpoint there since it was verified, and no manifest of it was set
        quarantined: retention goes by what was verified."""
        return any(
            newer[:2] > part[:2] and not right and self._is_excused(bucket.name, newer)
            for newer, right in self.on_tier(bucket).items()
        )

    def flushed(self, tier: str, part: Part, who: str) -> None:
        """A node says that it flushed a part: the manifest that it put last is the one that it had."""
        if self.putters.get((tier, part)) == f"{who} spoiled":
            raise Lost(f"{who} says that {part} lies on {tier}, and its manifest there was spoiled on the way")

    def _namers(self, bucket: Bucket, key: str) -> list[str]:
        return [
            one
            for one in bucket.keys
            if (whose := part_of(one)) and whose[0] == "manifests" and key in named(bucket.objects[one][0])
        ]

    def manifests_hold(self, bucket: Bucket, keys: list[str] | None, what: str) -> None:
        """Every manifest on a tier names only chunks that are there and right, unless the trial changed them."""
        hurt, revenants = self.hurt[bucket.name], self.revenants[bucket.name]
        for key in list(bucket.keys):
            whose = part_of(key)
            if not whose or whose[0] != "manifests" or key in revenants or key in hurt:
                continue
            if keys is not None and not named(bucket.objects[key][0]).intersection(keys):
                continue
            wrong = self.wrong(bucket, key)
            if hurt.intersection(wrong):
                self.excuse(bucket.name, [whose[1]])
            if bad := [one for one in wrong if one not in hurt]:
                raise Lost(
                    f"{bucket.name}: {what}: the manifest of {whose[1]} names {bad[0]}, which is not right there"
                )

    def never_goes_back(self, spools: list[tuple[Path, int]], what: str) -> None:
        """The newest checkpoint that can be restored is no older than it was."""
        best = max(self.whole(spools), default=None)
        falls, self._falls = self._falls, False
        if self.floor is not None and (best is None or best < self.floor) and not falls:
            raise Lost(f"{what}: {self.floor} could be restored, and now nothing newer than {best}")
        self.floor = best

    def may_go(self, node: str, part: Part, spool: Path) -> None:
        """A local copy goes only after a tier's copy was verified, or once enough newer ones have retired it: on every
        tier, or, where every rank saves in this spool, there and here together."""
        kept = [self.on_tier(bucket) for bucket in self.buckets]
        if any(place.get(part) for place in kept):
            return
        if any(self._is_excused(place, part) for place in (node, *(bucket.name for bucket in self.buckets))):
            self._falls = True  # a tier had it right, for all that anybody knows; or it is the hurt one itself
            return
        if part in self.ever and not any(part in place for place in kept):
            return  # pruned there since
        here = committed(spool)
        local = self._all_here({one for one, home in here if _is_whole(home, one) or self._is_excused(node, one)})
        self._falls |= any(self._is_excused(node, one) for one, _ in here)  # right when the daemon read it
        for bucket in self.buckets:
            right = [one for one, right in self.on_tier(bucket).items() if right or self._is_excused(bucket.name, one)]
            newer = self._all_here(right) | (local if part[:2] in local else set())
            if sum(one > part[:2] for one in newer) < self.keep:
                raise Lost(f"the spool's copy of {part} goes, which no tier has, and {bucket.name} has few newer ones")

    def _all_here(self, parts: Iterable[Part]) -> set[Checkpoint]:
        ranks = Counter(part[:2] for part in parts)
        return {one for one, many in ranks.items() if many == self.world}

    def injured(self, spools: list[tuple[Path, int]]) -> None:
        """The trial has taken something away: what is left is what can be asked for."""
        self.injuries += 1
        self._tiers.clear()
        self.floor = max(self.whole(spools), default=None)

    def node_lost(self, reported: set[int], spools: list[tuple[Path, int]]) -> None:
        """A node went, with all that it had. Before that, these launches' origins were `reported`."""
        self.orphaned |= reported - self.tells(spools) - {part[0] for part in self.ever}

    def head_lost(self, reported: set[int], spools: list[tuple[Path, int]]) -> None:
        """A head went. Before that, these launches' origins were known; what no manifest and no other head tells of is
        not known any more."""
        self.orphaned |= reported - self.tells(spools)

    # -- what a restore must give -----------------------------------------------------------------------------------

    def path(self, launch: int | None) -> list[tuple[int, float]]:
        """From a launch down: each launch and the largest step of it that counts."""
        found: list[tuple[int, float]] = []
        limit = float("inf")
        while launch is not None:
            found.append((launch, limit))
            origin = self.origins[launch]
            launch, limit = origin if origin else (None, 0)
        return found

    def newest(self, spools: list[tuple[Path, int]]) -> int | None:
        """The newest launch of which anything can be read, or else the newest that anything shows."""
        return max(self.tells(spools), default=None) or self.shown(spools)

    def shown(self, spools: list[tuple[Path, int]]) -> int | None:
        """The newest launch that anything shows."""
        shown = {part[0] for spool, _ in spools for part, _ in committed(spool)}
        shown |= {part[0] for spool, _ in spools for part, _ in committed(spool / _QUARANTINE)}
        shown |= {whose[1][0] for bucket in self.buckets for key in bucket.keys if (whose := part_of(key))}
        return max(shown, default=None)

    def tells(self, spools: list[tuple[Path, int]]) -> set[int]:
        """The launches of which a manifest can be read somewhere, quarantined or not, or that any head has: both say
        what they resumed from."""
        homes = [one for spool, _ in spools for base in (spool, spool / _QUARANTINE) for one in committed(base)]
        found = {part[0] for part, home in homes if by_hand.sealed(_manifest(home))}
        for bucket in self.buckets:
            whose = [(key, one[1][0]) for key in bucket.keys if (one := part_of(key))]
            found |= {launch for key, launch in whose if by_hand.sealed(bucket.objects[key][0])}
        return found.union(*(_launches(data) for data in self._heads(spools)))

    def _heads(self, spools: list[tuple[Path, int]]) -> list[bytes]:
        found = [bucket.objects[key][0] for bucket in self.buckets for key in bucket.keys if "/timeline/" in key]
        kept = [spool / HEAD for spool, _ in spools]
        return found + [path.read_bytes() for path in kept if path.exists()]

    def is_hurt(self, launch: int) -> bool:
        """Whether the trial, or a line, spoiled a part of a launch."""
        return launch in self.scarred

    def expected(self, spools: list[tuple[Path, int]]) -> Checkpoint | None:
        """What a restore gives, or something newer. Where the newest launch is only a name, which one that is hangs on
        what a daemon read before it could not be read any more: None."""
        newest, shown = self.newest(spools), self.shown(spools)
        if newest is not None and shown is not None and shown > newest:
            return None
        return self.along(newest, self.whole(spools))

    def along(self, launch: int | None, whole: set[Checkpoint]) -> Checkpoint | None:
        """The newest of these checkpoints on a launch's timeline."""
        for ancestor, limit in self.path(launch):
            steps = [step for one, step in whole if one == ancestor and step <= limit]
            if steps:
                return ancestor, max(steps)
        return None

    def branch(self, spools: list[tuple[Path, int]]) -> Checkpoint | None:
        """What a restore only names, and gives on request: the newest that is whole, where the newest
        launch began from nothing, since all lacked a part then, and has nothing whole itself."""
        newest = self.newest(spools)
        if newest is None or self.origins[newest] or self.expected(spools):
            return None
        ranks = Counter(step for launch, step, _ in self.acked if launch == newest)
        return max(self.whole(spools), default=None) if self.world not in ranks.values() else None


def committed(spool: Path) -> list[tuple[Part, Path]]:
    """The parts that can be seen in a spool."""
    found = []
    try:
        checkpoints = sorted(os.listdir(spool / RUN))
    except FileNotFoundError:
        return []
    for checkpoint in checkpoints:
        if match := _DIRECTORY.fullmatch(checkpoint):
            for name in os.listdir(spool / RUN / checkpoint):
                found.append(((int(match[2], 16), int(match[1]), int(name[:5])), spool / RUN / checkpoint / name))
    return found


@lru_cache(maxsize=4096)
def _launches(data: bytes) -> frozenset[int]:
    """The launches that a head tells of, if its seal holds."""
    return frozenset(int(attempt[-8:], 16) for attempt in (by_hand.sealed(data) or {"launches": ()})["launches"])


def _manifest(home: Path) -> bytes:
    try:
        return (home / "manifest.json").read_bytes()
    except OSError:
        return b""


def _is_whole(home: Path, part: Part) -> bool:
    try:
        manifest = by_hand.sealed(_manifest(home))
        return (
            manifest is not None
            and _describes(manifest, part)
            and all((home / name).read_bytes() == data for name, data in content(part).items())
        )
    except OSError:
        return False
