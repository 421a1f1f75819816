"""The division of replicated tensors among the ranks of a node."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples

from tierd.core.replicas.shares import LEAST_DIVIDED, divide

SIZES = st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 100 * LEAST_DIVIDED), max_size=40)
RANKS = st.lists(st.integers(0, 63), min_size=1, max_size=9, unique=True)


@settings(max_examples=examples(200))
@given(SIZES, RANKS, st.randoms())
def test_ranks_divide_all_large_tensors_evenly_and_alike(sizes, ranks, dice):
    owners = divide(sizes, ranks)
    assert owners.keys() == {name for name, size in sizes.items() if size >= LEAST_DIVIDED}
    assert set(owners.values()) <= set(ranks)
    shuffled = dice.sample(sorted(sizes.items()), len(sizes))
    assert divide(dict(shuffled), ranks[::-1]) == owners, "no rank's own order decides"
    shares = {rank: sum(sizes[name] for name in owners if owners[name] == rank) for rank in ranks}
    mean = sum(shares.values()) / len(ranks)
    assert max(shares.values()) <= mean + max((sizes[name] for name in owners), default=0)
