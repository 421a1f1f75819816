"""`StorageReader`: `dcp.load` from the newest checkpoint that every rank can read. `open_reader` reads it."""

from __future__ import annotations

from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from tierd.client.checkpointer import Checkpointer, made_of
from tierd.core.errors import ConfigError
from tierd.dcp.open_reader import OpenReader


class StorageReader(OpenReader):
    """Storage reader for `dcp.load`: the newest checkpoint of the run's timeline that every rank can read.

    Creating one is a collective of the launch's ranks. The checkpointer then resumes from that checkpoint, as after
    `restore`, and refuses saves until `dcp.load` has read through it. The number of ranks may differ from the number
    that saved.

    Args:
        step, attempt, best, mode: as for `Checkpointer.restore`.
        weights_only: refuse entries that torch's weights-only unpickler does not accept.

    Attributes:
        step, checkpoint, metrics, skipped, unreached: as for `OpenReader`.

    Raises:
        CheckpointNotFound, StoreUnavailable, DaemonUnavailable: as `Checkpointer.restore`.
        StateMismatch: the checkpoint was written through `stage`.
        StateRefused: its metadata names a class that is not one of DCP's.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        weights_only: bool = True,
    ) -> None:
        super().__init__(checkpointer, best=best, mode=mode, weights_only=weights_only)
        try:
            with made_of(checkpointer).ranks.attending(), self._launch.restoring():
                if next(self.candidates(step, attempt), None) is not None:
                    self._launch.loading(
                        f"a reader of {self.checkpoint} was made, and nothing has been loaded through it: load on "
                        "every rank, restore, or end"
                    )
                    self.go_on()  # here, because every rank that passed the gather reaches this line
        except BaseException:
            self.close()
            raise
        self._first_attempt = self._launch.attempt

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by torch.

        Raises:
            ConfigError: the launch has since saved, or resumed from another checkpoint, so its next save would not
                follow from the loaded state.
        """
        if self._launch.attempt != self._first_attempt or self._launch.steps:
            raise ConfigError(
                f"this reader of {self.checkpoint} was made before the launch saved or restored again: make a new one"
            )
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._launch.restoring():
            return super().read_data(plan, planner)
