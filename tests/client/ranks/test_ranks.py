"""Several ranks: a checkpoint is all of them or none, and they resume from the same one or not at all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest
import torch
from support.doubles import Double, contents, flip, flipped, is_chunk
from support.ranks import Group, environment, processes
from support.training import same, tensors
from support.world import Daemon, attempt

import tierd
from tierd.client.ranks import ranks as ranks_module
from tierd.client.ranks.launch import Beginning, Clock
from tierd.client.ranks.launchers import rank_and_world, slurm_attempt
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring import source
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    DaemonUnavailable,
    StateMismatch,
    StepRefused,
    StoreUnavailable,
)
from tierd.core.timeline.run_view import RunView
from tierd.ipc.messages import read_member
from tierd.spool.spool import Spool
from tierd.stores.memory import MemoryStore

_BEGIN = """
import json, sys, time
import torch
from torch import distributed
from support.training import tensors, same
import tierd
from tierd.client.restoring import source
source._PATIENCE = 0.5
"""


def rank(spool: Spool, number: int, name: str, world: int = 2) -> tierd.Checkpointer:
    return tierd.Checkpointer(spool.root, "run", rank=number, world_size=world, attempt=name, to=[])


def value(step: int, number: int) -> int:
    """What rank `number` saves at `step`, and has to get back."""
    return step * 100 + number


# -- without a way to talk --------------------------------------------------------------------------------------------


def test_a_checkpoint_is_complete_when_both_ranks_have_saved(spool):
    first, second = (rank(spool, number, attempt(1)) for number in (0, 1))
    first.save(1, tensors(1)).wait()
    with rank(spool, 0, attempt(2)) as asking:
        assert asking.restore(tensors(0)) is None
    second.save(1, tensors(10)).wait()
    first.save(2, tensors(2)).wait()
    for number, expected in ((0, 1), (1, 10)):
        state = tensors(0)
        with rank(spool, number, attempt(3)) as asking:
            found = asking.restore(state)
        assert found.step == 1 and same(state, expected)
        assert [(one.step, one.reason.split(":")[0]) for one in found.skipped] == [(2, "incomplete")]
    first.close(), second.close()


def test_what_became_whole_after_a_launch_began_anew_is_named_and_given_to_whoever_asks(spool):
    """Its other part lay on a node that was down. To go back to it, or on without it, is not for tierd to decide."""
    first, late = (rank(spool, number, attempt(1)) for number in (0, 1))
    first.save(1, tensors(1)).wait()
    with rank(spool, 0, attempt(2)) as anew:
        assert anew.restore(tensors(0)) is None
        anew.save(1, tensors(2)).wait()
    late.save(1, tensors(10)).wait()
    with rank(spool, 0, attempt(3)) as asking:
        for _ in range(2):  # also when the launcher tries again
            with pytest.raises(CheckpointNotFound, match=rf"off the timeline: step 1 of attempt {attempt(1)}"):
                asking.restore(tensors(0))
        state = tensors(0)
        found = asking.restore(state, step=1, attempt=attempt(1))
    assert (found.step, found.attempt) == (1, attempt(1)) and same(state, 1)
    first.close(), late.close()


def _alone(spool: Spool):
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        return checkpointer.restore(tensors(0))


def test_another_number_of_ranks_is_refused_and_both_numbers_are_named(spool):
    for number in (0, 1):
        with rank(spool, number, attempt(1)) as saving:
            saving.save(1, tensors(1))
    with pytest.raises(StateMismatch, match=r"by 2 ranks.*has 1.*tierd\.dcp"):
        _alone(spool)
    with pytest.raises(StateMismatch, match=r"by 2 ranks.*has 3"), rank(spool, 0, attempt(2), world=3) as asking:
        asking.restore(tensors(0))


def test_ranks_without_a_group_need_a_common_attempt(spool):
    with pytest.raises(ConfigError, match="share one attempt"):
        tierd.Checkpointer(spool.root, "run", rank=0, world_size=2, to=[])


def test_ranks_that_cannot_talk_take_no_mixture_of_one_spool_and_a_tier(tmp_path, quick):
    """The other rank does not see this spool: it would resume from another checkpoint."""
    spools, store = [Spool(tmp_path / name) for name in "ab"], MemoryStore()
    for spool, number in zip(spools, (0, 1), strict=True):
        with Daemon(spool.root, {"tier": Double(store)}) as daemon:
            with tierd.Checkpointer(spool.root, "run", number, 2, attempt(1)) as saving:
                saving.save(1, tensors(1)).wait()
                if number == 0:
                    saving.save(2, tensors(2)).wait()
            daemon.settle()
    with rank(spools[1], 1, attempt(1)) as saving:  # into the spool; its daemon is away
        saving.save(2, tensors(2)).wait()
    blocked = Double(store)
    blocked.before = no_puts
    for spool, number in zip(spools, (0, 1), strict=True):
        with (
            Daemon(spool.root, {"tier": blocked}),
            tierd.Checkpointer(spool.root, "run", number, 2, attempt(2)) as asking,
        ):
            assert asking.restore(tensors(0)).step == 1


def test_one_that_finds_its_part_corrupt_cannot_tell_and_the_next_launch_finds_the_one_before(spool):
    for number in (0, 1):
        with rank(spool, number, attempt(1)) as saving:
            for step in (1, 2):
                saving.save(step, tensors(value(step, number))).wait()
    harm(spool, 2, 1, 2)
    with pytest.raises(StoreUnavailable, match="launch again"), rank(spool, 1, attempt(2)) as asking:
        asking.restore(tensors(0))
    for number in (0, 1):
        with rank(spool, number, attempt(3)) as asking:
            assert asking.restore(tensors(0)).step == 1


# -- with a process group ---------------------------------------------------------------------------------------------


@pytest.fixture
def group(monkeypatch, spool):
    made = Group(3)
    monkeypatch.setattr(ranks_module, "_process_group", lambda: made)

    def saving(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            for step in (1, 2, 3, 4):
                checkpointer.save(step, tensors(value(step, number))).wait()

    assert made.run(saving) == [None] * 3
    return made


def restoring(spool: Spool, **asked):
    def work(number: int):
        state = tensors(0)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            found = checkpointer.restore(state, **asked)
            assert same(state, value(found.step, number))
            return found, checkpointer.attempt

    return work


def harm(spool: Spool, step: int, number: int, world: int = 3) -> None:
    path = next(spool.root.glob(f"run/{step:012}.*/{number:05}-of-{world:05}/tensors.safetensors"))
    path.write_bytes(flipped(path.read_bytes()))


def test_ranks_of_a_group_share_one_attempt(spool, group):
    before = group.exchanges
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [4, 4, 4]
    assert len({name for _, name in found}) == 1 and found[0][1] > found[0][0].attempt
    assert group.exchanges - before == 4, "one when they begin, and three to restore: look, read, loaded"


def test_all_ranks_step_back_together_when_one_rank_has_to(spool, group):
    """Each would find its own newest otherwise, and train on from different steps."""
    harm(spool, 4, 1)
    harm(spool, 3, 2)
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [2, 2, 2]
    assert len({name for _, name in found}) == 1
    for restored, _ in found:
        assert [(one.step, one.reason[:7]) for one in restored.skipped] == [(4, "rank 1:"), (3, "rank 2:")]
        assert all("differ from their digest" in one.reason for one in restored.skipped)


def test_when_one_rank_cannot_restore_none_does_and_none_waits_for_ever(spool, group):
    for step in (1, 2, 3, 4):
        harm(spool, step, 1)
    for error in group.run(restoring(spool)):
        assert isinstance(error, CheckpointNotFound) and str(error).count("rank 1:") == 4


def test_an_error_of_one_rank_steps_nobody_back(spool, group, monkeypatch):
    """An error is not corruption on any rank that meets it."""
    read = Spool.read

    def failing(self, part, manifest):
        if part.rank == 2:
            raise OSError(5, "Input/output error")
        return read(self, part, manifest)

    monkeypatch.setattr(Spool, "read", failing)
    found = group.run(restoring(spool))
    assert all(isinstance(error, StoreUnavailable) for error in found)
    assert all("rank 2" in str(found[number]) for number in (0, 1))


def test_a_checkpoint_that_one_rank_cannot_load_is_loaded_by_none(spool, group):
    """Else the others have loaded it already, and wait in the next collective for the one that raised."""

    def work(number: int):
        state = tensors(0)
        if number == 1:
            name = next(iter(state))
            state[name] = state[name].new_zeros(7, 7)
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            try:
                checkpointer.restore(state)
            except StateMismatch as error:
                return str(error), number == 1 or same(state, 0)
        return None

    found = group.run(work)
    assert all(untouched for _, untouched in found)
    assert "rank 1" in found[0][0] and "rank 1" in found[2][0]


def test_what_was_removed_since_the_look_is_looked_for_again(spool, group, monkeypatch):
    """Another launch's retention may do so. It is not corruption, and the newest that is left is taken."""
    obtained = []
    obtain = source.NodeSource.obtain

    def racing(self, part):
        if part.rank == 0 and not obtained:
            obtained.append(part)
            spool.remove([one for one in spool.parts() if one.checkpoint == part.checkpoint])
        return obtain(self, part)

    monkeypatch.setattr(source.NodeSource, "obtain", racing)
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [3, 3, 3]
    assert not spool.quarantined() and all(one.skipped == () for one, _ in found)


