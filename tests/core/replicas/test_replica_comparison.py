"""The comparison of tensors that should be the same on all ranks, by their fingerprints."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from tierd.core.replicas.replica_comparison import (
    MAX_RANKS,
    MAX_TENSORS,
    compare_replicas,
    replicas_digest,
    summarize_replicas,
)

NAMES = st.text(max_size=6)
FINGERPRINTS = st.builds("{}:{:032x}".format, st.sampled_from(("xxh3", "sum")), st.integers(0, 3))
MAPS = st.dictionaries(NAMES, FINGERPRINTS, max_size=12)


def fingerprint(number: int, function: str = "xxh3") -> str:
    return f"{function}:{number:032x}"


@settings(max_examples=examples(300))
@given(st.dictionaries(st.integers(0, 40), MAPS, max_size=8))
def test_comparison_names_exactly_the_tensors_that_differ_within_a_function(replicas):
    expected = set()
    for name in {name for names in replicas.values() for name in names}:
        values = {names[name] for names in replicas.values() if name in names}
        functions = Counter(value.partition(":")[0] for value in values)
        expected |= {name} if max(functions.values()) > 1 else set()
    differences = compare_replicas(replicas)
    assert differences.tensors == expected
    assert differences.compared == {rank for rank, names in replicas.items() if names}
    assert len(differences.described) <= MAX_TENSORS
    assert {difference.tensor for difference in differences.described} <= expected
    assert bool(differences.described) == bool(expected)
    for difference in differences.described:
        ranks = {*difference.agree, *difference.differ}
        assert len(ranks) == difference.agree_count + difference.differ_count
        assert all(difference.tensor in replicas[rank] for rank in ranks)
        if difference.agree:
            assert len({replicas[rank][difference.tensor] for rank in difference.agree}) == 1


@settings(max_examples=examples(200))
@given(MAPS, st.integers(2, 40), st.data())
def test_equal_maps_have_no_difference_and_shared_maps_compare_as_copies_do(replicas, world, data):
    copies = {rank: dict(replicas) for rank in range(world)}
    assert not compare_replicas(copies).tensors
    assert compare_replicas(dict.fromkeys(range(world), replicas)) == compare_replicas(copies)
    if replicas and world > 2:
        name, rank = data.draw(st.sampled_from(sorted(replicas))), data.draw(st.integers(0, world - 1))
        function = replicas[name].partition(":")[0]
        copies[rank][name] = fingerprint(9, function)
        (difference,) = compare_replicas(copies).described
        assert (difference.tensor, difference.differ, difference.differ_count) == (name, (rank,), 1)
        assert difference.agree_count == world - 1 and rank not in difference.agree
        changed = dict.fromkeys(range(world), replicas) | {rank: copies[rank]}
        assert compare_replicas(changed) == compare_replicas(copies)


@settings(max_examples=examples(200))
@given(MAPS, MAPS)
def test_digests_are_equal_exactly_for_equal_maps(left, right):
    assert (replicas_digest(left) == replicas_digest(right)) == (left == right)
    assert replicas_digest(dict(reversed(left.items()))) == replicas_digest(left)
    assert len(replicas_digest(left)) == (16 if left else 0)


def test_two_largest_groups_leave_open_which_is_right():
    maps = {0: {"w": fingerprint(1)}, 1: {"w": fingerprint(2)}}
    (difference,) = compare_replicas(maps).described
    assert (difference.agree, difference.agree_count, difference.differ) == ((), 0, (0, 1))
    assert "no majority" in str(difference)
    maps[2] = {"w": fingerprint(2)}
    (difference,) = compare_replicas(maps).described
    assert (difference.agree, difference.differ) == ((1, 2), (0,))
    assert str(difference) == "'w' on rank 0 differs from ranks 1-2, which agree"


def test_fingerprints_of_different_functions_are_not_compared():
    mixed = {0: {"w": fingerprint(1)}, 1: {"w": fingerprint(2, "sum")}, 2: {}}
    assert not compare_replicas(mixed).tensors
    mixed[3] = {"w": fingerprint(3, "sum")}
    (difference,) = compare_replicas(mixed).described
    assert difference.differ == (1, 3)


def test_result_of_many_ranks_and_tensors_is_bounded():
    world, names = 3000, [f"layer.{number}.{'weight' * 600}" for number in range(500)]
    right, wrong = ({name: fingerprint(value) for name in names} for value in (1, 2))
    maps = {rank: wrong if rank % 3 == 0 else right for rank in range(world)}
    differences = compare_replicas(maps)
    assert len(differences.tensors) == 500 and len(differences.described) == MAX_TENSORS
    for difference in differences.described:
        assert len(difference.agree) == len(difference.differ) == MAX_RANKS
        assert (difference.agree_count, difference.differ_count) == (2000, 1000)
    assert len(str(differences)) < 4000 and "and 492 more tensors" in str(differences)
    assert json.dumps(str(differences))


@settings(max_examples=examples(300))
@given(st.sets(NAMES, min_size=1, max_size=6), st.integers(2, 6), st.data())
def test_summaries_differ_exactly_if_ranks_with_the_same_tensors_differ(names, world, data):
    fingerprints = st.fixed_dictionaries({name: st.sampled_from([fingerprint(0), fingerprint(1)]) for name in names})
    replicas = {rank: data.draw(fingerprints) for rank in range(world)}
    summaries = {rank: summarize_replicas(replicas[rank]) for rank in replicas}
    whole, short = compare_replicas(replicas), compare_replicas(summaries)
    assert bool(whole.tensors) == bool(short.tensors)
    others = {"other": fingerprint(0)}
    assert not compare_replicas({0: summarize_replicas(replicas[0]), 1: summarize_replicas(others), 2: {}}).tensors
