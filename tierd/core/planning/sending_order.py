"""The order in which a flush sends a part's chunks, so that several nodes do not send the same bytes at a time.

Chunks of one home are the same on several ranks, and lie on the tier once. Each of these ranks begins at another place
of the same sequence and goes on around it. A listing shows which chunks others have put. A chunk right behind these is
in transfer, so it is left for last, and the caller waits a while for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, ContentId


def begin_place(part: PartId, count: int) -> int:
    """Return the index of the chunk with which a part begins, of `count` chunks that several ranks hold.

    The ranks that hold the same bytes mostly have the same distance to each other, one node's number of ranks.
    """
    return count * part.rank // part.world


@dataclass
class SendingOrder:
    """The chunks of one flush.

    Args:
        others: how many chunks another node has in transfer at once.
    """

    part: PartId
    chunks: Iterable[Chunk]
    others: int
    own: list[ContentId] = field(init=False, default_factory=list)  # those that no other rank holds
    by_home: dict[int, list[ContentId]] = field(init=False, default_factory=dict)  # each from this part's place on

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            group = self.own if chunk.home is None else self.by_home.setdefault(chunk.home, [])
            group.append(chunk.content)
        for home, alike in self.by_home.items():
            begin = begin_place(self.part, len(alike))
            self.by_home[home] = alike[begin:] + alike[:begin]

    def order(
        self, todo: Collection[ContentId], listed: Collection[ContentId]
    ) -> tuple[list[ContentId], set[ContentId]]:
        """Return the contents in `todo` in the order in which they are sent, and those that others are likely sending.

        Args:
            listed: the contents that are on the tier; they come last, because they are only read.
        """
        following: list[ContentId] = []
        far: list[ContentId] = []
        near: list[ContentId] = []
        present: list[ContentId] = []
        for _, alike in sorted(self.by_home.items()):
            # The first chunks, at the part's own place, are for this part to send.
            run_length, is_own = 0, True
            for content in alike:
                if content in listed or content not in todo:
                    run_length, is_own = 0, content not in todo
                    if content in todo:
                        present.append(content)
                    continue
                run_length += 1
                group = following if is_own else near if run_length <= self.others else far
                group.append(content)
        ordered = [*following, *self._rotated(far), *(content for content in self.own if content in todo)]
        return [*ordered, *self._rotated(near), *present], set(near)

    def _rotated(self, contents: Sequence[ContentId]) -> list[ContentId]:
        begin = begin_place(self.part, len(contents))
        return [*contents[begin:], *contents[:begin]]
