"""`make demo`: proves, for real and in about a minute, that a killed run goes on as if nothing had happened.

Invariant: it ends with 0 only if everything it claims was seen to be so: the corrupted checkpoint was skipped, and
every loss and every sample of the interrupted run equals the uninterrupted one's, bit for bit. All else ends with 1 and
one line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demo import compare, damage, table
from examples.demo.compare import Launch
from examples.demo.processes import Child, DemoFailed, started, wait_until
from tierd.core.errors import DaemonUnavailable, TierdError
from tierd.core.ids import CheckpointId
from tierd.core.planning.place import SPOOL
from tierd.daemon.status_file import read_status
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import ReportRequest, StatusRequest
from tierd.spool.spool import Spool

RUN = "demo"
TIER = "disk"
_WIDTH = 118  # columns where nobody looks
_CONFIG = """\
spool = {spool}

[retention]                  # of the spool: a copy goes only after a tier's copy was verified
keep_last = 2

[[tier]]
name = "{tier}"
url = {url}

[tier.retention]
keep_last = 3
keep_every_steps = {keep_every}
keep_best = {{ metric = "loss" }}
"""


class Demo:
    """The steps of the demo, in the order in which they happen."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.home = Path(options.home).absolute()
        self.logs, self.runs = self.home / "logs", self.home / "runs"
        self.spool, self.tier = self.home / "spool", self.home / "tier"
        self.console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        self._begun = time.monotonic()

    def run(self) -> None:
        """Everything; raises `DemoFailed` at the first thing that is not as it should be."""
        self._prepare()
        reference = self._reference()
        command = ("tierd", "run", "--config", str(self.home / "tierd.toml"))
        with started("daemon", self.logs, *command) as daemon:
            self._wait_for_daemon(daemon)
            killed = self._train_and_kill(daemon)
            # It first writes and flushes what the trainer had handed over. Else that could come after the damage, or
            # the trainer's successor would find its last snapshot in the daemon's memory, and need neither copy.
            daemon.terminate(self.options.patience)
        # The last state has them, and the next daemon has only its own.
        first_events = (read_status(Spool(self.spool).control) or {}).get("events", [])
        victim = self._corrupt_newest()
        with started("restarted daemon", self.logs, *command) as daemon:
            self._wait_for_daemon(daemon)
            resumed = self._resume(daemon, victim)
            self._compare(reference, killed, resumed)
            self._show(daemon, killed, resumed, first_events)
            daemon.terminate(self.options.patience)
        self._say("daemon: told to stop, ended with 0; configuration, logs, spool and tier are left to look at")
        self._note(str(self.home))

    def _prepare(self) -> None:
        file = self.home / "tierd.toml"
        if self.home.exists() and not file.exists():
            raise DemoFailed(f"{self.home} is there, and no demo made it: remove it, or name another --home")
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        # A JSON string is a TOML string.
        spool, url = json.dumps(str(self.spool), ensure_ascii=False), json.dumps(self.tier.as_uri())
        file.write_text(_CONFIG.format(spool=spool, tier=TIER, url=url, keep_every=3 * self.options.every), "utf-8")
        for directory in (self.logs, self.runs, self.tier):
            directory.mkdir()

    # -- one step each ----------------------------------------------------------------------------------------------

    def _reference(self) -> Launch:
        self._say(f"reference: {self.options.steps} steps without interruption, for comparison")
        arguments = self._trainer("reference", self.home / "reference-spool", "--alone")
        with started("reference trainer", self.logs, "examples.demo.train", *arguments) as trainer:
            trainer.end(self.options.patience)
        reference = self._read("reference")
        if reference.last != self.options.steps:
            raise DemoFailed(f"the reference made {reference.last} steps, not {self.options.steps}")
        self._note(f"loss {reference.loss(1):.3f} -> {reference.loss(reference.last):.3f}")
        return reference

    def _wait_for_daemon(self, daemon: Child) -> None:
        wait_until("the daemon answers", self._daemon_answers, self.options.patience, daemon)
        self._say(f"daemon: process {daemon.pid}, {self.spool} to {self.tier}")

    def _train_and_kill(self, daemon: Child) -> Launch:
        kill_at = self.options.kill_at
        self._say(f"trainer: the same run again, to be killed at step {kill_at}, in the middle of an epoch")
        with started("trainer", self.logs, "examples.demo.train", *self._trainer("killed", self.spool)) as trainer:
            wait_until(
                f"the trainer is at step {kill_at}",
                lambda: self._read("killed").last >= kill_at,
                self.options.patience,
                trainer,
                daemon,
            )
            trainer.must_run()
            trainer.kill()
            self._relay(trainer)
        killed = self._read("killed")
        if killed.last >= self.options.steps:
            raise DemoFailed("the trainer was done before it could be killed")
        self._note(f"SIGKILL to process {trainer.pid}, after step {killed.last}")
        return killed

    def _corrupt_newest(self) -> CheckpointId:
        """Flip a bit of both copies of the newest checkpoint."""
        victim = max((part.checkpoint for part in Spool(self.spool).parts(RUN)), default=None)
        if victim is None:
            raise DemoFailed("the killed trainer left no complete checkpoint")
        self._say(f"damage: one bit of the newest checkpoint, step {victim.step}, in the spool and on the tier")
        for path in (
            damage.in_spool(self.spool, RUN, victim.name),
            damage.on_tier(self.tier, RUN, victim.name),
        ):
            self._note(damage.flip_bit(path))
        return victim

    def _resume(self, daemon: Child, victim: CheckpointId) -> Launch:
        self._say("trainer: started again, with the same command")
        module, arguments = "examples.demo.train", self._trainer("resumed", self.spool)
        if self.options.forget:
            module, arguments = "examples.demo.sabotage", [self.options.forget, *arguments]
        with started("restarted trainer", self.logs, module, *arguments) as trainer:
            trainer.end(self.options.patience, daemon)
            self._relay(trainer)
        resumed = self._read("resumed")
        passed = [one for one in resumed.skipped if (one["step"], one["attempt"]) == (victim.step, victim.attempt)]
        if resumed.resumed is None or not passed:
            raise DemoFailed(f"the corrupted checkpoint, step {victim.step}, was not skipped: {resumed.resumed}")
        if resumed.resumed["step"] >= victim.step or resumed.failed_saves:
            raise DemoFailed(f"resumed from {resumed.resumed}; {resumed.failed_saves} saves failed")
        return resumed

    def _compare(self, reference: Launch, killed: Launch, resumed: Launch) -> None:
        different = compare.difference(reference, [killed, resumed])
        if different:
            raise DemoFailed(f"the resumed run is another run, first at {different}")
        again = len(killed.steps.keys() & resumed.steps.keys())
        self._say(
            f"equal, bit for bit: {len(reference.steps)} losses, learning rates and batches of samples, among them "
            f"{again} steps made twice, and the final parameters"
        )
        self._note(f"sha256 {resumed.final}")

    def _show(self, daemon: Child, killed: Launch, resumed: Launch, first_events: list[dict[str, Any]]) -> None:
        """The table, once the daemon has nothing left to do."""
        wait_until("the daemon has nothing left to do", self._settled, self.options.patience, daemon)
        events = [*first_events, *self._ask(StatusRequest())["status"]["events"]]
        saves = [*killed.saves, *resumed.saves]
        report = self._ask(ReportRequest(run=RUN))["report"]
        self.console.print()
        self.console.print(table.checkpoints(RUN, saves, report, events, [SPOOL, TIER]))
        self.console.print()

    # -- what they are made of --------------------------------------------------------------------------------------

    def _trainer(self, name: str, spool: Path, *more: str) -> list[str]:
        sizes = {name: getattr(self.options, name) for name in ("steps", "every", "epoch_steps", "width", "depth")}
        flags = [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return ["--spool", str(spool), "--run", RUN, "--log", str(self.runs / f"{name}.jsonl"), *flags, *more]

    def _read(self, name: str) -> Launch:
        return compare.read(f"{name} run", self.runs / f"{name}.jsonl")

    def _ask(self, request: Any) -> dict[str, Any]:
        with DaemonConnection(Spool(self.spool)) as link:
            return link.ask(request, self.options.patience)

    def _daemon_answers(self) -> bool:
        try:
            self._ask(StatusRequest())
        except DaemonUnavailable:
            return False
        return True

    def _report(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask(ReportRequest(run=RUN))["report"]["checkpoints"]
        return found

    def _settled(self) -> bool:
        """Nothing to prune, nothing to flush. The report comes first: it makes the daemon look."""
        copies = [copy for one in self._report() for copy in one["copies"]]
        tiers = self._ask(StatusRequest())["status"]["tiers"]
        return all(copy["keep"] for copy in copies) and not any(one["pending_parts"] or one["doing"] for one in tiers)

    def _say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self._begun:5.1f} s", text, "bold")

    def _note(self, text: str) -> None:
        self._print("", text, "dim")

    def _print(self, margin: str, text: str, style: str) -> None:
        line = Table.grid(padding=(0, 2))
        line.add_column(width=7)
        line.add_row(Text(margin), Text(text.replace(f"{Path.cwd()}/", ""), style))
        self.console.print(line)

    def _relay(self, child: Child) -> None:
        for line in child.said():
            self._note(line)


def parse() -> argparse.Namespace:
    """The command line; its defaults are what `make demo` runs."""
    parser = argparse.ArgumentParser(prog="examples.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--home", default=".demo", help="work directory, REMOVED at the start")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--epoch-steps", type=int, default=40)
    parser.add_argument("--kill-at", type=int, default=67)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patience", type=float, default=120, help="seconds that any one wait may take")
    parser.add_argument("--forget", choices=("rng", "data", "optimizer", "scheduler"), help="sabotage the resume")
    return parser.parse_args()


def main() -> int:
    """Run the demo; its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    try:
        Demo(parse()).run()
    except (DemoFailed, TierdError, TimeoutError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
