"""Launchers: a training under each launcher is hurt at a seeded place and launched again: torchrun (one agent, two as
two nodes, and 1 to 4 as nodes that die and come), an emulated `srun` with requeue, `mp.spawn`, Open MPI, MPICH,
Accelerate, Lightning and Ray Train. Divided launches have no launcher: forked ranks, of which each launch has another
number on other nodes, hold replicated tensors, or DTensors on a mesh of two dimensions, and their own.

A rank is killed, stopped, or raises, before, in or after a save or in a restore; where nodes have daemons of their own,
a daemon is killed or stopped, or a node is lost with its spool. In most divided launches a chunk on the tier is spoiled
that the newest checkpoint needs. In restores of divided launches on new nodes, a rank is killed while ranks send each
other chunks, or its connections are shut down; or it, or its daemon, is killed or stopped at a chunk that comes past
the spool. Required: ranks resume together, from nothing older
than what all were told is durable, under a later attempt that they share; the end is that of an uninterrupted run, bit
for bit; and tierd keeps no rank waiting for more than 60 s.
"""

from __future__ import annotations

import importlib.util
import shutil

from faults.hands import Trial, spread
from faults.rounds import Round

UNIT, SHORT, GATE = "launch cycles", 23, 1000

NAMES = (
    *("torchrun", "torchrun-group", "spawn", "srun", "srun-two-nodes", "torchrun-two-agents"),
    *("open-mpi", "open-mpi-group", "mpich", "mpich-group", "accelerate", "lightning", "ray"),
)
ELASTIC, DIVIDED = "torchrun-elastic", "divided"
_ELASTIC_EVERY = 50  # seeds: one such cycle takes a minute or two
_DIVIDED_EVERY = 10  # seeds, but for the elastic ones
DIVIDED_FROM = 1_000_000  # all seeds from here on are divided launches
_LIMIT_S = 900  # of one cycle
_WAITS = (1, 5, 15, 30, 60)  # seconds

MET = (
    *(f"{name}: cycles" for name in (*NAMES, ELASTIC, DIVIDED)),
    *(f"kill, {place}" for place in ("before", "saving", "saved", "restoring")),
    *(
        f"{what}, saving"
        for what in ("raise", "stop", "stop-kill", "daemon-kill", "daemon-stop", "daemon-kill+kill", "node-lost")
    ),
    "spoiled, a chunk on the tier",
    *("kill, sending", "disconnect, sending", "kill, filling", "daemon-kill, filling", "daemon-stop, filling"),
    "replicated chunks were sent between ranks",
)


def missing() -> str | None:
    lacking = [name for name in ("mpirun.openmpi", "mpiexec.hydra") if not shutil.which(name)]
    return f"not installed: {', '.join(lacking)}: apt-get install openmpi-bin mpich" if lacking else None


def run(work: Round) -> None:
    absent = {name for name in ("accelerate", "lightning", "ray") if importlib.util.find_spec(name) is None}
    for name in sorted(absent):
        work.skip(f"{name} is not installed: make loaders/ready")

    def prepare() -> Trial:
        from support import divided_launches, elastic_agents, launchers

        known = {one.name: one for one in (*launchers.PLAIN, *launchers.MPI, *launchers.LIBRARIES)}
        assert set(NAMES) == set(known)

        def trial(seed: int) -> tuple[int, list[str]]:
            name = name_of(seed)
            if name in absent:
                return 1, []
            home = work.room / str(seed)
            home.mkdir()
            if name in known:
                done, waited = launchers.cycle(known[name], seed, home)
            else:
                done, waited = (divided_launches if name == DIVIDED else elastic_agents).cycle(seed, home)
            shutil.rmtree(home, ignore_errors=True)
            longest = next((most for most in _WAITS if waited <= most), "more than 60")
            notes = [f"{name}: cycles", *done, *(f"{name}: {one.split(',')[0]}" for one in done)]
            return 1, [*notes, f"the longest wait is at most {longest} s"]

        return trial

    spread(work, prepare, deadline_s=_LIMIT_S, batch=1)


def name_of(seed: int) -> str:
    """The launcher of this seed, each in turn."""
    if seed < DIVIDED_FROM and seed % _ELASTIC_EVERY == _ELASTIC_EVERY - 1:
        return ELASTIC
    if seed >= DIVIDED_FROM or seed % _DIVIDED_EVERY == _DIVIDED_EVERY - 1:
        return DIVIDED
    return NAMES[seed % len(NAMES)]
