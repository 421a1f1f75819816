"""The order of flushes before the node ends: the newest first, whatever waits and whatever was begun."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.world import part

from tierd.core.ids import CheckpointId
from tierd.core.planning.flush_order import FlushCandidate, order_flushes
from tierd.core.planning.inventory import LastSent


def candidate(step: int, launch: int = 1, begun: int = 0, for_good: bool = False) -> FlushCandidate:
    return FlushCandidate(part(step, launch).checkpoint, begun, for_good, 0, True)


def test_begun_flushes_and_checkpoints_wanted_for_good_precede_the_newest_until_the_node_ends() -> None:
    waiting = [candidate(10, for_good=True), candidate(20, begun=1), candidate(30)]
    sent = LastSent(part(10).checkpoint, 0)

    def steps(**options: bool) -> list[int]:
        return [one.step for one in order_flushes(waiting, {}, sent, **options)]

    assert steps()[0] == 10, "it is finished first"
    assert steps(newest_first=True) == [30, 20, 10]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 3), st.integers(0, 4), st.booleans()), unique_by=lambda x: x[:2]
    )
)
def test_before_the_node_ends_every_candidate_is_sent_once_and_the_newest_first(drawn) -> None:  # type: ignore[no-untyped-def]
    waiting = [candidate(*one) for one in drawn]
    order: list[CheckpointId] = order_flushes(waiting, {}, None, newest_first=True)
    assert sorted(order) == sorted(one.checkpoint for one in waiting)
    assert order == sorted(order, key=lambda one: (one.attempt, one.step), reverse=True)
