"""What is done to a cluster of ranks: kills at random, a node replaced, a launch that will not die. And how it ends."""

from __future__ import annotations

import random
import re
import signal
import time

from support.ranked import KEEP, WORLD, Cluster, Launch, Point, complete, on_tier

# Why a launch may end by itself: a restore's daemon was killed, or is not up yet. Its launcher tries again.
_NO_DAEMON = ("DaemonUnavailable", "StoreUnavailable")


def finish(made: Cluster, names: str = "AABB", after: Launch | None = None) -> None:
    """Train some more without a kill than all launches did, or `after`, and hold all against an uninterrupted run."""
    steps = made.progress(after) + 10 * made.every
    last = made.launch(names, steps)
    last.join()
    made.check_resumed(last)
    made.converge()
    made.check_retention()
    made.verify()
    for node in made.nodes.values():
        node.end()
    made.check_training(steps)


def a_node_is_replaced(made: Cluster) -> None:
    """Node B is gone for good, an empty node C takes its ranks; and two ranks cannot go on for four."""
    made.launch("AABB", 6 * made.every).join()
    made.converge()
    made.nodes.pop("B").lose()
    second = made.launch("AACC", 9 * made.every)
    second.join()
    made.check_resumed(second)
    reported = {rank: words for rank in range(WORLD) for words in made.said(second, "resumed", rank)}
    assert {words[0] for words in reported.values()} == {str(6 * made.every)}
    assert [reported[rank][2] for rank in (2, 3)] == [made.tier.name] * 2
    made.converge()
    halved = made.launch("AA", 12 * made.every)
    made.await_that("both ranks have refused", lambda: not any(process.is_alive() for process in halved.processes))
    refusals = [" ".join(words) for words in made.said(halved, "died")]
    assert len(refusals) == 2, refusals
    for text in refusals:
        assert re.match(r"StateMismatch: .*by 4 ranks.* has 2", text), text
    assert not made.said(halved, "step")
    finish(made, "AACC")


def a_launch_lives_on(made: Cluster) -> None:
    """Launch 1 hangs on nodes A and B, launch 2 takes over on C and D, launch 1 wakes up and goes on saving. Launch 3,
    on the zombies' own nodes, resumes from launch 2's newest."""
    first = made.launch("AABB")
    made.await_that("launch 1 has something on the tier", lambda: complete(on_tier(made.tier)), first)
    first.signal(signal.SIGSTOP)
    second = made.launch("CCDD")
    _await_kept(made, second, 3)
    first.signal(signal.SIGCONT)
    awake = len(made.said(first, "acked"))
    made.await_that("the zombies save", lambda: len(made.said(first, "acked")) >= awake + 8 * WORLD, first)
    _await_kept(made, second, 3)
    second.kill()
    made.check_resumed(second)
    zombies = len(made.said(first, "acked"))
    made.await_that("only zombies save", lambda: len(made.said(first, "acked")) >= zombies + 2 * WORLD, first)
    first.kill()
    made.converge()
    attempt = made.said(second, "attempt", 0)[0][0]
    assert attempt > made.said(first, "attempt", 0)[0][0]
    kept = _kept_by_all(made, second)
    live = sorted(point.step for point in complete(on_tier(made.tier)) if point.attempt == attempt)
    assert len(live) >= KEEP and live[-1] >= max(kept), f"{live} are left of launch 2, and {kept} were verified"
    assert {step for step in kept if step >= live[-KEEP]} <= set(live), f"{live}, of {kept}"
    third = made.launch("AABB", made.progress(second) + made.every)
    assert third.expected == Point(attempt, live[-1])
    third.join()
    made.check_resumed(third)
    finish(made, after=third)


def _kept_by_all(made: Cluster, launch: Launch) -> set[int]:
    """The steps that every rank of a launch was told are verified on the tier."""
    reported = [{int(words[0]) for words in made.said(launch, "kept", rank)} for rank in range(WORLD)]
    return set.intersection(*reported)


def _await_kept(made: Cluster, launch: Launch, more: int) -> None:
    before = len(_kept_by_all(made, launch))
    made.await_that("more is on the tier", lambda: len(_kept_by_all(made, launch)) >= before + more, launch)


class Killer:
    """Kills ranks, daemons and whole nodes of a cluster at moments that a seed decides."""

    def __init__(self, made: Cluster, seed: int) -> None:
        self.cluster, self.seed = made, seed
        self.kills: list[str] = []
        self.restarts: list[str] = []  # launches that ended by themselves, and why
        self._noise = random.Random(seed)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}; {len(self.kills)} kills:", *self.kills, "ended by themselves:", *self.restarts]
        return "\n  ".join(lines)

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self)

    def run(self, kills: int) -> None:
        """Launch on nodes A and B, kill, and launch again, until there were so many kills. Nothing runs at the end."""
        launch = self.cluster.launch("AABB")
        while len(self.kills) < kills:
            launch = self._kill(launch) if self._come(launch) else self._again(launch)
        launch.kill()
        self.cluster.check_resumed(launch)

    def _come(self, launch: Launch) -> bool:
        """Wait for the moment; False when a rank has ended by itself before."""
        noise, made = self._noise, self.cluster
        rank = noise.randrange(WORLD)
        kind = noise.choice(("start", "restoring", "step", "step", "saving", "acked"))
        before = len(made.said(launch, kind, rank)) if kind != "restoring" else 0
        count = {"start": 0, "restoring": 1, "step": noise.randint(1, 3 * made.every)}.get(kind, noise.randint(1, 3))
        come = made.await_that(
            f"rank {rank} has said {kind!r} {count} times more, in launch {launch.number}",
            lambda: len(made.said(launch, kind, rank)) >= before + count,
            launch,
        )
        self._moment = f"launch {launch.number}, {kind} {before + count} of rank {rank}"
        time.sleep(noise.random() * {"start": 0.5, "restoring": 0.4, "step": 0.05, "saving": 0.03, "acked": 0.4}[kind])
        return come

    def _kill(self, launch: Launch) -> Launch:
        noise, made = self._noise, self.cluster
        what = noise.choice(("rank", "daemon", "node"))
        rank = noise.randrange(WORLD)
        node = launch.nodes[rank]
        name = f"rank {rank}" if what == "rank" else f"{what} {node.name}"
        self.kills.append(f"{len(self.kills)}: {name}, at {self._moment}")
        if what == "daemon":
            node.kill()
            time.sleep(noise.random() * 0.6)
            node.start()
            return launch
        if what == "rank":
            launch.kill(rank)
        else:
            launch.kill(*(one for one in range(WORLD) if launch.nodes[one] is node))
            node.lose()
        time.sleep(noise.random() * 0.2)  # until the launcher has noticed
        launch.kill()
        made.check_resumed(launch)
        if what == "node":
            node.start()
        return made.launch("AABB")

    def _again(self, launch: Launch) -> Launch:
        """A rank has ended by itself. That is right where a restore lost its daemon, and nowhere else."""
        made = self.cluster
        time.sleep(0.2)
        launch.kill()
        made.check_resumed(launch)
        why = [" ".join(words) for words in made.said(launch, "died")]
        self.restarts.append(f"launch {launch.number}: {why}")
        assert any(known in text for text in why for known in _NO_DAEMON), f"{self.restarts[-1]}\n{self}"
        assert len(self.restarts) < 10 + len(self.kills), f"it cannot come back: {self.restarts}"
        return made.launch("AABB")
