"""Several nodes, each with a link of its own that is slower than the saves, send one run's parts to one tier.

The nodes decide by `plan` alone, each by what it sees; links, saves and the tier are simulated on a clock of seconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from support.inventories import checkpoint, config, facts, part

from tierd.core.ids import PartId
from tierd.core.planning.flush_order import is_contended, is_newest_of_run
from tierd.core.planning.inventory import Inventory, LastSent
from tierd.core.planning.place import SPOOL, Flush, LocalLaunch, Place, Prune
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy

EVERY = 10.0  # seconds from one save to the next
SKEW = 0.3  # seconds by which ranks commit apart
ANSWER = 0.3  # seconds until others see what a node announced
UNTIL = 1500.0
KEEP = RetentionPolicy(keep_last=3)
SETTINGS = config(KEEP, spool=KEEP)


@dataclass
class Sender:
    """One node with one rank. `takes`: seconds that its link needs for a part; `sends`: what, and since when others
    see that it does."""

    rank: int
    takes: float
    spool: Place = field(default_factory=Place)
    sent: dict[str, LastSent] = field(default_factory=dict)
    busy: bool = False
    sends: tuple[int, float] | None = None


class Links:
    """Attributes: `durable`: (when, step) of what became complete on the tier; `behind`: of each, how many newer ones
    were complete when its first part was begun."""

    def __init__(self, takes: list[float], jitter: float, seed: int) -> None:
        self.rng, self.jitter, self.tier = random.Random(seed), jitter, Place()
        self.nodes = [Sender(rank, time) for rank, time in enumerate(takes)]
        self.durable: list[tuple[float, int]] = []
        self.behind: list[int] = []
        self._newest_then: dict[int, int] = {}
        self._committed = Counter[int]()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()

    def run(self) -> None:
        for step in range(1, int(UNTIL / EVERY)):
            for node in self.nodes:
                self._at(step * EVERY + self.rng.random() * SKEW, partial(self._save, node, step))
        while self._events and self._events[0][0] < UNTIL:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def gaps(self) -> Iterator[float]:
        """Seconds from one newer checkpoint that became durable to the next, from the first save on."""
        last, best = EVERY, 0
        for when, step in [*self.durable, (UNTIL, int(UNTIL))]:
            if step > best:
                yield when - last
                last, best = when, step

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), happen))

    def _save(self, node: Sender, step: int, now: float) -> None:
        node.spool = node.spool.adding(self._part(node, step), facts(step))
        self._committed[step] += 1
        self._choose(now, node)

    def _choose(self, now: float, node: Sender) -> None:
        if node.busy:
            return
        actions = plan(self._seen(now, node), SETTINGS, {}, now)
        while prunes := [one for one in actions if isinstance(one, Prune)]:
            for one in prunes:
                if one.tier == SPOOL:
                    node.spool = node.spool.without(one.checkpoint)
                else:
                    self.tier = self.tier.without(one.checkpoint)
            actions = plan(self._seen(now, node), SETTINGS, {}, now)
        for flush in [one for one in actions if isinstance(one, Flush)][:1]:
            step = flush.part.checkpoint.step
            whole = [one for one, count in self._committed.items() if count == len(self.nodes)]
            self._newest_then.setdefault(step, max(whole, default=0))
            if is_contended(self._seen(now, node), "a", flush.part):
                node.sends = step, now + ANSWER
            node.busy, leading = True, is_newest_of_run(flush.part.checkpoint, node.spool, self.tier)
            done = partial(self._sent, node, step, leading)
            self._at(now + node.takes * (1 + self.rng.uniform(-self.jitter, self.jitter)), done)

    def _sent(self, node: Sender, step: int, leading: bool, now: float) -> None:
        node.busy, node.sends, one = False, None, checkpoint(1, step)
        self.tier, last = self.tier.adding(self._part(node, step), facts(step)), node.sent.get("a")
        if last is None or last.last != one:
            node.sent["a"] = LastSent(one, 0 if leading or last is None else last.sent_since + 1)
        if self.tier.checkpoints[one].usable:
            self.durable.append((now, step))
            self.behind.append(sum(step < other <= self._newest_then[step] for other in self._committed))
        self._choose(now, node)

    def _seen(self, now: float, node: Sender) -> Inventory:
        others = {one.rank: one.sends[0] for one in self.nodes if one != node and one.sends and one.sends[1] <= now}
        said = {step: frozenset(str(rank) for rank in others if others[rank] == step) for step in others.values()}
        heard = replace(self.tier, announced={checkpoint(1, step): who for step, who in said.items()})
        launch = LocalLaunch(checkpoint(1, 1).attempt, {len(self.nodes): frozenset({node.rank})})
        return Inventory(replace(node.spool, launches={"r": launch}), {"a": heard}, sent=dict(node.sent))

    def _part(self, node: Sender, step: int) -> PartId:
        return part(checkpoint(1, step), node.rank, len(self.nodes))


@pytest.mark.parametrize(
    ("takes", "jitter"),
    [
        ([100.0], 0.0),
        ([100.0, 100.0, 100.0, 100.0], 0.05),
        ([100.0, 120.0], 0.0),
        ([50.0, 100.0, 100.0, 200.0], 0.05),
    ],
    ids=["one", "alike", "two", "mixed"],
)
def test_a_checkpoint_becomes_durable_as_often_as_the_slowest_link_can_send_its_part(takes, jitter):
    """At most 1.5 times the time of the slowest link apart, and each was the newest that was complete when the first
    node began it. Without announcements the four alike took up to five times as long."""
    links = Links(takes, jitter, seed=1)
    links.run()
    gaps = list(links.gaps())
    assert max(gaps) <= 1.5 * max(takes), gaps
    assert not any(links.behind)
