"""Mutants of what tells a process which rank it is, and its launch and its attempt a name."""

from __future__ import annotations

from faults.rounds import Mutant

_PATH, _WHO = "tierd/client/ranks/launchers.py", "pytest tests/client/ranks/test_launchers.py -k"

IDENTITY = (
    Mutant(
        "ranks of Open MPI are alone, each",
        _PATH,
        '        "OMPI_COMM_WORLD_SIZE",\n',
        "        None,\n",
        f"{_WHO} two_launches_of_mpirun",
    ),
    Mutant(
        "the step of mpirun's daemons names its ranks",
        _PATH,
        "LAUNCHERS = (\n    _TORCHRUN,",
        "LAUNCHERS = (\n    _SLURM,\n    _TORCHRUN,",
        f"{_WHO} started_its_daemons",
    ),
    Mutant(
        "a rank without a size is a process alone",
        _PATH,
        "        _check_halves()\n",
        "        pass\n",
        f"{_WHO} not_taken_for",
    ),
    Mutant(
        "a rank that never comes with a size is a process alone",
        _PATH,
        "if one.rank in os.environ and not one.alone:",
        "if one.rank in os.environ and one.world and not one.alone:",
        f"{_WHO} never_how_many",
    ),
    Mutant(
        "a size without a rank is passed over",
        _PATH,
        "environ_number(one.world, MAX_WORLD) > 1",
        "environ_number(one.world, MAX_WORLD) > MAX_WORLD",
        f"{_WHO} lightnings",
    ),
    Mutant(
        "a batch script is an error",
        _PATH,
        "if one.rank in os.environ and not one.alone:",
        "if one.rank in os.environ:",
        f"{_WHO} batch_script",
    ),
    Mutant(
        "a restart by torchrun has its launch's name",
        _PATH,
        'restart=("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),',
        'restart=("MASTER_ADDR", "MASTER_PORT"),',
        f"{_WHO} a_restart_have_another",
    ),
    Mutant(
        "a requeued SLURM job has its earlier name",
        _PATH,
        'restart=("SLURM_RESTART_COUNT", "SLURM_JOB_START_TIME"),',
        'restart=("SLURM_JOB_START_TIME",),',
        f"{_WHO} a_restart_have_another",
    ),
    Mutant(
        "a PMIx namespace alone names a step that may be requeued",
        _PATH,
        "naming.append(_SLURM)",
        "pass",
        f"{_WHO} a_restart_have_another",
    ),
    Mutant(
        "agents that count apart name a launch",
        _PATH,
        'or os.environ.get("GROUP_WORLD_SIZE") != "1":',
        "or False:",
        f"{_WHO} several_agents",
    ),
    Mutant(
        "another node's tasks are taken for this one's",
        _PATH,
        "        if left < 0:\n",
        "        if True:\n",
        f"{_WHO} tasks_on_this_node",
    ),
    Mutant(
        "a part of the ranks is all of them",
        _PATH,
        "(_local(_SLURM) if by_srun else None)) == numbers[1]",
        "(_local(_SLURM) if by_srun else None)) is not None",
        f"{_WHO} whether_that_is_all",
    ),
    Mutant(
        "a rank of a SLURM step that restores late is refused",
        "tierd/client/ranks/launch.py",
        "        given = self._given_for(origin)\n",
        "        given = self._given\n",
        "pytest tests/client/ranks/test_ranks.py -k restores_after_another",
    ),
)
