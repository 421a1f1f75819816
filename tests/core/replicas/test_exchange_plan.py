"""The plan by which ranks exchange what they have read: who reads which chunk, and to whom it is sent."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.seeds import seeds

from tierd.core.replicas import exchange_plan
from tierd.core.replicas.exchange_plan import ShareOffer, exchange_plans, reader_of_chunks


def job(nodes: int, ranks_per_node: int, *, has_part=lambda rank: False) -> list[ShareOffer]:
    """A DDP job: rank r of each node holds the same share, and the ranks of a node divide the state."""
    offers = []
    for rank in range(nodes * ranks_per_node):
        first = rank - rank % ranks_per_node
        siblings = tuple(other for other in range(first, first + ranks_per_node) if other != rank)
        offers.append(ShareOffer(f"share{rank - first}", siblings, first, has_part(rank)))
    return offers


@pytest.mark.parametrize("most", [1, 2, 3, 64])
@pytest.mark.parametrize("seed", seeds(weight=2))
def test_every_rank_gets_every_chunk_and_each_chunk_is_read_once(monkeypatch, most, seed):
    """What a rank has is played from the plans alone, step by step."""
    monkeypatch.setattr(exchange_plan, "MOST_MEMBERS", most)
    dice = random.Random(f"{most} {seed}")
    nodes, local = dice.randint(2, 9), dice.randint(1, 4)
    held = {rank for rank in range(nodes * local) if dice.random() < dice.choice([0, 0.4])}
    offers = job(nodes, local, has_part=held.__contains__)
    plans = exchange_plans(offers)
    sizes = [dice.randint(1, 100) for _ in range(dice.randint(1, 30))]
    present: dict[int, set[tuple[int, int]]] = {rank: set() for rank in range(len(plans))}
    read = Counter[tuple[int, int]]()
    for rank, plan in enumerate(plans):
        share = rank % local
        for chunk, reader in enumerate(reader_of_chunks(sizes, plan.readers)):
            if reader == rank:
                present[rank].add((share, chunk))
                read[share, chunk] += 1
    for step in ("leaders", "team", "siblings"):
        sent = {}
        for rank, plan in enumerate(plans):
            members = getattr(plan, step)
            if members:
                assert rank in members and all(getattr(plans[member], step) == members for member in members)
                assert len(members) <= max(most, local) or step == "team"
                sent[rank] = set().union(*(present[member] for member in members))
        present |= sent
    whole = {(share, chunk) for share in range(local) for chunk in range(len(sizes))}
    for rank in present:
        family = {rank, *offers[rank].siblings}
        at_hand = {(member % local, chunk) for member in family if member in held for chunk in range(len(sizes))}
        assert present[rank] | (at_hand if family <= held else set()) >= whole
    assert all(count == 1 for count in read.values())


@pytest.mark.parametrize("readers", [1, 2, 3, 7, 64])
def test_readers_read_as_many_bytes_each(readers):
    dice = random.Random(readers)
    sizes = [dice.randint(1, 32) for _ in range(400)]
    loads = Counter[int]()
    for size, rank in zip(sizes, reader_of_chunks(sizes, range(readers)), strict=True):
        loads[rank] += size
    assert len(loads) == readers and max(loads.values()) - min(loads.values()) <= 2 * 32


@pytest.mark.parametrize(
    "offers",
    [
        job(3, 2, has_part=lambda rank: True),
        job(1, 1),
        [*job(2, 2)[:3], ShareOffer(error="a tier does not answer")],
        [*job(2, 2)[:3], ShareOffer("share1", (), 2)],  # its sibling says that they divided a state
        [*job(2, 2)[:3], ShareOffer("share1", (2, 9), 2)],
        [ShareOffer(node=0), ShareOffer(node=1)],
    ],
)
def test_no_exchange_where_it_gains_nothing_or_a_rank_cannot_take_part(offers):
    assert exchange_plans(offers) == []


def test_ranks_with_other_shards_exchange_nothing_with_each_other():
    """HSDP: two shards on two nodes, and each node has both."""
    offers = [ShareOffer("left", node=0), ShareOffer("right", node=0), ShareOffer("left", node=2)]
    offers.append(ShareOffer("right", node=2))
    assert [plan.leaders for plan in exchange_plans(offers)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
