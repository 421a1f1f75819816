"""What grows with the number of checkpoints and runs: restoring, the daemon's CPU for each flush, `ls` and `status`.

    python benchmarks/growth.py [--scale 1.0] [--only restore,steady,backlog,ls,status] [--dir DIR] [--out DIR]

Checkpoints are small, so that their bytes do not count. CPU seconds are this process's, with its threads: a
daemon's tier workers run in it. Each figure is the median of raw samples, all of which are in growth.json. Writes
growth.json and growth.md; a part that is not measured keeps its previous figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tierd
from tierd.cli.reading.read import ls
from tierd.core.config import Config, TierConfig
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import MANIFEST_NAME, VERSION, Chunk, File, Manifest, Stored, encode
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconcile import Reconciler
from tierd.daemon.status import status
from tierd.priority import hasten
from tierd.spool.file_io import digest
from tierd.spool.records import mark_saved
from tierd.spool.spool import Spool
from tierd.stores.file import FileStore

RUN, ATTEMPT, DATA = "run", "001800000001-00000001", b"x" * 2000
START = datetime(2026, 1, 1, tzinfo=UTC)
SAMPLES = 5
PATIENCE_S = 1800.0

Samples = list[dict[str, float]]


def part(step: int, run: str = RUN, rank: int = 0, world: int = 1) -> PartId:
    return PartId(CheckpointId(run, ATTEMPT, step), rank, world)


def manifest(which: PartId, *, stored: bool) -> bytes:
    raw, step = digest(DATA), which.checkpoint.step
    key = f"chunks/{which.checkpoint.name}/{which.rank:05}/{raw}.raw"
    lies = Stored(codec="raw", size=len(DATA), xxh3_128=raw, key=key) if stored else None
    file = File(path="weights.bin", size=len(DATA), chunks=(Chunk(size=len(DATA), xxh3_128=raw, stored=lies),))
    return encode(
        Manifest(
            version=VERSION,
            run=which.checkpoint.run,
            step=step,
            attempt=ATTEMPT,
            resumed_from=None,
            rank=which.rank,
            world_size=which.world,
            created=(START + timedelta(minutes=step)).isoformat(),
            writer="tierd",
            metrics={"loss": 1 / (step + 1)},
            files=(file,),
        )
    )


def in_spool(spool: Spool, which: PartId) -> None:
    """Commit a part without making it durable."""
    stage = spool.control / "stage" / which.checkpoint.name
    stage.mkdir()
    (stage / "weights.bin").write_bytes(DATA)
    (stage / MANIFEST_NAME).write_bytes(manifest(which, stored=False))
    spool.path(which).parent.mkdir(parents=True, exist_ok=True)
    stage.rename(spool.path(which))


def on_tier(tier: Path, which: PartId) -> None:
    for key, data in ((which.manifest_key, manifest(which, stored=True)),):
        (tier / key).parent.mkdir(parents=True, exist_ok=True)
        (tier / key).write_bytes(data)


def measured(call: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def restores(home: Path, count: int) -> Samples:
    """A restore by a new `Checkpointer`, from a spool of so many checkpoints, without a daemon."""
    with tierd.Checkpointer(home, run=RUN, to=()) as checkpointer:
        checkpointer.save(count, {"losses": [1.0, 2.0]})
    spool = Spool(home)
    for step in range(count - 1):
        in_spool(spool, part(step))

    def restore() -> None:
        with tierd.Checkpointer(home, run=RUN, to=()) as checkpointer:
            found = checkpointer.restore({"losses": None})
        assert found and found.step == count

    return [measured(restore) for _ in range(SAMPLES)]


def daemon_of(home: Path) -> tuple[Reconciler, FileStore]:
    spool, tier = Spool(home / "spool"), home / "tier"
    tier.mkdir(exist_ok=True)
    keep = RetentionPolicy(keep_last=1_000_000)
    store = FileStore(tier)
    mark_saved(spool.control, part(0))
    settings = Config(
        spool=str(spool.root),
        tier=(TierConfig(name="tier", url=f"file://{tier}", retention=keep),),
        retention=keep,
        min_free_percent=0.0,
        scrub="0s",
    )
    return Reconciler(settings, spool, {"tier": store}), store


async def flushed(daemon: Reconciler, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await daemon.until(lambda: daemon.journal.counters["flushed"] >= count)


async def steady(home: Path, count: int) -> Samples:
    """One save after another, each flushed before the next, with so many checkpoints in the spool and on the tier."""
    daemon, store = daemon_of(home)
    for step in range(count):
        in_spool(daemon.spool, part(step))
        on_tier(home / "tier", part(step))
    samples: Samples = []
    hasten()  # what is measured must not wait for other work on this machine
    work = asyncio.ensure_future(daemon.run())
    await asyncio.sleep(3.0)  # what has just changed is looked at again for two seconds
    for step in range(count, count + 4 * SAMPLES):
        wall, cpu, before = time.perf_counter(), time.process_time(), daemon.journal.counters["flushed"]
        in_spool(daemon.spool, part(step))
        daemon.wake()
        await flushed(daemon, before + 1)
        await asyncio.sleep(0.3)  # what follows a flush is part of it
        samples.append({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await store.aclose()
    return samples


async def backlog(home: Path, count: int) -> Samples:
    """So many checkpoints wait in the spool, and a tier that wants all of them is empty; by tenths of them."""
    daemon, store = daemon_of(home)
    for step in range(count):
        in_spool(daemon.spool, part(step))
    samples: Samples = []
    hasten()
    work = asyncio.ensure_future(daemon.run())
    for tenth in range(1, 11):
        wall, cpu = time.perf_counter(), time.process_time()
        await flushed(daemon, count * tenth // 10)
        took = time.perf_counter() - wall, time.process_time() - cpu
        samples.append({"wall_s": took[0] / (count / 10), "cpu_s": took[1] / (count / 10)})
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await store.aclose()
    return samples


def listed(home: Path, runs: int, checkpoints: int, ranks: int) -> Samples:
    for run in range(runs):
        for step in range(checkpoints):
            for rank in range(ranks):
                on_tier(home, part(step, f"run{run:04}", rank, ranks))
    out = io.StringIO()

    def look() -> None:
        with contextlib.redirect_stdout(out):
            ls(url=[f"file://{home}"], spool=None, config=None, run=None, key_file=None, json=False)

    samples = [measured(look) for _ in range(2)]
    assert len(out.getvalue().splitlines()) >= 2 * runs * checkpoints
    return samples


async def asked(home: Path, runs: int, checkpoints: int) -> Samples:
    """The daemon's answer to `status`: the first is computed from scratch, later ones from the changes."""
    daemon, store = daemon_of(home)
    for run in range(runs):
        for step in range(checkpoints):
            in_spool(daemon.spool, part(step, f"run{run:04}"))
    await daemon.look("tier")
    samples = []
    for _ in range(SAMPLES):
        samples.append(measured(lambda: status(daemon, 0, 0)))
        await daemon.look("tier")
    await store.aclose()
    return samples


