"""An NVIDIA DALI pipeline as an entry of the state.

    @nvidia.dali.pipeline_def(batch_size=32, num_threads=4, device_id=0, enable_checkpointing=True)
    def images(): ...

    data = tierd.adapters.dali.Restorable(images)
    found = ckpt.restore({"model": model, "data": data})
    batch = data.pipeline.run()

Where readers are, how they shuffle and their operators' generators come back: the next `run()` gives the batch that
would have come next. Wrap what you call `run()` of yourself: a framework's iterator (`DALIGenericIterator`) reads
ahead, and saves itself through `iterator.checkpoints()`.

Law: DALI is called through what was given, and not imported: its own checkpoint is kept as the bytes that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierd.core.errors import ConfigError, StateMismatch


class Restorable:
    """A pipeline that is made when it is first needed, or anew from a checkpoint: DALI takes one at no other time.

    Args:
        make: called as ``make(checkpoint=...)``, with None or DALI's bytes; returns the pipeline. A function under
            `pipeline_def` is one, `functools.partial` gives another its arguments.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._pipeline: Any = None

    @property
    def pipeline(self) -> Any:
        """The built pipeline. After a restore it is another one: do not keep it."""
        if self._pipeline is None:
            self._load(None)
        return self._pipeline

    def state_dict(self) -> dict[str, bytes]:
        """DALI's checkpoint.

        Raises:
            ConfigError: the pipeline was made without `enable_checkpointing`.
        """
        try:
            return {"checkpoint": self.pipeline.checkpoint()}
        except RuntimeError as error:
            raise ConfigError(
                f"DALI gives no checkpoint ({error}): make the pipeline with enable_checkpointing=True"
            ) from error

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Make the pipeline anew, at that place.

        Raises:
            StateMismatch: not the state of a pipeline, or DALI refuses it.
        """
        if not isinstance(state_dict, dict) or type(state_dict.get("checkpoint")) is not bytes:
            raise StateMismatch("not the state of a DALI pipeline")
        try:
            self._load(state_dict["checkpoint"])
        except (RuntimeError, ValueError) as error:
            raise StateMismatch(f"DALI does not take its checkpoint: {error}") from error

    def _load(self, checkpoint: bytes | None) -> None:
        self._pipeline = self._make(checkpoint=checkpoint)
        self._pipeline.build()
