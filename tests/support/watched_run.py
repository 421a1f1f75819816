"""A watched directory whose units were taken into a spool and flushed to a tier, without waiting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.world import Daemon

from tierd.cli import run
from tierd.core.config import WatchConfig
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory
from tierd.daemon.intake.intake import Intake
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.daemon.spool_observer import SpoolObserver
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.watching.checkpoint_names import KnownCheckpoints, known_checkpoints, stepless_run

RUN = "r"


class Reported:
    """What a watch reported."""

    def __init__(self) -> None:
        self.parts: list[PartId] = []
        self.failures: list[Exception] = []
        self.reasons: dict[str, str] = {}
        self.doubts: dict[str, CheckpointId] = {}

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        if isinstance(outcome, Exception):
            self.failures.append(outcome)
        else:
            self.parts.append(part)

    def report_refused(self, path: str, why: str) -> None:
        self.reasons[path] = why

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        self.doubts[path] = checkpoint


def watched(root: Path, *more: str) -> int:
    """Watch a directory until it is idle, with the tier beside it; return the exit code."""
    return run(["watch", str(root), "--run", RUN, "--to", f"file://{root.parent}/tier", "--until-idle", *more])


def tier_of(write: Callable[[Path], object], home: Path) -> Path:
    """A new tier below `home` with the checkpoints that a program wrote and a watch took."""
    root, spool = home / "out", Spool(home / "spool")
    root.mkdir()
    write(root)
    assert take(spool, root).parts
    flush(spool, home / "tier")
    return home / "tier"


def observed(spool: Spool, run: str = RUN) -> KnownCheckpoints:
    """What a daemon that starts anew knows of the run."""
    return known_checkpoints(Inventory(SpoolObserver(spool).observe(), {}), run)


def take(spool: Spool, root: Path) -> Reported:
    """Take every unit that is there, those without a step as the run of their own."""
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0):
        watch.observe(observed(spool), now_s)
    if watch.leaves_stepless:
        stepless = UnitWatch(spool, root, stepless_run(RUN), reported, settle_s=0.0, stepless=True)
        for now_s in (1.0, 2.0):
            stepless.observe(observed(spool, stepless_run(RUN)), now_s)
    return reported


def flush(spool: Spool, tier: Path) -> None:
    """Have a daemon flush what the spool has."""
    tier.mkdir(exist_ok=True)
    with Daemon(spool.root, lambda: {"file": FileStore(tier)}) as daemon:
        daemon.settle()


def files(root: Path) -> dict[str, bytes]:
    """Every file below a directory but tierd's own."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    names = {str(path.relative_to(root)): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".tierd-")}


@contextmanager
def watching(
    home: Path, name: str, directory: str = "out", *, series: int | None = None, **options: object
) -> Iterator[Daemon]:
    """A daemon with the spool `home/name` that watches a directory of `home` and flushes to `home/tier`."""
    watch = WatchConfig(directory=str(home / directory), run=RUN, series=series)
    with Daemon(home / name, lambda: {"file": FileStore(home / "tier")}, watch=(watch,), **options) as daemon:

        async def begin() -> None:
            daemon.intake = Intake(daemon.reconciler, lambda: None)  # type: ignore[attr-defined]
            daemon.task = daemon.loop.create_task(daemon.intake.run())  # type: ignore[attr-defined]

        async def end() -> None:
            daemon.task.cancel()  # type: ignore[attr-defined]
            await asyncio.gather(daemon.task, return_exceptions=True)  # type: ignore[attr-defined]

        daemon.call(begin())
        try:
            yield daemon
        finally:
            daemon.call(end())


class Home:
    """A program's directory, the spool that takes its checkpoints, and a tier."""

    def __init__(self, home: Path) -> None:
        self.root, self.tier, self.spool = home / "out", home / "tier", Spool(home / ".out.tierd")
        self.root.mkdir()

    def taken(self) -> None:
        assert take(self.spool, self.root).parts
        flush(self.spool, self.tier)

    def prepare(self, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
        capsys.readouterr()
        assert run(["prepare", str(self.root), "--run", RUN, "--to", str(self.tier), "--json"]) == 0
        return {one["path"]: one for one in json.loads(capsys.readouterr().out)["units"]}
