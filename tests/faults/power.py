"""Power cuts: ext4 and xfs lose their power at the k-th call that changes anything, for every k of every scene.

A trial is a seed: a scene of `cut_scenes` on one kind of file system, played once to its end, then again for each of
the seed's cuts: before, during or after a call, with the journal's last part flushed or lost (FS_IOC_SHUTDOWN). Each
time the file systems are mounted anew, and

- what was said to be done is there, whole, byte by byte; all else is there whole or not at all (P1, P2, P5), and a
  restore is offered the complete checkpoints and no half ones;
- a daemon's start, and the same thing done again, lead to where they lead without a cut: the same parts, chunks, pins;
  nothing left over (P6).

Every other round of seeds takes each scene as it is, and each seed of a scene its share of all cuts that there are; so
a window of `window()` seeds has made every one, wherever it begins. The rounds between draw sizes and cuts by chance.
What threads do at once in "saves of two ranks" is not the seed's to say.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from faults import loopfs
from faults.cut_scenes import SCENES, Ground, Scene, by_chance, offered, settle
from faults.cut_truth import Seen, Sizes, Truth, look
from faults.cutter import Call, Cut, Cutter, Trace, can_trace, uncounted
from faults.loopfs import FLAGS, LoopFs
from faults.rounds import Lost, Mutant, Round, say

UNIT = "power cuts"
SHORT = 500
GATE = 13_000  # all cuts of every scene as it is, and as many again that are drawn

_SHARES = 16  # seeds that share the cuts of a scene as it is
_DRAWN = 11  # cuts of a seed that draws them
_PATIENCE = 60.0  # seconds that a child may take
_WORKERS = 2

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
            for moment in ("before", "during", "after")
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


@dataclass
class Outcome:
    """What a seed came to: `cuts` made, what they were of, and what was lost by one of them."""

    cuts: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    loss: str | None = None


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

    def run(self, outcome: Outcome) -> None:
        plan = self._plan
        for system in self._systems:
            system.restore(self._bench.fresh[system.kind])
        with self._mounted():
            said = in_child(lambda say: plan.scene.prepare(self._for(say)))
        self._base, self._kept = said, [system.keep("base") for system in self._systems]
        calls = self._to_the_end()
        for cut in plan.cuts(calls):
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
            outcome.cuts += 1
            outcome.notes[f"{plan.scene.name} on {plan.kind}"] += 1

    def _to_the_end(self) -> list[Call]:
        """Play it with no cut; every call that it made."""
        plan, homes = self._plan, [system.home for system in self._systems]
        traces: list[Trace] = []

        def act(say: Say) -> None:
            cutter = Cutter(homes, None, plan.rng)
            cutter.install()
            plan.scene.act(self._for(say))
            say(["calls", [[call.name, call.pages, call.worked] for call in cutter.calls]])

        def trace(pid: int) -> None:
            if plan.traced and can_trace():
                traces.append(Trace(pid, self._bench.room / "trace"))

        with self._mounted():
            *said, (_, calls) = in_child(act, before=trace)
        found = [Call(*call) for call in calls]
        if traces and (odd := uncounted(found, traces[0].changes(homes))):
            raise Lost(f"{plan.scene.name}: calls that are not hooked could not be cut: {odd}")
        with self._mounted():
            self._state = self._after(said)
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
            seen = look(ground.spool, ground.tier, ground.sizes)
            truth.check(seen)
            _check_offers(seen, offered(ground))
            if daemon_first:
                settle(ground, scene.keep, scene.keep_local)
            scene.act(ground)
            settle(ground, scene.keep, scene.keep_local)
            seen = look(ground.spool, ground.tier, ground.sizes)
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


# -- the round ------------------------------------------------------------------------------------------------------

_bench: Bench | None = None  # a worker's


def _set_up(room: Path, kinds: Sequence[str]) -> None:
    """Make a worker's file systems: in memory, and nobody else's."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loopfs.hide_mounts()
    place = Path(tempfile.mkdtemp(dir=room))
    loopfs.mount_memory(place)
    _bench = Bench({kind: LoopFs(kind, place, kind) for kind in kinds}, place)
    gc.freeze()  # what is there is not looked through again by every child


def _trial(seed: int) -> Outcome:
    assert _bench is not None
    outcome = Outcome()
    try:
        Play(_bench, Plan.of(seed, list(_bench.systems))).run(outcome)
    except Exception as error:
        outcome.loss = str(error) if isinstance(error, Lost) else traceback.format_exc()
    return outcome


@cache
def _kinds() -> dict[str, str | None]:
    """Each kind of file system, and why it cannot be had here, by trying."""

    def work(say: Say) -> None:
        loopfs.hide_mounts()
        for kind in loopfs.KINDS:
            why = loopfs.missing(kind)
            room = Path(tempfile.mkdtemp())
            try:
                if not why:
                    loopfs.mount_memory(room)
                    _try(LoopFs(kind, room, kind))
            except OSError as error:
                why = str(error)
            finally:
                shutil.rmtree(room, ignore_errors=True)
            say([kind, why])

    return dict(in_child(work))


