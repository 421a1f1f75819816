"""One seed of power cuts: what it stands for, and how it is played.

Invariant: where a file system is mounted, only a child that ends works on it, so that nothing of a cut is left in
memory.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults.power.cutter import MOMENTS, Call, Cut, Cutter, Trace, can_trace, speech, uncounted
from faults.power.ground import Ground, later, offered, settle
from faults.power.loopfs import FLAGS, LoopFs
from faults.power.scenes import SCENES, Scene, by_chance
from faults.power.truth import Seen, Sizes, Truth, observe
from faults.rounds import Lost

_SHARES = 16  # seeds that share the cuts of a scene as it is
_DRAWN = 6  # cuts of a seed that draws them, beside those at the end
_PATIENCE = 120.0  # seconds that a child may take

_write = os.write  # as it was before a cutter came

Say = Callable[[list[Any]], None]


# -- children -------------------------------------------------------------------------------------------------------


def in_child(
    work: Callable[[Say], None], *, before: Callable[[int], None] = lambda pid: None, patience: float = _PATIENCE
) -> list[list[Any]]:
    """What a forked child said.

    Args:
        work: done there; it may end the process.
        before: called with its number before it begins.

    Raises:
        Lost: it raised, or did not end in time.
    """
    (ready, go), (answer, said) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(go)
            os.read(ready, 1)
            logging.disable()
            work(lambda message: _tell(said, message))
        except BaseException:
            _tell(said, ["failed", traceback.format_exc()])
        os._exit(0)
    os.close(said)
    try:
        before(pid)
        os.write(go, b"g")
        data = _read_all(answer, patience)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        for fd in (ready, go, answer):
            os.close(fd)
    messages = [json.loads(line) for line in data.splitlines()]
    if status:
        raise Lost(f"a child ended with {os.waitstatus_to_exitcode(status)}, after {messages[-3:]}")
    for message in messages:
        if message[0] == "failed":
            raise Lost(message[1])
    return messages


def _tell(fd: int, message: list[Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    with speech:
        while data:
            data = data[_write(fd, data) :]


def _read_all(fd: int, patience: float) -> bytes:
    end, data = time.monotonic() + patience, b""
    while select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (more := os.read(fd, 1 << 20)):
            return data
        data += more
    raise Lost(f"not done within {patience:.0f} s, after {data[-500:]!r}")


# -- one seed -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a seed stands for. `share`: which of all cuts; None: draw some. `traced`: strace looks at the whole play."""

    scene: Scene
    kind: str
    sizes: Sizes
    pieces: int
    share: int | None
    traced: bool
    rng: random.Random

    @classmethod
    def of(cls, seed: int, kinds: Sequence[str]) -> Plan:
        places = [(scene, kind) for scene in SCENES for kind in kinds]
        number, which = divmod(seed, len(places))
        scene, kind = places[which]
        rng, share = random.Random(f"power {seed}"), number // 2 % _SHARES
        if number % 2:
            return cls(scene, kind, by_chance(scene, rng), rng.choice((0, 0, 1, 7, 300)), None, False, rng)
        return cls(scene, kind, scene.sizes, 0, share, share == 0 and kind == kinds[0], rng)

    def cuts(self, calls: Sequence[Call]) -> list[Cut]:
        """Before, during and after each call that did something, and at the end."""
        every = [
            Cut(number, moment, flag)
            for number, call in enumerate(calls)
            for moment in MOMENTS
            for flag in FLAGS
            if call.worked and (moment != "during" or call.pages > 1)
        ]
        ends = [Cut(len(calls), "before", flag) for flag in FLAGS]
        if self.share is None:
            return ends + self.rng.sample(every, min(_DRAWN, len(every)))
        every += ends
        random.Random(f"{self.scene.name} {self.kind}").shuffle(every)
        return every[self.share :: _SHARES]


def window(kinds: Sequence[str]) -> int:
    """So many seeds in a row make every cut of every scene as it is."""
    return len(SCENES) * len(kinds) * _SHARES * 2


@dataclass
class Bench:
    """A worker's file systems, by kind, and room for what is written about them."""

    systems: dict[str, LoopFs]
    room: Path
    fresh: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fresh = {kind: system.keep("fresh") for kind, system in self.systems.items()}


def warm_up(room: Path) -> None:
    """Have what is loaded and worked out at first use here, and not in every child."""
    room.mkdir()
    scene = next(scene for scene in SCENES if scene.name == "flushes")
    ground = Ground(room / "spool", room / "tier", scene.sizes, lambda message: None)
    scene.prepare(ground)
    scene.act(ground)
    offered(ground)
    observe(ground.spool, ground.tier, scene.sizes)


