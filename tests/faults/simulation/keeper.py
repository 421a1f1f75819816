"""The judge of whole lives: it watches every deletion, and says what must lie where when everything is at rest.

It is written from the docs' words. It knows every checkpoint from the moment when its trainer was told that it is
durable, and the rules of every place; it reads names, manifests and sizes from tiers and disks by itself.

- A tier deletes a checkpoint only if its own rules do not want it, and no other tier wants it and still lacks a
  verified copy. A tier that has not answered for longer than `hold_for` holds nothing; an alert names what is given up
  so.
- The spool's copy is deleted only once a tier has verified it, or when every tier would drop it at once; what is
  complete in the spool itself counts there like what a tier has, while that tier answers.
- A node whose spool never held a save of a run prunes nothing of it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from faults.rounds import Lost
from faults.simulation.rules import Rules, Saved, Which, is_on, timeline
from faults.simulation.store import Bucket
from support import by_hand

HOLD_FOR = 7 * 86400.0  # seconds
FINISHED = 86400.0  # seconds
# Seconds that may pass between the decision to delete a copy, whose tiers are asked then, and the deletion.
_ASKED = 150.0
_BATCH = 60.0  # seconds that one prune of a tier takes
_STALE = 900.0  # seconds: what was saved later than this before a deletion may not have been known to who decided it

_KEY = re.compile(r"([a-z0-9]+)/(manifests|quarantine)/([0-9]{12})\.[0-9a-f]{12}-([0-9a-f]{8})/00000-of-00001\.json")
_POLICY = re.compile(r"([a-z0-9]+)/retention/[0-9a-f]{8}\.configuration\.json")
_DIRECTORY = re.compile(r"([0-9]{12})\.[0-9a-f]{12}-([0-9a-f]{8})")


def which_of(key: str) -> Which | None:
    """The checkpoint whose manifest has this key on a tier."""
    found = _KEY.fullmatch(key)
    return (found[1], int(found[4], 16), int(found[3])) if found and found[2] == "manifests" else None


@lru_cache(maxsize=8192)
def _chunks(manifest: bytes) -> dict[str, int] | None:
    """The keys and stored sizes of the chunks that a manifest on a tier names."""
    try:
        parsed: dict[str, Any] = json.loads(manifest)
    except ValueError:
        return None
    return {f"{parsed['run']}/{one['key']}": one["size"] for one in by_hand.entries(parsed)}


@lru_cache(maxsize=8192)
def _launches(head: bytes) -> frozenset[int]:
    """The launches that a head tells of; none if it cannot be read."""
    try:
        return frozenset(int(attempt[-8:], 16) for attempt in json.loads(head)["launches"])
    except ValueError:
        return frozenset()


def committed(spool: Path) -> dict[Which, Path]:
    """The checkpoints that can be seen in a spool."""
    found = {}
    for run in sorted(os.listdir(spool)) if spool.is_dir() else ():
        if run.startswith("."):
            continue
        for checkpoint in sorted(os.listdir(spool / run)):
            home = spool / run / checkpoint / "00000-of-00001"
            if (match := _DIRECTORY.fullmatch(checkpoint)) and home.is_dir():
                found[run, int(match[2], 16), int(match[1])] = home
    return found


class Keeper:
    """All that was saved, and what may be deleted of it.

    Attributes:
        rules: tier -> its rules, which are the run's own as soon as a configured daemon has recorded them there.
        spool: the rules of every spool whose daemon is configured.
        saved: every checkpoint that was ever written. `acked`: those that were told to be durable, or reached a tier.
        reached: those that any tier ever had.
        up_since: tier -> when it answered again. `up_awake`: the same by `awake`, which does not count sleep.
        savers: node -> the runs that it saved.
        ended: (node, run) -> when its last trainer there ended; None while one is at work.
        pressed: node -> how many saves there ask the daemon for room, because the disk is full: while one does, its
            spool may drop verified copies early.
        hold_for: seconds after which a configured daemon holds nothing any more for a tier that does not answer.
        mute: (node, tier) -> when its daemon first asked in vain, and when it got an answer again; None until it does.
        given_up: checkpoints whose last copy went although a tier wanted them, because that one did not answer: the
            tier, and who deleted it.
        left_behind: (tier, run) where the tier does not hold what it should, because it was silent when its node's
            spool had nothing of the run any more, or because a silent one alone had what this one should hold: nobody
            sends it, or deletes there, until the run is trained again.
        unsaid: (tier, run) where the run left the spool of the node that prunes it while nobody had said what it keeps
        there:
            it keeps the default, and no daemon looks at it any more, until the run is trained again.
        conceded: those that were deleted by the default, where nobody had said what the run keeps.
        reported: what daemons said: each event, and of what.
    """

    def __init__(
        self, now: Callable[[], float], tiers: dict[str, Rules], spool: Rules, buckets: list[Bucket], hold_for: float
    ) -> None:
        self.now, self.rules, self.spool, self.buckets = now, tiers, spool, buckets
        self.saved: dict[Which, Saved] = {}
        self.acked: set[Which] = set()
        self.reached: set[Which] = set()
        self.conceded: set[Which] = set()
        self._configured: dict[str, bool] = {}
        self._started: dict[str, float] = {}
        self._recorded: dict[tuple[str, str], float] = {}  # tier, run -> when its policy was recorded
        self.savers: defaultdict[str, set[str]] = defaultdict(set)
        self.ended: dict[tuple[str, str], float | None] = {}
        self.pressed: Counter[str] = Counter()
        self._evicted: dict[tuple[str, Which], float] = {}  # node and what it deleted while pressed -> when, by `awake`
        self._pruned: dict[tuple[str, Which], float] = {}  # when it left a tier, by the time awake
        self.down_since: dict[str, float] = {}
        self.up_since: dict[str, float] = {}
        self.awake: Callable[[], float] = now
        self.up_awake: dict[str, float] = {}
        self.hold_for = hold_for
        self.mute: dict[tuple[str, str], tuple[float, float | None]] = {}
        self._heard: dict[tuple[str, str], float] = {}  # node, tier -> when it answered again, by `awake`
        self._in_vain: dict[tuple[str, str], float] = {}  # node, tier -> when it was first asked in vain, by `awake`
        self.given_up: dict[Which, tuple[str, str]] = {}
        self.left_behind: set[tuple[str, str]] = set()
        self.unsaid: set[tuple[str, str]] = set()
        self.reported: list[tuple[str, str]] = []
        self.spools: Callable[[], dict[str, Path]] = dict
        self._tiers: dict[str, tuple[int, set[Which]]] = {}

    # -- what lies where --------------------------------------------------------------------------------------------

    def on_tier(self, bucket: Bucket) -> set[Which]:
        """The checkpoints of which a tier holds a verified copy: the manifest, and every chunk that it names."""
        version, found = self._tiers.get(bucket.name, (-1, set()))
        if version != bucket.version:
            found = {which for key in bucket.keys if (which := which_of(key)) and not self._lacks(bucket, key)}
            self._tiers[bucket.name] = bucket.version, found
        return set(found)

    def _lacks(self, bucket: Bucket, key: str) -> list[str]:
        chunks = _chunks(bucket.objects[key][0])
        if chunks is None:
            return [key]
        return [one for one, size in chunks.items() if len(bucket.objects.get(one, (b"",))[0]) != size]

    def _known(self, run: str, spools: Iterable[Path], without: Collection[str] = ()) -> dict[Which, Saved]:
        """Everything of a run that these spools and the tiers show, but for the tiers `without`."""
        there = {which for spool in spools for which in committed(spool)}
        there |= {which for bucket in self.buckets if bucket.name not in without for which in self.on_tier(bucket)}
        return {which: self.saved[which] for which in there if which[0] == run and which in self.saved}

    def known(self, run: str) -> dict[Which, Saved]:
        return self._known(run, self.spools().values())

    def begun(self, saved: Saved) -> None:
        """A trainer begins to write a checkpoint."""
        self.saved[saved.which] = saved
        self.savers[saved.node].add(saved.run)
        self.left_behind -= {(bucket.name, saved.run) for bucket in self.buckets}
        self.unsaid -= {(bucket.name, saved.run) for bucket in self.buckets}

    def started(self, node: str, *, configured: bool) -> None:
        """A daemon begins its life on a node."""
        self._configured[node], self._started[node] = configured, self.now()
        self.mute = {one: when for one, when in self.mute.items() if one[0] != node}

    def asked(self, node: str, tier: str, *, answers: bool) -> None:
        """A node's daemon asks a tier something; whether that has an outage."""
        since, until = self.mute.get((node, tier), (0.0, 0.0))
        if not answers and until is not None:
            self.mute[node, tier] = self.now(), None
            self._in_vain[node, tier] = self.awake()
        elif answers and until is None:
            self.mute[node, tier] = since, self.now()
            self._heard[node, tier] = self.awake()
        elif not answers and self._is_silent(tier, node):
            left = self.savers[node] - {which[0] for which in committed(self.spools()[node])}
            self._leave_behind(node, left)

    def _leave_behind(self, node: str, runs: Iterable[str]) -> None:
        for run, bucket in itertools.product(runs, self.buckets):
            if self._is_silent(bucket.name, node) and self._differs(bucket, run):
                self.left_behind.add((bucket.name, run))

    def departs(self, node: str, run: str) -> None:
        """A finished run has left a spool whole: its daemon looks no more at that run on the tiers."""
        newest = max((one for one in self.acked if one[0] == run), default=None)
        if newest is None or self.saved[newest].node != node:
            return  # another node prunes it, and sends the tiers what they lack
        silent = [bucket.name for bucket in self.buckets if self._is_silent(bucket.name, node)]
        seen = self._known(run, [self.spools()[node]], silent)
        for bucket in self.buckets:
            if not self._configured[node] and (bucket.name, run) not in self._recorded:
                self.unsaid.add((bucket.name, run))
            # One that answers holds what it should by all that answers: what is amiss, only the silent ones show.
            as_seen = bucket.name in silent or not self._differs(bucket, run, seen)
            if as_seen and self._differs(bucket, run):
                self.left_behind.add((bucket.name, run))

    def _is_silent(self, tier: str, node: str) -> bool:
        """Whether a tier has not answered a node's daemon for longer than anything is held. What was decided before it
        answered again goes on for a little while, in which nobody sleeps: a look cut short by sleep is no answer."""
        since, until = self.mute.get((node, tier), (math.inf, math.inf))
        lasted = (self.now() if until is None else until) - since
        over = until is not None and self.awake() - self._heard.get((node, tier), -math.inf) >= _STALE
        return lasted >= (self.hold_for if self._configured[node] else HOLD_FOR) and not over

    def local(self, node: str) -> Rules:
        """What a spool keeps: there the node's configuration decides."""
        return self.spool if self._configured[node] else Rules()

    def _own(self, tier: str, run: str, who: str) -> list[Rules]:
        """What a run keeps on a tier, for a daemon that decides there: several where it may have been one or the other.
        A daemon without a configuration obeys what lies on the tier; the default is 3."""
        recorded = self._recorded.get((tier, run))
        if self._configured[who] or (recorded is not None and recorded < self.now() - _STALE):
            return [self.rules[tier]]
        return [Rules()] if recorded is None else [Rules(), self.rules[tier]]

    def _at_last(self, tier: str, run: str) -> Rules:
        """What a run keeps on a tier when everything is at rest."""
        key = tier, run
        return Rules() if key in self.unsaid and key not in self._recorded else self.rules[tier]

    def _answers(self, tier: str, since: float) -> bool:
        """Whether a tier has answered ever since."""
        return tier not in self.down_since and self.up_since.get(tier, 0.0) <= since

    def reach(self, node: str) -> dict[str, set[Which]]:
        """What lies in each place that a node may restore from."""
        return {node: set(committed(self.spools()[node]))} | {one.name: self.on_tier(one) for one in self.buckets}

    def passed(self, node: str, run: str) -> dict[int, float]:
        """The timeline of a run, for a node that restores: each launch with its last step that counts. The newest
        launch is the newest that a manifest or a head tells of, though nothing of it lies where the node can read."""
        spool = self.spools()[node]
        place, kept = f"{run}/timeline/", spool / ".tierd" / "timeline" / f"{run}.json"
        heads = [one.objects[key][0] for one in self.buckets for key in one.keys if key.startswith(place)]
        heads += [kept.read_bytes()] if kept.exists() else []
        reported = set().union(*(_launches(head) for head in heads))
        known = self._known(run, [spool]).values()
        return timeline([*known, *(one for one in self.saved.values() if one.run == run and one.launch in reported)])

    def offered(self, node: str, run: str, reach: dict[str, set[Which]], since: float) -> Which | None:
        """What a restore on a node that began then, with this in reach, gives, or something newer: the newest of the
        timeline in any place that answered all the while."""
        known, passed = self._known(run, [self.spools()[node]]), self.passed(node, run)
        there = set().union(*(held for name, held in reach.items() if self._answers(name, since)))
        return max((one for one in there if one in known and is_on(passed, one)), default=None)

    def down(self, tier: str) -> None:
        """A tier answers nobody any more."""
        self.down_since[tier], self.up_awake[tier] = self.now(), math.inf

    def up(self, tier: str) -> None:
        """It answers again."""
        del self.down_since[tier]
        self.up_since[tier], self.up_awake[tier] = self.now(), self.awake()

    def could_make_room(self, node: str, run: str, size: int, flushed: Collection[Which]) -> bool:
        """Whether a spool holds as much as this, beside the newest of that run, and what is `flushed` at that moment,
        that a tier has verified: one that has answered for so long that the daemon must have noticed."""
        held = committed(self.spools()[node])
        seen = self.awake() - _STALE
        up = [self.on_tier(one) for one in self.buckets if self.up_awake.get(one.name, 0.0) <= seen]
        newest = max((one for one in held if one[0] == run), default=None)
        stay = {newest, *flushed}
        safe = [home for one, home in held.items() if one not in stay and any(one in place for place in up)]
        return sum(path.stat().st_size for home in safe for path in home.rglob("*") if path.is_file()) >= size

    # -- deletions --------------------------------------------------------------------------------------------------

    def changed(self, bucket: Bucket, key: str, old: bytes | None, new: bytes | None, who: str) -> None:
        """An object was put or deleted on a tier by a node."""
        if new is not None:
            if which := which_of(key):
                self.acked.add(which)
                self.reached.add(which)
            if found := _POLICY.fullmatch(key):
                self._recorded.setdefault((bucket.name, found[1]), self.now())
            return
        if "/chunks/" in key:
            if namers := [one for one in bucket.keys if which_of(one) and key in self._lacks(bucket, one)]:
                raise Lost(f"{bucket.name}: {who} deleted {key}, which {namers[0]} names")
        elif (which := which_of(key)) and which in self.saved:
            self._leaves_tier(bucket, which, who)

    def _leaves_tier(self, bucket: Bucket, which: Which, who: str) -> None:
        run = which[0]
        what = f"{bucket.name}: {who} deleted {_name(which)}"
        if run not in self.savers[who]:
            raise Lost(f"{what}, and never saved anything of that run: reading deletes")
        # A tier that has not answered for longer than anything is held counts as absent until it answers again, and the
        # deletion may have been decided before or after.
        silent = [one.name for one in self.buckets if one is not bucket and self._is_silent(one.name, who)]
        views = [self._known(run, [self.spools()[who]], without) for without in ((), silent)]
        for known in views:
            known[which] = self.saved[which]
        # One prune deletes several at once, newest first: what has just gone was there when all of it was decided, and
        # confirmed how old this one is.
        batch = self._just_pruned(bucket.name, run)
        views.append(views[0] | {one: self.saved[one] for one in batch})
        self._pruned[bucket.name, which] = self.awake()

        def wanted(rules: Rules, tier: Bucket | None = None) -> bool:
            there = [self.on_tier(tier) | {which} if tier else set(known) for known in views]
            there[-1] |= batch
            seen = ([known[one] for one in some if one in known] for known, some in zip(views, there, strict=True))
            return all(self._wants(rules, which, here, known) for known, here in zip(views, seen, strict=True))

        if all(wanted(rules, bucket) for rules in self._own(bucket.name, run, who)):
            raise Lost(f"{what}, which its own rules want: {self._own(bucket.name, run, who)}; {self.lie(run)}")
        if wanted(self.rules[bucket.name], bucket):
            self.conceded.add(which)
        for other in self.buckets:
            if other is bucket or which in self.on_tier(other) or not wanted(self.rules[other.name]):
                continue
            own = self._own(other.name, run, who)
            if not all(wanted(rules) for rules in own):
                self.conceded.add(which)
            elif not self._is_silent(other.name, who):
                raise Lost(f"{what}, which {other.name} wants and lacks: {own}; {self.lie(run)}")
            elif which not in self.known(run):
                self.given_up[which] = other.name, who

    def _just_pruned(self, tier: str, run: str) -> set[Which]:
        """What left a tier so lately that it may have been one prune with what leaves it now."""
        since = self.awake() - _BATCH
        return {one for (name, one), when in self._pruned.items() if name == tier and one[0] == run and when >= since}

    def _wants(self, rules: Rules, which: Which, here: list[Saved], known: dict[Which, Saved]) -> bool:
        """Whether these rules want a checkpoint, by all that is known, and by what was known at each moment before at
        which the deletion may have been decided."""
        then = self.awake() - _STALE  # a daemon that slept for hours decides by what it knew before
        for moment in {then, *(saved.acked_awake for saved in known.values() if saved.acked_awake > then)}:
            some = {one: saved for one, saved in known.items() if one == which or saved.acked_awake <= moment}
            there = [saved for saved in here if saved.which in some]
            if which not in rules.lasting(some.values()) | rules.lately(there, list(some.values())):
                return False
        return True

    def leaves_spool(self, node: str, which: Which) -> None:
        """A node is about to delete its local copy."""
        if which not in self.saved:
            return
        run, what = which[0], f"{node}: the spool deleted {_name(which)}"
        holders = [bucket.name for bucket in self.buckets if which in self.on_tier(bucket)]
        known = self._known(run, [self.spools()[node]])
        known[which] = self.saved[which]
        if not holders:
            answering = any(self.mute.get((node, one.name), (0.0, 0.0))[1] is not None for one in self.buckets)
            for bucket in self.buckets:
                # What a tier had verified, and nobody wanted there any more, goes by what is known.
                there = (
                    known
                    if which in self.reached
                    else self.on_tier(bucket) | {which} | self._at_home(node, bucket.name)
                )
                here = [known[one] for one in there if one in known]
                wanted = all(self._wants(rules, which, here, known) for rules in self._own(bucket.name, run, node))
                if wanted and not (answering and self._is_silent(bucket.name, node)):
                    raise Lost(f"{what}, which no tier holds and {bucket.name} wants; {self.lie(run)}")
                if self._wants(self.rules[bucket.name], which, here, known):
                    self.conceded.add(which)
            self._gives_up(node, which, known)
        if not any(one[0] == run and one != which for one in committed(self.spools()[node])):
            self._leave_behind(node, (run,))
        if self.pressed[node]:
            self._evicted[node, which] = self.awake()
        if self.pressed[node] or self.may_be_finished(node, run):
            return
        local = [known[one] for one in committed(self.spools()[node]) if one in known]
        safe = [saved for saved in local if saved.which == which or self._is_safe(saved.which)]
        # What went for want of room may have been there when this deletion was decided: its tiers were asked since.
        lately = [one for (who, one), when in self._evicted.items() if who == node and self.awake() - when < _ASKED]
        before = [*local, *(self.saved[one] for one in lately if one[0] == run)]
        if all(self._wants(self.local(node), which, here, known) for here in (local, safe, before)):
            raise Lost(f"{what}, which its own rules want: {self.local(node)}; {self.lie(run)}")

    def _at_home(self, node: str, tier: str) -> set[Which]:
        """What a node has itself, where it may count for a tier: not for one that it has long asked in vain. A daemon
        that slept since it asked does not know of that yet."""
        _, answered = self.mute.get((node, tier), (0.0, 0.0))
        lasts = answered is None and self.awake() - self._in_vain[node, tier] > _STALE
        return set() if lasts else set(committed(self.spools()[node]))

    def _gives_up(self, node: str, which: Which, known: dict[Which, Saved]) -> None:
        """A spool deletes the last copy: whether a silent tier wants that, by everything that is known."""
        everything = list(known.values())
        if any(which in committed(spool) for name, spool in self.spools().items() if name != node):
            return
        for bucket in self.buckets:
            own = self._own(bucket.name, which[0], node)
            wanted = all(self._wants(rules, which, everything, known) for rules in own)
            if wanted and self._is_silent(bucket.name, node):
                self.given_up[which] = bucket.name, node

    def _is_safe(self, which: Which) -> bool:
        return any(which in self.on_tier(bucket) for bucket in self.buckets)

    def is_finished(self, node: str, run: str) -> bool:
        """Whether no trainer was at work on a run here for `finished`."""
        ended = self.ended.get((node, run), 0.0)
        return ended is not None and self.now() - ended >= FINISHED

    def may_be_finished(self, node: str, run: str) -> bool:
        """The same, for a daemon that only knows the trainers of its own life, and how old the newest part is."""
        ended = self.ended.get((node, run), 0.0)
        newest = max(self.saved[one].acked for one in committed(self.spools()[node]) if one[0] == run)
        is_old = self.now() - newest >= FINISHED
        return self.is_finished(node, run) or (ended is not None and ended <= self._started[node] and is_old)

    # -- at rest ----------------------------------------------------------------------------------------------------

    def at_rest(self) -> list[str]:
        """What is wrong when nothing happens any more."""
        wrong = []
        for run in sorted({which[0] for which in self.saved}):
            for bucket in self.buckets:
                rules = self._at_last(bucket.name, run)
                found = {which for which in self.on_tier(bucket) if which[0] == run}
                left = (bucket.name, run) in self.left_behind
                if not left and (differs := self._differs(bucket, run)):
                    wrong.append(differs)
                ever = rules.lasting(saved for one, saved in self.saved.items() if one[0] == run and one in self.acked)
                gone = ever - (self.known(run).keys() if left else found)
                if gone and not any(which[0] == run for which in (*self.given_up, *self.conceded)):
                    wrong.append(f"{bucket.name} lost {_names(gone)}, which it wants for good: {rules}")
        for bucket in self.buckets:
            wrong += [
                f"{bucket.name}: {key} lacks chunks"
                for key in bucket.keys
                if which_of(key) and self._lacks(bucket, key)
            ]
        for node, spool in self.spools().items():
            wrong += self._wrong_in_spool(node, spool)
        return wrong

    def _differs(self, bucket: Bucket, run: str, known: dict[Which, Saved] | None = None) -> str:
        """How what a tier holds of a run differs from what it should hold by all that is known, or by this; empty if
        it does not."""
        rules, known = self._at_last(bucket.name, run), self.known(run) if known is None else known
        wanted = rules.lasting(known.values()) | rules.lately(list(known.values()), list(known.values()))
        found = {which for which in self.on_tier(bucket) if which[0] == run}
        holds = f"{bucket.name} holds {_names(found)} of {run}, and should hold {_names(wanted)}: {rules}"
        return holds if found != wanted else ""

    def _wrong_in_spool(self, node: str, spool: Path) -> Iterable[str]:
        held = committed(spool)
        for run in sorted({which[0] for which in held}):
            here = [self.saved[which] for which in held if which[0] == run and which in self.saved]
            known = self.known(run)
            # What its own copies alone would have it keep may stay, too: it keeps more, and nothing is sent to a spool.
            wanted = self.spool.lasting(known.values()) | self.spool.lasting(here)
            wanted |= self.spool.lately(here, list(known.values()))
            if self.is_finished(node, run) and all(self._is_safe(one.which) for one in here):
                yield f"{node}: the spool still holds {_names(one.which for one in here)} of {run}, which is finished"
            elif extra := {one.which for one in here} - wanted:
                yield f"{node}: the spool still holds {_names(extra)}, which its rules do not want: {self.spool}"

    def dropped(self) -> list[str]:
        """What was given up without an alert that names it."""
        return [
            f"{_name(which)} was given up for {tier}, and no alert names it"
            for which, (tier, _) in self.given_up.items()
            if not any(
                what == "given up" and of.startswith(f"{which[0]} step {which[2]} ") for what, of in self.reported
            )
        ]

    def lie(self, run: str) -> str:
        """What lies where of a run."""
        places = {bucket.name: {which for which in self.on_tier(bucket) if which[0] == run} for bucket in self.buckets}
        places |= {
            node: {which for which in committed(spool) if which[0] == run} for node, spool in self.spools().items()
        }
        return "; ".join(f"{place} has {_names(found)}" for place, found in places.items())


def _name(which: Which) -> str:
    return f"{which[0]} step {which[2]} (launch {which[1]})"


def _names(found: Iterable[Which]) -> str:
    return "[" + " ".join(f"{launch}/{step}" for _, launch, step in sorted(found)) + "]"
