"""Retention: the tables in golden/retention.json, and what holds for every history and every policy."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from support.inventories import EPOCH, attempt, histories, judge_checkpoints, policies
from support.seeds import examples

from tierd.core.errors import ConfigError
from tierd.core.ids import CheckpointId
from tierd.core.retention.policy import Best, RetentionPolicy, check_policy, merge_policies, parse_duration, rule_values
from tierd.core.retention.retention_verdicts import CheckpointInfo, Ranking

GOLDEN = json.loads((Path(__file__).parent / "golden" / "retention.json").read_text())["cases"]
SUITE = settings(max_examples=examples(150))

# Each rule, with a policy that has it, and whether what it keeps is kept however many newer ones follow.
RULES: dict[str, tuple[RetentionPolicy, bool]] = {
    "keep_last": (RetentionPolicy(keep_last=7), False),
    "keep_every_steps": (RetentionPolicy(keep_every_steps=10), True),
    "keep_within": (RetentionPolicy(keep_within="3h"), False),
    "keep_every": (RetentionPolicy(keep_every="6h"), True),
    "keep_best": (RetentionPolicy(keep_best=Best(metric="loss")), True),
}

# Of each rule that takes several values, 17 of them that differ; all of them if it has fewer.
DISTINCT_VALUES = {
    "keep_every_steps": tuple(range(1, 18)),
    "keep_every": tuple(f"{n}h" for n in range(1, 18)),
    "keep_best": tuple(Best(metric=f"m{n}") for n in range(17)),
}


def read_row(row) -> tuple[CheckpointInfo, bool, tuple[str, ...]]:
    name, flags, minute, loss, verdict, reasons = row
    match = re.fullmatch(r"(\d+)@(\d+)(?: < (\d+)@(\d+))?", name)
    own = CheckpointId("r", attempt(int(match[1])), int(match[2]))
    origin = CheckpointId("r", attempt(int(match[3])), int(match[4])) if match[3] else None
    info = CheckpointInfo(
        own,
        complete="i" not in flags,
        verified="u" not in flags,
        pinned="p" in flags,
        created=EPOCH + timedelta(minutes=minute),
        metrics=None if loss is None else {"loss": float(loss)},
        origin=origin,
    )
    return info, verdict == "keep", tuple(reasons)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_tables(case):
    rows = [read_row(row) for row in case["rows"]]
    policy = msgspec.convert(case["policy"], RetentionPolicy)
    found = judge_checkpoints([info for info, *_ in reversed(rows)], policy)
    assert [(v.id, v.keep, v.reasons) for v in found] == [(info.id, keep, reasons) for info, keep, reasons in rows]


@st.composite
def infos(draw) -> list[CheckpointInfo]:
    often = st.sampled_from([True, True, True, False])
    return [
        CheckpointInfo(
            part.checkpoint, draw(often), draw(often), not draw(often), facts.created, facts.metrics, facts.origin
        )
        for part, facts in draw(histories(max_world=1)).items()
    ]


def deleted(found, policy):
    return {verdict.id for verdict in judge_checkpoints(found, policy) if not verdict.keep}


@SUITE
@given(infos(), policies)
def test_no_policy_deletes_the_newest_verified_unverified_or_pinned_checkpoints(found, policy):
    gone = deleted(found, policy)
    counted = sorted(info.id for info in found if info.complete and info.verified)
    assert not gone & set(counted[-policy.keep_last :])  # the newest verified, and as many as were asked for
    assert not gone & {info.id for info in found if not info.verified}
    assert not gone & {info.id for info in found if info.pinned}
    for checkpoint in gone:
        assert sum(other > checkpoint for other in counted) >= policy.keep_last


@SUITE
@given(infos(), policies, policies)
def test_adding_a_rule_never_deletes_more(found, policy, other):
    for rule in sorted(RULES.keys() - {"keep_last"}):
        without = msgspec.structs.replace(policy, **{rule: None})
        more = msgspec.structs.replace(without, **{rule: getattr(other, rule)})
        assert deleted(found, more) <= deleted(found, without)


def test_every_rule_is_in_the_table():
    """What stands in `RULES` is tested below, so a new rule belongs there."""
    assert list(RULES) == list(RetentionPolicy.__struct_fields__)


@pytest.mark.parametrize("rule", RULES)
def test_merging_keeps_every_rule(rule):
    policy, _ = RULES[rule]
    assert getattr(policy, rule) != getattr(RetentionPolicy(keep_last=1), rule)
    for several in ([policy, RetentionPolicy(keep_last=1)], [RetentionPolicy(keep_last=1), policy]):
        assert getattr(merge_policies(several), rule) == getattr(policy, rule)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"keep_last"}))
def test_every_rule_is_drawn(rule):
    """Else no property of any policy says anything of it."""
    assert find(policies, lambda policy: getattr(policy, rule) is not None)


@pytest.mark.parametrize(("rule", "for_good"), [(rule, good) for rule, (_, good) in RULES.items()])
def test_rule_keeps_for_good_only_checkpoints_that_later_saves_leave_kept(rule, for_good):
    """Of a run's first checkpoints, and of its newest one, `is_permanent` names only what many newer ones leave."""
    made = [
        CheckpointInfo(
            CheckpointId("r", attempt(1), 10 * n), True, True, False, EPOCH + timedelta(hours=n), {"loss": n}
        )
        for n in range(40)
    ]
    policy = msgspec.structs.replace(RULES[rule][0], keep_last=7 if rule == "keep_last" else 1)
    ranking = Ranking(made, policy)
    good = {info.id for info in made if ranking.is_permanent(info)}
    assert bool(good) == for_good
    assert good <= ranking.kept_ids
    later = [replace(info, id=replace(info.id, step=info.id.step + 401), metrics={}) for info in made]
    later = [replace(info, created=info.created + timedelta(days=9)) for info in later]
    assert Ranking([*made, *later], policy).kept_ids & {info.id for info in made} == good


