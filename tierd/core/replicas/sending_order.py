"""The order in which a flush sends a part's chunks, so that several nodes send the bytes that all of them hold once.

Each node knows its number among those that hold the same chunks, so each chunk has one node that sends it, without a
message. A node sends its own chunks first. Then it goes by listings of what the others have put, because a node may be
slow, late or dead:

- It leaves the chunks that another node probably has in transfer to that node.
- What lies further ahead is sent by the chunk's deputy, another node, from the second listing on.
- When nothing has come for a while, deputies send everything that is missing; after as long again, everybody does.

Invariant: a chunk is left to others for at most twice `SendingOrder.longest_wait_s`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, ContentId

_LONGEST_WAIT = (
    6  # of `silence_s`, as which a flush waits for nodes that send slowly, unless its own chunks took longer
)


@dataclass(frozen=True, slots=True)
class _Shared:
    """A chunk that several nodes hold: the numbers of the node that sends it, and of its deputy."""

    home: int
    sender: int
    deputy: int


@dataclass
class SendingOrder:
    """The chunks of one flush. All times are in seconds of one monotonic clock.

    Args:
        senders: by home, this node's number among the nodes that hold these chunks, how many they are, and whether the
            parts of all of them have the same chunks in the same order. Chunks of another home are this node's to send.
        others: how many chunks another node has in transfer at once.
        began_s: when the flush began.
        listed_s: how old a listing may be.
        silence_s: how long the missing chunks are left to the other nodes at least.
    """

    part: PartId
    chunks: Iterable[Chunk]
    others: int
    began_s: float
    listed_s: float
    silence_s: float
    senders: Mapping[int, tuple[int, int, bool]] = field(default_factory=lambda: MappingProxyType({}))
    # when the last chunk that is this node's to send was put; None before
    ended_s: float | None = field(init=False, default=None)
    # whether other nodes were waited for and sent nothing; None if nothing was missing
    was_vain: bool | None = field(init=False, default=None)
    own: list[ContentId] = field(init=False, default_factory=list)  # those that this node sends, in order
    _shared: dict[ContentId, _Shared] = field(init=False, default_factory=dict)  # those that others send
    _unsent: set[ContentId] = field(init=False)  # of `own`
    _changed_s: float = field(init=False, default=0.0)  # when another node's chunk came, or this node put one of theirs
    _present: set[ContentId] = field(init=False, default_factory=set)  # of `_shared`, those that were listed

    def __post_init__(self) -> None:
        by_home: dict[int | None, list[ContentId]] = {}
        for chunk in self.chunks:
            by_home.setdefault(chunk.home, []).append(chunk.content)
        unshared = by_home.pop(None, [])
        for home, contents in sorted((home, contents) for home, contents in by_home.items() if home is not None):
            number, count, is_alike = self.senders.get(home, (0, 1, True))
            if not 0 <= number < count > 1:  # it is not known who else sends them, so each part begins elsewhere
                self.own += _rotated(contents, self.part.rank, self.part.world)
            else:
                self._divide(home, contents, number, count, is_alike=is_alike)
        self.own += unshared
        self._unsent = set(self.own)
        self._own_count = len(self.own)
        if not self.own:
            self.ended_s = self.began_s

    def _divide(self, home: int, contents: Sequence[ContentId], number: int, count: int, *, is_alike: bool) -> None:
        """Give each node a run of the chunks, of about as many bytes; or if parts differ, chunks by their digests."""
        total, at, places = sum(size for _, size in contents), 0, [0] * count
        for content in contents:
            sender = (2 * at + content[1]) * count // (2 * total)
            at += content[1]
            if not is_alike:
                sender = int(content[0][:8], 16) * count >> 32
            if sender == number:
                self.own.append(content)
            else:
                deputy = (sender + 1 + places[sender] % (count - 1)) % count
                self._shared[content] = _Shared(home, sender, deputy)
            places[sender] += 1

    @property
    def longest_wait_s(self) -> float:
        """How long after its own chunks a node leaves others to nodes that do send some."""
        return max(_LONGEST_WAIT * self.silence_s, (self.ended_s or self.began_s) - self.began_s)

    def finish(self, content: ContentId, now_s: float) -> None:
        """Note that this node has put or compared a chunk."""
        self._unsent.discard(content)
        if not self._unsent and self.ended_s is None:
            self.ended_s = now_s
        if content in self._shared and content not in self._present:
            self._changed_s = now_s

    def order(
        self, todo: Collection[ContentId], listed: Collection[ContentId], now_s: float
    ) -> tuple[list[ContentId], set[ContentId]]:
        """Return the contents in `todo` in the order in which they are sent, and those that wait for other nodes.

        Args:
            listed: the contents that are on the tier; they are only read, so the missing ones come first.
        """
        if not self._present.issuperset(arrived := self._shared.keys() & listed):
            self._present |= arrived
            self._changed_s = now_s
            if self.ended_s is not None and self.was_vain is None:
                self.was_vain = False
        missing = [content for content in self._shared if content in todo and content not in listed]
        taken = self._taken(missing, now_s)
        chosen = set(taken)
        own = [content for content in self.own if content in todo]
        present = [content for content in self._shared if content in todo and content in listed]
        waiting = [content for content in missing if content not in chosen]
        new = [content for content in own if content not in listed]
        return [*new, *taken, *(content for content in own if content in listed), *present, *waiting], set(waiting)

    def _taken(self, missing: Sequence[ContentId], now_s: float) -> list[ContentId]:
        """Return those of the other nodes' `missing` chunks that this node sends now."""
        if self.ended_s is None or not missing:
            return []
        waited_s = now_s - self.ended_s
        silent_s = now_s - max(self.ended_s, self._changed_s)
        level = min(2, max(int(silent_s / self._patience_s), int(waited_s / self.longest_wait_s)))
        if not level and waited_s < self.listed_s:
            return []
        self.was_vain = self.was_vain or bool(level)
        deputed: list[ContentId] = []
        places: dict[tuple[int, int], int] = {}
        for content in missing:
            chunk = self._shared[content]
            place = places[chunk.home, chunk.sender] = places.get((chunk.home, chunk.sender), 0) + 1
            if chunk.deputy == self.senders[chunk.home][0] and (level or place > self.others):
                deputed.append(content)
        deputed.reverse()  # because the sender comes from the other end
        if level < 2:
            return deputed
        known = set(deputed)
        number, count, _ = self.senders[self._shared[missing[0]].home]
        return deputed + _rotated([content for content in missing if content not in known], number, count)

    @property
    def _patience_s(self) -> float:
        """How long nothing may come from nodes that send: at least as long as two of this node's own chunks took."""
        assert self.ended_s is not None
        own_s = self.ended_s - self.began_s
        return max(self.silence_s, own_s * min(1.0, 2 * self.others / max(self._own_count, 1)))


def _rotated(contents: Sequence[ContentId], number: int, count: int) -> list[ContentId]:
    begin = len(contents) * number // count
    return [*contents[begin:], *contents[:begin]]
