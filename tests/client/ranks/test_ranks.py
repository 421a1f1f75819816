"""Several ranks: a checkpoint is all of them or none, and they resume from the same one or not at all."""

from __future__ import annotations

import time

import pytest
import torch
from support.doubles import Double
from support.rank_states import harm, no_puts, rank, value
from support.ranks import Group
from support.training import same, tensors
from support.world import Daemon, attempt, commit, part

import tierd
from tierd.client.checkpointer import internals
from tierd.client.ranks.attempts import Beginning, RankClock
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring import part_source
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restorer
from tierd.client.restoring.verified_chunks import SpoolChunks
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    DaemonUnavailable,
    StateMismatch,
    StepRefused,
    StoreUnavailable,
)
from tierd.core.timeline.run_view import RunView
from tierd.ipc.message_codec import read_member
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore


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


def test_checkpoint_that_became_complete_after_a_fresh_launch_is_named_and_given_when_asked_for(spool):
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
            saving = tierd.Checkpointer(spool.root, "run", number, 2, attempt(1))
            saving.save(1, tensors(1)).wait()
            if number == 0:
                saving.save(2, tensors(2)).wait()
            daemon.settle()
        if number == 1:
            saving.save(2, tensors(2)).wait()  # into the spool; its daemon is away
        saving.close()
    blocked = Double(store)
    blocked.before = no_puts
    for spool, number in zip(spools, (0, 1), strict=True):
        with (
            Daemon(spool.root, {"tier": blocked}),
            tierd.Checkpointer(spool.root, "run", number, 2, attempt(2)) as asking,
        ):
            assert asking.restore(tensors(0)).step == 1


def test_rank_with_a_corrupt_part_cannot_decide_and_the_next_launch_restores_the_previous_checkpoint(spool):
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


@pytest.fixture
def group(monkeypatch, spool):
    made = Group(3)
    made.install(monkeypatch)

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
    each = SpoolChunks.each

    def failing(self, work):
        if self.manifest.rank == 2:
            raise OSError(5, "Input/output error")
        return each(self, work)

    monkeypatch.setattr(SpoolChunks, "each", failing)
    found = group.run(restoring(spool))
    assert all(isinstance(error, StoreUnavailable) for error in found)
    assert all("rank 2" in str(found[number]) for number in (0, 1))


def test_no_rank_loads_a_checkpoint_that_another_rank_cannot_load(spool, group):
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


def test_restore_searches_again_for_checkpoints_that_were_removed_since_it_observed(spool, group, monkeypatch):
    """Another launch's retention may do so. It is not corruption, and the newest that is left is taken."""
    obtained = []
    obtain = part_source.NodeSource.obtain

    def racing(self, part, **more):
        if part.rank == 0 and not obtained:
            obtained.append(part)
            spool.remove([one for one in spool.parts() if one.checkpoint == part.checkpoint])
        return obtain(self, part, **more)

    monkeypatch.setattr(part_source.NodeSource, "obtain", racing)
    found = group.run(restoring(spool))
    assert [one.step for one, _ in found] == [3, 3, 3]
    assert not spool.quarantined() and all(one.skipped == () for one, _ in found)


def test_rolled_back_launch_continues_and_the_abandoned_branch_is_left(spool, group):
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


def test_invalid_argument_of_one_rank_is_reported_to_the_others(spool, group):
    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            return checkpointer.restore(tensors(0), step=1.0 if number == 1 else 1)

    first, wrong, third = group.run(work)
    assert isinstance(wrong, StepRefused)
    assert all(isinstance(one, StoreUnavailable) and "rank 1 could not" in str(one) for one in (first, third))


@pytest.mark.parametrize("answer", [{"resume": {}}, {"sight": {"\ud800": 1}}], ids=["other", "no text"])
def test_daemon_of_another_version_is_named_in_the_error(answer):
    with pytest.raises(DaemonUnavailable, match="another version"):
        read_member({"ok": True} | answer, "sight", RunView)