def test_every_rule_of_several_values_is_in_the_table():
    assert {name for name in RULES if takes_several(name)} == DISTINCT_VALUES.keys()


@pytest.mark.parametrize("rule", DISTINCT_VALUES)
def test_program_gives_rule_no_more_values_than_a_file(rule):
    policy = RetentionPolicy(**{rule: DISTINCT_VALUES[rule]})
    assert len(rule_values(policy, rule)) == len(DISTINCT_VALUES[rule])
    if len(DISTINCT_VALUES[rule]) < 17:  # an enumeration, which cannot have too many
        assert check_policy(policy) == policy
        return
    with pytest.raises(ConfigError, match=f"{rule} has 17 values, at most 16"):
        check_policy(policy)


def takes_several(rule: str) -> bool:
    """Whether a rule takes one value or several, by its type."""
    return "tuple" in str(RetentionPolicy.__annotations__[rule])


@SUITE
@given(infos(), policies, st.integers(1, 3))
def test_keeping_more_of_the_last_never_deletes_more(found, policy, extra):
    wider = msgspec.structs.replace(policy, keep_last=policy.keep_last + extra)
    assert deleted(found, wider) <= deleted(found, policy)


@SUITE
@given(infos(), policies, st.randoms(use_true_random=False))
def test_verdicts_are_newest_first_with_reasons_in_any_order_of_asking(found, policy, rng):
    verdicts = judge_checkpoints(found, policy)
    assert [verdict.id for verdict in verdicts] == sorted((info.id for info in found), reverse=True)
    assert all(verdict.reasons for verdict in verdicts)
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert judge_checkpoints(shuffled, policy) == verdicts


@SUITE
@given(infos(), policies, st.integers(-(10**6), 10**6))
def test_no_wall_clock_decides(found, policy, minutes):
    """The whole history moved in time is judged the same: ages are differences between checkpoints."""
    moved = [replace(info, created=info.created + timedelta(minutes=minutes)) for info in found]
    assert judge_checkpoints(moved, policy) == judge_checkpoints(found, policy)


@SUITE
@given(infos(), policies)
def test_second_pass_of_retention_deletes_nothing_more(found, policy):
    """Acting on the verdicts and asking again deletes nothing more: retention is idempotent."""
    gone = deleted(found, policy)
    left = [info for info in found if info.id not in gone]
    assert deleted(left, policy) == set()


