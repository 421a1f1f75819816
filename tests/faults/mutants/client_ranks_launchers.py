"""Mutants of `tierd/client/ranks/`: launches, and who this process is."""

from __future__ import annotations

from faults.rounds import Mutant

_LAUNCH = "tierd/client/ranks/launch.py"
_LAUNCHERS = "tierd/client/ranks/launchers.py"
_OTHER_LAUNCHES = "tierd/client/ranks/other_launches.py"
_PROCESSES = "tierd/client/ranks/processes.py"
_TEST_LAUNCHERS = "pytest tests/client/ranks/test_launchers.py"
_TEST_INTERRUPTED = "pytest tests/client/restoring/test_interrupted_restore.py"
_TEST_LEASES = "pytest tests/spool/test_leases.py"
_TEST_MEETING = "pytest tests/client/ranks/test_note_exchange.py"

MUTANTS = (
    Mutant(
        "a trainer does not show that it lives",
        _LAUNCH,
        "        self._saving(part)",
        "        pass",
        "pytest tests/end_to_end/test_two_launches.py -k both_are_warned",
    ),
    Mutant(
        "a rank of a SLURM step that restores late is refused",
        _LAUNCH,
        "        given = self._given_for(origin)\n",
        "        given = self._given\n",
        "pytest tests/client/ranks/test_rank_numbers.py -k restores_after_another",
    ),
    Mutant(
        "a launch saves although a rank could not load",
        _LAUNCH,
        "        if refused:\n",
        "        if False:\n",
        "pytest tests/client/ranks/test_ranks.py -k cannot_load_no_rank",
    ),
    Mutant(
        "an interrupted restore leaves saves as they were",
        _LAUNCH,
        "        except BaseException as error:\n            if self._changing",
        "        except Exception as error:\n            if self._changing",
        f"{_TEST_INTERRUPTED} -k loaded_in_part",
    ),
    Mutant(
        "a launch that has nothing saves after a restore that had no answer",
        _LAUNCH,
        "if self._changing or not self._begun:",
        "if self._changing:",
        f"{_TEST_INTERRUPTED} -k no_fresh_start",
    ),
    Mutant(
        "nothing is saved after a restore that loaded nothing",
        _LAUNCH,
        "if self._changing or not self._begun:",
        "if True:",
        f"{_TEST_INTERRUPTED} -k had_begun",
    ),
    Mutant(
        "a restore inside another lifts its refusal",
        _LAUNCH,
        "            if not self._restores:\n                self._changing, self._later",
        "            if True:\n                self._changing, self._later",
        f"{_TEST_INTERRUPTED} -k inside_another",
    ),
    Mutant(
        "a restore that ends lets saves into another's",
        _LAUNCH,
        "            self._restores.discard(mine)\n",
        "            self._restores.clear()\n",
        f"{_TEST_INTERRUPTED} -k outlasts",
    ),
    Mutant(
        "a load through DCP that was interrupted leaves saves as they were",
        "tierd/dcp/open_reader.py",
        "        self._launch.loading()\n",
        "",
        "pytest tests/dcp/test_dcp.py -k interrupted_load",
    ),
    Mutant(
        "an interrupted rank leaves the others waiting",
        "tierd/client/ranks/ranks.py",
        "                self._notes.tell(msgspec.json.encode(",
        "                _ = (msgspec.json.encode(",
        f"{_TEST_INTERRUPTED} -k other_ranks_hear",
    ),
    Mutant(
        "ranks that talk take an earlier launch's attempt for theirs",
        _LAUNCH,
        "not self._begun and given in attempts:",
        "not self._begun and given in attempts and self.world == 1:",
        "pytest tests/client/ranks/test_ranks.py -k left_no_complete",
    ),
    Mutant(
        "a launch's own attempt is taken for another's",
        _LAUNCH,
        "not self._begun and given in attempts:",
        "given in attempts:",
        "pytest tests/client/ranks/test_ranks.py -k left_no_complete",
    ),
    Mutant(
        "a rank that cannot talk saves under its earlier attempt",
        _LAUNCH,
        "            if own:\n",
        "            if False:\n",
        "pytest tests/client/ranks/test_ranks.py -k rank_has_used",
    ),
    Mutant(
        "a launch that resumed claims another origin",
        _LAUNCH,
        '        if self._origin is not None:\n            raise ConfigError(f"start_from: this',
        '        if False:\n            raise ConfigError(f"start_from: this',
        "pytest tests/end_to_end/test_lineage.py -k over_its_launches",
    ),
    Mutant(
        "ranks of Open MPI are alone, each",
        _LAUNCHERS,
        '        "OMPI_COMM_WORLD_SIZE",\n',
        "        None,\n",
        f"{_TEST_LAUNCHERS} -k two_launches_of_mpirun",
    ),
    Mutant(
        "the step of mpirun's daemons names its ranks",
        _LAUNCHERS,
        "LAUNCHERS = (\n    _TORCHRUN,",
        "LAUNCHERS = (\n    _SLURM,\n    _TORCHRUN,",
        f"{_TEST_LAUNCHERS} -k started_its_daemons",
    ),
    Mutant(
        "a rank without a size is a process alone",
        _LAUNCHERS,
        "        _check_halves()\n",
        "        pass\n",
        f"{_TEST_LAUNCHERS} -k not_taken_for",
    ),
    Mutant(
        "a rank that never comes with a size is a process alone",
        _LAUNCHERS,
        "if one.rank in os.environ and not one.alone:",
        "if one.rank in os.environ and one.world and not one.alone:",
        f"{_TEST_LAUNCHERS} -k never_how_many",
    ),
    Mutant(
        "a size without a rank is passed over",
        _LAUNCHERS,
        "environ_number(one.world, MAX_WORLD) > 1",
        "environ_number(one.world, MAX_WORLD) > MAX_WORLD",
        f"{_TEST_LAUNCHERS} -k lightnings",
    ),
    Mutant(
        "a batch script is an error",
        _LAUNCHERS,
        "if one.rank in os.environ and not one.alone:",
        "if one.rank in os.environ:",
        f"{_TEST_LAUNCHERS} -k batch_script",
    ),
    Mutant(
        "a restart by torchrun has its launch's name",
        _LAUNCHERS,
        'restart=("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),',
        'restart=("MASTER_ADDR", "MASTER_PORT"),',
        f"{_TEST_LAUNCHERS} -k a_restart_have_another",
    ),
    Mutant(
        "a requeued SLURM job has its earlier name",
        _LAUNCHERS,
        'restart=("SLURM_RESTART_COUNT", "SLURM_JOB_START_TIME"),',
        'restart=("SLURM_JOB_START_TIME",),',
        f"{_TEST_LAUNCHERS} -k a_restart_have_another",
    ),
    Mutant(
        "a PMIx namespace alone names a step that may be requeued",
        _LAUNCHERS,
        "naming.append(_SLURM)",
        "pass",
        f"{_TEST_LAUNCHERS} -k a_restart_have_another",
    ),
    Mutant(
        "agents that count apart name a launch",
        _LAUNCHERS,
        'or os.environ.get("GROUP_WORLD_SIZE") != "1":',
        "or False:",
        f"{_TEST_LAUNCHERS} -k several_agents",
    ),
    Mutant(
        "another node's tasks are taken for this one's",
        _LAUNCHERS,
        "        if left < 0:\n",
        "        if True:\n",
        f"{_TEST_LAUNCHERS} -k tasks_on_this_node",
    ),
    Mutant(
        "a part of the ranks is all of them",
        _LAUNCHERS,
        "(_local(_SLURM) if by_srun else None)) == numbers[1]",
        "(_local(_SLURM) if by_srun else None)) is not None",
        f"{_TEST_LAUNCHERS} -k whether_that_is_all",
    ),
    Mutant(
        "a Checkpointer that saves again takes the lease of the one that took its own",
        _OTHER_LAUNCHES,
        "among=former is not None and not shown)",
        "among=False)",
        f"{_TEST_LEASES} -k in_turns",
    ),
    Mutant(
        "a Checkpointer that lost its lease does not notice",
        _OTHER_LAUNCHES,
        "        if shown and former and former",
        "        if former and former",
        f"{_TEST_LEASES} -k in_turns",
    ),
    Mutant(
        "another world size of the same attempt is not noticed",
        _OTHER_LAUNCHES,
        "(one.attempt, one.world) != own",
        "one.attempt != own[0]",
        f"{_TEST_LEASES} -k two_world_sizes",
    ),
    Mutant(
        "a launch that is closed during its first save lives on",
        _OTHER_LAUNCHES,
        "        if self._ended.is_set():",
        "        if False:",
        f"{_TEST_LEASES} -k handler_that_closes",
    ),
    Mutant(
        "a second process that saves one attempt is only logged",
        _OTHER_LAUNCHES,
        "            if isinstance(error, ConfigError):",
        "            if False:",
        f"{_TEST_LEASES} -k refused_until",
    ),
    Mutant(
        "a rank that ended before it began is waited for as a late one",
        _PROCESSES,
        "        return self._expected - running.keys()\n",
        "        return set()\n",
        f"{_TEST_MEETING} -k 'before_it_began and killed'",
    ),
    Mutant(
        "a rank that is on another node counts as ended",
        _PROCESSES,
        "            if all_here() and self._launcher_is_visible(rank):\n",
        "            if self._launcher_is_visible(rank):\n",
        f"{_TEST_MEETING} -k before_it_began",
    ),
    Mutant(
        "a rank that imports its modules counts as ended",
        _PROCESSES,
        "pid in pids if",
        "pid in [os.getpid()] if",
        f"{_TEST_MEETING} -k 'before_it_began and slow'",
    ),
    Mutant(
        "a rank that wrote a title over its environment counts as ended",
        _PROCESSES,
        "            if born is not None and _born(pid) == born:\n",
        "            if False:\n",
        f"{_TEST_MEETING} -k hides_its_environment",
    ),
)