def _try(system: LoopFs) -> None:
    for _ in range(2):  # the second time after a cut
        system.mount()
        home = os.open(system.home, os.O_RDONLY | os.O_DIRECTORY)
        loopfs.cut(home, loopfs.LOG_LOST)
        os.close(home)
        system.unmount()


def missing() -> str | None:
    if all(_kinds().values()):
        return "; ".join(f"{kind}: {why}" for kind, why in _kinds().items())
    return None


def run(work: Round) -> None:
    kinds = [kind for kind, why in _kinds().items() if not why]
    for kind, why in _kinds().items():
        if why:
            say(f"SKIPPED {kind}: {why}")
            work.notes[f"SKIPPED {kind}"] += 1
    if not can_trace():
        say("SKIPPED the check of what is hooked: there is no strace")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_WORKERS, fork, _set_up, (work.room, kinds)) as pool:
        under_way: dict[Future[Outcome], int] = {}
        seeds = 0

        def take(enough: int) -> None:
            while len(under_way) > enough:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    _note(work, under_way.pop(future), future.result())

        for seed in work.seeds():
            under_way[pool.submit(_trial, seed)] = seed
            take(_WORKERS)
            seeds += 1
        take(0)
    work.notes["times that every cut was made"] = seeds // window(kinds)


def _note(work: Round, seed: int, outcome: Outcome) -> None:
    work.passed(outcome.cuts, *outcome.notes.elements())
    if outcome.loss:
        work.lost(seed, outcome.loss)


_BY = "power --trials 500"

MUTANTS = (
    Mutant(
        "a file is not durable before it is shown",
        "tierd/persist.py",
        """        os.fsync(self._fd)
        return File(path=self._name""",
        """        return File(path=self._name""",
        _BY,
    ),
    Mutant(
        "a commit is answered before it is durable",
        "tierd/stage.py",
        """        sync_directory(target.parent)
        sync_directory(self.path.parent)
""",
        "",
        _BY,
    ),
    Mutant(
        "a part's spare is written over before its removal is durable",
        "tierd/spool.py",
        """            return None
        _sync_left(path.parent)
        return grave
""",
        """            return None
        return grave
""",
        _BY,
    ),
    Mutant(
        "a removal takes the files of what is visible",
        "tierd/spool.py",
        "grave = self._bury(self.path(part))",
        "grave = self.path(part) if self.path(part).exists() else None",
        _BY,
    ),
    Mutant(
        "a quarantine is answered before it is durable",
        "tierd/spool.py",
        """        sync_directory(aside.parent)
        _sync_left(home.parent)
""",
        "",
        _BY,
    ),
    Mutant(
        "a pin is answered before it is durable",
        "tierd/spool.py",
        """        if path.parent.is_dir():
            sync_directory(path.parent)
""",
        "",
        _BY,
    ),
    Mutant(
        "a put is not durable before it is shown",
        "tierd/stores/file.py",
        "os.fsync(fd)  # never tried again",
        "pass  # never tried again",
        _BY,
    ),
    Mutant(
        "a put is answered before it is durable",
        "tierd/stores/file.py",
        """dst_dir_fd=parent)
                        sync_directory(parent)
""",
        """dst_dir_fd=parent)
""",
        _BY,
    ),
    Mutant(
        "a tier's chunks go before the manifest that names them",
        "tierd/daemon/prune.py",
        """        await store.delete(keys)
        doomed |= {info.key async for info in store.scan(f"{chunks_prefix(run)}{checkpoint.name}/")}
        aside = [info.key async for info in store.scan(f"{quarantine_prefix(run)}{checkpoint.name}/")]
        # After the marks and after the listing of chunks: whoever names one of these from now on sees the marks.
        gone = sorted(doomed - await _survivors(store, checkpoint, doomed, known))
        await store.delete(gone + aside)
""",
        """        doomed |= {info.key async for info in store.scan(f"{chunks_prefix(run)}{checkpoint.name}/")}
        aside = [info.key async for info in store.scan(f"{quarantine_prefix(run)}{checkpoint.name}/")]
        # After the marks and after the listing of chunks: whoever names one of these from now on sees the marks.
        gone = sorted(doomed - await _survivors(store, checkpoint, doomed, known))
        await store.delete(gone + aside)
        await store.delete(keys)
""",
        _BY,
    ),
    Mutant(
        "a fetched file is not durable before it is shown",
        "tierd/daemon/download.py",
        """        os.fsync(self.fd)
        self.close()
""",
        """        self.close()
""",
        _BY,
    ),
    Mutant(
        "a copy on a tier is set aside after it was taken away",
        "tierd/daemon/prune.py",
        """    await store.put(part.quarantine_key, data)
    await store.delete([part.manifest_key])
""",
        """    await store.delete([part.manifest_key])
    await store.put(part.quarantine_key, data)
""",
        _BY,
    ),
)
