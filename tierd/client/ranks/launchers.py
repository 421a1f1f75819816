"""This process's rank and world size by the environment: one table of launchers.

Invariant: a process that a launcher calls a rank never counts as a single process. It finds its rank and the number of
ranks together, or neither.

Sources of the variables:

- `RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `TORCHELASTIC_*`: torch,
  `distributed/elastic/agent/server/local_elastic_agent.py`. Accelerate starts its ranks through torchrun; Ray Train
  sets the first three in `ray/train/torch/config.py`, Kubeflow's training operator the first two in its pods.
  Lightning's own launcher sets `WORLD_SIZE` and no `RANK`
  (`lightning/fabric/strategies/launchers/subprocess_script.py`).
- `OMPI_COMM_WORLD_*`: Open MPI's manual, "Environment variables set for MPI applications". `OMPI_MCA_orte_hnp_uri`, the
  address of this mpirun, exists only up to version 4 (`orte/mca/odls/base`).
- `PMIX_RANK`, `PMIX_NAMESPACE`: OpenPMIx, `PMIx_server_setup_fork`. PMIx keeps the size in its own store.
- `PMI_RANK`, `PMI_SIZE`, `PMI_ID`, `MPI_LOCALNRANKS`: MPICH, `src/pm/hydra/proxy/pmip_cb.c`; `PMI_ID` is set without
  the others with `mpiexec -pmi-port`. Intel MPI adds `I_MPI_HYDRA_UUID`. `PMI_LOCAL_SIZE`, `PALS_*`: Slurm,
  `src/plugins/mpi/cray_shasta`, and HPE's PALS.
- `MV2_COMM_WORLD_*`: MVAPICH2, `mpispawn`. `JSM_NAMESPACE_*`: IBM's jsrun. `FLUX_*`: Flux, flux-environment(7).
- `SLURM_*`: srun(1); Slurm, `src/common/env.c`.
- `JOB_COMPLETION_INDEX`: Kubernetes, "Indexed Job for Parallel Processing with Static Work Assignment".
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable
from typing import NamedTuple

from tierd.core.errors import ConfigError
from tierd.core.ids import MAX_WORLD, check_rank, next_attempt

# Parses Slurm's "2(x3),1": three nodes with 2 tasks, and one with 1.
_TASKS = re.compile(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?")


class Launcher(NamedTuple):
    """The names of the variables that one launcher sets for its ranks."""

    name: str
    rank: str
    world: str | None  # None if the launcher sets none
    local: tuple[str, ...] = ()  # the number of ranks on this node; the first one that is set counts
    launch: tuple[str, ...] = ()  # the same on all ranks of a launch, and different for concurrent launches
    restart: tuple[str, ...] = ()  # these also differ between a launch and its restart, if they are set
    alone: str = ""  # why a rank without a size is a single process with this launcher

    def numbers(self) -> tuple[int, int] | None:
        """Return this process's rank and the number of ranks; None if one of the variables is not set.

        Raises `ConfigError`, which names the variable, if they are no numbers, or do not fit each other.
        """
        if self.world is None or self.rank not in os.environ or self.world not in os.environ:
            return None
        rank, size = environ_number(self.rank, MAX_WORLD), environ_number(self.world, MAX_WORLD)
        if rank >= size:
            raise ConfigError(
                f"{self.rank}={rank} and {self.world}={size} in the environment: ranks count from 0 to {self.world} - 1"
            )
        return rank, size


_TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    local=("LOCAL_WORLD_SIZE",),
    launch=("TORCHELASTIC_RUN_ID",),
    restart=("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)
_SLURM = Launcher(
    "slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    launch=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    restart=("SLURM_RESTART_COUNT", "SLURM_JOB_START_TIME"),
    alone="a batch script, in which one process runs, has SLURM_PROCID and SLURM_NTASKS, too",
)
_JSRUN = Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", local=("JSM_NAMESPACE_LOCAL_SIZE",))

# The first match counts. SLURM is late in the list, because mpirun in an allocation starts its daemons with srun, and
# every rank inherits its daemon's SLURM_PROCID, which is the number of the node.
LAUNCHERS = (
    _TORCHRUN,
    Launcher(
        "open-mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        launch=("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", launch=("FLUX_JOB_ID",)),
    Launcher(
        "pmi",
        "PMI_RANK",
        "PMI_SIZE",
        local=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        launch=("I_MPI_HYDRA_UUID", "PALS_APID"),
    ),
    Launcher("mvapich", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", local=("MV2_COMM_WORLD_LOCAL_SIZE",)),
    _JSRUN,
    _SLURM,
    Launcher("PMIx", "PMIX_RANK", None),
    Launcher("PMI", "PMI_ID", None),
    Launcher("PALS", "PALS_RANKID", None),
    Launcher("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", None),
)


def rank_and_world(
    rank: int | None, world_size: int | None, group: Callable[[], tuple[int, int] | None]
) -> tuple[int, int]:
    """Return this process's rank and the number of ranks: as given, else the group's, else the environment's, else 0 of
    1.

    Raises `ConfigError` if only one of `rank` and `world_size` is given, or as `check_rank` and `environment_ranks`.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("give both rank and world_size, or neither")
    if rank is not None:
        return check_rank(rank, world_size)
    return group() or environment_ranks() or (0, 1)