def test_ranks_that_ask_for_different_steps_are_refused(spool, group):
    found = group.run(lambda number: restoring(spool, step=2 + (number == 1))(number))
    assert all(
        isinstance(error, ConfigError) and "every rank of a launch restores the same" in str(error) for error in found
    )


@pytest.mark.parametrize("what", ["attempt", "run"])
def test_ranks_that_were_given_different_names_are_refused(spool, group, what):
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


def test_rank_that_cannot_begin_notifies_the_others(spool, group):
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


def test_no_rank_continues_where_a_rank_cannot_load_and_nothing_is_saved_until_all_have_restored(spool, group):
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

    reported = group.run(work)
    assert [one[1:] for one in reported] == [(9, 0.0), (9, 1.0), (9, 2.0)]
    assert all("rank 1 could not load run step 9" in reported[number][0] for number in (0, 2))
    assert group.run(
        lambda number: Restorer(NodeSource(spool, "run", tiers=False), Ranks()).restore(None, None).part
    ) == [part for part in spool.parts() if part.checkpoint.step == 10]


@pytest.mark.parametrize(
    ("what", "odd", "even"),
    [
        ("to", {"to": []}, {"to": None}),
        ("retention", {"retention": tierd.Retention(keep_last=5)}, {}),
        ("when", {"when": tierd.When(steps=5)}, {}),
    ],
)
def test_ranks_that_were_made_differently_are_refused_at_once(spool, group, what, odd, even):
    def work(number: int) -> None:
        tierd.Checkpointer(spool.root, "run", **{"to": [], **(odd if number == 1 else even)})

    for error in group.run(work):
        assert isinstance(error, ConfigError) and f"{what}=" in str(error) and "rank 1" in str(error)


def test_ranks_that_want_different_entries_are_refused(spool, group):
    def work(number: int) -> None:
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            state = tensors(0)
            checkpointer.restore(state, only=list(state) if number else next(iter(state)))

    for error in group.run(work):
        assert isinstance(error, ConfigError) and "every rank of a launch restores the same" in str(error)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_restore_is_named_on_all_others(spool, group, absent):
    def work(number: int):
        with tierd.Checkpointer(spool.root, "run", to=[], rank_timeout=1.5) as checkpointer:
            if number == absent:
                time.sleep(8)
                return None
            return checkpointer.restore(tensors(0))

    found = group.run(work)
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
def test_group_that_was_initialised_later_and_contradicts_the_rank_is_detected(spool, monkeypatch, call):
    """`mp.spawn`: every process took itself for rank 0 of 1, and each wrote over the others' parts."""
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[], when=tierd.When(steps=1))
    made = Group(2)
    made.me.rank = 1
    made.install(monkeypatch)
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


def test_notes_of_ranks_are_small_and_have_a_schema(monkeypatch):
    """No pickle: what is no such value is refused, and ranks that are at different calls are told so."""
    made = Group(2)
    made.install(monkeypatch)
    said = Beginning(run="run", world=2, clock=RankClock(7, "0" * 8, None))

    def say(number: int) -> list:
        with torch.device("meta"):  # as `set_default_device` leaves it
            return Ranks().gather(said)

    assert made.run(say) == [[said, said]] * 2
    mixed = made.run(lambda number: Ranks().gather((said, RankClock(1, "", None))[number]))
    assert all(isinstance(error, StoreUnavailable) for error in mixed)
    assert "this rank is at Beginning, and rank 1 is at RankClock" in str(mixed[0])


# -- a given attempt in two launches ----------------------------------------------------------------------------------


