"""Worlds in memory: what plan() is asked about, made by Hypothesis, and an executor that does what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from tierd.core.config import Config, TierConfig
from tierd.core.errors import ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory, LastSent
from tierd.core.planning.place import SPOOL, Action, Discard, Flush, Place, Prune, RepairCopy
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.core.retention.retention_verdicts import Ranking, Verdict

EPOCH = datetime(2025, 1, 1, tzinfo=UTC)


def attempt(number: int) -> str:
    return f"{number:012x}-{number:08x}"


def checkpoint(number: int, step: int, run: str = "r") -> CheckpointId:
    """The checkpoint of the `number`-th attempt at `step`."""
    return CheckpointId(run, attempt(number), step)


def part(owner: CheckpointId, rank: int = 0, world: int = 1) -> PartId:
    return PartId(owner, rank, world)


def facts(minute: float = 0, *, metrics=None, origin=None, bases=()) -> ManifestFacts:
    return ManifestFacts(EPOCH + timedelta(minutes=minute), metrics or {}, origin, 10, 8, frozenset(bases))


def config(*tiers: RetentionPolicy, spool: RetentionPolicy | None = None, low: float = 5.0) -> Config:
    """Tiers called a, b, c ... with these policies."""
    named = tuple(
        TierConfig(name=chr(ord("a") + number), url=f"/tier/{number}", retention=policy)
        for number, policy in enumerate(tiers)
    )
    return Config(spool="/spool", tier=named, retention=spool or RetentionPolicy(), min_free_percent=low)


def judge_checkpoints(checkpoints, policy: RetentionPolicy, origins=None, live=()) -> tuple[Verdict, ...]:
    """Judge one run's checkpoints in one place, newest first."""
    ranking = Ranking(checkpoints, policy, origins or {}, live)
    newest_first = sorted(checkpoints, key=lambda info: (info.id.attempt, info.id.step), reverse=True)
    return tuple(ranking.verdict(info) for info in newest_first)


def held(place: Place) -> dict[PartId, ManifestFacts | None]:
    """Every part of a place; None where it cannot be used."""
    return {p: place.facts(p) for p in place.parts()}


def remade(place: Place, parts=None, defects=None, **more) -> Place:
    """`place` with other parts or defects, each of them read, or with another of its fields."""
    parts = held(place) if parts is None else parts
    defects = {p: d for p, d in place.defects() if p in parts} if defects is None else defects
    return replace(place, checkpoints=Place.of(parts, defects).checkpoints, **more)


def solo(place: Place, *checkpoints: CheckpointId, **more) -> Place:
    """`place` with these checkpoints of one rank added, one minute apart by step."""
    return remade(place, {**held(place), **{part(c): facts(c.step, **more) for c in checkpoints}})


def whole(place: Place, owner: CheckpointId) -> bool:
    """Whether a place has every rank's readable part of a checkpoint: completeness, said independently of plan.py."""
    found = [p for p in place.parts() if p.checkpoint == owner]
    return any({p.rank for p in found if p.world == w} == set(range(w)) for w in {p.world for p in found}) and all(
        place.facts(p) for p in found
    )


def newer_whole_in(place: Place, owner: CheckpointId) -> set[CheckpointId]:
    """The newer, complete, readable checkpoints of the same run that a place holds."""
    others = {p.checkpoint for p in place.parts() if p.checkpoint.run == owner.run and p.checkpoint > owner}
    return {other for other in others if whole(place, other)}


def newer_whole(place: Place, owner: CheckpointId) -> int:
    """How many newer, complete, verified checkpoints of the same run a tier holds."""
    return len(newer_whole_in(place, owner))


# -- strategies -------------------------------------------------------------------------------------------------------

