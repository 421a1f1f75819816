"""At rest a daemon makes at most 60 requests an hour, whatever a look costs."""

from __future__ import annotations

import pytest
from support.inventories import facts
from support.world import part

from tierd.core.planning.background_schedule import is_arriving, listing_pause_s
from tierd.core.planning.place import Place


@pytest.mark.parametrize("tiers", [1, 2, 5])
@pytest.mark.parametrize("requests", [0, 1, 4, 61, 7100])
def test_all_looks_of_an_hour_are_at_most_sixty_requests(requests, tiers):
    pause = listing_pause_s(30.0, requests, tiers)
    assert pause >= 30.0
    assert tiers * requests * 3600 / pause <= 60


def test_parts_that_other_nodes_may_be_sending_are_on_the_way():
    spool = Place.of({part(1, rank=0, world=2): facts()})
    half = Place.of({part(1, rank=0, world=2): facts()})
    whole = Place.of({part(1, rank=rank, world=2): facts() for rank in range(2)})
    other = Place.of({part(2, rank=0, world=2): facts()})
    assert is_arriving(spool, half)
    assert not is_arriving(spool, whole)
    assert not is_arriving(spool, Place()), "it is not wanted there"
    assert not is_arriving(spool, other), "another node's concern"
