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

from faults.rounds import Mutant, Round
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

# Each finds its mutants by several of its seeds: what a seed does changes with every change of tierd.
_CUTS = "simulation --seed 15 --trials 4000"
_STORIES = "simulation --seed 1 --trials 8000"
_OUTAGES = "simulation --seed 101 --trials 6000"
_LIVES = "simulation --seed 1000000 --trials 150000"
MUTANTS = (
    Mutant(
        "a stage's directories are not synced before the rename",
        "tierd/spool/stage.py",
        "            sync_directory(Path(directory))\n",
        "            pass\n",
        _CUTS,
        "lost in a power cut",
    ),
    Mutant(
        "a part's entry is not synced after the rename",
        "tierd/spool/stage.py",
        "            os.fsync(shelf)\n",
        "",
        _CUTS,
        "lost in a power cut",
    ),
    Mutant(
        "a file is not synced",
        "tierd/spool/file_io.py",
        "        os.fsync(self._fd)\n        return File(",
        "        return File(",
        _CUTS,
        "lost in a power cut",
    ),
    Mutant(
        "a new spool is not synced",
        "tierd/spool/root.py",
        "        sync_directory(path.parent)\n    except OSError as error:",
        "        pass\n    except OSError as error:",
        _CUTS,
        "lost in a power cut",
    ),
    Mutant(
        "a tier that does not answer is empty",
        "tierd/daemon/tiers/observations.py",
        "        except TierdError:\n            self._saw(tier, begun, None)\n            raise\n",
        "        except TierdError:\n            self._saw(tier, begun, Place())\n",
        _OUTAGES,
        "was right there | which no tier holds",
    ),
    Mutant(
        "what was put is not read back",
        "tierd/daemon/transfer/chunk_upload.py",
        "            await self._read_back(key, stored)\n",
        "            pass\n",
        "pytest tests/daemon/transfer/test_flush.py -k read_back_as_it_was_put",
    ),
    Mutant(
        "a manifest that was put is not read back",
        "tierd/daemon/tiers/objects.py",
        "    if await store.put(key, data) and not reread:\n",
        "    if await store.put(key, data) or not reread:\n",
        "pytest tests/daemon/transfer/test_flush.py -k spoiled_on_its_way",
    ),
    Mutant(
        "a prune deletes chunks before the manifests",
        "tierd/daemon/tiers/prune.py",
        "            await store.delete(manifests)\n",
        "            await store.delete([key async for key in _lying(store, run, going)])\n"
        "            await store.delete(manifests)\n",
        _STORIES,
        "which is not right there",
    ),
    Mutant(
        "a prune spares nothing that others name",
        "tierd/daemon/tiers/deletions.py",
        "return mark not in self.listed.named.under(owner)",
        "return True",
        _STORIES,
        "which is not right there",
    ),
    Mutant(
        "a tier holds nothing for another",
        "tierd/core/planning/verdicts.py",
        "    names = tuple(other for other in names if other not in demand.inventory.silent)\n",
        "    names = ()\n",
        _LIVES,
        "wants and lacks",
    ),
    Mutant(
        "ages trust every launch's clock",
        "tierd/core/retention/ages.py",
        "        pauses_s = min(largest[ahead] - smallest[_WRONG - ahead] for ahead in range(_WRONG + 1))\n",
        "        pauses_s = largest[0] - smallest[0]\n",
        _LIVES,
        "its own rules want | should hold",
    ),
    Mutant(
        "nothing tells of what was given up",
        "tierd/daemon/reconciling/pruner.py",
        '            journal.record("given up", tier, checkpoint, why)\n',
        "            pass\n",
        _LIVES,
        "no alert names it",
    ),
    Mutant(
        "whoever holds a run's newest part prunes it",
        "tierd/core/planning/janitor.py",
        "max(known) in mine and run not in inventory.spool.restored",
        "max(known) in mine",
        _LIVES,
        "reading deletes",
    ),
    Mutant(
        "the rooms of what a spool remembers of runs are not durable",
        "tierd/spool/records.py",
        "    for directory in (control.parent, control, control / room):\n",
        "    for directory in (control / room,):\n",
        "pytest tests/spool/test_records.py -k recorded_once",
    ),
    Mutant(
        "what one tier of several holds leaves the spool as finished, though another wants it",
        "tierd/core/planning/plan.py",
        "        leaving = leaving and not self._is_owed()\n",
        "        leaving = leaving\n",
        "pytest tests/core/planning/test_eviction.py -k finished_run_stays",
        "it is still to be sent there",
    ),
    Mutant(
        "a finished run never leaves the spool",
        "tierd/core/planning/plan.py",
        "        leaving = leaving and not self._is_owed()\n",
        "        leaving = False\n",
        _LIVES,
        "which is finished",
    ),
    Mutant(
        "no head is written on a tier",
        "tierd/daemon/tiers/heads.py",
        "    return None if [one.launches for one in there] == [head.launches] else head\n",
        "    return None if head.launches else head\n",
        _CUTS,
        "0 heads can be read",
    ),
    Mutant(
        "a full disk gives up nothing",
        "tierd/daemon/spool_space.py",
        "        for checkpoint in self._evictable(inventory):\n",
        "        for checkpoint in ():\n",
        "pytest tests/daemon/test_spool_space.py -k give_way_first",
    ),
    Mutant(
        "a daemon without a configuration obeys nobody",
        "tierd/core/retention/policies.py",
        "    stored = list(_standing(inventory, config, run, place, here)) if here else []\n",
        "    stored = []\n",
        _LIVES,
        "which its own rules want",
    ),
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
