"""One spool's life: a daemon and a training over it are killed again and again, and what they leave is held against
what must be there. In the end faults stop, everything is flushed, and every byte that is left is looked at.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.kills.expected import Expected
from faults.kills.fresh_nodes import strike_restore
from faults.kills.remains import check_remains, leftovers, waiting
from faults.kills.victims import CALLS, RUN, Orders, Page, daemon, fork, rank
from faults.rounds import Lost

from tierd.core.config import Config, TierConfig
from tierd.core.retention.policy import RetentionPolicy

DEADLINE = 120.0  # seconds without anything new after which what has not come counts as hung
_TICK = 0.004
_DAEMONS = ("fsync", "rename", "unlink", "mkdir", "write")  # calls that it is killed at
_WRITERS = ("tell", "tell", "send", "send", "copy", "copy", "mkdir", "rename")

# Why a writer may end by itself where its daemon or another rank was killed: its launcher tries again.
_EXCUSED = ("DaemonUnavailable", "DaemonSilent", "StoreUnavailable")
_EXCUSED_RANKS = (
    *_EXCUSED,
    "ConfigError: the ranks do not find each other",
    "RuntimeError",
    "DistNetworkError",
    "DistStoreError",
)


@dataclass
class Victim:
    """A process that lives, or has just died."""

    name: str
    pid: int
    page: Page
    begun: float
    log: Path
    status: int | None = None  # as waitpid tells it
    died: float = -math.inf  # when that was seen, monotonic seconds

    def alive(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status, self.died = status, time.monotonic()
        return self.status is None

    def kill(self) -> bool:
        """Whether it was alive and at work until now."""
        was = self.alive() and self.page.at_work
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status, self.died = os.waitpid(self.pid, 0)[1], time.monotonic()
        return was and os.WIFSIGNALED(self.status)

    @property
    def killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status)


class KilledLife:
    """Made and ended in one process, which is the parent of all that it kills.

    Args:
        room: an empty directory.
    """

    def __init__(self, seed: int, room: Path) -> None:
        self.seed, self.room = seed, room
        self.noise = noise = random.Random(seed)
        self.notes: Counter[str] = Counter()
        self.kills = 0
        self.world = noise.choice((1, 1, 2, 3))
        self.keep = {"local": noise.randint(1, 3)}
        self.tiers = {name: room / name for name in ("first", "second")[: noise.randint(1, 2)]}
        self.alone = noise.random() < 0.25  # some launches use no daemon
        self.slots = noise.randint(1, 2)
        self.slow = noise.choice((0.0, 0.0, 0.1, 0.4))
        for name, path in self.tiers.items():
            path.mkdir()
            self.keep[name] = noise.randint(1, 3)
        self.config = Config(
            spool=str(room / "spool"),
            tier=tuple(
                TierConfig(name=name, url=f"file://{path}", retention=RetentionPolicy(keep_last=self.keep[name]))
                for name, path in self.tiers.items()
            ),
            retention=RetentionPolicy(keep_last=self.keep["local"]),
            rescan="1s",
            drain="20s",
            min_free_percent=0.0,
            scrub="0s",
        )
        self.expected = Expected(self.world)
        self.daemon: Victim | None = None
        self.ranks: list[Victim] = []
        self.former: Victim | None = None  # of a launch that lives on beside the latest
        self.zombies: set[int] = set()  # launches that have lived on beside another
        self.unasking: set[int] = set()  # launches without the daemon
        self.is_fresh_node = False  # its spool was lost, and nobody was killed since
        self.resting = False  # nothing is killed any more
        self.launch = 0
        self.launched = 0.0  # when, monotonic seconds
        self.excuse = 0.0  # when something was killed last
        self.heard = 0.0  # when a writer wrote something down last
        self.log = room / "log"
        self.log.touch()
        self._at = 0
        self._rest = b""
        self.seen: Counter[str] = Counter()  # lines of this launch
        self.found: dict[tuple[int, int], Any] = {}  # launch and how often it restored -> what was found
        self.restores: Counter[tuple[int, int]] = Counter()  # launch, rank
        self.story: list[str] = []

    # -- what happens -------------------------------------------------------------------------------------------------

    def live(self, kills: int) -> None:
        """Kill so often, then let it come to rest. Raises `Lost`."""
        try:
            self.start_daemon()
            while self.kills < kills:
                self._go_on()
                self._strike()
            self._come_to_rest()
        except Exception as error:
            raise Lost(f"{error}\n{self._tale()}") from error
        finally:
            for victim in (self.daemon, self.former, *self.ranks):
                if victim:
                    victim.kill()

    def start_daemon(self, *, last: bool = False) -> None:
        page, log = Page(), self.room / "daemon.log"
        config = self.config
        slow = 0.0 if last else self.slow
        pid = fork(page, log, lambda: daemon(config, page, slow, last=last))
        self.daemon = Victim("daemon", pid, page, time.monotonic(), log)
        self.record(f"daemon {pid} starts")

    def start_launch(self, steps: int | None = None) -> None:
        """All ranks anew."""
        assert not any(victim.alive() for victim in self.ranks)
        self.launch += 1
        self.seen.clear()
        with_daemon = steps is not None or not (self.alone and self.noise.random() < 0.3)
        if not with_daemon:
            self.unasking.add(self.launch)
        self.launched = time.monotonic()
        self.ranks = []
        for number in range(self.world):
            orders = Orders(
                seed=self.seed,
                launch=self.launch,
                rank=number,
                world=self.world,
                spool=self.config.spool,
                tiers=tuple(self.tiers),
                log=str(self.log),
                meeting=str(self.room / f"meeting-{self.launch}"),
                daemon=with_daemon,
                slots=self.slots,
                pace=self.noise.choice((0.0, 0.01, 0.03)),
                slow=self.slow,
                steps=steps,
            )
            page, log = Page(), self.room / f"rank-{number}.log"
            pid = fork(page, log, lambda orders=orders, page=page: rank(orders, page))
            self.ranks.append(Victim(f"rank {number}", pid, page, time.monotonic(), log))
        self.record(f"launch {self.launch} starts{'' if with_daemon else ' without the daemon'}")

    def _go_on(self) -> None:
        """Start every process that is to run."""
        self.observe()
        if self.daemon is None or not self.daemon.alive():
            self.start_daemon()
        if not self.ranks or not self._all_alive():
            self.end_launch()
            if not self.alone and self.noise.random() < 0.5 and self.expected.latest_is_on_a_tier():
                self._lose_node()
            self.start_launch()
        elif self.world == 1 and self.former is None and self.noise.random() < 0.15:
            self._launch_beside()

    def _launch_beside(self) -> None:
        """The latest launch is taken for dead, and lives on."""
        [self.former], self.ranks = self.ranks, []
        self.former.name = "the former rank"
        self.notes["launches beside one that lives on"] += 1
        self.zombies.add(self.launch)
        self.start_launch()

    def _end_former(self) -> None:
        if self.former:
            self.former.kill()
            self.observe()
        self.former = None

    def _intrude(self) -> None:
        """P10: a second daemon of the spool refuses, and the first one goes on."""
        first = self.daemon
        assert first is not None
        lock = self._await_lock(first)
        config, page, log = self.config, Page(), self.room / "second.log"
        log.unlink(missing_ok=True)
        pid = fork(page, log, lambda: daemon(config, page, 0.0, last=False))
        second, end = Victim("a second daemon", pid, page, time.monotonic(), log), time.monotonic() + DEADLINE
        try:
            while second.alive() and first.alive():
                if _says(lock) == str(pid) or time.monotonic() > end:
                    raise Lost(f"a second daemon runs on one spool\n{_tail(log)}")
                self.observe()
                time.sleep(_TICK)
        finally:
            second.kill()
        if first.alive():
            if not second.status or "a daemon holds it already" not in log.read_text():
                raise Lost(f"a second daemon ended with {second.status}, and did not say why\n{_tail(log)}")
            self.notes["second daemons refused"] += 1
            self.record("a second daemon refuses")

    def _await_lock(self, daemon: Victim) -> Path:
        lock = Path(self.config.spool) / ".tierd" / "lock"
        self.wait_for(lambda: _says(lock) == str(daemon.pid) or not daemon.alive(), "the daemon holds its spool")
        return lock

    def _all_alive(self) -> bool:
        return all(victim is not None and victim.alive() for victim in (self.daemon, *self.ranks))

    def _lose_node(self) -> None:
        """Its spool is gone with it. The next node is another one, which tiers' marks are not the own ones of."""
        self._end_former()
        self.kill("daemon")
        self.expected.lost_spool()
        shutil.rmtree(self.config.spool, ignore_errors=True)
        self.notes["spools lost with their node"] += 1
        self.record("the spool is lost")
        self.is_fresh_node = True
        self.start_daemon()

    def _strike(self) -> None:
        """Choose who dies and when, and wait for that."""
        noise, is_fresh_node, self.is_fresh_node = self.noise, self.is_fresh_node, False
        if is_fresh_node and noise.random() < 0.8:
            strike_restore(self)
            return
        if noise.random() < 0.1 or not self.kills:  # once in every life at least
            self._intrude()
        if self.former and (not self.former.alive() or noise.random() < 0.2):
            self._end_former()
        who = noise.choice(("writer", "writer", "writer", "daemon", "daemon", "both"))
        writers = [*self.ranks, *([self.former] if self.former else [])]
        victim = noise.choice(writers) if who != "daemon" else self.daemon
        assert victim is not None
        self.wait_for(lambda: victim.page.at_work or not victim.alive(), f"{victim.name} is at work")
        if noise.random() < 0.75:  # else it may be still at its start
            count = self.seen["returned"] + noise.randint(1, 4)
            self.wait_for(lambda: self.seen["returned"] >= count or not self._all_alive(), "some saves return")
        if noise.random() < (0.45 if victim.name != "daemon" else 0.7):
            self._at_a_call(victim)
        else:
            self._at_a_time(victim)
        if who == "both":
            order, pause = [victim.name, "daemon"], noise.random() * 0.05
            if noise.random() < 0.5:
                order.reverse()
            for name in order:
                self.kill(name, "both: ")
                self._await_more(pause)  # what the other is told of it
        else:
            self.kill(victim.name)
        if victim is self.former:
            self._end_former()
        elif victim.name != "daemon":
            self._await_more(noise.random() * 0.02)
            self.end_launch()
        if self.daemon and not self.daemon.alive():
            self._await_more(noise.random() * noise.choice((0.0, 0.05, 0.3)))  # until it is started again

    def _at_a_time(self, victim: Victim) -> None:
        noise = self.noise
        kind = noise.choice((None, None, "restored", "begun", "returned", "returned", "local", "tier"))
        if kind:
            count, end = self.seen[kind] + 1, time.monotonic() + 0.5
            while self.seen[kind] < count and time.monotonic() < end and victim.alive():
                self.observe()
                time.sleep(_TICK)
        self._await_more(noise.random() * noise.choice((0.005, 0.03, 0.25)))

    def _at_a_call(self, victim: Victim) -> None:
        noise = self.noise
        own = _DAEMONS if victim.name == "daemon" else _WRITERS
        few = noise.choice((None, *own))
        kinds = set(range(len(CALLS))) if few is None else {CALLS.index(few)}
        many = noise.choice((2, 6, 25)) if victim.name == "daemon" else 3
        verb = noise.choice((None, None, "persist", "flush", "prune")) if victim.name == "daemon" else None
        victim.page.arm(noise.randint(1, many), kinds, verb, after=noise.random() < 0.5)
        end = time.monotonic() + 1.5
        while self._all_alive() and time.monotonic() < end:
            self.observe()
            time.sleep(_TICK)

    def kill(self, name: str, why: str = "") -> None:
        """Kill one, unless it did it itself, and count that."""
        victim = next(one for one in (self.daemon, self.former, *self.ranks) if one and one.name == name)
        assert victim is not None
        by_itself = not victim.alive()
        hit = victim.page.hit
        if by_itself and not hit:
            return  # it ended by itself; `observe` judges that
        if not (victim.kill() or (by_itself and victim.killed)):
            return
        self.kills += 1
        self.excuse = time.monotonic()
        kind = "daemon" if name == "daemon" else "writer"
        self.notes[f"kills of the {kind}"] += 1
        if why:
            self.notes["of these, of both at once"] += 1
        self.notes[f"at the n-th call: {hit}" if hit else "at random times"] += 1
        for verb in victim.page.verbs:
            self.notes[f"{kind} in the middle of {verb}"] += 1
        self.record(f"{why}{name} killed{f' at {hit}' if hit else ''} in {', '.join(victim.page.verbs) or 'nothing'}")
        self.observe()

    def end_launch(self) -> None:
        """One rank is gone: a launcher ends the others, and reads what they were told."""
        for victim in self.ranks:
            if victim.alive():
                victim.kill()
                self.notes["(not counted: other ranks, killed by their launcher)"] += 1
        self.observe()
        self.ranks = []

    # -- what is seen -------------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Read what writers were told since, and judge it."""
        with self.log.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.daemon and not self.daemon.alive():
            if not self.daemon.killed:
                raise Lost(f"the daemon ended by itself, with {self.daemon.status}")
            self.expected.death = self.excuse = self.daemon.died
        for text in lines:
            self._saw(json.loads(text))

    def _saw(self, line: dict[str, Any]) -> None:
        what, number = line["what"], line["rank"]
        self.heard = time.monotonic()
        self.record(" ".join(f"{key}={value}" for key, value in line.items() if key not in ("at", "trace")))
        if line["launch"] == self.launch:
            self.seen[what] += 1
        if what == "restoring":
            self.expected.begin(line["launch"], number, lambda giver: self._waits_for(line["launch"], giver))
        elif what == "restored":
            self._restored(line)
        elif what == "failed":
            raise Lost(f"a save failed, though no disk did: {line}")
        elif what == "died":
            self._died(line)
        elif what == "untold" and self.resting:
            raise Lost(f"nothing fails any more, and a tier does not get what was saved: {line}")
        elif what not in ("ended", "untold"):
            self.expected.saw(number, what, line)

    def _waits_for(self, launch: int, giver: int) -> bool:
        """Whether a restore of `launch` has the daemon finish what `giver` gave it: it does so for the dead."""
        return launch not in self.unasking and (launch == giver or not {launch, giver} & self.zombies)

    def _restored(self, line: dict[str, Any]) -> None:
        found = (line["found"][0], line["found"][1]) if line["found"] else None
        number, launch = line["rank"], line["launch"]
        if found and not line["right"]:
            raise Lost(f"wrong bytes were restored: {line}")
        if found and line["skipped"] and any("corrupt" in one for one in line["skipped"]):
            raise Lost(f"something was called corrupt: {line}")
        if self.expected.wrong(launch, number, found):
            time.sleep(0.3)  # the daemon may have died so lately that the system does not say so yet
            if self.daemon and not self.daemon.alive():
                self.expected.death = self.daemon.died
        if why := self.expected.wrong(launch, number, found):
            raise Lost(f"{why}: {line}")
        self.restores[launch, number] += 1
        turn = launch, self.restores[launch, number]
        if self.found.setdefault(turn, found) != found:
            raise Lost(f"ranks of one launch restored different checkpoints: {self.found[turn]} and {found}")
        if found:
            self.expected.restored.add(found)
            self.notes[f"restores from {line['tier']}"] += 1
        else:
            self.notes["restores of nothing"] += 1

    def _died(self, line: dict[str, Any]) -> None:
        why = line["why"]
        excused = _EXCUSED if self.world == 1 else _EXCUSED_RANKS
        if self.daemon and not self.daemon.alive() and self.daemon.page.hit:  # at a call, and nobody has looked yet
            self.excuse = time.monotonic()
        if not why.startswith(excused) or self.excuse < self.launched - 5.0:
            raise Lost(f"a writer died of itself: {why}\n{line['trace']}")
        self.notes["launches ended by an error, and begun again"] += 1

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        begun = time.monotonic()
        while not condition():
            if time.monotonic() > max(begun, self.heard) + DEADLINE:
                raise Lost(f"nothing moved for {DEADLINE:.0f} s, and it did not come to be that {what}{self._stacks()}")
            self.observe()
            time.sleep(_TICK)

    def _await_more(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _TICK))
            self.observe()

    def _stacks(self) -> str:
        for victim in (self.daemon, *self.ranks):
            if victim and victim.alive():
                os.kill(victim.pid, signal.SIGUSR2)
        time.sleep(0.5)
        return ""

    # -- the end ------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        """Faults stop: a last launch saves some more, and then nothing but that is left."""
        self._end_former()
        self.end_launch()
        assert self.daemon is not None
        self.daemon.page.disarm()
        time.sleep(0.05)
        again = self.noise.random() < 0.5 or not self.daemon.alive()
        if again:
            self.kill("daemon")
            self.start_daemon(last=True)
        if self.notes["spools lost with their node"]:
            self._let_a_day_pass()
        self.excuse, self.resting = -1e9, True
        steps = max(self.keep.values()) + 2
        self.start_launch(steps)
        self.wait_for(lambda: not any(victim.alive() for victim in self.ranks), "the last launch ends")
        self.observe()
        if any(victim.status for victim in self.ranks):
            raise Lost(f"the last launch ended with {[victim.status for victim in self.ranks]}")
        self.ranks = []
        if not again:
            self._stop_daemon()
            self.start_daemon(last=True)
        end, fewest, newest = time.monotonic() + DEADLINE, math.inf, self.expected.newest
        while left := leftovers(Path(self.config.spool), self.tiers, self.keep, self.world, newest):
            if len(left) < fewest:  # it goes on
                end, fewest = time.monotonic() + DEADLINE, len(left)
            if quarantined := [one for one in left if "/quarantine/" in one]:
                raise Lost(f"something was called corrupt: {quarantined}")
            if time.monotonic() > end:
                self._stacks()
                raise Lost(f"{DEADLINE:.0f} s after faults stopped there is left: {left[:10]}")
            self.observe()
            time.sleep(0.05)
        self._stop_daemon()
        self.notes["chunks that nobody names, beside one that is lent"] += waiting(self.tiers)
        check_remains(Path(self.config.spool), self.tiers, self.seed)
        for path in self.room.glob("*.log"):
            text = path.read_text(errors="replace")
            if path.name == "daemon.log" and "Traceback" in text:
                raise Lost(f"the daemon met what it does not know: {text[text.index('Traceback') :][:4000]}")

    def _let_a_day_pass(self) -> None:
        """What a node that is gone said of its turns on the tiers counts for a day."""
        for tier in self.tiers.values():
            for kind in ("flushing", "pruning"):
                for path in [one for one in (tier / RUN / kind).rglob("*") if one.is_file()]:
                    name, _, stamp = path.name.rpartition(".")
                    when, _, who = stamp.partition("-")
                    path.rename(path.with_name(f"{name}.{int(when, 16) - 86_400_000:012x}-{who}"))

    def _stop_daemon(self) -> None:
        assert self.daemon is not None
        victim = self.daemon
        self._await_lock(victim)  # before that, nobody has said yet what the signal means
        os.kill(victim.pid, signal.SIGTERM)
        end = time.monotonic() + DEADLINE
        while victim.alive():
            if time.monotonic() > end:
                raise Lost(f"SIGTERM did not end the daemon within {DEADLINE:.0f} s{self._stacks()}")
            time.sleep(_TICK)
        if victim.status:
            raise Lost(f"SIGTERM ended the daemon with {victim.status}")
        self.daemon = None

    # -- the tale -----------------------------------------------------------------------------------------------------

    def record(self, line: str) -> None:
        self.story.append(f"{time.monotonic():.3f} {line}")

    def _tale(self) -> str:
        settings = (
            f"world {self.world}, keep {self.keep}, tiers {len(self.tiers)}, alone {self.alone}, slots {self.slots}"
        )
        logs = "\n".join(f"-- {path.name}\n{_tail(path)}" for path in sorted(self.room.glob("*.log")))
        return "\n".join([settings, *self.story[-60:], logs])


def _says(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-60:])