def cases(scale: float) -> dict[str, list[tuple[str, Callable[[Path], Samples]]]]:
    """By part of the page: the name of each row, and the function that measures it."""

    def few(count: int) -> int:
        return max(1, int(count * scale))

    runs = few(200)
    return {
        "restore": [(f"{n:,}", lambda home, n=n: restores(home, n)) for n in (1, few(100), few(1000), few(5000))],
        "steady": [(f"{n:,}", lambda home, n=n: asyncio.run(steady(home, n))) for n in (20, few(80), few(1000))],
        "backlog": [(f"{few(2000):,}", lambda home: asyncio.run(backlog(home, few(2000))))],
        "ls": [(f"{runs} x 50 x 8", lambda home: listed(home, runs, 50, 8))],
        "status": [("100 x 20", lambda home: asyncio.run(asked(home, 100, 20)))],
    }


TITLES = {
    "restore": "A restore from a spool of so many checkpoints",
    "steady": "The daemon, for each save and its flush, with so many checkpoints in the spool and on the tier",
    "backlog": "The daemon, for each flush of a backlog of so many, by tenths of it; all were sent",
    "ls": "`tierd ls` over runs x checkpoints x ranks on a file tier",
    "status": "The daemon's answer to `status` with runs x checkpoints in its spool",
}


def page(result: dict[str, Any]) -> str:
    lines = [
        "# Costs that grow with the number of checkpoints",
        "",
        f"`python benchmarks/growth.py`, {result['created']}: {result['machine']}. Medians of the samples in",
        "`growth.json`; the machine was shared, so trust CPU seconds and ratios. One checkpoint has 2 kB.",
    ]
    for name, rows in result["parts"].items():
        lines += ["", f"## {TITLES[name]}", "", "| | CPU | wall | CPU, least to most |", "| --- | --- | --- | --- |"]
        for row, samples in rows.items():
            cpu = sorted(1000 * one["cpu_s"] for one in samples)
            wall = 1000 * statistics.median(one["wall_s"] for one in samples)
            lines.append(
                f"| {row} | {statistics.median(cpu):,.1f} ms | {wall:,.1f} ms | {cpu[0]:,.1f} to {cpu[-1]:,.1f} ms |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="measure so many times as many checkpoints and runs")
    parser.add_argument("--only", default="restore,steady,backlog,ls,status")
    parser.add_argument("--dir", default=None, help="where spools and tiers are made")
    parser.add_argument("--out", default="benchmarks/results", type=Path)
    asked_for = parser.parse_args()
    path = asked_for.out / "growth.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name, rows in cases(asked_for.scale).items():
        if name not in asked_for.only.split(","):
            continue
        parts[name] = {}
        for row, measure in rows:
            with tempfile.TemporaryDirectory(dir=asked_for.dir) as home:
                parts[name][row] = measure(Path(home))
            print(name, row, parts[name][row], flush=True)
    machine = f"{os.cpu_count()} cores shared with other work, Python {platform.python_version()}"
    order = {name: parts[name] for name in TITLES if name in parts}
    result = {"created": datetime.now(UTC).date().isoformat(), "machine": machine, "parts": order}
    path.write_text(json.dumps(result, indent=1) + "\n")
    (asked_for.out / "growth.md").write_text(page(result))


if __name__ == "__main__":
    main()
