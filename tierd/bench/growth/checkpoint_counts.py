"""What grows with the number of checkpoints and runs: restoring, the daemon's CPU for each flush, `ls` and `status`.

Checkpoints are small, so that their bytes do not count. A daemon's tier workers run in this process, so its CPU seconds
are theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import tierd
from tierd.bench.growth.growth_result import Clock, Figures, Rows, Samples, run_tierd, timed
from tierd.core.config import Config, TierConfig
from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import MANIFEST_NAME, Chunk, File, Manifest, StoredChunk
from tierd.core.manifest_codec import decode, encode
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.daemon_status import make_status
from tierd.daemon.reconciler import Reconciler
from tierd.spool.file_io import digest
from tierd.spool.run_records import mark_saved
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.threads import mark_foreground

RUN, ATTEMPT, DATA = "run", "001800000001-00000001", b"x" * 2000
START = datetime(2026, 1, 1, tzinfo=UTC)
ROUNDS, FEW_CHECKPOINTS = 5, 20
PATIENCE_S = 1800.0
TIERD_NAME = "tierd"


def make_part(step: int, run: str = RUN, rank: int = 0, world: int = 1) -> PartId:
    return PartId(CheckpointId(run, ATTEMPT, step), rank, world)


def encoded_manifest(which: PartId, *, stored: bool) -> bytes:
    raw, step = digest(DATA), which.checkpoint.step
    key = chunk_key(which, raw, "raw")
    location = StoredChunk(codec="raw", size=len(DATA), xxh3_128=raw, key=key) if stored else None
    file = File(path="weights.bin", size=len(DATA), chunks=(Chunk(size=len(DATA), xxh3_128=raw, stored=location),))
    metrics, created = {"loss": 1 / (step + 1)}, START + timedelta(minutes=step)
    return encode(Manifest.of(which, None, metrics, created, "", (file,)))


def put_in_spool(spool: Spool, which: PartId) -> None:
    """Commit a part without making it durable."""
    stage = spool.control / "stage" / which.checkpoint.name
    stage.mkdir()
    (stage / "weights.bin").write_bytes(DATA)
    (stage / MANIFEST_NAME).write_bytes(encoded_manifest(which, stored=False))
    spool.path(which).parent.mkdir(parents=True, exist_ok=True)
    stage.rename(spool.path(which))


def put_on_tier(tier: Path, which: PartId) -> None:
    path = tier / which.manifest_key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded_manifest(which, stored=True))


def put_runs_on_tier(tier: Path, runs: int, checkpoints: int, ranks: int) -> None:
    for run, step, rank in itertools.product(range(runs), range(checkpoints), range(ranks)):
        put_on_tier(tier, make_part(step, f"run{run:04}", rank, ranks))


def spool_restores(home: Path, count: int) -> Samples:
    """A restore by a new `Checkpointer`, from a spool of so many checkpoints, without a daemon.

    `least` restores from a spool of one, and lists the names of so many, which no restore can leave out.
    """
    full_spool, single_spool = home / "many", home / "one"
    for spool in (full_spool, single_spool):
        with tierd.Checkpointer(spool, run=RUN, to=()) as checkpointer:
            checkpointer.save(count, {"losses": [1.0, 2.0]})
    for step in range(count - 1):
        put_in_spool(Spool(full_spool), make_part(step))

    def restore(spool: Path) -> None:
        with tierd.Checkpointer(spool, run=RUN, to=()) as checkpointer:
            restored = checkpointer.restore({"losses": None})
        assert restored and restored.step == count

    def restore_floor() -> None:
        restore(single_spool)
        _names(full_spool)

    samples: Samples = {TIERD_NAME: [], "least": []}
    for _ in range(ROUNDS):
        samples[TIERD_NAME].append(timed(partial(restore, full_spool))[1])
        samples["least"].append(timed(restore_floor)[1])
    return samples


def _names(spool: Path) -> list[str]:
    return os.listdir(spool / RUN)  # noqa: PTH208, because a Path for each name costs more than listing


def tier_directories(home: Path, count: int = 1) -> list[Path]:
    """The directories of so many tiers."""
    return [home / "tier", *(home / f"tier{number}" for number in range(2, count + 1))]


def make_daemon(home: Path, tiers: int = 1) -> tuple[Reconciler, list[FileStore]]:
    """A daemon over the spool `home/spool`, with tiers in directories that keep everything."""
    spool, keep = Spool(home / "spool"), RetentionPolicy(keep_last=1_000_000)
    places = {path.name: path for path in tier_directories(home, tiers)}
    for path in places.values():
        path.mkdir(exist_ok=True)
    stores = {name: FileStore(path) for name, path in places.items()}
    mark_saved(spool.control, make_part(0))
    settings = Config(
        spool=str(spool.root),
        tier=tuple(TierConfig(name=name, url=f"file://{path}", retention=keep) for name, path in places.items()),
        retention=keep,
        min_free_percent=0.0,
        scrub="0s",
    )
    return Reconciler(settings, spool, stores), list(stores.values())


@asynccontextmanager
async def running(daemon: Reconciler, stores: Sequence[FileStore]) -> AsyncIterator[None]:
    """Run a daemon, in this process and context, until the block ends; then close its stores."""
    mark_foreground()  # what is measured must not wait for other work on this machine
    work = asyncio.ensure_future(daemon.run())
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for store in stores:
            await store.aclose()


async def wait_flushed(daemon: Reconciler, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await daemon.until(lambda: daemon.journal.counters["flushed"] >= count)


async def steady_flushes(home: Path, count: int) -> Samples:
    """One save after another, each flushed before the next, with so many checkpoints in the spool and on the tier.

    `least` is the same with `FEW_CHECKPOINTS`, and lists once the names of so many in the spool and on the tier.
    """
    full_home, small_home = home / "many", home / "few"
    samples: Samples = {
        TIERD_NAME: await _flushes(full_home, count),
        "least": await _flushes(small_home, FEW_CHECKPOINTS),
    }
    for figures in samples["least"]:
        listed = timed(lambda: (_names(full_home / "spool"), [*os.walk(full_home / "tier" / "manifests")]))[1]
        figures.update({figure: value + listed[figure] for figure, value in figures.items()})
    return samples


async def _flushes(home: Path, count: int) -> list[Figures]:
    home.mkdir()
    daemon, stores = make_daemon(home)
    for step in range(count):
        put_in_spool(daemon.spool, make_part(step))
        put_on_tier(home / "tier", make_part(step))
    samples: list[Figures] = []
    async with running(daemon, stores):
        await asyncio.sleep(3.0)  # what has just changed is looked at again for two seconds
        for step in range(count, count + 4 * ROUNDS):
            clock, before = Clock(), daemon.journal.counters["flushed"]
            put_in_spool(daemon.spool, make_part(step))
            daemon.wake()
            await wait_flushed(daemon, before + 1)
            await asyncio.sleep(0.3)  # what follows a flush is part of it
            samples.append(clock.read())
    return samples


async def backlog_flushes(home: Path, count: int) -> Samples:
    """So many checkpoints wait in the spool, and a tier that wants all of them is empty; by tenths of them."""
    daemon, stores = make_daemon(home)
    for step in range(count):
        put_in_spool(daemon.spool, make_part(step))
    samples: list[Figures] = []
    async with running(daemon, stores):
        for tenth in range(1, 11):
            clock = Clock()
            await wait_flushed(daemon, count * tenth // 10)
            samples.append({figure: value / (count / 10) for figure, value in clock.read().items()})
    return {TIERD_NAME: samples}


def ls_command(home: Path, runs: int, checkpoints: int, ranks: int) -> Samples:
    put_runs_on_tier(home, runs, checkpoints, ranks)
    samples: Samples = {TIERD_NAME: [], "least": []}
    for _ in range(2):
        clock = Clock()
        lines = run_tierd("ls", f"file://{home}")
        samples[TIERD_NAME].append(clock.read())
        assert lines.count(b"\n") >= runs * checkpoints
        count, floor = timed(partial(_count_listed, home))
        assert count == runs * checkpoints
        samples["least"].append(floor)
    return samples


def _count_listed(home: Path) -> int:
    """List every directory, and read and check one manifest of each checkpoint, which no `ls` can leave out."""
    count = 0
    for directory, _, names in os.walk(home):
        if names:
            decode(Path(directory, min(names)).read_bytes())
            count += 1
    return count


async def status_answers(home: Path, runs: int, checkpoints: int) -> Samples:
    """The daemon's answer to `status`: the first is computed from scratch, later ones from the changes."""
    daemon, (store,) = make_daemon(home)
    for run in range(runs):
        for step in range(checkpoints):
            put_in_spool(daemon.spool, make_part(step, f"run{run:04}"))
    await daemon.observe("tier")
    samples = []
    for _ in range(ROUNDS):
        samples.append(timed(lambda: make_status(daemon, 0, 0))[1])
        await daemon.observe("tier")
    await store.aclose()
    return {TIERD_NAME: samples}


def parts(scale: float) -> dict[str, Rows]:
    """This module's parts of the page, with so many times as many checkpoints and runs."""

    def scaled_count(count: int) -> int:
        return max(1, int(count * scale))

    runs = scaled_count(200)
    return {
        "restore": [
            (f"{n:,}", partial(spool_restores, count=n))
            for n in (1, scaled_count(100), scaled_count(1000), scaled_count(5000))
        ],
        "steady": [
            (f"{n:,}", lambda home, n=n: asyncio.run(steady_flushes(home, n)))  # type: ignore[misc]
            for n in (FEW_CHECKPOINTS, scaled_count(80), scaled_count(1000))
        ],
        "backlog": [(f"{scaled_count(2000):,}", lambda home: asyncio.run(backlog_flushes(home, scaled_count(2000))))],
        "ls": [(f"{runs} x 50 x 8", partial(ls_command, runs=runs, checkpoints=50, ranks=8))],
        "status": [("100 x 20", lambda home: asyncio.run(status_answers(home, 100, 20)))],
    }
