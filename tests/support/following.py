"""A follower in a process of its own, and checkpoints that arrive on its tier one after the other."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from support.chunk_keys import chunk_files
from support.world import commit, part

import tierd
from tierd.core.ids import CheckpointId
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.reading.command_follower import CommandFollower
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

RUN = "run"


def put(home: Path, steps: Sequence[int], world: int = 1) -> Path:
    """A tier with these checkpoints; each rank's part holds the files of `support.world.content`."""
    spool, tier = Spool(home / "spool"), home / "full"
    tier.mkdir(exist_ok=True)

    async def work() -> None:
        store = FileStore(tier)
        for step in steps:
            for rank in range(world):
                which = part(step, rank=rank, world=world)
                commit(spool, which)
                await flush(spool, which, TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())
    return tier


def arrive(full: Path, tier: Path, step: int) -> None:
    """Copy one checkpoint to another tier as a flush does: its chunks, then its manifests, each by a rename."""
    manifests = sorted((full / RUN / "manifests" / part(step).checkpoint.name).iterdir())
    for source in [*chunk_files(full, RUN, step), *manifests]:
        target = tier / source.relative_to(full)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.part")
        shutil.copyfile(source, unfinished)
        unfinished.rename(target)


def name(step: int) -> CheckpointId:
    return part(step).checkpoint


def follow_forever(tier: str, home: str, words: list[str], period_s: float) -> None:
    """Follow with a command in a process group of its own, until killed or interrupted."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job that a shell runs in the background
    with tierd.open(f"file://{tier}", RUN) as reader:
        CommandFollower(reader.tiers, Path(home), words, lambda delivery: None).run(
            latest=False, period_s=period_s, once=False
        )
