"""Data pipelines of the test bed. Each is right unless `wrong` names its mistake."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

SIZE, BATCH = 40, 4


class Sampler:
    """Epochs of `size` numbers, shuffled by seed and epoch."""

    def __init__(self, wrong: str = "", seed: int = 3, size: int = SIZE, first: int = 0, every: int = 1) -> None:
        self.seed, self.size, self.wrong, self.first, self.every = seed, size, wrong, first, every
        self.epoch = self.position = 0
        self.order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(self.first, self.size, self.every))
        if self.wrong == "order_from_global_rng":
            random.shuffle(order)
        else:
            random.Random(self.seed * 1000 + self.epoch).shuffle(order)
        return order

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0
        self.order = self._shuffled()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == len(self.order):
            self.set_epoch(self.epoch + 1)
        self.position += 1
        return self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        position = self.position + {"position_ahead": 2 * BATCH, "position_stale": -BATCH}.get(self.wrong, 0)
        return {"epoch": self.epoch, "position": position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        if self.wrong == "position_lost":
            self.position = 0
        elif self.wrong == "position_off_by_one":
            self.position += 1
        elif self.wrong == "epoch_lost":
            self.epoch = 0
        elif self.wrong == "epoch_one_too_high":
            self.epoch += 1
        elif self.wrong == "seed_lost":
            self.seed = 17
        self.order = self._shuffled()


class Buffer:
    """A shuffle buffer."""

    def __init__(self, source: Any, wrong: str = "", size: int = 12) -> None:
        self.source, self.wrong, self.size = source, wrong, size
        self.held: list[int] = []
        self.chance = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while len(self.held) < self.size:
            self.held.append(next(self.source))
        return self.held.pop(self.chance.randrange(len(self.held)))

    def state_dict(self) -> dict[str, Any]:
        return {"held": list(self.held), "chance": self.chance.getstate(), "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        if self.wrong != "buffer_lost":
            self.held = list(state["held"])
        if self.wrong == "buffer_halved":
            self.held = self.held[: len(self.held) // 2]
        if self.wrong != "buffer_generator_lost":
            self.chance.setstate(state["chance"])


class Packing:
    """Documents of different lengths in sequences of 10; the rest of a document begins the next."""

    def __init__(self, source: Any, wrong: str = "") -> None:
        self.source, self.wrong = source, wrong
        self.rest: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        room, pieces = 10, []
        while room:
            document, start = self.rest or (next(self.source), 0)
            end = min(3 + document % 11, start + room)
            pieces.append(f"{document}:{start}-{end}")
            room -= end - start
            self.rest = (document, end) if end < 3 + document % 11 else None
        return " ".join(pieces)

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        rest = state["rest"]
        if self.wrong == "rest_lost":
            rest = None
        elif self.wrong == "rest_from_its_start" and rest is not None:
            rest = (rest[0], 0)
        self.rest = rest


class Queue:
    """Reads ahead."""

    def __init__(self, source: Any, wrong: str = "", depth: int = 6) -> None:
        self.source, self.wrong, self.depth = source, wrong, depth
        self.queue: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while len(self.queue) < self.depth:
            self.queue.append(next(self.source))
        return self.queue.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {"queue": list(self.queue), "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.wrong != "source_of_the_queue_lost":
            self.source.load_state_dict(state["source"])
        if self.wrong != "queue_lost":
            self.queue = deque(state["queue"])


class Filter:
    """Drops what came lately, and what is above a threshold that moves."""

    def __init__(self, source: Any, wrong: str = "") -> None:
        self.source, self.wrong = source, wrong
        self.lately: list[int] = []
        self.threshold = 20.0
        self.dropped = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        while True:
            one = next(self.source)
            if one in self.lately or (one > self.threshold and (self.dropped + one) % 3):
                self.dropped += 1
                self.threshold += 0.5
                continue
            self.lately = [*self.lately, one][-11:]
            self.threshold = 0.9 * self.threshold + 0.1 * one + 1
            return one

    def state_dict(self) -> dict[str, Any]:
        state = {"lately": list(self.lately), "threshold": self.threshold, "dropped": self.dropped}
        return {**state, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])
        if self.wrong != "lately_lost":
            self.lately = list(state["lately"])
        if self.wrong != "threshold_lost":
            self.threshold = state["threshold"]
        if self.wrong != "quota_lost":
            self.dropped = state["dropped"]


class Curriculum:
    """Samples grow harder with the steps."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.level = 0
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.drawn += 1
        if self.drawn % 6 == 0:
            self.level += 1
        return 100 * self.level + self.drawn % 97

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level, self.drawn = state["level"], state["drawn"]
        if self.wrong == "level_lost":
            self.level = 0
        elif self.wrong == "level_off_by_one":
            self.level += 1
        elif self.wrong == "drawn_off_by_a_batch":
            self.drawn += BATCH


class Mixture:
    """Two sources, drawn from by chance."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.sources = [Sampler(seed=1), Sampler(seed=2, size=2 * SIZE, first=SIZE)]
        self.chance = random.Random(9)
        self.weight = 0.3

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.weight = min(0.8, self.weight + 0.01)
        return next(self.sources[self.chance.random() < self.weight])

    def state_dict(self) -> dict[str, Any]:
        states = [one.state_dict() for one in self.sources]
        return {"sources": states, "chance": self.chance.getstate(), "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, (one, saved) in enumerate(zip(self.sources, state["sources"], strict=True)):
            if not (self.wrong == "second_source_lost" and number == 1):
                one.load_state_dict(saved)
        if self.wrong != "mixing_generator_lost":
            self.chance.setstate(state["chance"])
        if self.wrong != "mixing_weight_lost":
            self.weight = state["weight"]


class Workers:
    """Five readers that take turns, as a loader's worker processes do."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.workers = [Sampler(seed=6, size=5 * SIZE, first=number, every=5) for number in range(5)]
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        one = next(self.workers[self.turn % 5])
        self.turn += 1
        return one

    def state_dict(self) -> dict[str, Any]:
        return {"workers": [one.state_dict() for one in self.workers], "turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["workers"]
        if self.wrong == "workers_swapped":
            saved = saved[::-1]
        for number, one in enumerate(self.workers):
            if not (self.wrong == "one_worker_lost" and number == 1):
                one.load_state_dict(saved[number])
        if self.wrong == "one_worker_ahead":
            next(self.workers[2])
        if self.wrong != "turn_lost":
            self.turn = state["turn"]


class Hashed:
    """Names in the order of a set, which is another one in each process."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.at = 0
        names = {f"sample {number}" for number in range(60)}
        self.names = list(names) if wrong else sorted(names)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.at += 1
        return self.names[self.at % 60]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ByClock(Sampler):
    """Seeded by the clock."""

    def _shuffled(self) -> list[int]:
        order = list(range(self.size))
        random.Random(time.time_ns()).shuffle(order)
        return order