def test_a_rolled_back_launch_goes_on_and_the_abandoned_branch_is_left(spool, group):
    def back(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            checkpointer.restore(tensors(0), step=2)
            for step in (21, 22)[: 2 if number == 0 else 1]:  # of 22 only rank 0's part comes to be
                checkpointer.save(step, tensors(value(step, number))).wait()

    assert group.run(back) == [None] * 3
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [21] * 3
    harm(spool, 21, 0)
    assert [one.step for one, _ in group.run(restoring(spool))] == [2] * 3, "never 3 or 4, which were abandoned"


def test_an_attempt_that_is_not_there_is_no_fresh_start(spool, group):
    for error in group.run(restoring(spool, attempt=attempt(9))):
        assert isinstance(error, CheckpointNotFound) and attempt(9) in str(error)


def test_what_one_rank_is_asked_wrongly_is_told_to_the_others(spool, group):
    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            return checkpointer.restore(tensors(0), step=1.0 if number == 1 else 1)

    first, wrong, third = group.run(work)
    assert isinstance(wrong, StepRefused)
    assert all(isinstance(one, StoreUnavailable) and "rank 1 could not" in str(one) for one in (first, third))


@pytest.mark.parametrize("answer", [{"resume": {}}, {"sight": {"\ud800": 1}}], ids=["other", "no text"])
def test_a_daemon_of_another_version_is_told_so(answer):
    with pytest.raises(DaemonUnavailable, match="another version"):
        read_member({"ok": True} | answer, "sight", RunView)


def test_ranks_that_were_asked_for_different_steps_are_told(spool, group):
    found = group.run(lambda number: restoring(spool, step=2 + (number == 1))(number))
    assert all(
        isinstance(error, ConfigError) and "every rank of a launch restores the same" in str(error) for error in found
    )


@pytest.mark.parametrize("what", ["attempt", "run"])
def test_ranks_that_were_given_different_names_are_told(spool, group, what):
    def work(number: int):
        given = attempt(900 + (number == 2)) if what == "attempt" else None
        run = f"run{number == 2}" if what == "run" else "run"
        tierd.Checkpointer(spool.root, run, attempt=given, to=[])

    for error in group.run(work):
        assert isinstance(error, ConfigError) and f"{what}=" in str(error)
    some = group.run(
        lambda number: tierd.Checkpointer(spool.root, "run", attempt=attempt(9) if number else None, to=[])
    )
    assert all(isinstance(error, ConfigError) and "None" in str(error) for error in some)


def test_a_rank_that_cannot_begin_tells_the_others(spool, group):
    """They would wait for it, for hours."""
    spool.root.with_name("file").write_text("")
    found = group.run(
        lambda number: tierd.Checkpointer(spool.root if number else spool.root.with_name("file"), "run", to=[])
    )
    assert not isinstance(found[0], StoreUnavailable | tierd.Checkpointer)
    assert all(isinstance(error, StoreUnavailable) and "rank 0 cannot begin" in str(error) for error in found[1:])


def test_saving_and_closing_talk_to_no_other_rank(spool, group):
    """A slow or dead rank never blocks the others."""
    made = group.run(lambda number: tierd.Checkpointer(spool.root, "run", to=[]))
    group.run(lambda number: made[number].restore(tensors(0)))
    group.deaf = True

    def work(number: int) -> None:
        for step in (10, 11, 12)[: number + 1]:
            made[number].save(step, tensors(value(step, number))).wait()
        with made[number].stage(20) as directory:
            (directory / "x").write_text("x")
        made[number].close()

    assert group.run(work) == [None] * 3


def test_given_ranks_that_are_not_the_groups_do_not_use_it(spool, group):
    """A writer per node beside the training's group, say: the other ranks make no checkpointer."""
    group.deaf = True
    group.me.rank = 1
    with tierd.Checkpointer(spool.root, "other", rank=0, world_size=1, to=[]) as alone:
        alone.save(1, tensors(1)).wait()
    with pytest.raises(ConfigError, match="share one attempt"):
        tierd.Checkpointer(spool.root, "other", rank=0, world_size=2, to=[])


class Stubborn:
    """Holds a tensor, and cannot be loaded on one rank."""

    def __init__(self, number: int, *, fails: bool) -> None:
        self.value, self.fails = torch.full((3,), float(number)), fails

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        if self.fails:
            raise RuntimeError("not with this configuration")
        self.value = state["value"].clone()


def test_where_one_rank_cannot_load_no_rank_goes_on_and_nothing_is_saved_until_all_have_restored(spool, group):
    def saving(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            checkpointer.restore(tensors(0))
            checkpointer.save(9, {"model": Stubborn(number, fails=False)}).wait()

    assert group.run(saving) == [None] * 3

    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            state = {"model": Stubborn(7, fails=number == 1)}
            with pytest.raises(StateMismatch) as raised:
                checkpointer.restore(state)
            with pytest.raises(ConfigError, match="nothing is saved, because the last restore failed"):
                checkpointer.save(10, state)
            state["model"].fails = False
            found = checkpointer.restore(state)
            checkpointer.save(10, state).wait()
            return str(raised.value), found.step, float(state["model"].value[0])

    told = group.run(work)
    assert [one[1:] for one in told] == [(9, 0.0), (9, 1.0), (9, 2.0)]
    assert all("rank 1 could not load run step 9" in told[number][0] for number in (0, 2))
    assert group.run(lambda number: Restorer(spool, "run", Ranks(), tiers=False).restore(None, None).part) == [
        part for part in spool.parts() if part.checkpoint.step == 10
    ]


@pytest.mark.parametrize(
    ("what", "odd", "even"),
    [
        ("to", {"to": []}, {"to": None}),
        ("retention", {"retention": tierd.Retention(keep_last=5)}, {}),
        ("when", {"when": tierd.When(steps=5)}, {}),
    ],
)
def test_ranks_that_were_made_differently_are_told_at_once(spool, group, what, odd, even):
    def work(number: int) -> None:
        tierd.Checkpointer(spool.root, "run", **{"to": [], **(odd if number == 1 else even)})

    for error in group.run(work):
        assert isinstance(error, ConfigError) and f"{what}=" in str(error) and "rank 1" in str(error)


def test_ranks_that_want_different_entries_are_told(spool, group):
    def work(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            state = tensors(0)
            checkpointer.restore(state, only=list(state) if number else next(iter(state)))

    for error in group.run(work):
        assert isinstance(error, ConfigError) and "every rank of a launch restores the same" in str(error)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_restore_is_named_on_all_others_in_time(spool, group, absent):
    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[], rank_timeout=1.5) as checkpointer:
            if number == absent:
                time.sleep(8)
                return None
            return checkpointer.restore(tensors(0))

    begun = time.monotonic()
    found = group.run(work)
    assert time.monotonic() - begun < 20
    for number in {0, 1, 2} - {absent}:
        assert isinstance(found[number], StoreUnavailable) and f"rank {absent} (process" in str(found[number])


def test_a_rank_that_restores_twice_is_not_waited_with(spool, group):
    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[], rank_timeout=1.5) as checkpointer:
            first = checkpointer.restore(tensors(0))
            if number == 1:
                with pytest.raises(StoreUnavailable, match="rank 0"):
                    checkpointer.restore(tensors(0))
            return first.step

    assert group.run(work) == [4] * 3


@pytest.mark.parametrize("name", ["rank_timeout", "start_timeout"])
@pytest.mark.parametrize("bad", [0, -1, True, "30", float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(spool, name, bad):
    with pytest.raises(ConfigError, match=f"{name}="):
        tierd.Checkpointer(spool.root, "run", to=[], **{name: bad})


@pytest.mark.parametrize("call", ["save", "restore", "due", "stage"])
def test_a_group_that_came_later_and_says_otherwise_is_found(spool, monkeypatch, call):
    """`mp.spawn`: every process took itself for rank 0 of 1, and each wrote over the others' parts."""
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[], when=tierd.When(steps=1))
    made = Group(2)
    made.me.rank = 1
    monkeypatch.setattr(ranks_module, "_process_group", lambda: made)
    calls = {
        "save": lambda: checkpointer.save(1, tensors(1)),
        "restore": lambda: checkpointer.restore(tensors(0)),
        "due": lambda: checkpointer.due(1),
        "stage": lambda: checkpointer.stage(1).__enter__(),
    }
    with pytest.raises(ConfigError, match=r"made as rank 0 of 1.*says rank 1 of 2.*after init_process_group"):
        calls[call]()
    checkpointer.close()
    assert not spool.parts()
    with tierd.Checkpointer(spool.root, "run", rank=0, world_size=1, to=[]) as alone:  # who is told is believed
        alone.save(1, tensors(1)).wait()


_SLURM = (
    _BEGIN
    + """
import os
number, spool, room, launch = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
os.environ.update({
    "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": launch,
})
def wait(name):
    for _ in range(3000):
        if os.path.exists(f"{room}/{name}"):
            return
        time.sleep(0.01)
    raise SystemExit(f"{name} did not come")
if launch == "1700000000":
    with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
        assert checkpointer.restore(tensors(0)) is None
        for step in (5, 6)[: 2 - number]:
            checkpointer.save(step, tensors(step * 100 + number)).wait()
        if number == 1:  # its last part becomes durable between the two ranks' looks
            snapshot = checkpointer.attempt
            open(f"{room}/attempt", "w").write(snapshot)
    print("{}")
    raise SystemExit
sight = source.NodeSource.sight
def looking(self):
    if number == 1:
        wait("looked")
        with tierd.Checkpointer(spool, "run", 1, 2, open(f"{room}/attempt").read(), to=[]) as late:
            late.save(6, tensors(601)).wait()
    try:
        return sight(self)
    finally:
        open(f"{room}/looked", "w").close()
source.NodeSource.sight = looking
state = tensors(0)
with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
    found = checkpointer.restore(state)
    assert same(state, found.step * 100 + number)
    print(json.dumps([found.step, checkpointer.attempt]))
"""
)


@pytest.mark.slow
def test_ranks_of_a_slurm_step_on_one_node_resume_from_the_same_without_a_group(tmp_path, spool):
    for launch in ("1700000000", "1700000100"):
        own = [[str(number), str(spool.root), str(tmp_path), launch] for number in (0, 1)]
        told = processes(_SLURM, own)
    first, second = (json.loads(one.splitlines()[-1]) for one in told)
    assert first == second, "rank 0 would go on from 5, and rank 1 from 6"


# -- nodes with a spool each ------------------------------------------------------------------------------------------


def no_puts(operation: str, key: str) -> None:
    if operation == "put":
        raise StoreUnavailable("nothing is taken")


class Nodes:
    """Two nodes, a daemon and a rank on each, and one tier. Which rank is on which node may change between launches."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.spools = [Spool(tmp_path / name) for name in ("a", "b")]
        self.inner = MemoryStore()
        self.stores = [Double(self.inner) for _ in self.spools]
        self.group = Group(2)
        self.order = [0, 1]  # rank -> node
        monkeypatch.setattr(ranks_module, "_process_group", lambda: self.group)

    def __enter__(self):
        self.daemons = [
            Daemon(spool.root, {"tier": store}).__enter__()
            for spool, store in zip(self.spools, self.stores, strict=True)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons:
            daemon.stop()

    def checkpointer(self, number: int) -> tierd.Checkpointer:
        return tierd.Checkpointer(self.spools[self.order[number]].root, "run")

    def save(self, *steps: int, ranks=(0, 1), after: int | None = None) -> None:
        def work(number: int) -> None:
            with self.checkpointer(number) as checkpointer:
                if after is not None:
                    checkpointer.restore(tensors(0), step=after)
                for step in steps:
                    if number in ranks:
                        checkpointer.save(step, tensors(value(step, number))).wait()

        assert self.group.run(work) == [None, None]

    def settle(self) -> None:
        for daemon in self.daemons:
            daemon.settle()

    def take(self, *, puts: bool) -> None:
        for store in self.stores:
            store.before = None if puts else no_puts

    def restore(self, **asked) -> list:
        def work(number: int):
            state = tensors(0)
            with self.checkpointer(number) as checkpointer:
                found = checkpointer.restore(state, **asked)
                assert found is None or same(state, value(found.step, number))
                return found

        return self.group.run(work)


@pytest.fixture
def nodes(tmp_path, monkeypatch, quick):
    with Nodes(tmp_path, monkeypatch) as nodes:
        yield nodes


def test_parts_that_lie_only_in_the_nodes_own_spools_are_restored(nodes):
    """No tier has either part of step 2, no node sees both: together they are whole."""
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    assert [(one.step, one.tier, one.skipped) for one in nodes.restore()] == [(2, "local", ())] * 2


def test_a_fresh_node_restores_its_rank_from_the_tier(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[0]])
    assert [(one.step, one.tier) for one in nodes.restore()] == [(1, "local"), (1, "tier")]


def test_ranks_that_changed_nodes_have_what_they_need_flushed_first(nodes):
    """Elastic launches number nodes as they come. Stepping back would throw work away that lies one node further."""
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.order = [1, 0]
    nodes.take(puts=True)
    found = nodes.restore()
    assert [getattr(one, "step", one) for one in found] == [2, 2], found
    assert all(one.skipped == () for one in found)


def test_when_it_cannot_be_flushed_no_rank_steps_back(nodes, monkeypatch):
    monkeypatch.setattr(source, "_FLUSH", 0.3)
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.order = [1, 0]
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable)
        assert "step 2" in str(error) and "a node's spool alone" in str(error) and "step=…" in str(error)
    assert [one.step for one in nodes.restore(step=1)] == [1, 1]


def test_a_part_of_a_lost_node_that_was_not_flushed_is_passed_over(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2, after=1)
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    found = nodes.restore()
    assert [one.step for one in found] == [1, 1]
    assert all([(s.step, s.reason.split(":")[0]) for s in one.skipped] == [(2, "incomplete")] for one in found)


def test_while_one_ranks_tier_is_away_nobody_steps_past_what_may_be_whole(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.save(2, ranks=(0,), after=1)
    nodes.stores[1].error = StoreUnavailable("down")
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable) and "step 2" in str(error) and "tier did not" in str(error)
    nodes.stores[1].error = None
    assert [one.step for one in nodes.restore()] == [1, 1]


def test_while_one_ranks_tier_is_away_its_missing_part_stops_all(nodes):
    nodes.save(1, 2)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    nodes.stores[1].error = StoreUnavailable("down")
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable) and "step 2" in str(error)
    nodes.stores[1].error = None
    assert [(one.step, one.tier) for one in nodes.restore()] == [(2, "local"), (2, "tier")]


def test_one_rank_without_a_daemon_and_without_its_part_stops_all(nodes):
    nodes.save(1, 2)
    nodes.settle()
    nodes.spools[1].remove([nodes.spools[1].parts()[-1]])
    nodes.daemons[1].stop()
    for error in nodes.restore():
        assert isinstance(error, StoreUnavailable | DaemonUnavailable) and "step 2" in str(error)


def test_a_copy_that_is_corrupt_everywhere_steps_all_back_and_each_says_whose(nodes):
    nodes.save(1, 2)
    nodes.settle()
    harm(nodes.spools[1], 2, 1, 2)
    daemon = nodes.daemons[1]
    for key in daemon.call(contents(nodes.inner)):
        if is_chunk(key) and "/000000000002." in key and "/00001/" in key:
            daemon.call(flip(nodes.inner, key))
    found = nodes.restore()
    assert [one.step for one in found] == [1, 1]
    for one in found:
        (skipped,) = one.skipped
        assert skipped.step == 2 and skipped.reason.startswith("rank 1:")
        assert "local" in skipped.reason and "tier" in skipped.reason


def restored_past_a_corrupt_copy(nodes) -> list:
    """Ranks have come to each other's nodes; rank 1's newest part is corrupt on the tier, and right in one spool."""
    nodes.save(1, 2)
    nodes.settle()
    nodes.order = [1, 0]
    daemon = nodes.daemons[0]
    for key in daemon.call(contents(nodes.inner)):
        if is_chunk(key) and "/000000000002." in key and "/00001/" in key:
            daemon.call(flip(nodes.inner, key))
    return nodes.restore()


def test_what_is_corrupt_on_the_tier_and_right_in_another_nodes_spool_is_flushed_again_and_restored(nodes):
    """Seeds 200120 and 200195 of the simulation: ranks came to other nodes, and all stepped back."""
    found = restored_past_a_corrupt_copy(nodes)
    assert [(one.step, one.skipped) for one in found] == [(2, ())] * 2 and found[1].tier == "tier"


def test_what_the_other_node_flushed_again_before_anybody_looked_is_restored(nodes, monkeypatch):
    """Its daemon saw by itself that the copy was gone, and no rank lacked anything at the next look."""
    settle = Restorer.settle

    def slowly(self, candidate, error, **told):
        settled = settle(self, candidate, error, **told)
        if settled.corrupt:
            nodes.settle()
        return settled

    monkeypatch.setattr(Restorer, "settle", slowly)
    found = restored_past_a_corrupt_copy(nodes)
    assert [(one.step, one.skipped) for one in found] == [(2, ())] * 2 and found[1].tier == "tier"


def test_corrupt_on_the_tier_and_in_every_spool_many_are_stepped_back_over(nodes):
    nodes.save(1, 2, 3, 4, 5)
    nodes.settle()
    nodes.order = [1, 0]
    daemon = nodes.daemons[0]
    for step in (2, 3, 4, 5):
        harm(nodes.spools[1], step, 1, 2)
        for key in daemon.call(contents(nodes.inner)):
            if is_chunk(key) and f"/{step:012}." in key and "/00001/" in key:
                daemon.call(flip(nodes.inner, key))
    found = nodes.restore()
    assert [one.step for one in found] == [1, 1]
    assert [[skipped.step for skipped in one.skipped] for one in found] == [[5, 4, 3, 2]] * 2
    assert all(skipped.reason.startswith("rank 1: ") for one in found for skipped in one.skipped)


def test_a_node_that_did_not_see_the_newest_attempt_resumes_from_no_abandoned_branch(nodes):
    """Restored at 200, went on at 210; 210 lies in one spool only. The other node still has the whole of 300."""
    nodes.save(100, 200, 300)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(210, ranks=(0,), after=200)
    found = nodes.restore()
    assert [one.step for one in found] == [200, 200]
    assert all([one.step for one in restored.skipped] == [210] for restored in found)
    nodes.save(210, after=200)
    assert [one.step for one in nodes.restore()] == [210, 210]


def test_a_reader_of_every_ranks_part_has_them_flushed_and_finds_the_newest(nodes):
    nodes.save(1)
    nodes.settle()
    nodes.take(puts=False)
    nodes.save(2)
    nodes.take(puts=True)

    def work(number: int):
        restorer = Restorer(nodes.spools[number], "run", Ranks(), tiers=True)
        tried = []
        for candidate in restorer.whole(None, None):
            tried.append((candidate.checkpoint.step, candidate.world, candidate.lacking))
            if restorer.settle(candidate, None).load:
                break
        restorer.close()
        return tried, restorer.resume.attempts, len(restorer.agreement.clocks)

    found = nodes.group.run(work)
    assert found[0] == found[1] and found[0][0] == [(2, 2, ())] and found[0][2] == 2


# -- what the environment says ----------------------------------------------------------------------------------------

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


def test_arguments_go_before_the_group_before_torchrun_before_slurm(environ, monkeypatch):
    assert who() == (0, 1)
    environ(SLURM_PROCID="0", SLURM_NTASKS="8")
    assert who() == (0, 1), "a batch script, in which one process runs"
    environ(**STEP)
    assert who() == (3, 4)
    environ(RANK="1", WORLD_SIZE="2")
    assert who() == (1, 2)
    made = Group(5)
    made.me.rank = 4
    monkeypatch.setattr(ranks_module, "_process_group", lambda: made)
    assert who() == (4, 5)
    assert who(6, 7) == (6, 7)
    for half in ((1, None), (None, 2)):
        with pytest.raises(ConfigError, match="both"):
            who(*half)


@pytest.mark.parametrize("bad", ["", "-1", "one", "1.0", "9" * 30, "²"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_a_value_that_is_no_number_is_named(environ, name, bad):
    given = {"RANK": "0", "WORLD_SIZE": "1"} if "SLURM" not in name else STEP
    environ(**{**given, name: bad})
    with pytest.raises(ConfigError, match=name):
        who()


def test_a_rank_beyond_the_world_is_named(environ):
    environ(RANK="2", WORLD_SIZE="2")
    with pytest.raises(ConfigError, match=r"RANK=2 and WORLD_SIZE=2"):
        who()


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


def test_a_rank_of_a_slurm_step_restores_after_another_one_has_saved(environ, spool):
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


def test_a_slurm_attempt_that_is_not_the_latest_is_refused_as_a_given_one(environ, spool):
    environ(**STEP)
    for number in range(4):
        with rank(spool, number, "050000000000-00000000", world=4) as saving:
            saving.save(1, tensors(1)).wait()
    with pytest.raises(ConfigError, match="later"), tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.restore(tensors(0))


def test_a_slurm_that_does_not_tell_when_the_job_started_needs_another_way(environ, spool, monkeypatch):
    environ(**STEP)
    monkeypatch.delenv("SLURM_JOB_START_TIME")
    with pytest.raises(ConfigError, match=r"SLURM_JOB_START_TIME.*initialise torch\.distributed.*pass attempt="):
        tierd.Checkpointer(spool.root, "run", to=[])
    with rank(spool, 3, attempt(1), world=4) as given:
        assert given.attempt == attempt(1)


# -- real processes ---------------------------------------------------------------------------------------------------

_GLOO = (
    _BEGIN
    + """
file, number, world, spool, to, wish = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7]
distributed.init_process_group("gloo", store=distributed.FileStore(file, world), rank=number, world_size=world)
state = tensors(0)
told = {}
try:
    with tierd.Checkpointer(spool, "run", to=json.loads(to)) as checkpointer:
        found = checkpointer.restore(state)
        if found:
            told = {"step": found.step, "skipped": [[s.step, s.reason] for s in found.skipped]}
            assert same(state, found.step * 100 + number), "what was loaded is not what was saved"
        told["attempt"] = checkpointer.attempt
        for step in json.loads(wish):
            checkpointer.save(step, tensors(step * 100 + number)).wait()
except tierd.core.errors.TierdError as error:
    told = {"error": type(error).__name__, "text": str(error)}
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps(told))
"""
)


def launch(tmp_path, spools, to, *steps: int) -> list[dict]:
    file = tmp_path / f"rendezvous{time.monotonic_ns()}"
    world = str(len(spools))
    own = [
        [str(file), str(number), world, str(spool.root), json.dumps(to), json.dumps(steps)]
        for number, spool in enumerate(spools)
    ]
    return [json.loads(output.splitlines()[-1]) for output in processes(_GLOO, own)]


def test_processes_agree_over_gloo(tmp_path, quick):
    """Each node's spool has its own rank's parts; the tier takes none of them."""
    spools, store = [Spool(tmp_path / name) for name in "ab"], Double()
    store.before = no_puts
    with Daemon(spools[0].root, {"tier": store}), Daemon(spools[1].root, {"tier": store}):
        first = launch(tmp_path, spools, None, 1, 2)
        assert len({one["attempt"] for one in first}) == 1
        harm(spools[1], 2, 1, 2)
        second = launch(tmp_path, spools, None)
    assert [one["step"] for one in second] == [1, 1]
    assert all(step == 2 and reason.startswith("rank 1:") for one in second for step, reason in one["skipped"])
    assert second[0]["attempt"] == second[1]["attempt"] > first[0]["attempt"]


_DYING = (
    _BEGIN
    + """
