"""`tierd.dcp.load`: a load that steps back from what is proven corrupt.

Law: ranks step back together, by the launch's own gather, which is there where DCP has none; and for corruption alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tierd.client.dcp.reader import UNFIT, OpenReader
from tierd.client.restore import Restored
from tierd.core.errors import StateMismatch, StoreUnavailable

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer


def load(
    state: MutableMapping[str, Any],
    checkpointer: Checkpointer,
    step: int | None = None,
    *,
    attempt: str | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    planner: LoadPlanner | None = None,
    weights_only: bool = True,
) -> Restored | None:
    """`dcp.load` the newest checkpoint that can be verified; where one is proven corrupt, all ranks step back.

    Args:
        state: as for `dcp.load`: it is loaded in place.
        step, attempt, best, mode, weights_only: as for `StorageReader`.
        planner: as for `dcp.load`.

    Returns:
        As `Checkpointer.restore`, with the checkpoint's directory in the spool, where this node's own parts lie if they
        are there; None on a fresh start.

    Raises:
        As `StorageReader`; a failure of another rank is told with its number. What is no corruption never steps back.
        StateMismatch: DCP cannot plan this load, as where the state has a key that the checkpoint has not.
        Where a checkpoint that lay in the spool turns out corrupt and no older one can be had, some tensors may have
        been loaded.
    """
    with checkpointer._ranks.attending():
        return _load(
            state, OpenReader(checkpointer, best=best, mode=mode, weights_only=weights_only), step, attempt, planner
        )


def _load(
    state: MutableMapping[str, Any],
    reader: OpenReader,
    step: int | None,
    attempt: str | None,
    planner: LoadPlanner | None,
) -> Restored | None:
    restorer = reader.restorer
    try:
        for candidate in reader.candidates(step, attempt):
            told: BaseException | None = None
            try:
                dcp_load(state, storage_reader=reader, planner=planner)
            except BaseException as raised:
                told = raised
            own = _own(told)
            if own is not None and not isinstance(own, Exception):  # an interrupt: the others would wait
                with suppress(StoreUnavailable):
                    restorer.settle(candidate, StoreUnavailable(f"it was ended by {type(own).__name__}"))
                raise own
            if not restorer.settle(candidate, own, unfit=isinstance(own, UNFIT)).load:
                continue
            if told is not None:
                raise StoreUnavailable(f"a process of another launch in this group could not load: {told}") from told
            reader.go_on()
            return Restored(
                step=candidate.checkpoint.step,
                attempt=candidate.checkpoint.attempt,
                tier=reader.tier,
                metrics=reader.metrics,
                skipped=reader.skipped,
                unreached=reader.unreached,
                directory=reader.directory,
            )
        return None
    finally:
        reader.close()


def _own(told: BaseException | None) -> BaseException | None:
    """Why this rank could not load; None also where only others could not, who tell it themselves."""
    if not isinstance(told, CheckpointException):
        return told
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    error = told.failures[rank][0] if rank in told.failures else None
    if isinstance(error, RuntimeError | ValueError | KeyError) and not isinstance(error, UNFIT):
        # How DCP's planner says it; what tierd finds wrong is a TierdError.
        mismatch = StateMismatch(f"DCP cannot load this into the state: {type(error).__name__}: {error}")
        mismatch.__cause__ = error
        return mismatch
    return error
