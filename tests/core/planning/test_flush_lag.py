"""Whether the tiers are behind a run is judged by its oldest checkpoint that a tier wants and none has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inventories import EPOCH, checkpoint, config, facts, part, solo

from tierd.core.planning.flush_lag import FlushLag, flush_lags
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.plan import flushes
from tierd.core.retention.policy import RetentionPolicy

TIER = RetentionPolicy(keep_last=3)


def place_of(*steps: int) -> Place:
    """A place with checkpoints of one launch, each made at its step's minute."""
    return solo(Place(), *(checkpoint(1, step) for step in steps))


def judge(
    minute: float, spool: Place, *tiers: Place, unknown: tuple[str, ...] = (), policy=TIER, saved: tuple[int, ...] = ()
) -> FlushLag:
    settings = config(*[policy] * len(tiers))
    inventory = Inventory(spool, dict(zip("abc", tiers, strict=False)))
    planned = [(flush.part, flush.tier) for flush in flushes(inventory, settings, {}, 0.0)]
    saves = [(checkpoint(1, step), EPOCH.timestamp() + 60 * step) for step in saved]
    (lag,) = flush_lags(inventory, planned, unknown, lambda run: saves, EPOCH.timestamp() + 60 * minute)
    return lag


def test_run_is_current_if_a_tier_has_all_that_any_tier_wants() -> None:
    lag = judge(9999, place_of(10, 20, 30), place_of(10, 20, 30))
    assert (lag.state, lag.text, lag.tier_step, lag.unsent) == ("current", "step 30 is on a tier", 30, 0)


def test_run_is_late_once_its_oldest_unsent_checkpoint_waits_for_two_intervals() -> None:
    spool, tier = place_of(10, 20, 30), place_of(10)
    sending, late = judge(40, spool, tier), judge(40.1, spool, tier)
    assert (sending.state, sending.unsent, sending.oldest_step, sending.lacking) == ("sending", 2, 20, ("a",))
    assert (sending.waited_s, sending.allowed_s) == (20 * 60, 20 * 60)
    assert sending.text == "step 10 is on a tier; 2 wait for 20 min"
    assert (late.state, late.text) == ("late", f"{sending.text} (allowed: 20 min)")


def test_checkpoint_that_another_tier_has_is_not_unsent() -> None:
    lag = judge(9999, place_of(10, 20), place_of(10, 20), place_of())
    assert (lag.state, lag.tier_step) == ("current", 20)


def test_checkpoint_that_no_policy_wants_is_not_unsent() -> None:
    lag = judge(9999, place_of(10, 20, 30), place_of(30), policy=RetentionPolicy(keep_last=1))
    assert lag.state == "current"


@pytest.mark.parametrize("tier", [(10,), ()])
def test_wait_begins_with_the_first_unsent_save_although_newer_saves_took_its_place(tier) -> None:
    """A policy that wants the newest alone would never be late while training saves, however long no tier has it."""
    policy = RetentionPolicy(keep_last=1)
    lag = judge(101, place_of(80, 90, 100), place_of(*tier), policy=policy, saved=(10, 20, 30, 90, 100))
    assert (lag.state, lag.unsent, lag.oldest_step) == ("late", 1, 100)
    assert lag.waited_s == (81 if tier else 91) * 60
    caught_up = judge(101, place_of(80, 90, 100), place_of(90), policy=policy, saved=(10, 20, 30, 90, 100))
    assert (caught_up.state, caught_up.waited_s) == ("sending", 60)


def test_older_wanted_checkpoint_is_unsent_although_the_newest_was_sent() -> None:
    lag = judge(9999, place_of(10, 20, 30), place_of(30))
    assert (lag.state, lag.tier_step, lag.oldest_step) == ("late", 30, 10)


@pytest.mark.parametrize(("steps", "allowed_s"), [((1, 2, 3), 300), ((10, 900, 1800), 4 * 3600), ((10,), 3600)])
def test_allowed_time_has_bounds(steps: tuple[int, ...], allowed_s: float) -> None:
    assert judge(0, place_of(*steps), place_of()).allowed_s == allowed_s


def test_one_short_interval_does_not_shorten_the_allowed_time() -> None:
    """A last save right after a periodic one says nothing of how long flushes may take."""
    assert judge(0, place_of(10, 20, 30, 40, 41), place_of()).allowed_s == 20 * 60


def test_rank_s_part_waits_although_other_nodes_have_the_other_ranks() -> None:
    half = Place.of({part(checkpoint(1, 10), 0, 2): facts(10)})
    other = Place.of({part(checkpoint(1, 10), 1, 2): facts(10)})
    lag = judge(9999, half, other)
    assert (lag.state, lag.tier_step, lag.text.split(";")[0]) == ("late", None, "on no tier")


def test_tier_that_never_answered_may_hold_the_checkpoint() -> None:
    lag = judge(9999, place_of(10), Place(), unknown=("a",))
    assert (lag.state, lag.text) == ("unknown", "not known, because a did not answer yet")
    assert judge(9999, place_of(10), place_of(10), Place(), unknown=("b",)).state == "current"


def test_checkpoint_from_a_clock_that_is_ahead_does_not_wait_for_negative_time() -> None:
    lag = judge(-60, place_of(10), place_of())
    assert (lag.state, lag.waited_s) == ("sending", 0.0)


def test_run_whose_launch_names_no_tier_is_local() -> None:
    spool = replace(Place(), local_only={"r": checkpoint(1, 0).attempt})
    (lag,) = flush_lags(Inventory(spool, {"a": Place()}), (), (), lambda run: (), 0.0)
    assert (lag.run, lag.state, lag.tier_step) == ("r", "local", None)