import os
file, number, spool = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", store=distributed.FileStore(file, 2), rank=number, world_size=2)
checkpointer = tierd.Checkpointer(spool, "run", to=[])
if number == 1:
    os._exit(0)
try:
    checkpointer.restore(tensors(0))
except tierd.core.errors.StoreUnavailable as error:
    print("told:", error)
    checkpointer.save(1, tensors(1)).wait()
    print("saved")
sys.stdout.flush()
os._exit(0)
"""
)


def test_a_rank_that_dies_while_others_restore_is_noticed_at_once_and_holds_up_no_save(tmp_path):
    own = [[str(tmp_path / "rendezvous"), str(number), str(tmp_path / "spool")] for number in (0, 1)]
    first, _ = processes(_DYING, own, timeout=60)
    assert "told: rank 0 of 2: the other ranks cannot be heard: rank 1 (process " in first and "saved" in first


_ABSENT = (
    _BEGIN
    + """
import os, time
file, number, spool = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", store=distributed.FileStore(file, 2), rank=number, world_size=2)
if number == 0:
    try:
        tierd.Checkpointer(spool, "run", to=[], start_timeout=3)
    except tierd.core.errors.ConfigError as error:
        print("told:", error)
    open(file + ".done", "w").close()
for _ in range(600):
    if os.path.exists(file + ".done"):
        break
    time.sleep(0.1)
