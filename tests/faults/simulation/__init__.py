"""The real reconcile loop, flush, fetch, scrub, prune and restore, simulated: one seeded loop, a clock that jumps,
disks that lose at a power cut what was not synced, and tiers whose answers get lost. Beside these trials are whole
lives (`life`): several tiers, job after job, readers, small disks, judged by `keeper`.

`trial` plays one trial, `workers` are the processes that play them.

A unit is one callback of the loop in the time in which faults happen.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

from faults.rounds import Round
from faults.simulation.trial import LIVES
from faults.simulation.workers import Worker

UNIT = "simulated fault steps"
SHORT = 40_000
GATE = 1_000_000
MET = (
    *("lives", "life: crashes", "life: daemons killed", "life: daemons without a configuration", "life: readings"),
    *("life: saves that met a full disk", "life: outages longer than anything is held", "life: daemon: given up"),
    "life: launches with a wrong clock",
    *("crashes", "crashes while flushing", "crashes while pruning", "crashes while restoring", "nodes lost"),
    *("rot on a tier", "rot in a spool", "restores", "restores elsewhere", "restores that another node was asked for"),
    *("lost: a manifest", "lost: a head on a tier", "lost: a head in a spool"),
    *("restores that raised", "daemon: pruned", "daemon: quarantined", "daemon: scrub_findings"),
    *("daemon: repaired_chunks", "daemon: healed_chunks", "daemon: flushed_shared_bytes", "patches put"),
    *(f"store faults: {one}" for one in ("fails", "lost", "late", "stalls", "partial", "spoils", "flips", "slow down")),
)


def missing() -> str | None:
    return None if os.path.isdir("/dev/shm") else "no /dev/shm for the simulated disks"


def run(work: Round) -> None:
    """Workers do the trials, one each of this machine's cores: a seed's order of events hangs on the hashes of strings,
    which a process is given when it starts."""
    seeds = _mixed(work)
    workers = [Worker() for _ in range(1 if work.only is not None else os.cpu_count() or 1)]
    try:
        busy = [worker for worker in workers if worker.give(next(seeds, None))]
        while busy:
            select.select([worker.out for worker in busy], [], [], max(0.0, min(worker.left() for worker in busy)))
            for worker in list(busy):
                answer = worker.take()
                if answer is None:
                    continue
                if answer["lost"]:
                    work.lost(worker.seed, answer["lost"], answer["steps"])
                else:
                    work.notes.update(answer["count"])
                    beside = worker.seed >= LIVES > work.first  # what it counts is not of this round
                    work.passed(0 if beside else answer["steps"], "lives" if worker.seed >= LIVES else "trials")
                if not worker.give(next(seeds, None)):
                    busy.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _mixed(work: Round) -> Iterator[int]:
    """The round's seeds, and after every third of them that of a whole life."""
    for seed in work.seeds():
        yield seed
        if work.only is None and seed < LIVES and seed % 3 == 2:
            yield LIVES + seed // 3
