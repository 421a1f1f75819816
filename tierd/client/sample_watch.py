"""Watch the samples that a run trains on for repetitions within an epoch, and for samples of the validation split.

Invariant: a finding never stops or slows training: it is logged, counted and reported to the daemon once per epoch. The
samples seen in an epoch are part of the saved state, so that a resume that repeats samples is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from tierd.core.errors import ConfigError

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer

log = logging.getLogger("tierd")

_MASK = (1 << 63) - 1
_LISTED_SAMPLES = 5


class SampleWatch:
    """Notice samples that this rank trains on twice in an epoch, or that belong to the validation split.

    Put it into the state, and call `see` once per step. A sample costs about 0.5 µs, 60 bytes of memory until its epoch
    ends, and 8 bytes in each checkpoint. Samples of different ranks are not compared; `tierd check-resume` does that.

    Args:
        checkpointer: the run's `Checkpointer`; its daemon reports a finding with the event `samples leaked`. If None, a
            finding is only logged.
        validation: samples that training must never use.

    Attributes:
        repeated, leaked: the number of samples in this launch that were repeated, and that belong to the validation
            split.
    """

    def __init__(self, checkpointer: Checkpointer | None = None, validation: Iterable[Hashable] = ()) -> None:
        self.repeated = self.leaked = 0
        self._checkpointer = checkpointer
        self._validation = set(_numbers(validation))
        self._epoch_samples: set[int] = set()
        self._epoch: int | None = None
        self._reported: set[str] = set()

    def see(self, step: int, samples: Iterable[Hashable], epoch: int) -> int:
        """Record the samples of this step, and return how many of them are repeated or belong to the validation split.

        Args:
            step: the training step, for messages.
            samples: indices, ids or hashes, or a 1-d integer tensor.
            epoch: the epoch's number. A new epoch forgets the samples of the last one.
        """
        if epoch != self._epoch:
            self._epoch, self._reported = int(epoch), set()
            self._epoch_samples.clear()
        numbers = _numbers(samples)
        before = len(self._epoch_samples)
        repeats: list[int] = []
        if not self._epoch_samples.isdisjoint(numbers):
            repeats = [number for number in numbers if number in self._epoch_samples]
        self._epoch_samples.update(numbers)
        count = before + len(numbers) - len(self._epoch_samples)
        inside = [number for number in numbers if number in self._validation] if self._validation else []
        self.repeated += count
        self.leaked += len(inside)
        if count:
            self._report(step, "twice", f"{count} samples of step {step} came twice in epoch {epoch}", repeats)
        if inside:
            self._report(
                step, "validation", f"{len(inside)} samples of step {step} are of the validation split", inside
            )
        return count + len(inside)

    def _report(self, step: int, kind: str, why: str, examples: list[int]) -> None:
        if kind in self._reported:
            return
        self._reported.add(kind)
        why += f": {', '.join(map(str, examples[:_LISTED_SAMPLES]))}" if examples else ""
        log.error("%s", why)
        if self._checkpointer is not None:
            self._checkpointer.report_leaked(step, why)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples seen in this epoch."""
        samples = torch.tensor(sorted(self._epoch_samples), dtype=torch.int64)
        return {"epoch": self._epoch, "seen": samples, "told": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the samples of a saved epoch."""
        self._epoch, self._reported = state["epoch"], set(state["told"])
        self._epoch_samples = set(state["seen"].tolist())


def _numbers(samples: Iterable[Hashable]) -> list[int]:
    """Return 63 bits for each sample; a small integer is its own number."""
    to_list = getattr(samples, "tolist", None)
    listed: Any = to_list() if callable(to_list) else samples
    if isinstance(listed, str | bytes):
        raise ConfigError(f"samples={listed!r}: several of them, such as a list")
    return [
        number & _MASK if type(number) is int else xxhash.xxh3_64_intdigest(repr(number).encode()) & _MASK
        for number in (listed if isinstance(listed, Iterable) else [listed])
    ]
