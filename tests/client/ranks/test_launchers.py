"""Who a process is, from the environments that launchers really give it, and what names the launch to all its ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.ranks import environment, is_launchers
from support.training import tensors

import tierd
from tierd.client import user_messages
from tierd.client.ranks import launchers
from tierd.client.ranks.launchers import is_single_node, launch_name, local_ranks, rank_and_world
from tierd.core.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "ranks.md").read_text()

# What each launcher gave to rank 1 of 2 on one node where it could be run here (Open MPI 4.1, MPICH 4.0, torchrun of
# torch 2.13), and otherwise what its source sets: the docstring of tierd/client/ranks/launchers.py says which.
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "node",
    "MASTER_PORT": "42713",
    "TORCHELASTIC_RUN_ID": "9c9ae1c6-6f3a-4d5c-8d45-0b2c4c7d0a51",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
RAY = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "361955329",
    "OMPI_MCA_orte_hnp_uri": "361955328.0;tcp://192.0.2.2:56153",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "361955329",
    "PMIX_SERVER_URI4": "361955328.0;tcp4://127.0.0.1:44147",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node-31085@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = HYDRA | {"I_MPI_HYDRA_UUID": "9d260000-7c26-e807-8fb4-050000430af0"}
CRAY = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PALS_RANKID": "1",
    "PALS_NODEID": "0",
    "PALS_APID": "3a1e3ad8-6d1c-4c8e-9b0e-3a2d6c4f7e11",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_ID": "1",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "1",
    "LSB_JOBID": "77",
}
JSRUN_SPECTRUM_MPI = JSRUN | {name: OPEN_MPI_5[name] for name in OPEN_MPI_5 if name.startswith("OMPI_")}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2bRvWcd7y"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_START_TIME": "1700000000",
}
SRUN_PMI2 = SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "77.0", "PMI_FD": "15"}
SRUN_PMIX = SRUN | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.77.0"}
SRUN_OPEN_MPI = SRUN_PMIX | {name: OPEN_MPI_5[name] for name in OPEN_MPI_5 if name.startswith("OMPI_")}
BATCH = {  # a batch script of 2 nodes with 4 tasks each: one process runs there
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_START_TIME": "1700000000",
}

ALL = {name: given for name, given in globals().items() if name.isupper() and isinstance(given, dict)}
TWO = {name: given for name, given in ALL.items() if name != "BATCH"}
NAMELESS = {"RAY", "KUBEFLOW", "HYDRA", "MVAPICH", "JSRUN", "JSRUN_SPECTRUM_MPI"}


@pytest.fixture
def environ(monkeypatch):
    """Replaces the launcher's environment."""

    def give(given: dict[str, str] | None = None, **more: str) -> None:
        for name in filter(is_launchers, list(os.environ)):
            monkeypatch.delenv(name)
        for name, value in {**(given or {}), **more}.items():
            monkeypatch.setenv(name, value)

    give()
    return give


def who() -> tuple[int, int]:
    return rank_and_world(None, None, lambda: None)


# -- rank and size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TWO)
def test_a_launchers_rank_and_size_are_read(environ, name):
    environ(TWO[name])
    assert who() == (1, 2)


@pytest.mark.parametrize("name", ["OPEN_MPI_4", "HYDRA"])
def test_two_launches_of_mpirun_mix_no_ranks(environ, spool, name):
    """Each rank took itself for rank 0 of 1, and after the second launch both held rank 1's data."""
    rank, local = {
        "OPEN_MPI_4": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "HYDRA": ("PMI_RANK", "MPI_LOCALNRANKS"),
    }[name]
    for number in range(2):
        environ({**ALL[name], rank: str(number), local: "1"})  # on two nodes
        with pytest.raises(ConfigError, match="2 ranks must share one attempt"):
            tierd.Checkpointer(spool.root, "run", to=[])
        with tierd.Checkpointer(spool.root, "run", attempt="01a000000000-00000001", to=[]) as checkpointer:
            assert checkpointer.restore(tensors(0)) is None, "one rank's part is no checkpoint"
            checkpointer.save(1, tensors(10 + number)).wait()
    parts = sorted(path.name for path in (spool.root / "run").glob("*/*-of-*"))
    assert parts == ["00000-of-00002", "00001-of-00002"]


