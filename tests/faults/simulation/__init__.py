"""The real reconcile loop, flush, fetch, scrub, prune and restore, simulated: one seeded loop, a clock that jumps,
disks that lose at a power cut what was not synced, and tiers whose answers get lost. Beside these trials are whole
lives (`life`): several tiers, job after job, readers, small disks, judged by `keeper`.

A unit is one callback of the loop in the time in which faults happen.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from faults.hands import Trial, spread
from faults.rounds import Round
from faults.simulation.trial import LIVES, play

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
    "summaries put",
    *(f"store faults: {one}" for one in ("fails", "lost", "late", "stalls", "partial", "spoils", "flips", "slow down")),
)

_DEADLINE_S = 600  # of a trial, on a machine that others load; most take one or two


def missing() -> str | None:
    return None if os.path.isdir("/dev/shm") else "no /dev/shm for the simulated disks"


def run(work: Round) -> None:
    def prepare() -> Trial:
        logging.disable(logging.CRITICAL)

        def trial(seed: int) -> tuple[int, list[str]]:
            steps, count = play(seed)
            is_beside = seed >= LIVES > work.first  # what it counts is not of this round
            return 0 if is_beside else steps, ["lives" if seed >= LIVES else "trials", *count.elements()]

        return trial

    spread(work, prepare, deadline_s=_DEADLINE_S, batch=1, seeds=_mixed(work))


def _mixed(work: Round) -> Iterator[int]:
    """The round's seeds, and after every third of them that of a whole life."""
    for seed in work.seeds():
        yield seed
        if work.only is None and seed < LIVES and seed % 3 == 2:
            yield LIVES + seed // 3