class Play:
    """A plan being played on a bench."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self._bench, self._plan = bench, plan
        own = bench.systems[plan.kind]
        other = next((system for kind, system in bench.systems.items() if kind != plan.kind), own)
        self._systems = [own, other] if plan.scene.apart and other is not own else [own]
        self._ground = Ground(own.home / "spool", self._systems[-1].home / "tier", plan.sizes, lambda message: None)
        self._ground.pieces = plan.pieces
        self._state: dict[str, Any] | None = None  # where it leads without a cut

    def run(self) -> tuple[int, list[str]]:
        """How many cuts were made, and of what."""
        plan, notes = self._plan, list[str]()
        for system in self._systems:
            system.restore(self._bench.fresh[system.kind])
        with self._mounted():
            said = in_child(lambda say: plan.scene.prepare(self._for(say)))
        self._base, self._kept = said, [system.keep("base") for system in self._systems]
        calls = self._to_the_end()
        cuts = plan.cuts(calls)
        for cut in cuts:
            where = self._systems
            if plan.share is None and len(where) > 1:
                where = plan.rng.choice(([where[0]], [where[1]], where))
            try:
                self._cut(cut, where)
            except Exception as error:
                names = ", ".join(system.kind for system in where)
                call = calls[cut.number].name if cut.number < len(calls) else "end"
                why = str(error) if isinstance(error, Lost) else "".join(traceback.format_exception(error))
                raise Lost(f"{plan.scene.name} on {names}, {cut} ({call}) of {len(calls)}: {why}") from None
            notes += [f"{plan.scene.name} on {plan.kind}", cut.note(plan.kind)]
        return len(cuts), [*notes, *["plays seen by strace, too"] * self._traced]

    @property
    def _traced(self) -> bool:
        return self._plan.traced and can_trace()

    def _to_the_end(self) -> list[Call]:
        """Play it with no cut; every call that it made. Where it leads must be right by itself, before a cut is held
        against it."""
        plan, homes = self._plan, [system.home for system in self._systems]
        traces: list[Trace] = []

        def act(say: Say) -> None:
            cutter = Cutter(homes, None, plan.rng)
            cutter.install()
            plan.scene.act(self._for(say))
            say(["calls", [[call.name, call.pages, call.worked] for call in cutter.calls]])

        def trace(pid: int) -> None:
            if self._traced:
                traces.append(Trace(pid, self._bench.room / "trace"))

        with self._mounted():
            *said, (_, calls) = in_child(act, before=trace)
        found = [Call(*call) for call in calls]
        if traces and (odd := uncounted(found, traces[0].changes(homes))):
            raise Lost(f"{plan.scene.name}: calls that are not hooked could not be cut: {odd}")
        with self._mounted():
            self._state = self._after(said)
        there, wanted = {(place, name) for place, name in self._state["things"]}, plan.scene.things_at_rest()
        if there != wanted:
            odd = f"missing {sorted(wanted - there)}, too many {sorted(there - wanted)}"
            raise Lost(f"{plan.scene.name} leads elsewhere without any cut: {odd}")
        for _, name in self._state["things"]:
            if name.count("/") == 2:
                plan.sizes.files_of(name)  # once, and not in every child
        return found

    def _cut(self, cut: Cut, where: Sequence[LoopFs]) -> None:
        plan = self._plan
        for system, kept in zip(self._systems, self._kept, strict=True):
            system.restore(kept)

        def act(say: Say) -> None:
            cutter = Cutter([system.home for system in where], cut, random.Random(f"{cut} {plan.rng.random()}"))
            cutter.install()
            plan.scene.act(self._for(say))
            cutter.power_off(cut.flag)

        with self._mounted():
            said = in_child(act)
        with self._mounted():
            self._after(said)

    def _after(self, said: list[list[Any]]) -> dict[str, Any]:
        """Look at what is there, start a daemon, do it again; where that leads."""
        scene, truth = self._plan.scene, Truth()
        truth.hear(self._base)
        scene.expect(truth)
        truth.hear(said)
        daemon_first = self._plan.rng.random() < 0.3

        def work(say: Say) -> None:
            ground = replace(self._for(lambda message: None), again=True)
            seen = observe(ground.spool, ground.tier, ground.sizes)
            truth.check(seen)
            _check_offers(seen, offered(ground))
            later()
            if daemon_first:
                settle(ground, scene.keep, scene.keep_local)
            scene.act(ground)
            settle(ground, scene.keep, scene.keep_local)
            seen = observe(ground.spool, ground.tier, ground.sizes)
            seen.at_rest()
            say(["state", seen.state()])

        [(_, state)] = in_child(work)
        if self._state is not None and state != self._state:
            raise Lost(f"it leads elsewhere: {_difference(self._state, state)}")
        return dict(state)

    def _for(self, say: Say) -> Ground:
        return replace(self._ground, say=say)

    @contextmanager
    def _mounted(self) -> Iterator[None]:
        mounted: list[LoopFs] = []
        try:
            for system in self._systems:
                system.mount()
                mounted.append(system)
            yield
        finally:
            for system in mounted:
                system.unmount()


def _check_offers(seen: Seen, offers: set[str]) -> None:
    """P2 and P3, as a restore sees it."""
    if gone := seen.complete(whole=True) - offers:
        raise Lost(f"complete, and not offered to a restore: {sorted(gone)}")
    if half := offers - seen.complete(whole=False):
        raise Lost(f"offered to a restore, and not complete: {sorted(half)}")


def _difference(wanted: dict[str, Any], there: dict[str, Any]) -> str:
    said = []
    for what in wanted:
        missing = [one for one in wanted[what] if one not in there[what]]
        more = [one for one in there[what] if one not in wanted[what]]
        said += [f"{what} missing {missing}, too many {more}"] if missing or more else []
    return "; ".join(said)