policies = st.builds(
    RetentionPolicy,
    keep_last=st.sampled_from([1, 1, 2, 3]),
    keep_every_steps=st.sampled_from([None, None, None, 2, 4, (3, 5)]),
    keep_within=st.sampled_from([None, None, None, "2m", "10m", "120s"]),
    keep_every=st.sampled_from([None, None, None, "3m", "20m", ("180s", "5m")]),
    keep_best=st.sampled_from(
        [
            None,
            None,
            None,
            Best(metric="loss"),
            Best(metric="loss", mode="max", count=2),
            (Best(metric="loss", count=2), Best(metric="loss", mode="max")),
        ]
    ),
)


@st.composite
def histories(draw, run: str = "r", max_world: int = 2) -> dict[PartId, ManifestFacts]:
    """Every part that one run's launches ever wrote: attempts that resume from earlier ones, clocks that jump."""
    made: list[CheckpointId] = []
    parts: dict[PartId, ManifestFacts] = {}
    for number in range(1, draw(st.integers(1, 3)) + 1):
        origin = draw(st.sampled_from([None, *made]))
        world = draw(st.integers(1, max_world))
        for step in sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=4))):
            owner = checkpoint(number, step, run)
            value = draw(st.sampled_from([None, float("nan"), 1.0, 2.0, 3.0]))
            minute = draw(st.sampled_from([step, step, step + 30, step - 30]))
            made.append(owner)
            for rank in range(world):
                metrics = {} if value is None else {"loss": value}
                parts[part(owner, rank, world)] = facts(minute, metrics=metrics, origin=origin)
    return parts


def places(history: dict[PartId, ManifestFacts], *, flawed: bool = True) -> st.SearchStrategy[Place]:
    """A place that shows some of a history; with `flawed`, also unreadable manifests, pins, quarantine and orphans."""
    owners = sorted({p.checkpoint for p in history})
    none = st.just(frozenset())
    few = st.one_of(none, none, st.frozensets(st.sampled_from(owners), max_size=2)) if flawed else none

    @st.composite
    def build(draw) -> Place:
        some = draw(st.sets(st.sampled_from(sorted(history)), max_size=4))
        chosen = set(history) - some if draw(st.sampled_from([True, True, False])) else some
        corrupt = set()
        if flawed and chosen and draw(st.sampled_from([True, False, False])):
            corrupt = draw(st.sets(st.sampled_from(sorted(chosen)), min_size=1, max_size=2))
        quarantined = draw(st.sets(st.sampled_from(sorted(history)), max_size=1)) - chosen if flawed else set()
        return Place.of(
            {p: None if p in corrupt else history[p] for p in chosen},
            {p: ManifestError("its bytes differ from its own digest") for p in corrupt},
            draw(few),
            frozenset(p.checkpoint for p in chosen) | draw(few),
            {p: history[p] for p in quarantined},
        )

    return build()


@st.composite
def cases(draw, *, flawed: bool = True, dark: bool = True, tiers: int = 2) -> tuple[Inventory, Config]:
    """A world and a configuration. `dark`: a tier may be None. Both runs' names share the one history's shape."""
    history = {**draw(histories()), **(draw(histories(run="other")) if flawed and draw(st.booleans()) else {})}
    settings = config(*(draw(policies) for _ in range(draw(st.integers(1, tiers)))), spool=draw(policies))
    spool = replace(draw(places(history, flawed=flawed)), owners=frozenset())
    found = {t.name: draw(places(history, flawed=flawed)) for t in settings.tier}
    if dark:
        found = {name: draw(st.sampled_from([place, place, place, None])) for name, place in found.items()}
    owners = sorted({p.checkpoint for p in history})
    return Inventory(
        spool,
        found,
        free=draw(st.sampled_from([1.0, 0.01])) if flawed else 1.0,
        leftovers=("stage/x",) if flawed and draw(st.booleans()) else (),
        being_restored=draw(st.frozensets(st.sampled_from(owners), max_size=1)) if flawed else frozenset(),
        busy=draw(st.frozensets(st.sampled_from(sorted(history)), max_size=1)) if flawed else frozenset(),
    ), settings


# -- the executor -----------------------------------------------------------------------------------------------------


