"""Which rank of how many a process is, and which attempt a SLURM step derives, by arguments and environment."""

from __future__ import annotations

import pytest
from support.rank_states import rank, value
from support.ranks import Group
from support.training import tensors
from support.world import attempt

import tierd
from tierd.client.ranks import ranks as ranks_module
from tierd.client.ranks.launchers import rank_and_world, slurm_attempt
from tierd.core.errors import ConfigError

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_START_TIME",
    "SLURM_RESTART_COUNT",
)
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_START_TIME": "1700000000",
}


@pytest.fixture
def environ(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return lambda **given: [monkeypatch.setenv(name, value) for name, value in given.items()]


def who(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    return rank_and_world(rank, world, ranks_module._group_ranks)


def test_arguments_precede_the_group_then_torchrun_then_slurm(environ, monkeypatch):
    assert who() == (0, 1)
    environ(SLURM_PROCID="0", SLURM_NTASKS="8")
    assert who() == (0, 1), "a batch script, in which one process runs"
    environ(**STEP)
    assert who() == (3, 4)
    environ(RANK="1", WORLD_SIZE="2")
    assert who() == (1, 2)
    made = Group(5)
    made.me.rank = 4
    made.install(monkeypatch)
    assert who() == (4, 5)
    assert who(6, 7) == (6, 7)
    for half in ((1, None), (None, 2)):
        with pytest.raises(ConfigError, match="both"):
            who(*half)


def test_a_slurm_step_derives_its_attempt_the_same_on_every_rank(environ, spool):
    environ(**STEP)
    names = set()
    for number in range(4):
        environ(SLURM_PROCID=str(number))
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            names.add(checkpointer.attempt)
            checkpointer.save(1, tensors(value(1, number))).wait()
    (first,) = names
    assert int(first[:12], 16) == 1_700_000_000_002
    environ(SLURM_STEP_ID="3")
    again = slurm_attempt(3, 4)
    environ(SLURM_STEP_ID="0", SLURM_RESTART_COUNT="1", SLURM_JOB_START_TIME="1700009999")
    requeued = slurm_attempt(3, 4)
    assert first < again < requeued and len({name[13:] for name in (first, again, requeued)}) == 3
    assert slurm_attempt(0, 1) is None, "of other ranks than the step's"
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        assert checkpointer.attempt == requeued and checkpointer.restore(tensors(0)).step == 1
        on = checkpointer.attempt
    assert on[:12] == requeued[:12] and on != requeued, "ranks that resumed from different steps share no attempt"


def test_rank_of_a_slurm_step_restores_after_another_rank_has_saved(environ, spool):
    """Its attempt is that of what it resumes from, and not the one that it would have in a fresh start."""
    environ(**STEP)
    for launch in range(8):
        environ(SLURM_JOB_ID=str(70 + launch), SLURM_JOB_START_TIME=str(1_700_000_000 + launch))
        names = set()
        for number in range(4):
            environ(SLURM_PROCID=str(number))
            with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
                found = checkpointer.restore(tensors(0))
                assert (found.step if found else None) == (launch - 1 if launch else None)
                checkpointer.save(launch, tensors(value(launch, number))).wait()
                names.add(checkpointer.attempt)
        assert len(names) == 1


def test_slurm_attempt_that_is_not_the_latest_is_refused_like_a_given_attempt(environ, spool):
    environ(**STEP)
    for number in range(4):
        with rank(spool, number, "050000000000-00000000", world=4) as saving:
            saving.save(1, tensors(1)).wait()
    with pytest.raises(ConfigError, match="later"), tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(tensors(0))


def test_slurm_job_without_a_start_time_is_refused_with_a_remedy(environ, spool, monkeypatch):
    environ(**STEP)
    monkeypatch.delenv("SLURM_JOB_START_TIME")
    with pytest.raises(ConfigError, match=r"SLURM_JOB_START_TIME.*initialise torch\.distributed.*pass attempt="):
        tierd.Checkpointer(spool.root, "run", to=[])
    with rank(spool, 3, attempt(1), world=4) as given:
        assert given.attempt == attempt(1)