sys.stdout.flush()
os._exit(0)
"""
)


def test_a_rank_that_makes_no_checkpointer_is_not_waited_for_for_hours(tmp_path):
    own = [[str(tmp_path / "rendezvous"), str(number), str(tmp_path / "spool")] for number in (0, 1)]
    first, _ = processes(_ABSENT, own, timeout=60)
    assert "rank 1 of 2 did not come within 3 s" in first and "Every rank makes a Checkpointer" in first


_RUN = (
    _BEGIN
    + """
spool, way, log = sys.argv[1:]
if way == "group":
    distributed.init_process_group("gloo")
made = [tierd.Checkpointer(spool, run, to=[]) for run in ("run", "second")]
state = tensors(0)
found = made[0].restore(state)
number = int(__import__("os").environ["RANK"])
assert found is None or same(state, found.step * 100 + number)
if way == "later":
    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2
step = found.step + 1 if found else 1
made[0].save(step, tensors(step * 100 + number)).wait()
for one in made:
    one.close()
if distributed.is_initialized():
    distributed.destroy_process_group()
with open(f"{log}.{number}", "a") as file:
    print(found.step if found else None, made[0].attempt, made[1].attempt, file=file)
"""
)

# In one process, because each takes seconds to load torch.
_TORCHRUN_TWICE = """
import sys
from torch.distributed.run import main
for _ in range(2):
    main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("group", ["--standalone"]),
        ("store", ["--standalone"]),
        ("later", ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]),
        ("later", ["--master-addr=127.0.0.1"]),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_ranks_of_torchrun_agree_with_and_without_a_group(tmp_path, way, options):
    if options[0].startswith("--master"):
        options = [*options, f"--master-port={free_port()}"]
    script = tmp_path / "train.py"
    script.write_text(_RUN)
    arguments = ["--nproc-per-node=2", *options, str(script), str(tmp_path / "spool"), way, str(tmp_path / "log")]
    done = subprocess.run(
        [sys.executable, "-c", _TORCHRUN_TWICE, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"log.{number}").read_text().splitlines() for number in (0, 1))
    assert first == second and [line.split()[0] for line in first] == ["None", "1"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_what_ranks_say_is_small_and_has_a_schema(monkeypatch):
    """No pickle: what is no such value is refused, and ranks that are at different calls are told so."""
    made = Group(2)
    monkeypatch.setattr(ranks_module, "_process_group", lambda: made)
    said = Beginning(run="run", world=2, clock=Clock(7, "0" * 8, None))

    def say(number: int) -> list:
        with torch.device("meta"):  # as `set_default_device` leaves it
            return Ranks().gather(said)

    assert made.run(say) == [[said, said]] * 2
    mixed = made.run(lambda number: Ranks().gather((said, Clock(1, "", None))[number]))
    assert all(isinstance(error, StoreUnavailable) for error in mixed)
    assert "this rank is at Beginning, and rank 1 is at Clock" in str(mixed[0])
