"""Start, watch and kill the launches of a checked loop.

Invariant: no process, workers included, outlives its launch. A wait ends when no new record line has arrived for
`patience` seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tierd.check.launch_records import KillPoint, RankRecord, RecordLine
from tierd.check.witness import WitnessOrders
from tierd.core.errors import LoopFailed, TierdError
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool

_CHILD_CODE = "import sys; sys.path[:] = {path!r}; from tierd.check.witness import main; main(sys.argv[1])"
_TAIL_LINES = 15  # lines of a failed launch's output in the error message
_POLL_S = 0.02


@dataclass
class LaunchedRank:
    """One process of a launch, and its record so far."""

    process: subprocess.Popen[bytes]
    record_path: Path
    output_path: Path
    rank_record: RankRecord = field(default_factory=RankRecord)
    _read_bytes: int = 0

    def poll(self) -> bool:
        """Read the new lines of the record, and return whether there were any."""
        with suppress(FileNotFoundError), self.record_path.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().splitlines(keepends=True)
            complete = [line for line in lines if line.endswith(b"\n")]
            for line in complete:
                self.rank_record.add(msgspec.json.decode(line, type=RecordLine))
            self._read_bytes += sum(map(len, complete))
            return bool(complete)
        return False

    @property
    def exit_status(self) -> int | None:
        """The exit status, as `Popen.returncode`; None while the process runs.

        The process is not reaped, so that its pid cannot be reused.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def stop(self) -> None:
        """Send SIGKILL to the process and its workers, and return when it has ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.poll()

    def tail(self) -> str:
        """Return the last lines of the process's output."""
        with suppress(FileNotFoundError):
            return "\n".join(self.output_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return ""


@dataclass(frozen=True)
class CheckedLoop:
    """The loop under check, which can be launched repeatedly."""

    target: str
    ranks: int
    steps: int
    home: Path  # the directory for records and output
    patience: float  # seconds without a new step after which a launch counts as hung
    on_line: Callable[[str], None]
    captured: tuple[int, ...] = ()  # the steps after which the state is captured, in addition to the last one
    every_save: bool = False  # whether to capture it at each save as well
    is_later: bool = False  # whether the next launch is not the run's first

    def with_captures(self, captured: Iterable[int]) -> CheckedLoop:
        """Return the same loop with the state captured after these steps and at every save."""
        return replace(self, captured=tuple(captured), every_save=True)

    def launch(self, name: str, spool: Path, kill: KillPoint | None, victim: int, margin: int) -> list[RankRecord]:
        """Run one launch until rank `victim` was killed at `kill`, or until every rank has finished.

        Args:
            name: the launch's name for its files and errors.
            margin: samples that each rank reads after the last step, unless its function ends.

        Raises:
            LoopFailed: the launch ended, failed or hung before; the message has the end of its output.
        """
        self.on_line(f"{name}: {f'to be killed at {kill}' if kill else f'to step {self.steps}'}")
        port = _free_port()
        ranks: list[LaunchedRank] = []
        try:
            for rank in range(self.ranks):
                ranks.append(self._start(name, spool, rank, kill if rank == victim else None, port))
            self._watch(name, ranks, kill, ranks[victim], margin)
        finally:
            for rank_process in ranks:
                rank_process.stop()
        return [process.rank_record for process in ranks]

    def _start(self, name: str, spool: Path, rank: int, kill: KillPoint | None, port: int) -> LaunchedRank:
        path = list(dict.fromkeys(str(Path(entry).absolute()) for entry in ["", *sys.path]))
        files = self.home / f"{name.replace(' ', '-')}-rank-{rank}"
        record, output = files.with_suffix(".jsonl"), files.with_suffix(".out")
        orders = self._orders(spool, record, kill)
        command = [sys.executable, "-c", _CHILD_CODE.format(path=path), msgspec.json.encode(orders).decode()]
        with output.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(rank, self.ranks, port) | {"TMPDIR": str(self._scratch())},
                start_new_session=True,  # a process group of its own, so that its workers are killed with it
            )
        return LaunchedRank(process, record, output)

    def _orders(self, spool: Path, record: Path, kill: KillPoint | None) -> WitnessOrders:
        return WitnessOrders(
            self.target,
            str(spool),
            str(record),
            os.getpid(),
            self.steps,
            str(kill) if kill else None,
            self.captured,
            self.every_save,
            self.is_later,
        )

    def _scratch(self) -> Path:
        """Return the directory for the loop's temporary files.

        SIGKILL leaves such files, so they are removed with all others.
        """
        path = self.home / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def _watch(
        self, name: str, ranks: Sequence[LaunchedRank], kill: KillPoint | None, victim: LaunchedRank, margin: int
    ) -> None:
        heard = time.monotonic()
        while True:
            # Before the records, because the record of an ended process is then complete.
            ends = [process.exit_status for process in ranks]
            new = [process.poll() for process in ranks]
            if any(new):
                heard = time.monotonic()
            if victim.rank_record.kill_point is not None:
                if victim.exit_status is not None:
                    return
            elif all(self._has_finished(process, end, margin) for process, end in zip(ranks, ends, strict=True)):
                if kill is not None:
                    raise LoopFailed(self._not_killed_message(name, ranks, kill))
                return
            else:
                for rank, (rank_process, end) in enumerate(zip(ranks, ends, strict=True)):
                    if end is not None and not self._has_finished(rank_process, end, margin):
                        raise LoopFailed(self._ended_message(name, rank, rank_process, end))
            if time.monotonic() - heard > self.patience:
                raise LoopFailed(self._hung_message(name, ranks))
            time.sleep(_POLL_S)

    def _has_finished(self, rank: LaunchedRank, end: int | None, margin: int) -> bool:
        if (
            not rank.rank_record.is_finished
        ):  # because a slow machine captures the state long after it recorded the step
            return False
        return end is not None or rank.rank_record.samples_after(self.steps) >= margin

    # -- error messages ---------------------------------------------------------------------------------------------

    def _ended_message(self, name: str, rank: int, process: LaunchedRank, end: int) -> str:
        how = f"was killed by signal {-end}" if end < 0 else f"ended with exit code {end}"
        last = process.rank_record.last_step
        early = last is None or last < self.steps
        before = f"before step {self.steps}" if early else "before its state was taken"
        return f"{name}: rank {rank} {how} {_progress(process)}, {before}{_output_tail(process)}"

    def _hung_message(self, name: str, ranks: Sequence[LaunchedRank]) -> str:
        slowest = min(
            range(len(ranks)), key=lambda rank: -1 if (last := ranks[rank].rank_record.last_step) is None else last
        )
        return (
            f"{name}: nothing new for {self.patience:g} s; rank {slowest} stands {_progress(ranks[slowest])} "
            f"(--patience says how long to wait){_output_tail(ranks[slowest])}"
        )

    def _not_killed_message(self, name: str, ranks: Sequence[LaunchedRank], kill: KillPoint) -> str:
        saves = sorted({step for process in ranks for step in process.rank_record.saved_steps})
        explanation = f"it saved steps {', '.join(map(str, saves))}" if saves else "it never saved through tierd"
        return f"{name}: came to step {self.steps} and could not be killed at {kill}: {explanation}"


def _progress(process: LaunchedRank) -> str:
    last = process.rank_record.last_step
    return "before its first tierd.observe" if last is None else f"after step {last}"


def _output_tail(process: LaunchedRank) -> str:
    tail = process.tail()
    return f"; its output ends with:\n{tail}" if tail else "; it printed nothing"


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun gives to a rank; for a single rank, the environment without a change."""
    if ranks == 1:
        return dict(os.environ)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    given = {name: str(value) for name, value in numbers.items()}
    return environment | given | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop_daemons(home: Path) -> None:
    """End the daemons that the loop started for spools under `home`."""
    for control in home.rglob(".tierd"):
        try:
            with DaemonConnection(Spool(control.parent, write=False)) as link:
                pid = int(link.ask(StatusRequest(), 10)["status"]["pid"])
        except (TierdError, TimeoutError, OSError):
            continue  # no daemon runs there any more
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            # It is not a child of this process, and must not write after the directory is removed.
            for _ in range(100):
                os.kill(pid, 0)
                time.sleep(_POLL_S)