@SUITE
@given(infos(), st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_the_best_are_the_best(found, count, mode):
    policy = RetentionPolicy(keep_last=1, keep_best=Best(metric="loss", mode=mode, count=count))
    named = [v.id for v in judge_checkpoints(found, policy) if any("best" in reason for reason in v.reasons)]
    values = {
        info.id: info.metrics["loss"]
        for info in found
        if info.complete and info.verified and not math.isnan(info.metrics.get("loss", math.nan))
    }
    assert len(named) == min(count, len(values))
    sign = 1 if mode == "max" else -1
    worst = min((sign * values[checkpoint] for checkpoint in named), default=math.inf)
    assert all(sign * value <= worst for checkpoint, value in values.items() if checkpoint not in named)


@SUITE
@given(infos(), st.sampled_from(["3m", "20m", "1h"]), st.randoms(use_true_random=False))
def test_keep_every_keeps_the_same_checkpoint_of_each_interval_after_any_prunes(found, every, rng):
    """Judged after every single save, with prunes done at any time in between or never, the same ones are left."""
    policy = RetentionPolicy(keep_last=1, keep_every=every)
    whole = sorted((replace(i, complete=True, verified=True, pinned=False) for i in found), key=lambda info: info.id)
    named = {v.id for v in judge_checkpoints(whole, policy) if f"one every {every}" in v.reasons}
    left: list[CheckpointInfo] = []
    for info in whole:
        left.append(info)
        if rng.random() < 0.6:
            gone = deleted(left, policy)
            left = [one for one in left if one.id not in gone]
    assert {v.id for v in judge_checkpoints(left, policy) if f"one every {every}" in v.reasons} == named
    kept = [info for info in whole if info.id in named]
    assert not whole or kept[0] is whole[0], "the oldest is the first"
    for one, following in pairwise(kept):
        assert abs(following.created - one.created) >= timedelta(seconds=parse_duration(every))
        passed = [info.created for info in whole if one.id < info.id < following.id]
        assert all(abs(created - one.created) < timedelta(seconds=parse_duration(every)) for created in passed)


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("1.5m", 90), ("12h", 43200), ("7d", 604800), ("0s", 0)])
def test_durations(text, expected):
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 s", "1s\n", "1w", "1.s", "1e3s", "\u0663s"])
def test_other_texts_are_no_durations(text):
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"keep_within": text}, RetentionPolicy)


@SUITE
@given(infos(), policies)
def test_one_more_is_judged_as_if_it_had_been_among_the_others(history, policy):
    """So that a thousand can each be judged alone without judging a thousand times a thousand."""
    together = {verdict.id: verdict for verdict in judge_checkpoints(history, policy)}
    for number, one in enumerate(history):
        alone = Ranking(history[:number] + history[number + 1 :], policy)
        assert alone.verdict(one) == together[one.id]


# -- several policies -------------------------------------------------------------------------------------------------


@SUITE
@given(infos(), policies, policies)
def test_merged_policies_keep_each_checkpoint_that_either_keeps(found, one, other):
    both = merge_policies([one, other])
    assert deleted(found, both) <= deleted(found, one) & deleted(found, other)


@SUITE
@given(st.lists(policies, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_depends_on_no_order_and_a_policy_adds_nothing_to_itself(found, rng):
    together = merge_policies(found)
    shuffled = rng.sample(found, len(found))
    assert merge_policies(shuffled) == together
    assert merge_policies([together, together, *found]) == together
    assert merge_policies(found[:1]) == found[0]
    assert merge_policies([merge_policies(found[:2]), *found[2:]]) == together


def test_merging_takes_the_most_of_each_rule():
    one = RetentionPolicy(keep_last=2, keep_within="90m", keep_every_steps=10, keep_best=Best(metric="loss", count=3))
    other = RetentionPolicy(
        keep_last=5,
        keep_within="1h",
        keep_every_steps=15,
        keep_every="6h",
        keep_best=[Best(metric="loss"), Best(metric="acc", mode="max")],
    )
    assert merge_policies([one, other]) == RetentionPolicy(
        keep_last=5,
        keep_within="90m",
        keep_every_steps=(10, 15),
        keep_every="6h",
        keep_best=(Best(metric="acc", mode="max"), Best(metric="loss", count=3)),
    )
    assert merge_policies([]) is None


def test_equal_policies_are_equal_however_they_are_written():
    one = msgspec.convert({"keep_every_steps": [10], "keep_every": ["60s", "1m"], "keep_best": []}, RetentionPolicy)
    assert one == RetentionPolicy(keep_every_steps=10, keep_every="1m")
    assert msgspec.json.decode(msgspec.json.encode(one), type=RetentionPolicy) == one


@pytest.mark.parametrize(
    ("rules", "where"),
    [
        ({"keep_every_steps": [5, 0]}, "keep_every_steps"),
        ({"keep_every_steps": [1] * 17}, "keep_every_steps"),
        ({"keep_every": ["6h", "soon"]}, "keep_every"),
        ({"keep_best": [{"metric": ""}]}, "keep_best"),
    ],
)
def test_each_of_several_values_is_checked(rules, where):
    with pytest.raises(msgspec.ValidationError, match=where):
        msgspec.convert(rules, RetentionPolicy)
