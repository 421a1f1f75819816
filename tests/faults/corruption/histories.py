"""Trials in which names, heads and whole histories are planted, replaced and taken away, and a launch resumes: for
`faults.corruption`.

Required: no resume is stopped, or led to an older checkpoint, while a sound one of the timeline is in a place that
answers; and whatever went back is an error, or in `skipped`, where a spool, a tier or the caller remembers more.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from faults.corruption.harms import LOCAL
from faults.corruption.judge import digest
from faults.corruption.launch import launch
from faults.corruption.places import OTHER, RUN, TIERS, WORLD, Places
from faults.corruption.remembered import HEAD, Known, is_foreign, look
from faults.corruption.trials import _REASON, PLACES, Trials, _skipped
from faults.rounds import Lost
from support.world import attempt

from tierd.client.restore import Found
from tierd.core.errors import CheckpointNotFound, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.daemon import observe
from tierd.daemon.budget import Budget
from tierd.daemon.journal import Journal
from tierd.daemon.repair import Repairer
from tierd.priority import hasten
from tierd.stores.base import Buffer, ObjectInfo
from tierd.stores.memory import MemoryStore

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
ANSWERS = ("the newest", "an older one", "refused", "nothing", "anew", "of another key", "a place is silent")
TOLD = ("gone", "unvouched", "passed over")


def sealed(told: dict[str, Any]) -> bytes:
    body = json.dumps(told, separators=(",", ":")).encode()[:-1]
    return body + b',"digest":"%s"}\n' % digest(body).encode()


def head(run: str, by: str, launches: dict[str, tuple[str, int] | None], newest: dict[str, int], counter: int) -> bytes:
    """A head by FORMAT.md, of launches with what they resumed from."""
    told = {
        one: {
            "resumed_from": {"step": origin[1], "attempt": origin[0]} if origin else None,
            "newest": newest.get(one),
        }
        for one, origin in launches.items()
    }
    before = None if counter == 1 else f"{counter:032x}"
    written = "2026-11-22T00:00:00+00:00"
    return sealed(
        {"version": 1, "run": run, "by": by, "counter": counter, "before": before, "written": written, "launches": told}
    )


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


class _Silent:
    """A tier that does not answer."""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        raise StoreUnavailable("no answer")

    async def put(self, key: str, data: Buffer) -> str:
        raise StoreUnavailable("no answer")

    async def delete(self, keys: Sequence[str]) -> None:
        raise StoreUnavailable("no answer")

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        raise StoreUnavailable("no answer")
        yield

    async def aclose(self) -> None: ...


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
                told = {"version": 2, "cipher": "aes-256-gcm", "key_id": f"{noise.getrandbits(64):016x}"}
                places.put_raw(tier, key, sealed({**told, "encrypted": text}))

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


@dataclass(frozen=True)
class Due:
    """What must come, by what lies there before anybody asks.

    Attributes:
        known: what all places that answer show.
        line: the candidates in order; `sound` are those of which every part is right, or can be made so, and `foreign`
            those of which a manifest is intact and of another key, so that nobody can tell.
        silent: whether a place does not answer.
        at_least: the step that the caller knows of.
    """

    known: Known
    line: list[CheckpointId]
    sound: set[CheckpointId]
    foreign: set[CheckpointId]
    silent: bool
    at_least: int | None

    def is_enough(self, one: CheckpointId) -> bool:
        return self.at_least is None or one.step >= self.at_least

    @property
    def wanted(self) -> CheckpointId | None:
        return next((one for one in self.line if one in self.sound and self.is_enough(one)), None)

    @property
    def above(self) -> list[CheckpointId]:
        """The candidates that have to be passed over."""
        line = self.line[: self.line.index(self.wanted)] if self.wanted else self.line
        return [one for one in line if self.is_enough(one)]

    @property
    def doubtful(self) -> bool:
        """Whether anything that is no candidate may be newer, and lie whole where nobody answers."""
        newer = [*self.known.checkpoints, *self.known.remembered()]
        return not self.wanted or any(one > self.wanted for one in newer)

    @property
    def may_begin_anew(self) -> bool:
        known = self.known
        whole = any(known.complete(world) for world in (1, 2, 3))
        return not (self.silent or known.remembered() or known.unvouched() or whole or self.at_least is not None)


@dataclass(frozen=True)
class Came:
    """What came: a checkpoint, an error, or nothing at all, which is to begin anew. `told`: what was passed over."""

    got: CheckpointId | None
    error: TierdError | None
    told: dict[CheckpointId, str]
    text: str

    @property
    def anew(self) -> bool:
        return self.got is None and self.error is None


class Histories(Trials):
    """The trials of one process, on its own world."""

    def __init__(self, places: Places, root: Path) -> None:
        super().__init__(places, root)
        home = places.spool.control / "saved" / RUN
        self._marks = {path: path.read_bytes() for path in home.iterdir()}

    async def resume(self, noise: random.Random) -> list[str]:
        """Harm, let a launch resume, compare, put back; notes of what was done and what came."""
        hasten()
        try:
            history = History(self.places, noise)
            history.make()
            history.inflict()
            if silent := noise.random() < 0.1:  # what it holds counts for nothing: nobody can ask
                self.places.memory["far"], self.places.stores["far"] = MemoryStore(), _Silent()
                history.done.append("silent")
            due = self._due(silent=silent, at_least=noise.choice([None, None, None, 2, 4, 5]))
            before, journal = self._whole(), Journal()
            # A reader of few manifests reads all of them; a daemon, one a checkpoint, and of its own ranks.
            with mock.patch.object(observe, "_FEW", noise.choice([0, 1000])):
                came = await self._ask(Repairer(self.places.spool, self.places.stores, journal, Budget()), due.at_least)
            try:
                answer = judged(due, came)
                self._nothing_got_worse(before, journal)
            except Lost as lost:
                raise Lost(
                    f"{lost}; at least {due.at_least}, of {due.line}, after {history.done}: {came.text}"
                ) from lost
            return [*dict.fromkeys(f"harm: {one}" for one in history.done), *answer]
        finally:
            self._put_back()

    def _due(self, *, silent: bool, at_least: int | None) -> Due:
        known = look(self.places, self.judge)
        line = known.candidates()
        sound = {one for one in line if all(self._is_right(part) for part in _parts(one))}
        foreign = {
            one for one in line if any(is_foreign(self.places, tier, part) for tier in TIERS for part in _parts(one))
        }
        return Due(known, line, sound, foreign, silent, at_least)

    def _is_right(self, part: PartId) -> bool:
        return part in self.judge.truth and self.judge.can_be_had(part)

    async def _ask(self, repairer: Repairer, at_least: int | None) -> Came:
        try:
            found = await launch(self.places, repairer, WORLD, self._read, at_least)
        except TierdError as error:
            return Came(None, error, {}, f"{type(error).__name__}: {error}")
        one = found[0]
        if isinstance(one, Found):
            got = one.part.checkpoint
            same = [isinstance(each, Found) and (each.part.checkpoint, each.skipped) for each in found]
            if same != [(got, one.skipped)] * WORLD:
                raise Lost(f"the ranks restored, and skipped, otherwise: {same}")
            told = {CheckpointId(RUN, each.attempt, each.step): each.reason for each in one.skipped}
            return Came(got, None, told, f"{got}, past {told}")
        if one is None:
            return Came(None, None, {}, "a launch began anew")
        return Came(None, CheckpointNotFound(one), _skipped(one.splitlines()), one)

    def _put_back(self) -> None:
        self.places.write(HEAD, None)
        for path, data in self._marks.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        self.places.reset()


def _parts(one: CheckpointId) -> list[PartId]:
    return [PartId(one, rank, WORLD) for rank in range(WORLD)]


def judged(due: Due, came: Came) -> list[str]:
    """Compare; notes of what came."""
    wanted, above = due.wanted, due.above
    if came.error is not None and not isinstance(came.error, CheckpointNotFound):
        if due.silent and (above or due.doubtful):
            return ["resumed: a place is silent"]
        if isinstance(came.error, StoreUnavailable) and due.foreign.intersection(above):
            return ["resumed: of another key"]
        raise Lost(f"{wanted or 'an answer'} can be had, and the resume was stopped")
    if due.silent and (above or not wanted) and not (due.at_least is not None and came.error):
        raise Lost("what was passed over may lie where nobody answers")
    if came.got != wanted:
        raise Lost(f"{wanted or 'nothing'} can be had, and {came.got or 'nothing'} came")
    if came.anew:
        if not due.may_begin_anew:
            raise Lost(f"more is remembered, {due.known.remembered()}, and a launch began anew")
        return ["resumed: anew"]
    if came.error and due.may_begin_anew and not due.known.checkpoints:
        raise Lost("nothing is there, nor was, and a launch was stopped")
    notes = _all_told(due, came)
    if came.got is None:
        return [f"resumed: {'refused' if due.sound else 'nothing'}", *notes]
    went_back = above or any(one > came.got for one in due.known.remembered())
    return [f"resumed: {'an older one' if went_back else 'the newest'}", *notes]


def _all_told(due: Due, came: Came) -> list[str]:
    """That everything that is newer, and was or may have been complete, is named, each with a reason."""
    known, notes = due.known, Counter[str]()
    left = next((one for one in due.line if not due.is_enough(one)), None) if came.got is None else came.got
    which = {
        "passed over": set(due.above),
        "unvouched": known.unvouched(),
        "gone": {one for one in known.remembered() if one not in known.checkpoints},
        "incomplete": {one for one in known.remembered() if one in known.checkpoints - known.complete(WORLD)},
    }
    for why, one in [(why, one) for why, some in which.items() for one in some]:
        if left is None or one > left:
            if len(came.told.get(one, "")) < _REASON:
                raise Lost(f"{one} ({why}) is newer than {left}, and this was said: {came.told}")
            notes[f"told: {why}"] += 1
    if came.got in came.told:
        raise Lost(f"{came.got} was given, and is among what was skipped: {came.told}")
    return list(notes)