def test_ranks_that_talk_refuse_an_attempt_of_a_launch_that_left_no_complete_checkpoint(spool, group):
    """A launcher that restarts them hands on its environment: step 9 would be made of parts of both launches."""

    def work(number: int, given: str, *saving: int) -> tuple[object, object]:
        with tierd.Checkpointer(spool.root, "other", attempt=given, to=[]) as checkpointer:
            found = checkpointer.restore(tensors(0))
            if number in saving:
                checkpointer.save(9, tensors(value(9, number))).wait()
            group.together.wait()
            return found, checkpointer.restore(tensors(0)) if len(saving) == 1 else None  # of the launch itself

    given = tierd.new_attempt()
    assert group.run(lambda number: work(number, given, 0)) == [(None, None)] * 3
    for error in group.run(lambda number: work(number, given, 1, 2)):
        assert isinstance(error, ConfigError) and f"attempt {given} of run other is an earlier launch's" in str(error)
    other = tierd.new_attempt()
    assert group.run(lambda number: work(number, other, 0, 1, 2)) == [(None, None)] * 3


def test_ranks_that_talk_refuse_a_used_attempt_before_they_save(spool, group):
    """Without a restore, step 9 was made of parts of both launches."""
    commit(spool, part(9, world=3))  # by a process of the earlier launch, whose other ranks died
    made = group.run(lambda number: tierd.Checkpointer(spool.root, "run", attempt=attempt(1), to=[]))
    assert ["an earlier launch's" in str(one) for one in made] == [True] * 3 and isinstance(made[2], ConfigError)


def test_ranks_that_talk_may_make_other_checkpointers_in_their_launch(spool, group):
    def work(number: int) -> None:
        for step in (1, 2):
            with tierd.Checkpointer(spool.root, "run", attempt=attempt(1), to=[]) as checkpointer:
                if number or step == 2:  # rank 0 sees the others' parts, and has none
                    checkpointer.save(step, tensors(step)).wait()
                group.together.wait()

    assert group.run(work) == [None] * 3
    assert len([one for one in spool.parts("run") if one.checkpoint.attempt == attempt(1)]) == 5


def test_ranks_that_cannot_talk_refuse_an_attempt_that_this_rank_has_used(spool):
    commit(spool, part(1, world=2))  # by another process
    with rank(spool, 1, attempt(1)) as late, rank(spool, 2, attempt(1), world=3):  # only others have saved
        assert late.restore(tensors(0)) is None
    with pytest.raises(ConfigError, match="an earlier launch's"):
        rank(spool, 0, attempt(1))


def test_a_rank_that_cannot_talk_refuses_an_attempt_that_was_used_while_it_began(spool):
    with rank(spool, 0, attempt(1)) as late:
        commit(spool, part(1, world=2))  # by another process, which then ends
        with pytest.raises(ConfigError, match="an earlier launch's"):
            late.save(2, tensors(2))


def test_a_rank_that_cannot_talk_may_make_another_checkpointer_in_its_launch(spool):
    """It was refused as an earlier launch's."""
    with rank(spool, 0, attempt(1)) as first:
        first.save(1, tensors(1)).wait()
    with rank(spool, 0, attempt(1)) as second:
        second.save(2, tensors(2)).wait()
    assert [one.checkpoint.step for one in spool.parts("run")] == [1, 2]


def test_part_that_another_process_saves_for_a_launch_belongs_to_the_launch(spool):
    """As `dcp.async_save` in a process."""
    with rank(spool, 0, attempt(1)) as first:
        internals(first).launch.share()
        commit(spool, part(1, world=2))
        with rank(spool, 0, attempt(1)) as second:
            second.save(2, tensors(2)).wait()
    assert [one.checkpoint.step for one in spool.parts("run")] == [1, 2]


def test_lone_rank_refuses_a_used_attempt_with_any_origin(spool):
    def resume(given: str) -> None:
        with tierd.Checkpointer(spool.root, "run", attempt=given, to=[]) as checkpointer:
            checkpointer.restore(tensors(0), step=1)
            checkpointer.save(2, tensors(2)).wait()

    with tierd.Checkpointer(spool.root, "run", to=[]) as first:
        first.save(1, tensors(1)).wait()
    given = tierd.new_attempt()
    resume(given)
    with pytest.raises(ConfigError, match="an earlier launch's"):
        resume(given)
