"""A run: its rows, and arms taking turns.

Invariant: an arm's turn has its own worker, and for tierd its own daemon and empty spool; turns go round by round,
every round beginning with another arm. A turn that fails is a line in its row's errors, and the others go on.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import checkpoints
import msgspec
from host import Bucket, Daemon, busy_seconds

from tierd.bench.process_counters import cpu_seconds, sync_filesystem
from tierd.bench.worker_pipe import WorkerPipe

Say = Callable[[str], None]
Figures = dict[str, float]

PEER, OURS = "peer.py", "ours.py"


class Case(msgspec.Struct):
    """One row: an arm at one size; a sample of each figure for every round.

    Attributes:
        how: what a reader has to know about this row alone.
        errors: what went wrong, one line a failed turn.
    """

    part: str
    gigabytes: float
    kind: str
    place: str
    arm: str
    raw_bytes: int = 0
    how: str = ""
    samples: dict[str, list[float]] = msgspec.field(default_factory=dict)
    errors: list[str] = msgspec.field(default_factory=list)


@dataclass
class Bench:
    """What every part needs.

    Attributes:
        rounds: of each part.
        window: seconds of training alone in part e.
        save: writes the results so far, after every turn.
        peer_packages: what the peer's worker said that it runs on.
    """

    directory: Path
    bucket: Bucket
    env: Mapping[str, str]
    peer_python: str
    rounds: Mapping[str, int]
    window: float
    say: Say
    cases: list[Case] = field(default_factory=list)
    peer_packages: dict[str, str] = field(default_factory=dict)
    dropped: bool = True
    save: Callable[[], None] = lambda: None

    def worker(self, script: str, home: Path) -> closing[WorkerPipe]:
        """A worker, for the time of a `with`."""
        command = [self.peer_python if script == PEER else sys.executable, str(Path(__file__).parent / script)]
        return closing(WorkerPipe(script, command, home / "worker.log", self.env, 1800.0))

    def daemon(self, home: Path, *urls: str) -> closing[Daemon]:
        """A daemon of the turn's spool, for the time of a `with`."""
        return closing(Daemon(home / "spool", list(urls), self.env, home / "daemon.log"))

    @contextmanager
    def emptied(self, prefix: str) -> Iterator[None]:
        """Whatever is put there within a `with` is deleted after it."""
        try:
            yield
        finally:
            self.bucket.empty(prefix)

    def file(self, case: Case) -> Path:
        """The checkpoint that the row is about."""
        return checkpoints.file_of(self.directory, case.kind, case.gigabytes)

    def raw_bytes(self, kind: str, gigabytes: float) -> int:
        """Of its tensors: the file less its header."""
        path = checkpoints.file_of(self.directory, kind, gigabytes)
        with path.open("rb") as file:
            return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")

    def home(self) -> Path:
        """An empty directory for one turn."""
        home = self.directory / "turn"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        return home

    def turns(self, cases: Sequence[Case], turn: Callable[[Case, Path], Figures]) -> None:
        """Every case once a round, each round beginning with another one."""
        self.cases += cases
        rounds = self.rounds[cases[0].part]
        for number in range(rounds):
            first = number % len(cases)
            for case in (*cases[first:], *cases[:first]):
                what = f"{case.part}: {case.gigabytes:g} GB {case.kind}, {case.place}: {case.arm}"
                self.say(f"{what}: round {number + 1} of {rounds}")
                home = self.home()
                try:
                    for figure, value in turn(case, home).items():
                        case.samples.setdefault(figure, []).append(value)
                except Exception as error:
                    reason = " / ".join(str(error).splitlines()[-3:])
                    case.errors.append(f"{type(error).__name__}: {reason}")
                    self.say(f"{what}: failed: {error}")
                finally:
                    shutil.rmtree(home, ignore_errors=True)
                    sync_filesystem(self.directory)
                self.save()


class Costs:
    """CPU seconds of a turn's own processes, and of everybody else meanwhile."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._begun, self._own, self._all = time.monotonic(), sum(map(cpu_seconds, pids)), busy_seconds()

    def figures(self) -> Figures:
        own = sum(map(cpu_seconds, self._pids)) - self._own
        others = busy_seconds() - self._all - own
        return {"cpu_s": own, "others_cores": others / (time.monotonic() - self._begun)}