def environment_ranks() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks by the first launcher that sets both; None without a launcher.

    Raises `ConfigError` if the numbers are impossible, or launchers set only one of the two.
    """
    detected = _detect()
    if detected is None:
        _check_halves()
    return detected[1] if detected else None


def torchrun_ranks() -> tuple[int, int] | None:
    return _TORCHRUN.numbers()


def slurm_attempt(rank: int, world: int, origin: str = "") -> str | None:
    """Return the attempt that every rank of a SLURM step derives without communication; None outside a step.

    Its time is the job's start (`SLURM_JOB_START_TIME`, seconds since 1970, which a requeue renews) plus the step's
    number in milliseconds. Its token is a digest of job, restart count, step and `origin`, the checkpoint that was
    resumed from. So ranks that resumed from different checkpoints never write parts of the same checkpoint.
    """
    if _SLURM.numbers() != (rank, world):
        return None
    if "SLURM_JOB_START_TIME" not in os.environ:
        raise ConfigError(
            f"{world} ranks must share one attempt, and this Slurm sets no SLURM_JOB_START_TIME to derive it from: "
            "initialise torch.distributed first, or pass attempt= (tierd.new_attempt() makes one; give every rank the "
            "same)"
        )
    step = environ_number("SLURM_STEP_ID", 2**32 - 1)
    started = environ_number("SLURM_JOB_START_TIME", 2**37)
    names = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")]
    names.append(origin)
    return next_attempt(started * 1000 + step, (), hashlib.blake2b("/".join(names).encode(), digest_size=4).hexdigest())


def launch_name() -> str | None:
    """Return the name of this launch and its restart, the same on all its ranks; None if the environment names none.

    Launches that run at the same time have different names. A later launch may have the same name: containers repeat
    process ids, from which Open MPI makes its names; a `--rdzv-id` may be given twice; and an elastic job of torchrun
    that shrinks back to one node does not count that restart. So notes that are found under the name may be from
    processes that are gone.

    MPICH, MVAPICH2, Kubeflow and Ray Train name no launch, and no variable is known that names jsrun's. torchrun names
    none with several agents, because each agent counts only the restarts that it decided itself. A Kubernetes Indexed
    Job has a name, and does not count restarts of its pods.
    """
    detected = _detect()
    if detected is None:
        return None
    launcher, numbers = detected
    naming = [launcher]
    if launcher is _TORCHRUN:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return _indexed_job()
        # Without --rdzv-id, torchrun names every launch "none".
        if os.environ.get("TORCHELASTIC_RUN_ID") == "none" or os.environ.get("GROUP_WORLD_SIZE") != "1":
            return None
    elif _JSRUN.numbers() == numbers:  # its ranks also have Open MPI's variables and a PMIx namespace of jsrun's
        return None
    elif launcher is not _SLURM and _SLURM.numbers() == numbers:
        naming.append(_SLURM)  # srun itself started these ranks, and a PMIx namespace does not change with a requeue
    if not any(name in os.environ for source in naming for name in source.launch):
        return None
    names = [f"{name}={os.environ.get(name)}" for source in naming for name in source.launch + source.restart]
    return f"{launcher.name}-{hashlib.blake2b(chr(10).join(names).encode(), digest_size=12).hexdigest()}"


def _indexed_job() -> str | None:
    """Return the name of a Kubernetes Indexed Job, whose pods have the hostname `<job>-<index>`.

    None if something else set `RANK`. A Job that is created again under the same name has the same name here.
    """
    index, hostname = os.environ.get("JOB_COMPLETION_INDEX", ""), socket.gethostname()
    job = hostname.removesuffix(f"-{index}")
    if not index or job == hostname:
        return None
    return f"kubernetes-{hashlib.blake2b(job.encode(), digest_size=12).hexdigest()}"


def local_ranks() -> int:
    """Return the number of this launch's ranks on this node; 1 if the environment does not say."""
    return next(filter(None, map(_local, LAUNCHERS)), 1)


