"""`tierd.observe`: what a training loop tells `tierd check-resume` about each step.

Law: outside a check it is one `is None` test, and nothing is loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import SupportsFloat

Record = Callable[[int, Iterable[Hashable], "SupportsFloat | None"], None]
_record: Record | None = None


def observe(step: int, samples: Iterable[Hashable], loss: SupportsFloat | None = None) -> None:
    """Say what one optimizer step of this rank was made of. Does nothing unless `tierd check-resume` runs the loop.

    Args:
        step: rises by one from step to step; after a resume it goes on where the checkpoint ended.
        samples: what tells this step's samples apart from others, in their order: indices, ids, hashes of the bytes; or
            a 1-d integer tensor.
        loss: this step's, as a number or a 0-d tensor; compared bit for bit.

    Raises:
        ConfigError: inside a check, when `step` does not rise, or `loss` is no number.
    """
    if _record is not None:
        _record(step, samples, loss)


def begin(record: Record) -> None:
    """From now on every `observe` of this process is given to `record`."""
    global _record
    _record = record
