"""What befalls a run's history: names and heads are planted, replaced and set back, and whole histories are taken away;
for `faults.corruption.histories`.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from faults.corruption.harms import LOCAL
from faults.corruption.places import OTHER, RUN, TIERS, WORLD, Places
from faults.corruption.remembered import HEAD
from faults.corruption.trials import PLACES
from support.by_hand import seal
from support.world import attempt

from tierd.core.ids import CheckpointId, PartId

FIRST, SECOND, THIRD = attempt(1), attempt(2), attempt(3)
BETWEEN = f"{FIRST[:12]}-ffffffff"
FUTURE = f"{int(datetime(2100, 1, 1, tzinfo=UTC).timestamp()) * 1000:012x}-00000000"
NONE = ("ffffffffffff-00000000", f"{int(datetime(2200, 1, 1, tzinfo=UTC).timestamp()) * 1000:012x}-00000000")
WHERE = {
    "the newest launch": (SECOND,),
    "an older launch": (FIRST,),
    "a launch between": (BETWEEN,),
    "a newer launch": (THIRD,),
    "the far future": (FUTURE,),
    "no launch": NONE,
}
CONTENT = {"zero bytes": 4, "garbage": 3, "another manifest": 2, "another key": 2}
HEADS = ("garbage", "zero bytes", "a bit", "older", "another run's", "no launch", "deleted", "a launch that never was")
GONE = ("a manifest", "a manifest everywhere", "the newest", "the newest everywhere", "a launch's manifests are rot")
GONE += ("an older copy", "all in a place", "all everywhere", "all that tell but one", "all but heads")
NAMED = tuple(f"names: {what}" for what in (*WHERE, *CONTENT, "of another number of ranks"))
HARMS = (*NAMED, *(f"head: {what}" for what in HEADS), *(f"gone: {what}" for what in GONE), "silent")


def head(run: str, by: str, launches: dict[str, tuple[str, int] | None], newest: dict[str, int], counter: int) -> bytes:
    """A head by FORMAT.md, of launches with what they resumed from."""
    reported = {
        one: {
            "resumed_from": {"step": origin[1], "attempt": origin[0]} if origin else None,
            "newest": newest.get(one),
        }
        for one, origin in launches.items()
    }
    before = None if counter == 1 else f"{counter:032x}"
    written = "2026-11-22T00:00:00+00:00"
    tree = {"version": 1, "run": run, "by": by, "counter": counter, "before": before, "written": written}
    return _sealed(tree | {"launches": reported})


def _sealed(tree: dict[str, Any]) -> bytes:
    return seal(json.dumps(tree, separators=(",", ":")).encode())


LINE: dict[str, tuple[str, int] | None] = {FIRST: None, SECOND: (FIRST, 2)}
# What heads said, from the oldest to the newest: launches and their newest complete step.
THEN: tuple[tuple[dict[str, tuple[str, int] | None], dict[str, int]], ...] = (
    ({FIRST: None}, {FIRST: 2}),
    ({FIRST: None}, {FIRST: 3}),
    (LINE, {FIRST: 3}),
    (LINE, {FIRST: 3, SECOND: 3}),
    (LINE, {FIRST: 3, SECOND: 4}),
)
# And the checkpoints that a place had then.
HAD = (((FIRST, 1), (FIRST, 2)), ((FIRST, 3),), (), ((SECOND, 3),), ((SECOND, 4),))


class History:
    """One trial's harms, drawn from `noise`. `done`: what changed something, by name."""

    def __init__(self, places: Places, noise: random.Random) -> None:
        self._places, self._noise = places, noise
        self._mine = [part for part in places.parts if part.checkpoint.run == RUN]
        self.done: list[str] = []

    def make(self) -> None:
        """The heads that a daemon has written, and what retention has taken from the spool."""
        noise = self._noise
        self._origin = noise.choice([(SECOND, 4), (SECOND, 3), (FIRST, 2)])  # of a launch that never was
        self._by = {tier: f"{noise.getrandbits(32):08x}" for tier in TIERS}
        for place in PLACES:
            if noise.random() < 0.85:
                self._put_head(place, len(THEN) - 1)
        kind = noise.random()
        some = self._mine if kind < 0.5 else noise.sample(self._mine, noise.randrange(len(self._mine) + 1))
        for part in some if kind < 0.8 else ():
            self._places.drop(part)

    def _put_head(self, place: str, then: int) -> None:
        self._write(place, head(RUN, self._who(place), *THEN[then], counter=then + 1))

    def _who(self, place: str) -> str:
        return "" if place == LOCAL else self._by[place]

    def _write(self, place: str, data: bytes | None, by: str = "") -> None:
        if place == LOCAL:
            self._places.write(HEAD, data)
        else:
            self._places.put(place, f"{RUN}/timeline/{by or self._by[place]}.json", data)

    def inflict(self) -> None:
        noise = self._noise
        for _ in range(1 + min(int(noise.expovariate(0.5)), 5)):
            one = noise.choices([self._names, self._head, self._take], [5, 3, 3])[0]
            self.done += one()

    # -- names --------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        noise, tier = self._noise, self._noise.choice(TIERS)
        where, content = noise.choice(list(WHERE)), noise.choices(list(CONTENT), list(CONTENT.values()))[0]
        step = noise.choice([0, 1, 2, 3, 4, 5, 5, 6, 999_999_999_999])
        one = CheckpointId(RUN, noise.choice(WHERE[where]), step)
        world = noise.choice([WORLD, WORLD, WORLD, 1, 3, 99_999])
        ranks = range(world) if world < 4 and noise.random() < 0.8 else [noise.randrange(min(world, 4))]
        for rank in ranks:
            self._plant(tier, PartId(one, rank, world), content)
        return [f"names: {where}", f"names: {content}", *(["names: of another number of ranks"] * (world != WORLD))]

    def _plant(self, tier: str, part: PartId, content: str) -> None:
        noise, places, key = self._noise, self._places, part.manifest_key
        other = noise.choice([one for one in self._mine if one != part]).manifest_key
        match content:
            case "zero bytes":
                places.put_raw(tier, key, b"")
            case "garbage":
                places.put_raw(tier, key, noise.randbytes(noise.randrange(1, 300)))
            case "another manifest":
                (places.put if noise.random() < 0.5 else places.put_raw)(tier, key, places.pristine["far"][other])
            case "another key":
                text = base64.b64encode(noise.randbytes(200)).decode().rstrip("=")
                reported = {"version": 2, "cipher": "aes-256-gcm", "key_id": f"{noise.getrandbits(64):016x}"}
                places.put_raw(tier, key, _sealed({**reported, "encrypted": text}))

    # -- heads --------------------------------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        noise, place, what = self._noise, self._noise.choice(PLACES), self._noise.choice(HEADS)
        now = head(RUN, self._who(place), *THEN[-1], counter=9)
        at, by = noise.randrange(len(now)), ""
        if place != LOCAL and what not in ("deleted", "older") and noise.random() < 0.3:
            by = f"{noise.getrandbits(32):08x}"  # beside the one that is there
        launches, newest = THEN[-1]
        never = {**launches, THIRD: self._origin}, {**newest, **({THIRD: 9} if noise.random() < 0.5 else {})}
        beyond = {**launches, noise.choice(NONE): None}, newest
        data: dict[str, Callable[[], bytes | None]] = {
            "garbage": lambda: noise.randbytes(noise.randrange(1, 300)),
            "zero bytes": lambda: b"",
            "a bit": lambda: now[:at] + bytes([now[at] ^ 1 << noise.randrange(8)]) + now[at + 1 :],
            "older": lambda: head(RUN, self._who(place), *THEN[noise.randrange(4)], counter=1),
            "another run's": lambda: head(OTHER, by or self._who(place), {THIRD: None}, {THIRD: 999}, counter=1),
            "no launch": lambda: head(RUN, by or self._who(place), *beyond, counter=10),
            "deleted": lambda: None,
            "a launch that never was": lambda: head(RUN, by or self._who(place), *never, counter=10),
        }
        self._write(place, data[what](), by)
        return [f"head: {what}"]

    # -- what goes ----------------------------------------------------------------------------------------------------

    def _take(self) -> list[str]:
        noise, what = self._noise, self._noise.choices(GONE, [3, 2, 2, 3, 2, 4, 2, 1, 6, 1])[0]
        place = noise.choice(PLACES)
        last = [part for part in self._mine if part.checkpoint == self._mine[-1].checkpoint]
        everywhere = PLACES if "everywhere" in what else (place,)
        match what:
            case "a manifest" | "a manifest everywhere":
                part = noise.choice(self._mine[-4:])
                for one in everywhere:
                    self._delete(one, part)
            case "the newest" | "the newest everywhere":
                for one in everywhere:
                    for part in last:
                        self._delete(one, part)
            case "a launch's manifests are rot":
                for part in self._seconds():
                    for one in PLACES:
                        self._rot(one, part)
            case "an older copy":
                self._go_back(place, noise.randrange(len(THEN) - 1))
            case "all in a place" | "all everywhere":
                for one in everywhere:
                    self._clear(one)
            case "all but heads":
                for part in self._mine:
                    for one in PLACES:
                        self._delete(one, part)
            case "all that tell but one":
                self._leave_one_voice()
        return [f"gone: {what}"]

    def _seconds(self) -> list[PartId]:
        return [part for part in self._mine if part.checkpoint.attempt == SECOND]

    def _rot(self, place: str, part: PartId) -> None:
        places = self._places
        if place in TIERS and places.raw(place, part.manifest_key) is not None:
            places.put_raw(place, part.manifest_key, b"")
        elif place == LOCAL and places.spool.path(part).is_dir():
            places.write(f"{part.path}/manifest.json", b"")

    def _leave_one_voice(self) -> None:
        """Of the newest launch's manifests and of the heads, only one can still be read, on a tier as a rule."""
        noise = self._noise
        voices: list[tuple[str, PartId | None]] = [
            (place, part) for place in PLACES for part in (None, *self._seconds())
        ]
        if noise.random() < 0.6:
            self._clear(LOCAL)
        kept = noise.choice([one for one in voices if (one[1] is None) == (noise.random() < 0.4)])
        for place, part in voices:
            if part is not None and (place, part) != kept:
                self._rot(place, part)
            elif (place, part) != kept:
                self._write(place, noise.choice([None, b""]))

    def _delete(self, place: str, part: PartId) -> None:
        if place in TIERS:
            self._places.put_raw(place, part.manifest_key, None)
        elif self._places.spool.path(part).is_dir():
            self._places.drop(part)

    def _go_back(self, place: str, then: int) -> None:
        """A place is what it was then: a tier from a backup, or a spool from a snapshot of the node."""
        had = {one for some in HAD[: then + 1] for one in some}
        for part in self._mine:
            if (part.checkpoint.attempt, part.checkpoint.step) not in had:
                self._delete(place, part)
        if self._noise.random() < 0.8:
            self._put_head(place, then)
        else:
            self._write(place, None)
        if place == LOCAL:
            shutil.rmtree(self._places.spool.control / "saved" / RUN, ignore_errors=True)

    def _clear(self, place: str) -> None:
        if place == LOCAL:
            self._go_back(LOCAL, 0)
            self._write(LOCAL, None)
            for part in self._mine:
                self._delete(LOCAL, part)
        else:
            for key in [key for key, _ in self._places.contents(place) if key.startswith(f"{RUN}/")]:
                self._places.put_raw(place, key, None)
