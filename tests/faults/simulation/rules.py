"""Which checkpoints a retention policy wants, in plain code: the docs' words, and nothing of tierd.

Every rule is worked out from steps, creation times and metrics. `lasting` are the rules that keep for good: they
consider every complete checkpoint that is known anywhere. `lately` are the rules that follow training: `keep_last` and
`keep_within`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations, pairwise

Which = tuple[str, int, int]  # run, launch, step


@dataclass(frozen=True)
class Saved:
    """One checkpoint at the moment when its trainer was told that it is durable.

    Attributes:
        origin: the launch and step that its launch resumed from.
        node: where it was saved.
        created: seconds since 1970; `acked` is the simulated time of the acknowledgement, and `acked_awake` the same
            without the time in which the machines slept.
    """

    run: str
    launch: int
    step: int
    origin: tuple[int, int] | None
    node: str
    created: float
    acked: float
    acked_awake: float
    metrics: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def which(self) -> Which:
        return self.run, self.launch, self.step


@dataclass(frozen=True)
class Rules:
    """A policy. Times in seconds; `best` is a metric, whether smaller values are better, and how many."""

    last: int = 3
    every_steps: int | None = None
    within: float | None = None
    every: float | None = None
    best: tuple[str, bool, int] | None = None

    def lasting(self, known: Iterable[Saved]) -> set[Which]:
        """What stays for good, of everything of one run that is known."""
        ordered = sorted(known, key=lambda one: one.which)
        found = {one.which for one in ordered if self.every_steps and one.step % self.every_steps == 0}
        found |= _spaced(ordered, self.every) if self.every else set()
        if self.best:
            metric, smaller, count = self.best
            ranked = [one for one in ordered if metric in one.metrics]
            # Of equal values the newer one is better, so that a plateau does not pin its oldest checkpoint.
            ranked.sort(key=lambda one: (one.metrics[metric] * (-1 if smaller else 1), one.which))
            found |= {one.which for one in ranked[-count:]}
        return found

    def lately(self, here: Collection[Saved], known: Collection[Saved]) -> set[Which]:
        """What stays of `here` because it is new. `known` is everything of that run: it tells the timeline."""
        ordered = sorted(here, key=lambda one: one.which)
        if not ordered:
            return set()
        passed = timeline(known)
        path = [one for one in ordered if is_on(passed, one.which)]
        found = {one.which for one in (*ordered[-self.last :], *path[-self.last :])}
        if self.within:
            found |= {one.which for one in ordered if _age(one, ordered) <= self.within}
        return found


def _age(one: Saved, ordered: list[Saved]) -> float:
    """How much older than the newest it is at least, if at most two launches' clocks are wrong: what passed within
    launches, and of the pauses between them what is left whichever two launches are ignored."""
    launches: dict[int, list[float]] = {}
    for some in ordered:
        if some.which >= one.which:
            launches.setdefault(some.launch, []).append(some.created)
    within, starts = 0.0, []
    for number, times in enumerate(launches.values()):
        passed = times[-1] - times[0]
        passed = passed if passed >= 0 else sum(max(b - a, 0.0) for a, b in pairwise(times))
        starts.append(times[0] - within if number else times[-1] - passed)
        within += passed
    pauses = [0.0]
    if len(starts) > 2:
        rest = [
            [start for at, start in enumerate(starts) if at not in out] for out in combinations(range(len(starts)), 2)
        ]
        pauses = [max(some) - min(some) for some in rest]
    return within + min(pauses)


def _spaced(ordered: list[Saved], every: float) -> set[Which]:
    """The oldest, and then each that was made at least this much later than the last one kept so."""
    found, last = set(), None
    for one in ordered:
        if last is None or abs(one.created - last) >= every:
            last = one.created
            found.add(one.which)
    return found


def timeline(known: Collection[Saved]) -> dict[int, float]:
    """The launches that the newest one descends from, each with its last step that counts. The manifests of a launch
    tell what it resumed from, so the way ends where no checkpoint of a launch is left."""
    origins = {one.launch: one.origin for one in known}
    found: dict[int, float] = {}
    launch: int | None
    launch, limit = max(origins, default=None), float("inf")
    while launch is not None:
        found[launch] = limit
        launch, limit = origins.get(launch) or (None, 0.0)
    return found


def is_on(passed: dict[int, float], one: Which) -> bool:
    """Whether a checkpoint is on a timeline."""
    return one[2] <= passed.get(one[1], -1)
