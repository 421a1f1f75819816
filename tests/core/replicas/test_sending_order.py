"""Several nodes that flush the same chunks, in virtual time: how often each chunk is put, and when each flush ends."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from support.seeds import seeds

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk, ContentId
from tierd.core.replicas.sending_order import SendingOrder

SLOTS, LISTED_S, SILENCE_S = 8, 1.0, 5.0
NEVER = float("inf")
READ_SHARE = 0.25  # of the time of a put that it takes to read and compare a chunk


def order_of(
    number: int, count: int, chunks: list[Chunk], began_s: float = 0.0, senders: dict | None = None
) -> SendingOrder:
    part = PartId(CheckpointId("run", "a", 1), number, count)
    given = {0: (number, count, True)} if senders is None else senders
    return SendingOrder(part, chunks, SLOTS, began_s, LISTED_S, SILENCE_S, given)


def chunks_of(count: int, home: int | None = 0, size: int = 1 << 20) -> list[Chunk]:
    return [Chunk(size=size, xxh3_128=f"{number:032x}", home=home) for number in range(count)]


@dataclass
class Node:
    """A node in the simulation. It lists as `SharedOrder` does: when the last listing is too old, or its own are sent.

    Attributes:
        put_s: how long a chunk takes.
        begin_s: when its flush begins; infinite for a node that does not come.
        dies_s: when it stops, in the middle of its transfers.
    """

    put_s: float
    begin_s: float = 0.0
    dies_s: float = NEVER
    order: SendingOrder = field(init=False)
    todo: dict[ContentId, None] = field(init=False)
    waiting: set[ContentId] = field(init=False, default_factory=set)
    listed: set[ContentId] = field(init=False, default_factory=set)
    listed_s: float = field(init=False, default=-NEVER)
    idle: int = field(init=False, default=SLOTS)
    ended_s: float | None = field(init=False, default=None)


class Simulation:
    def __init__(self, nodes: list[Node], chunks: list[Chunk]) -> None:
        self.nodes, self.puts, self._tier = nodes, Counter[ContentId](), set[ContentId]()
        self._events: list[tuple[float, int, Node, ContentId | None, bool]] = []
        self._numbers = itertools.count()
        for number, node in enumerate(nodes):
            node.order = order_of(number, len(nodes), chunks, node.begin_s)
            node.todo = dict.fromkeys(chunk.content for chunk in chunks)
            if node.begin_s < NEVER:
                self._push(node.begin_s, node)

    def run(self) -> None:
        while self._events:
            now_s, _, node, content, is_put = heapq.heappop(self._events)
            if now_s >= node.dies_s or node.ended_s is not None:
                continue
            if content is not None:
                node.idle += 1
                node.order.finish(content, now_s)
                if is_put:
                    self._tier.add(content)
                    self.puts[content] += 1
            self._work(node, now_s)

    def _work(self, node: Node, now_s: float) -> None:
        while node.idle and node.todo:
            if node.listed_s < max(node.order.ended_s or 0.0, now_s - LISTED_S):
                node.listed_s = now_s
                ordered, node.waiting = node.order.order(node.todo, self._tier & node.todo.keys(), now_s)
                assert sorted(ordered) == sorted(node.todo) and node.waiting <= node.todo.keys()
                node.listed = set(self._tier)
                node.todo = dict.fromkeys(ordered)
            content = next(iter(node.todo))
            if content in node.waiting:
                self._push(now_s + LISTED_S * 1.001, node)
                return
            del node.todo[content]
            node.idle -= 1
            is_put = content not in node.listed
            self._push(now_s + node.put_s * (1 if is_put else READ_SHARE), node, content, is_put)
        if not node.todo and node.idle == SLOTS:
            node.ended_s = now_s

    def _push(self, at_s: float, node: Node, content: ContentId | None = None, is_put: bool = False) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), node, content, is_put))


def simulate(nodes: list[Node], count: int) -> float:
    """Play the nodes; return how often each chunk was put on average.

    Each node that comes and lives ends, by the time that it would need to send all chunks, and a bounded wait.
    """
    simulation = Simulation(nodes, chunks_of(count))
    simulation.run()
    for node in nodes:
        if node.begin_s < NEVER and node.dies_s == NEVER:
            assert len(simulation.puts) == count and node.ended_s is not None
            alone_s = (count / SLOTS + 2) * node.put_s
            own_s = (count / len(nodes) / SLOTS + 3) * node.put_s
            assert node.ended_s - node.begin_s <= alone_s + 2 * max(6 * SILENCE_S, own_s) + 3 * LISTED_S
    return simulation.puts.total() / max(len(simulation.puts), 1)


@pytest.mark.parametrize("put_s", [0.01, 0.3, 2.0, 20.0])
@pytest.mark.parametrize("chunks", [16, 36, 100, 400])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_nodes_of_about_one_speed_put_each_chunk_about_once(nodes, chunks, put_s):
    chance = random.Random(f"{nodes} {chunks} {put_s}")
    drawn = [Node(put_s * chance.uniform(0.67, 1.33), chance.uniform(0, 1)) for _ in range(nodes)]
    assert simulate(drawn, chunks) <= 1.1


@pytest.mark.parametrize("chunks", [36, 400])
@pytest.mark.parametrize("begin_s", [NEVER, 3.0, 20.0])
def test_deputies_put_the_chunks_of_an_absent_or_late_node_once(chunks, begin_s):
    nodes = [Node(0.1), Node(0.1), Node(0.1, begin_s), Node(0.1)]
    assert simulate(nodes, chunks) <= 1.2  # listings are a second old, in which the deputies put 240 chunks
    assert all(node.ended_s < 0.1 * chunks / SLOTS + SILENCE_S + 5 * LISTED_S for node in nodes[:2])


@pytest.mark.parametrize("chunks", [36, 400])
def test_node_that_dies_delays_the_others_by_one_silence(chunks):
    nodes = [Node(0.5), Node(0.5, dies_s=0.7), Node(0.5), Node(0.5)]
    assert simulate(nodes, chunks) <= 1.1
    assert all(node.ended_s < 0.5 * chunks / SLOTS + SILENCE_S + 8 * LISTED_S for node in nodes if node.ended_s)


def test_slow_node_is_not_waited_for_longer_than_the_bound():
    nodes = [Node(0.1), Node(60.0)]
    assert simulate(nodes, 36) <= 1.5
    assert nodes[0].ended_s < 2 * 6 * SILENCE_S


@pytest.mark.parametrize("seed", seeds(60))
def test_each_flush_ends_beside_dead_slow_and_absent_nodes(seed):
    chance = random.Random(seed)
    nodes = []
    for _ in range(chance.randint(1, 16)):
        begin_s = chance.choice([0.0, chance.uniform(0, 2), chance.uniform(0, 90), NEVER])
        dies_s = begin_s + chance.uniform(0, 60) if chance.random() < 0.3 else NEVER
        nodes.append(Node(chance.choice([0.01, 0.2, 1.0, 15.0]) * chance.uniform(0.3, 3), begin_s, dies_s))
    simulate(nodes, chance.randint(1, 400))


# -- one order --------------------------------------------------------------------------------------------------------


def numbers(contents) -> list[int]:
    return [int(digest, 16) for digest, _ in contents]


def test_nodes_divide_shared_chunks_by_bytes_and_each_sends_its_own_first():
    chunks = [*chunks_of(1, None), *(Chunk(size=size, xxh3_128=f"{100 + size:032x}", home=0) for size in (1, 2, 3, 6))]
    orders = [order_of(number, 2, chunks) for number in range(2)]
    assert [numbers(order.own) for order in orders] == [[101, 102, 103, 0], [106, 0]]
    todo = [chunk.content for chunk in chunks]
    assert [numbers(order.order(todo, (), 0.0)[0]) for order in orders] == [
        [101, 102, 103, 0, 106],
        [106, 0, 101, 102, 103],
    ]
    assert [numbers(sorted(order.order(todo, (), 0.0)[1])) for order in orders] == [[106], [101, 102, 103]]


def test_chunks_whose_other_holders_are_unknown_are_sent_at_once_from_another_place_by_each_rank():
    chunks = chunks_of(8)
    orders = [order_of(rank, 4, chunks, senders={}) for rank in range(4)]
    assert [numbers(order.own)[0] for order in orders] == [0, 2, 4, 6]
    assert all(order.order([chunk.content for chunk in chunks], (), 0.0)[1] == set() for order in orders)


def test_chunks_of_each_home_are_divided_among_the_nodes_that_hold_them():
    chunks = [*chunks_of(4), *(Chunk(size=1, xxh3_128=f"{number:032x}", home=2) for number in range(10, 16))]
    assert numbers(order_of(0, 8, chunks, senders={0: (1, 2, True), 2: (2, 3, True)}).own) == [2, 3, 14, 15]


def test_order_puts_listed_chunks_behind_those_that_are_missing():
    chunks = chunks_of(6)
    order, contents = order_of(0, 2, chunks), [chunk.content for chunk in chunks]
    ordered, waiting = order.order(contents, {contents[0], contents[4]}, 0.0)
    assert (numbers(ordered), numbers(sorted(waiting))) == ([1, 2, 0, 4, 3, 5], [3, 5])


def test_nodes_with_different_parts_agree_on_the_sender_of_each_chunk_by_its_digest():
    """Two ranks on one node divide what one rank on the other node stores alone."""
    chance = random.Random(1)
    chunks = [Chunk(size=9, xxh3_128=f"{chance.getrandbits(128):032x}", home=0) for _ in range(60)]
    halves = [order_of(0, 2, part, senders={0: (0, 2, False)}) for part in (chunks[::2], chunks[1::2])]
    whole = order_of(1, 2, chunks, senders={0: (1, 2, False)})
    sent = sorted(content for order in (*halves, whole) for content in order.own)
    assert sent == sorted(chunk.content for chunk in chunks)


def test_order_shows_whether_it_waited_for_other_nodes_in_vain():
    chunks = chunks_of(4)
    contents = [chunk.content for chunk in chunks]
    for sent, was_vain in ((contents[2:3], False), ([], True)):
        order = order_of(0, 2, chunks)
        for content in contents[:2]:
            order.finish(content, 1.0)
        order.order(contents[2:], (), 1.0)
        assert order.was_vain is None
        order.order(contents[2:], sent, 2.5)
        order.order(contents[2:], sent, 6.5)
        assert order.was_vain is was_vain
