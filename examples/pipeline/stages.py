"""The stages of the pipeline, each an endless iterator around the one before it.

The rule that makes a resume exact: **what a stage took from its source and has not given away yet is in its state,**
and so is every number that decides what it gives next. A stage's state holds its source's state; the outermost one's
`state_dict()` is therefore the whole pipeline's, taken at one moment. What travels is small: documents go by number,
pieces of them by number and range, never their tokens.

What goes wrong without it:
- the position alone: a resume repeats what stood in the shuffle buffer, or loses it;
- the source's position read through a prefetch queue: a resume skips exactly what was in the queue;
- one epoch number for all ranks: ranks have different numbers of documents, so each is in an epoch of its own.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

Piece = tuple[int, int, int]  # a document, and the range of its tokens: first, last + 1
State = dict[str, Any]

SHARDS = (31, 11, 17, 23, 8)  # documents in each file, as they happen to lie on disk
LENGTHS = (5, 40)  # tokens of a document, from and to


def tokens_of(document: int) -> int:
    """How many tokens a document has."""
    return random.Random(document).randint(*LENGTHS)


class Stage(Protocol):
    """What stages have in common."""

    def __next__(self) -> Any: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class Documents:
    """This rank's documents, epoch after epoch, in an order that only seed, epoch and rank decide.

    So that no order needs to be saved: an epoch and a position say everything. Whole shards go to a rank; so ranks have
    different numbers of documents, and nobody waits for the others at the end of an epoch.
    """

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.position = 0, 0
        starts = [sum(SHARDS[:shard]) for shard in range(len(SHARDS))]
        mine = range(rank, len(SHARDS), world_size)
        self._mine = [starts[shard] + number for shard in mine for number in range(SHARDS[shard])]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(self._mine)
        random.Random(f"{self.seed}/{self.epoch}/{self.rank}").shuffle(order)  # text: neighbours must not resemble
        return order

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += 1
        return self._order[self.position - 1]

    def state_dict(self) -> State:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: State) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()


class ShuffleBuffer:
    """Holds `size` items and gives a random one: mixes what lies close together, across the epoch's edge too."""

    def __init__(self, source: Stage, size: int, seed: int) -> None:
        self._source, self._size = source, size
        self._held: list[int] = []
        self._random = random.Random(seed)  # its own: nobody else's draws move it

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while len(self._held) < self._size:
            self._held.append(next(self._source))
        place = self._random.randrange(len(self._held))
        self._held[place], self._held[-1] = self._held[-1], self._held[place]
        return self._held.pop()

    def state_dict(self) -> State:
        return {"held": list(self._held), "random": self._random.getstate(), "source": self._source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._held = list(state["held"])
        self._random.setstate(state["random"])
        self._source.load_state_dict(state["source"])


class Packing:
    """Fills sequences of exactly `length` tokens; what of a document does not fit any more begins the next one."""

    def __init__(self, source: Stage, length: int) -> None:
        self._source, self._length = source, length
        self._rest: Piece | None = None

    def __iter__(self) -> Iterator[list[Piece]]:
        return self

    def __next__(self) -> list[Piece]:
        pieces: list[Piece] = []
        room = self._length
        while room:
            document, start, end = self._rest or self._whole(next(self._source))
            cut = min(end, start + room)
            pieces.append((document, start, cut))
            self._rest = (document, cut, end) if cut < end else None
            room -= cut - start
        return pieces

    @staticmethod
    def _whole(document: int) -> Piece:
        return document, 0, tokens_of(document)

    def state_dict(self) -> State:
        return {"rest": self._rest, "source": self._source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._rest = state["rest"]
        self._source.load_state_dict(state["source"])


class Prefetch:
    """A thread reads up to `depth` items ahead. One lock covers taking an item from the source *and* queueing it, so
    that a state never misses the item between the two."""

    def __init__(self, source: Stage, depth: int) -> None:
        self._source, self._depth = source, depth
        self._queue: deque[list[Piece]] = deque()
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[list[Piece]]:
        return self

    def __next__(self) -> list[Piece]:
        with self._changed:
            if self._reader is None:  # not before: a state may still be loaded
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            self._changed.wait_for(lambda: self._queue or self._failure)
            if not self._queue and self._failure is not None:
                raise self._failure
            self._changed.notify_all()
            return self._queue.popleft()

    def _read(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: len(self._queue) < self._depth)
                try:
                    self._queue.append(next(self._source))
                except Exception as error:  # raised where it is waited for
                    self._failure = error
                self._changed.notify_all()
                if self._failure is not None:
                    return

    def state_dict(self) -> State:
        with self._changed:
            return {"queue": list(self._queue), "source": self._source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        with self._changed:
            if self._reader is not None:
                raise RuntimeError("restore the pipeline before its first item is taken")
            self._queue = deque(state["queue"])
            self._source.load_state_dict(state["source"])


def make_pipeline(rank: int, world_size: int, seed: int, length: int) -> Prefetch:
    """One rank's sequences: lists of pieces, `length` tokens each."""
    documents = Documents(rank, world_size, seed)
    return Prefetch(Packing(ShuffleBuffer(documents, size=12, seed=seed + rank), length), depth=4)