def without(place: Place, owner: CheckpointId) -> Place:
    """A tier after a prune: nothing of the checkpoint is left but what survivors borrow."""
    parts = {p: f for p, f in held(place).items() if p.checkpoint != owner}
    shared = {c for f in parts.values() if f for c in f.bases}
    return remade(
        place,
        parts=parts,
        quarantined={p: f for p, f in place.quarantined.items() if p.checkpoint != owner},
        owners=place.owners - ({owner} - shared),
    )


class Cluster:
    """Nodes, each with a spool and a daemon, that share tiers. `step` lets one worker of one daemon do one action."""

    def __init__(self, spools: list[Place], tiers: dict[str, Place | None], settings: Config) -> None:
        self.spools, self.tiers, self.settings = spools, tiers, settings
        self.flushed: Counter[tuple[PartId, str]] = Counter()
        self.sent: dict[str, LastSent] = {}

    def inventory(self, node: int) -> Inventory:
        return Inventory(self.spools[node], dict(self.tiers), sent=dict(self.sent))

    def _after(self, name: str, owner: CheckpointId) -> LastSent:
        """What was sent to a tier last, once this is."""
        last = self.sent.get(name)
        if last and last.last == owner:
            return last
        newest = not newer_whole(self.tiers[name], owner)
        return LastSent(owner, 0 if newest or last is None else last.sent_since + 1)

    def lanes(self) -> list[tuple[int, Action]]:
        """What each tier worker of each daemon would do next."""
        found = []
        for node in range(len(self.spools)):
            first: dict[str, Action] = {}
            for action in plan(self.inventory(node), self.settings, {}, 0.0):
                first.setdefault(action.tier, action)
            found += [(node, action) for action in first.values()]
        return found

    def act(self, node: int, action: Action) -> None:
        match action:
            case Flush(p, name, relayed):
                self.flushed[p, name] += 1
                tier = self.tiers[name]
                sources = [t for other, t in self.tiers.items() if other != name and t]
                found = next((t.facts(p) for t in (sources if relayed else [self.spools[node]]) if t.facts(p)), None)
                assert found, f"nobody has {p}"
                self.sent[name] = self._after(name, p.checkpoint)
                self.tiers[name] = remade(
                    tier,
                    parts={**held(tier), p: found},
                    defects={q: d for q, d in tier.defects() if q != p},
                    quarantined={q: f for q, f in tier.quarantined.items() if q != p},
                    owners=tier.owners | {p.checkpoint},
                )
            case Prune(owner, name) if name == SPOOL:
                spool = self.spools[node]
                left = {p: f for p, f in held(spool).items() if p.checkpoint != owner}
                self.spools[node] = remade(spool, left)
            case Prune(owner, name):
                tier = self.tiers[name]
                survivors = [p for p in tier.parts() if p.checkpoint.run == owner.run and p.checkpoint != owner]
                assert all(tier.facts(p) for p in survivors), "what an unreadable survivor borrows cannot be known"
                self.tiers[name] = without(tier, owner)
            case RepairCopy(p, name):
                place = self.spools[node] if name == SPOOL else self.tiers[name]
                good = next((t.facts(p) for t in self.tiers.values() if t and t.facts(p)), None)
                defects = {q: d for q, d in place.defects() if q != p}
                if name == SPOOL and good:
                    self.spools[node] = remade(place, {**held(place), p: good}, defects)
                    return
                fresh = remade(
                    place,
                    parts={q: f for q, f in held(place).items() if q != p},
                    defects=defects,
                    quarantined={**place.quarantined, p: None},
                )
                if name == SPOOL:
                    self.spools[node] = fresh
                else:
                    self.tiers[name] = fresh
            case Discard(name):
                spool = self.spools[node]
                quarantined = {p: f for p, f in spool.quarantined.items() if f"quarantine/{p.path}" != name}
                self.spools[node] = replace(spool, quarantined=quarantined)
