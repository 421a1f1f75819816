"""Launchers that start the training of `support.launched`, kills at seeded places, and what must be true afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support import agents, launched, srun
from support.launched import NODE_LOST, OF_DAEMON, OF_RANK, ORDERS, PLACES, WORLD, Fault, Orders
from support.ranks import environment
from support.waiting import wait_until

import tierd

SCRIPT = launched.__file__
STEPS, EVERY = 12, 3
RETRIES = 12  # launches that a launcher over several nodes makes at most: a stopped daemon ends some
TIMEOUT = 150.0  # seconds that one call of a launcher may take
_LONGEST = 60.0  # seconds for which tierd may keep a rank waiting


@dataclass(frozen=True)
class Launcher:
    """How two ranks are started, and what a loop over it needs.

    Attributes:
        command: of one call; None in it stands for the script's own path.
        numbers, group: as `Orders` has them.
        restarts: it starts the ranks again by itself.
        attempt: the ranks cannot talk, so each launch is given one, as the how-to says.
        variables: more of the environment.
        timeout: seconds that one call may take.
        tier: the ranks are on nodes of their own, with one tier.
    """

    name: str
    command: Sequence[str]
    numbers: tuple[str, str] = ("RANK", "WORLD_SIZE")
    group: str = ""
    restarts: bool = False
    attempt: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    timeout: float = TIMEOUT
    tier: bool = False

    def __str__(self) -> str:
        return self.name


class Resumed(NamedTuple):
    rank: int
    step: int
    attempt: str
    world: int


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


TORCHRUN = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3", SCRIPT)
SPAWN = (
    "from torch import multiprocessing; from support import launched; multiprocessing.spawn(launched.spawned, nprocs=2)"
)
PLAIN = (
    Launcher("torchrun", TORCHRUN, restarts=True),
    Launcher(
        "torchrun-group",
        TORCHRUN,
        group="env",
        restarts=True,
        variables=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
    ),
    Launcher("spawn", python("-c", SPAWN), group="file"),
    Launcher(
        "srun",
        python(srun.__file__, str(WORLD), "3", *python(SCRIPT)),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        restarts=True,
    ),
    Launcher(
        "srun-two-nodes",
        python(srun.__file__, str(WORLD), str(RETRIES), *python(SCRIPT)),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        restarts=True,
        variables=(("TIERD_TEST_NODES", str(WORLD)),),
        timeout=400.0,
        tier=True,
    ),
    Launcher(
        "torchrun-two-agents",
        python(agents.__file__, str(WORLD), str(RETRIES), SCRIPT),
        group="env",
        restarts=True,
        variables=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
        timeout=400.0,
        tier=True,
    ),
)
_OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", *python(SCRIPT))
_OPEN_MPI_NUMBERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_HYDRA = ("mpiexec.hydra", "-n", "2", *python(SCRIPT))
MPI = (
    Launcher("open-mpi", _OPEN_MPI, _OPEN_MPI_NUMBERS, attempt=True),
    Launcher("open-mpi-group", _OPEN_MPI, _OPEN_MPI_NUMBERS, group="file"),
    Launcher("mpich", _HYDRA, ("PMI_RANK", "PMI_SIZE"), attempt=True),
    Launcher("mpich-group", _HYDRA, ("PMI_RANK", "PMI_SIZE"), group="file"),
)
_ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--num_processes=2")
LIBRARIES = (
    Launcher(
        "accelerate",
        python(*_ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no", SCRIPT, "accelerate"),
        group="others",
    ),
    Launcher("lightning", python(SCRIPT, "lightning"), group="others"),
    Launcher(
        "ray",
        python(SCRIPT, "ray"),
        group="others",
        restarts=True,
        variables=(("RAY_TRAIN_V2_ENABLED", "1"), ("RAY_USAGE_STATS_ENABLED", "0")),
        timeout=600.0,  # a dozen processes, each of which loads Ray
    ),
)


def faults(launcher: Launcher, seed: int) -> tuple[Fault, ...]:
    """What this seed does: to one rank or its node's daemon, at a step whose checkpoint is due, past the first
    checkpoint in most cases, or in a restore."""
    chance = random.Random(f"{launcher} {seed}")
    what = chance.choice(OF_RANK + ((*OF_DAEMON, NODE_LOST) if launcher.tier else ()))
    rank = chance.randrange(WORLD)
    # Ranks that cannot talk do not wait for each other, and those of one call do not come back for one that ended.
    if chance.random() < 0.15 and not launcher.attempt:
        return (Fault(rank, 0, "restoring", what),)
    return (Fault(rank, EVERY * chance.randint(1, STEPS // EVERY), chance.choice(PLACES), what),)


def cycle(launcher: Launcher, seed: int, home: Path, tier: str = "") -> tuple[list[str], float]:
    """Launch, be hurt, launch again; then the last state is that of an uninterrupted run, bit for bit.

    Args:
        tier: the URL of the tier, where the launcher has nodes; a directory below `home` if none is given.

    Returns:
        What was done, and the longest wait in seconds.

    Raises:
        AssertionError: it is not, or ranks resumed from different checkpoints or from an older one than both were told
            is durable, or shared no attempt, or waited for too long. It names the launcher and the seed.
    """
    planned = faults(launcher, seed)
    reported = f"launcher {launcher}, seed {seed}, {planned}"
    deadly, exact = sum(one.is_deadly for one in planned), all(one.is_exact for one in planned)
    if launcher.tier and not tier:
        (home / "tier").mkdir()
        tier = f"file://{home / 'tier'}"
    lost = any(one.what == NODE_LOST for one in planned)  # then only a tier keeps what it has taken
    for number in range(deadly + 1 if exact else deadly + RETRIES):
        orders = Orders(
            home=str(home),
            numbers=launcher.numbers,
            group=launcher.group,
            steps=STEPS,
            every=EVERY,
            faults=planned,
            meeting=str(home / f"meeting-{number}"),
            attempt=tierd.new_attempt() if launcher.attempt else None,
            tier=tier if launcher.tier else "",
            durable=tier.partition(":")[0] if lost else "local",
        )
        status, said = call(launcher, orders)
        if status == 0:
            break
        assert not launcher.restarts, f"{reported}: status {status}\n{said}"
    done = len(list(home.glob("killed-*")))
    assert (status, done) == (0, len(planned)), f"{reported}: launch {number}, status {status}, {done} killed\n{said}"
    assert launcher.restarts or not exact or number == deadly, f"{reported}: {number} launches ended by themselves"
    judge((home / "log").read_text().splitlines(), reported, deadly + 1 if exact else None)
    final = [(home / f"final-{rank}").read_text() for rank in range(WORLD)]
    assert final == launched.uninterrupted(STEPS, bool(launcher.group)), f"{reported}: not as in an uninterrupted run"
    waited = judge_waits((home / "waits").read_text().splitlines(), reported)
    return [f"{one.what}, {one.place}" for one in planned], waited


def judge(log: list[str], reported: str, launches: int | None) -> None:
    """What all ranks of a launch were told is durable is resumed from, by all, under a later attempt that they share.

    Args:
        log: `RANK acked STEP ATTEMPT` and `RANK resumed STEP ATTEMPT [WORLD]`, in order.
        launches: how many resumed; None where some may have ended before.
    """
    acked: dict[tuple[str, int], set[str]] = defaultdict(set)
    whole = [("", 0)]
    attempts: dict[str, list[Resumed]] = {}
    for rank, what, step, attempt, *world in (line.split() for line in log):
        if what == "acked":
            acked[attempt, int(step)].add(rank)
            if len(acked[attempt, int(step)]) == attempts[attempt][0].world:
                whole.append((attempt, int(step)))
        elif what == "resumed":
            begun = Resumed(int(rank), int(step), attempt, int(world[0]) if world else WORLD)
            attempts.setdefault(attempt, []).append(begun)
            # The other rank of this launch may have saved since, and nothing of that is whole without this one.
            durable = max(point for point in whole if point[0] < attempt)
            assert begun.step >= durable[1], f"{reported}: {begun}, and {durable} was durable on all ranks"
    # Without a group, a rank may be killed before the other one has come to restore.
    assert launches in (None, len(attempts)) and list(attempts) == sorted(attempts), (
        f"{reported}: {launches} launches: {attempts}"
    )
    for together in attempts.values():
        ranks, launched = [one.rank for one in together], {(one.step, one.world) for one in together}
        assert len(launched) == 1 and len(ranks) == len(set(ranks)), f"{reported}: ranks do not go together: {together}"
    assert len(together) == together[0].world, f"{reported}: the last launch is not whole: {together}"


def judge_waits(log: list[str], reported: str) -> float:
    """The longest time that a call of tierd took, in seconds, whether it succeeded or raised."""
    waits = [(float(seconds), f"rank {rank} in {what}") for rank, what, seconds in map(str.split, log)]
    longest, where = max(waits)
    assert longest <= _LONGEST, f"{reported}: {where} for {longest} s"
    return longest


def call(launcher: Launcher, orders: Orders) -> tuple[int, str]:
    """One call of the launcher: its exit status, and the end of what was printed. Leaves no process of it behind."""
    variables = environment(**{ORDERS: orders.text(), **dict(launcher.variables)})
    home = Path(orders.home)
    with (home / "output").open("ab") as output:
        process = subprocess.Popen(
            launcher.command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=home
        )
        try:
            status = process.wait(launcher.timeout)
        finally:
            process.kill()
            process.wait()
            end_all(home)
    return status, (home / "output").read_text(errors="replace")[-4000:]


def end_all(home: Path) -> None:
    """End what outlived its launcher, and wait until it is gone: all of it was started with orders that name `home`."""

    def left() -> list[int]:
        return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal() and ours(one, home)]

    for pid in left():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not left())


def ours(process: Path, home: Path) -> bool:
    try:
        return (
            f"{ORDERS}={{".encode() in (given := (process / "environ").read_bytes()) and f'"{home}"'.encode() in given
        )
    except OSError:
        return False