def launch_variables() -> tuple[str, tuple[str, ...]] | None:
    """Return the name of this process's rank variable, and the set ones that all ranks of this launch on this node
    share.
    """
    detected = _detect()
    if detected is None:
        return None
    launcher = detected[0]
    shared = (launcher.world, *launcher.launch, *launcher.restart)
    return launcher.rank, tuple(name for name in shared if name is not None and name in os.environ)


def is_single_node() -> bool:
    detected = _detect()
    if detected is None:
        return False
    launcher, numbers = detected
    by_srun = launcher is not _TORCHRUN and _SLURM.numbers() == numbers
    return (_local(launcher) or (_local(_SLURM) if by_srun else None)) == numbers[1]


def environ_number(name: str, limit: int) -> int:
    """Return the variable's value, from 0 to `limit`. Raises `ConfigError`, which names it, for any other value."""
    value = os.environ.get(name, "")
    if not value.isascii() or not value.isdecimal() or len(value) > 20 or int(value) > limit:
        raise ConfigError(f"{name}={value[:40]!r} in the environment: a number from 0 to {limit} is expected there")
    return int(value)


def _detect() -> tuple[Launcher, tuple[int, int]] | None:
    return next(((launcher, numbers) for launcher in LAUNCHERS if (numbers := launcher.numbers())), None)


def _check_halves() -> None:
    """Raise `ConfigError` if a variable sets a rank or a size, and no launcher sets both."""
    for launcher in LAUNCHERS:
        if launcher.rank in os.environ and not launcher.alone:
            present, lacks = f"{launcher.rank}={environ_number(launcher.rank, MAX_WORLD)}", "how many ranks there are"
            missing, remedy = f"no {launcher.world}", f"set {launcher.world}"
            if launcher.world is None:
                missing, remedy = f"{launcher.name} tells no world size", "set RANK and WORLD_SIZE"
        elif (
            launcher.world is not None
            and launcher.world in os.environ
            and launcher.rank not in os.environ
            and environ_number(launcher.world, MAX_WORLD) > 1
        ):
            present, lacks = f"{launcher.world}={os.environ[launcher.world]}", "which of the ranks this process is"
            missing, remedy = f"no {launcher.rank}", f"set {launcher.rank}"
        else:
            continue
        raise ConfigError(
            f"{present} in the environment, and {missing}: {lacks} is not known; {remedy}, or initialise "
            "torch.distributed "
            "before the Checkpointer is made, or pass rank= and world_size= (for a process that trains alone: rank=0, "
            "world_size=1)"
        )


def _local(launcher: Launcher) -> int | None:
    if launcher is _SLURM:
        return _slurm_local()
    for name in launcher.local:
        value = os.environ.get(name, "")
        if value.isascii() and value.isdecimal() and len(value) < 6 and int(value):
            return int(value)
    return None


def _slurm_local() -> int | None:
    """Return this node's (`SLURM_NODEID`) entry in the step's tasks per node (`SLURM_STEP_TASKS_PER_NODE`)."""
    node = os.environ.get("SLURM_NODEID", "")
    if not node.isascii() or not node.isdecimal() or len(node) > 5:
        return None
    remaining = int(node)
    for item in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = _TASKS.fullmatch(item)
        if match is None:
            return None
        remaining -= int(match[2] or 1)
        if remaining < 0:
            return int(match[1]) or None
    return None
