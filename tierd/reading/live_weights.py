"""`LiveWeights`, which `Reader.live` returns: a run's newest weights in another process, step after step.

Invariant: weights reach the caller only inside `update`, only after each chunk was verified against the manifest, and
only all of them together. Nothing on the trainer's side knows of a follower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING

from tierd.core.errors import ConfigError, StateMismatch, StateRefused, TierdError
from tierd.core.ids import CheckpointId
from tierd.core.timeline.launch_chain import is_abandoned
from tierd.exporting.weight_image import WeightImage, copy_into
from tierd.reading.swap_gate import SwapGate
from tierd.reading.weight_feed import HeldWeights, WeightFeed

if TYPE_CHECKING:
    from typing import Self

    import torch

log = logging.getLogger("tierd")

_LONGEST_PAUSE_S = 30.0  # between two tries after errors


@dataclass(frozen=True, slots=True)
class LiveUpdate:
    """Newer weights, as `LiveWeights.update` returns them.

    Attributes:
        step: the step at which they were saved.
        attempt: the launch that saved them.
        tensors: by name, the tensors whose bytes, dtype or shape changed since the last update; all of them in the
            first one. They are in host memory that later updates share: copy them, and do not write to them.
        digests: by name, the XXH3-128 of the bytes of every tensor, changed or not, in row-major order.
        abandoned: the checkpoint whose weights these replace, if the trainer went back behind it; None otherwise.
        fetched_bytes: bytes of chunks that this follower read from tiers since the last update.
        tiers: the tiers from which bytes of this checkpoint came.
    """

    step: int
    attempt: str
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str]
    abandoned: CheckpointId | None
    fetched_bytes: int
    tiers: tuple[str, ...]


class LiveWeights:
    """Follows a run's weights. Made by `Reader.live`; a context manager, and an endless iterator over updates.

    A thread asks the tiers every `period_s` seconds for a newer verified checkpoint, fetches the chunks that differ
    from those it holds, and verifies them. It changes nothing that the caller has: only `update` does.
    """

    def __init__(self, feed: WeightFeed, targets: Mapping[str, torch.Tensor] | None, period_s: float | None) -> None:
        self._feed, self._targets, self._period_s = feed, targets, period_s
        self._applied: HeldWeights | None = None
        self._is_whole = False  # whether the caller has all of `_applied`
        self._counted_bytes = 0
        self._failure: BaseException | None = None
        self._changed, self._gate, self._closing = Condition(), SwapGate(), Event()
        self._thread = Thread(target=self._follow, name="tierd-live", daemon=True) if period_s is not None else None
        if self._thread:
            self._thread.start()

    @property
    def checkpoint(self) -> CheckpointId | None:
        """The checkpoint whose weights the caller has; None before the first update."""
        return self._applied.checkpoint if self._applied else None

    @property
    def problem(self) -> str:
        """Why the newest checkpoint on the tiers has not been fetched, for people; empty if it has."""
        return self._feed.problem

    def update(self, wait_s: float = 0.0) -> LiveUpdate | None:
        """Take over the newest weights: copy them into the state, if there is one, and return what changed.

        Args:
            wait_s: seconds to wait for newer weights than the last ones; 0 takes what has been fetched by now.

        Returns:
            None if there is nothing newer, for which `problem` may give a reason.

        Raises:
            StateMismatch, StateRefused: the newest checkpoint does not fit the state, or the arguments of `live`.
            CorruptChunk: a live tensor has other bytes after the copy. The next call copies all of them again.
            ConfigError: this is called inside `paused`, or after `close`.
        """
        if self._thread is None:
            self._try_fetch()
        with self._changed:
            self._changed.wait_for(self._has_news, wait_s)
            if self._closing.is_set():
                raise ConfigError("these live weights are closed")
            if self._failure is not None:
                raise self._failure
            newest, fetched_bytes = self._feed.newest, self._feed.fetched_bytes
        before = self._applied
        if newest is None or (newest is before and self._is_whole):
            return None
        image, earlier = newest.image, before.image if before and self._is_whole else WeightImage()
        changed = [name for name in image.tensors if not image.has_same_tensor(name, earlier)]
        with self._gate.closed():
            if self._targets is not None:
                self._is_whole = False
                copy_into(self._targets, image, changed)
            self._applied, self._is_whole = newest, True
        abandoned = None
        if before and is_abandoned(before.checkpoint, newest.origins):
            abandoned = before.checkpoint
            log.warning("live weights: the trainer went back: %s replaces %s", newest.checkpoint, abandoned)
        fetched_bytes, self._counted_bytes = fetched_bytes - self._counted_bytes, fetched_bytes
        return LiveUpdate(
            newest.checkpoint.step,
            newest.checkpoint.attempt,
            {name: image.tensors[name] for name in changed},
            dict(image.digests),
            abandoned,
            fetched_bytes,
            newest.tiers,
        )

    def __iter__(self) -> Iterator[LiveUpdate]:
        while True:
            if update := self.update(wait_s=_LONGEST_PAUSE_S):
                yield update

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the weights as they are: `update`, called by another thread, waits until every such block has ended."""
        with self._gate.open():
            yield

    def close(self) -> None:
        """End the thread. The weights stay as they are. Closing twice is harmless."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_news(self) -> bool:
        newest = self._feed.newest
        is_new = newest is not None and (newest is not self._applied or not self._is_whole)
        return is_new or self._failure is not None or self._closing.is_set()

    def _follow(self) -> None:
        assert self._period_s is not None
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            is_fine = self._try_fetch()
            pause_s = self._period_s if is_fine else min(max(2 * pause_s, self._period_s), _LONGEST_PAUSE_S)

    def _try_fetch(self) -> bool:
        """Fetch newer weights; False if that failed. `update` raises errors that no later try can repair."""
        failure: BaseException | None = None
        try:
            has_changed = self._feed.fetch_newer()
        except (StateMismatch, StateRefused, ConfigError) as error:
            failure = error
        except (TierdError, OSError, MemoryError):
            return False
        except BaseException as error:
            failure = error
        else:
            if not has_changed:
                return True
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        return failure is None
