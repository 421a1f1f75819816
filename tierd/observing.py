"""`tierd.observe`: a training loop's report of each step to `tierd check-resume`.

Invariant: outside a check, `observe` costs one `is None` test and loads no module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import SupportsFloat

Recorder = Callable[[int, Iterable[Hashable], "SupportsFloat | None", "int | None", Iterable[Hashable]], None]
_record: Recorder | None = None


def observe(
    step: int,
    samples: Iterable[Hashable],
    loss: SupportsFloat | None = None,
    *,
    epoch: int | None = None,
    validation: Iterable[Hashable] = (),
) -> None:
    """Report the samples and the loss of one optimizer step of this rank. Does nothing outside `tierd check-resume`.

    Args:
        step: the step's number. It grows by one with each step, and after a resume continues from the checkpoint's.
        samples: identifiers of this step's samples in order: indices, ids or hashes of the bytes; or a 1-d integer
            tensor.
        loss: this step's loss as a number or a 0-d tensor, compared bit for bit.
        epoch: the epoch of the samples, so that a repeated sample can be distinguished from the next epoch.
        validation: identifiers of the samples on which the model was evaluated since the last call.

    Raises:
        ConfigError: inside a check, if `step` does not grow, or if `loss` is no number.
    """
    if _record is not None:
        _record(step, samples, loss, epoch, validation)


def set_recorder(record: Recorder) -> None:
    """Pass every later `observe` of this process to `record`."""
    global _record
    _record = record
