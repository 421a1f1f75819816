"""What a flush costs: to one tier and to two, of bytes that do not compress, and after a change of some rows.

The daemon runs in this process, on tiers in directories. Figures are by GB of state. `read_bytes` leaves out what a
flush reads back from each tier to verify it, which is what the tiers then hold. `raw` reads the same file, puts it in
pieces and reads them back, which is the least that a verified flush of bytes that are not encoded can do.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import torch

import tierd
from tierd.bench.growth.checkpoints import OURS, RUN, daemon_of, flushed, tiers_of
from tierd.bench.growth.measured import Clock, Figures, Rows, Samples
from tierd.bench.procfs import drop_cache
from tierd.priority import hasten
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.file import FileStore

GIGABYTES, ROUNDS, PIECE = 0.25, 3, 32 << 20
ROWS, _WIDTH, _CHANGED = 100_000, 256, 0.05
_UPDATES = 18  # two times as many as share one whole chunk


def _state(kind: str) -> dict[str, torch.Tensor]:
    """Weights as training leaves them, or bytes that no codec shortens."""
    draw, count = torch.Generator().manual_seed(1), int(GIGABYTES * 1e9)
    if kind == "noise":
        return {"data": torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)}
    return {f"layer.{n}": torch.randn(count // 64, generator=draw) * 0.02 for n in range(16)}


async def _flush(home: Path, tiers: int) -> Figures:
    """Flush what the spool holds to so many tiers that are empty."""
    hasten()  # here, because the context of a caller would stay hasty
    daemon, stores = daemon_of(home, tiers)
    clock, read = Clock(), _read_bytes()
    work = asyncio.ensure_future(daemon.run())
    await flushed(daemon, tiers)
    figures, read = clock.read(), _read_bytes() - read
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    for store in stores:
        await store.aclose()
    return {**figures, "read_bytes": read - sum(map(_stored, tiers_of(home, tiers)))}


def _read_bytes() -> float:
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return float(line.split()[1])


def flushes(home: Path, kind: str, tiers: int) -> Samples:
    """Flushes of one state, each to new tiers, in turns with `raw`."""
    state = _state(kind)
    samples: Samples = {OURS: [], "raw": []}
    for number in range(ROUNDS):
        place = home / str(number)
        place.mkdir()
        with tierd.Checkpointer(place / "spool", RUN) as checkpointer:
            checkpointer.save(1, state).wait()
        drop_cache(place)
        samples[OURS].append(_by_gigabyte(asyncio.run(_flush(place, tiers))))
        drop_cache(place)
        samples["raw"].append(_by_gigabyte(asyncio.run(_raw(place))))
    return samples


def _by_gigabyte(figures: Figures) -> Figures:
    return {name: value / GIGABYTES for name, value in figures.items()}


async def _raw(place: Path) -> Figures:
    hasten()
    part = Spool(place / "spool").parts()[0]
    path = max((place / "spool").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    assert part.checkpoint.run == RUN
    (place / "raw").mkdir()
    store, memory = FileStore(place / "raw"), memory_for(PIECE)
    clock = Clock()
    with path.open("rb", buffering=0) as file:
        for number in range(-(-os.fstat(file.fileno()).st_size // PIECE)):
            size = file.readinto(memory)
            assert size
            name = digest(memory[:size])
            await store.put(f"{number}", memory[:size])
            assert digest(await store.get(f"{number}", memory[:size])) == name
    await store.aclose()
    return clock.read()


def changed_rows(home: Path, rows_in_all: int = ROWS) -> Samples:
    """The share of an embedding that is sent again after some of its rows have changed, update by update."""
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(rows_in_all, _WIDTH, generator=draw) * 0.02
    samples: list[Figures] = []
    for number in range(1 + _UPDATES):
        if number:
            rows = torch.randperm(rows_in_all, generator=draw)[: int(rows_in_all * _CHANGED)]
            table[rows] += 1e-3
        with tierd.Checkpointer(home / "spool", RUN) as checkpointer:
            checkpointer.save(number + 1, {"embedding": table}).wait()
        before, clock = _stored(home / "tier"), Clock()
        asyncio.run(_flush(home, 1))
        samples.append({**clock.read(), "sent_share": (_stored(home / "tier") - before) / table.nbytes})
    mean = {name: sum(sample[name] for sample in samples[1:]) / _UPDATES for name in samples[1]}
    return {"first": samples[:1], "again": samples[1:], "mean of those": [mean]}


def _stored(tier: Path) -> int:
    return sum(path.stat().st_size for path in tier.rglob("*") if path.is_file())


def parts() -> dict[str, Rows]:
    """This module's parts of the page."""
    return {
        "flush": [
            ("weights, one tier", partial(flushes, kind="weights", tiers=1)),
            ("weights, two tiers", partial(flushes, kind="weights", tiers=2)),
            ("noise, one tier", partial(flushes, kind="noise", tiers=1)),
        ],
        "rows": [(f"{_CHANGED:.0%} of {ROWS:,} rows of {4 * _WIDTH:,} bytes", changed_rows)],
    }
