"""An NVIDIA DALI pipeline as an entry of the state.

    @nvidia.dali.pipeline_def(batch_size=32, num_threads=4, device_id=0, enable_checkpointing=True)
    def images(): ...

    data = tierd.adapters.dali.Restorable(images)
    found = ckpt.restore({"model": model, "data": data})
    batch = data.pipeline.run()

A restore brings back the readers' positions, their shuffling and the operators' generators: the next `run()` returns
the batch that would have come next. Wrap only a pipeline whose `run()` you call yourself. A framework's iterator
(`DALIGenericIterator`) reads ahead, and is saved through `iterator.checkpoints()`.

Invariant: this module calls DALI only through the caller's objects and does not import it. DALI's own checkpoint is
stored as opaque bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierd.core.errors import ConfigError, StateMismatch


class Restorable:
    """A pipeline that is built at first use and rebuilt by a restore.

    The rebuild is needed because DALI accepts a checkpoint only while it builds a pipeline.

    Args:
        make: called as ``make(checkpoint=...)``, with None or DALI's bytes; returns the pipeline. A function decorated
            with `pipeline_def` qualifies; bind further arguments with `functools.partial`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._pipeline: Any = None

    @property
    def pipeline(self) -> Any:
        """The built pipeline. Do not keep a reference, because a restore replaces it."""
        if self._pipeline is None:
            self._load(None)
        return self._pipeline

    def state_dict(self) -> dict[str, bytes]:
        """Return DALI's checkpoint.

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
        """Rebuild the pipeline at the saved position; `StateMismatch` if the state is none, or DALI rejects it."""
        if not isinstance(state_dict, dict) or type(state_dict.get("checkpoint")) is not bytes:
            raise StateMismatch("not the state of a DALI pipeline")
        try:
            self._load(state_dict["checkpoint"])
        except (RuntimeError, ValueError) as error:
            raise StateMismatch(f"DALI does not take its checkpoint: {error}") from error

    def _load(self, checkpoint: bytes | None) -> None:
        self._pipeline = self._make(checkpoint=checkpoint)
        self._pipeline.build()
