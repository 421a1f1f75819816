"""The passes of a Keras `fit` over its data, which an exact resume needs to be its epochs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def obstacle(model: Any, has_loader: bool) -> str | None:
    """Return which resumes of the `fit` that is calling are not exact, and why; None if nothing is known against any.

    Args:
        model: the model whose `fit` is in the calling stack. Keras gives its iterator no other way.
        has_loader: whether the data has a state, which is saved.
    """
    iterator = _iterator_of(model)
    if iterator is None:
        return None
    steps = iterator.steps_per_epoch
    if steps is None:
        return None
    if iterator.data_adapter.num_batches is None and has_loader:
        return (
            f"a resume of this fit within an epoch is not exact: the data has no length, and Keras reads "
            f"steps_per_epoch={steps} more batches in the resumed epoch; save at the end of epochs alone"
        )
    return (
        f"no resume of this fit is exact: with steps_per_epoch={steps} Keras begins a pass over the data before the "
        "epoch begins, and goes on in it from epoch to epoch, so a resumed run reads samples in another order, twice "
        "in a pass or not at all; leave steps_per_epoch out"
    )


def forget_length(model: Any) -> None:
    """Have the `fit` that is calling count the batches of data without a length again, in its next epoch.

    Keras takes the batches of its first epoch for the length of all. In an epoch that was resumed they are the rest.
    """
    iterator = _iterator_of(model)
    if iterator is not None and iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
        iterator.reset()


def _iterator_of(model: Any) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame.f_locals.get("epoch_iterator")
        frame = frame.f_back
    return None