def test_mpiruns_numbers_precede_those_of_the_srun_that_started_its_daemons(environ):
    """mpirun in a SLURM allocation: srun starts one daemon on each node, and each rank inherits its daemon's number."""
    daemon = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    for ranks in (OPEN_MPI_4, HYDRA):
        environ({**daemon, **ranks})
        assert who() == (1, 2) and local_ranks() == 2
        assert (launch_name() or "").startswith("open-mpi") == (ranks is OPEN_MPI_4), "not named by the daemons' step"


def test_torchruns_numbers_precede_those_of_the_launcher_that_started_it(environ):
    for outer in (SRUN, OPEN_MPI_4, HYDRA):
        environ({**outer, **TORCHRUN, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
        assert who() == (6, 8) and local_ranks() == 4 and not is_single_node()


def test_one_process_without_a_launcher_and_in_a_batch_script(environ):
    for given in ({}, BATCH, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}):
        environ(given)
        assert who() == (0, 1) and launch_name() is None and local_ranks() == 1 and not is_single_node()


@pytest.mark.parametrize("name", TWO)
def test_a_rank_without_a_size_is_not_taken_for_a_process_alone(environ, name):
    """And a size without a rank neither: silently, each would be rank 0 of 1."""
    for one in launchers.LAUNCHERS:
        for kept, lost in ((one.rank, one.world), (one.world, one.rank)):
            if kept not in TWO[name] or lost not in TWO[name] or kept == "SLURM_PROCID":
                continue
            environ({kept: TWO[name][kept]})
            with pytest.raises(ConfigError, match=rf"{kept}=[12].*no {lost}.*rank= and world_size=.*rank=0"):
                who()
            environ({kept: TWO[name][kept]} | (SRUN if "SLURM" not in kept else TORCHRUN))
            assert who() == (1, 2), "a whole pair says it"
    assert rank_and_world(0, 1, lambda: None) == (0, 1)
    assert rank_and_world(None, None, lambda: (3, 4)) == (3, 4)


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMI_ID", "PALS_RANKID", "JOB_COMPLETION_INDEX"])
def test_launcher_that_gives_ranks_and_no_world_size_is_an_error_that_names_the_remedy(environ, name):
    environ({name: "1"})
    with pytest.raises(ConfigError, match=rf"{name}=1.*how many.*RANK and WORLD_SIZE.*rank=0, world_size=1"):
        who()
    for given in (TORCHRUN, SRUN):
        environ({name: "7"} | given)
        assert who() == (1, 2)


def test_lightnings_own_processes_with_a_size_and_no_rank_are_refused(environ):
    """Its first process knows nothing when it makes a Checkpointer before `fit`: the others must not be alone, too."""
    environ(WORLD_SIZE="2", LOCAL_RANK="1", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="40001")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2.*no RANK.*torch\.distributed"):
        who()


@pytest.mark.parametrize("bad", ["", "-1", "one", "1.0", "9" * 30, "9" * 5000, "²"])
def test_a_value_that_is_no_number_is_named(environ, bad):
    for one in launchers.LAUNCHERS:
        for name in filter(None, (one.rank, one.world)):
            given = {one.rank: "0"} | ({one.world: "1"} if one.world else {})
            environ({**given, name: bad})
            with pytest.raises(ConfigError, match=name):
                who()


def test_a_rank_beyond_the_size_is_named(environ):
    for one in launchers.LAUNCHERS:
        if one.world:
            environ({one.rank: "2", one.world: "2"})
            with pytest.raises(ConfigError, match=rf"{one.rank}=2 and {one.world}=2"):
                who()


# -- what names a launch ----------------------------------------------------------------------------------------------


def changed(given: dict[str, str], **more: str) -> dict[str, str]:
    return {**given, **more}


@pytest.mark.parametrize("name", TWO)
def test_a_launch_has_one_name_on_all_its_ranks_and_it_is_fit_for_a_path(environ, name):
    names = set()
    for number in "01":
        ranks = {one.rank for one in launchers.LAUNCHERS}
        # What also differs from rank to rank, or from node to node.
        own = {"PMIX_SERVER_URI4": number, "PMI_FD": number, "SLURM_LOCALID": number, "SLURM_NODEID": "0"}
        given = {key: number if key in ranks else value for key, value in TWO[name].items()}
        environ({**given, **{key: value for key, value in own.items() if key in given}})
        names.add(launch_name())
    (one,) = names
    assert (one is None) == (name in NAMELESS)
    assert one is None or (one.isascii() and one.replace("-", "").isalnum() and len(one) < 40 and one == one.lower())


NEXT = {
    "TORCHRUN": ({"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "another"}),
    "OPEN_MPI_4": ({"PMIX_NAMESPACE": "355008513"}, {"OMPI_MCA_orte_hnp_uri": "361955328.0;tcp://192.0.2.2:33333"}),
    "OPEN_MPI_5": ({"PMIX_NAMESPACE": "prterun-node-31099@1"},),
    "INTEL": ({"I_MPI_HYDRA_UUID": "9d260000-7c26-e807-8fb4-050000430af1"},),
    "CRAY": ({"PALS_APID": "another"},),
    "FLUX": ({"FLUX_JOB_ID": "f2bRvWcd7z"},),
} | dict.fromkeys(
    ("SRUN", "SRUN_PMI2", "SRUN_PMIX", "SRUN_OPEN_MPI"),
    (
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_START_TIME": "1700009999"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "78"},
    ),
)


@pytest.mark.parametrize("name", NEXT)
def test_another_launch_and_a_restart_have_another_name(environ, name):
    names = set()
    for more in ({}, *NEXT[name]):
        environ(changed(TWO[name], **more))
        names.add(launch_name())
    assert len(names) == 1 + len(NEXT[name]) and None not in names


def test_every_launcher_that_names_its_launches_is_tried_above():
    assert set(NEXT) | NAMELESS == set(TWO)


def test_several_agents_of_torchrun_name_no_launch_because_each_counts_its_own_restarts(environ):
    environ(TORCHRUN, GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    assert launch_name() is None
    environ(TORCHRUN, TORCHELASTIC_RUN_ID="none")  # what torchrun says without --rdzv-id
    assert launch_name() is None


def test_a_rank_that_somebody_set_is_not_named_by_the_step_around_it(environ):
    """Ray's workers inherit the numbers of the step that started Ray: some of them are the same by chance."""
    environ(SRUN | RAY)
    assert who() == (1, 2) and launch_name() is None


# -- this node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TWO)
def test_how_many_ranks_are_on_this_node_and_whether_that_is_all(environ, name):
    environ(TWO[name])
    known = name not in ("KUBEFLOW", "FLUX")
    assert (local_ranks(), is_single_node()) == ((2, True) if known else (1, False))
    size = next((one.world for one in launchers.LAUNCHERS if one.world in TWO[name]), "")
    environ({**TWO[name], size: "4"})
    assert not is_single_node()


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [
        ("2", "0", 2),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("4,2(x2)", "1", 2),
        ("1(x0),3", "0", 3),
        ("2(x3)", "3", 1),
        ("2(x999999999999)", "5", 1),
        ("x", "0", 1),
        ("", "0", 1),
        ("2", "", 1),
    ],
)
def test_a_slurm_steps_tasks_on_this_node(environ, tasks, node, local):
    environ(SRUN, SLURM_STEP_NUM_TASKS="7", SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=node)
    assert local_ranks() == local and not is_single_node()


@pytest.mark.parametrize("bad", ["", "0", "-1", "many", "9" * 5000])
def test_a_local_size_that_cannot_be_is_passed_over(environ, bad):
    environ(TORCHRUN, LOCAL_WORLD_SIZE=bad)
    assert local_ranks() == 1 and not is_single_node()


def test_the_warning_of_a_small_disk_counts_the_nodes_ranks_of_every_launcher(environ, spool, monkeypatch, caplog):
    monkeypatch.setattr(type(spool), "free", lambda self: (10, 700))
    environ(OPEN_MPI_4)
    user_messages.SpaceCheck(spool, lambda: 3, lambda compare: compare()).check(100)
    assert "from each of 2 ranks" in caplog.text


# -- what is written about it -----------------------------------------------------------------------------------------


def test_the_page_lists_every_variable_that_decides():
    table = PAGE.split("<!-- launchers -->")[1].split("<!-- launchers: end -->")[0]
    for one in launchers.LAUNCHERS:
        for name in filter(None, (one.rank, one.world)):
            assert f"`{name}`" in table, name


def test_the_tests_own_processes_inherit_no_launchers_variables(monkeypatch):
    for given in ALL.values():
        for name, value in given.items():
            monkeypatch.setenv(name, value)
    assert not {name for given in ALL.values() for name in given} & set(environment())
