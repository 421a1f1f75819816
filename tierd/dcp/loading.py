"""`tierd.dcp.load`: a load that falls back to an older checkpoint if one is proven corrupt.

Invariant: ranks fall back together, and only because of corruption. They agree through the launch's own gather, because
DCP does not have one in every mode.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tierd.client.checkpointer import Checkpointer, made_of
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import StateMismatch, StoreUnavailable
from tierd.dcp.load_planner import CheckedLoadPlanner
from tierd.dcp.open_reader import UNFIT, OpenReader
from tierd.dcp.stand_ins import StandIns


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
    """`dcp.load` the newest checkpoint that can be verified; if one is proven corrupt, all ranks fall back.

    It loads checkpoints saved through DCP and checkpoints of `Checkpointer.save`. DTensors of the latter are loaded
    onto this launch's meshes, of any shape and number of ranks. Values other than DTensors must then be the same on all
    ranks that saved them. If as many ranks load as saved, they may differ, and each rank receives its own.

    Args:
        state: as for `dcp.load`; it is loaded in place. Its names must be those of the saved state, as DCP forms them.
            So an optimizer's own state is loaded into an optimizer, not into the result of `get_optimizer_state_dict`,
            and the reverse. An optimizer that has no state yet receives one, and its parameters are compared as
            `Checkpointer.restore` compares them. A module's extra state is loaded as it was saved. Another tensor of
            the checkpoint is converted to the dtype of its target in the state, as DCP does.
        step, attempt, best, mode, weights_only: as for `StorageReader`.
        planner: as for `dcp.load`.

    Returns:
        As `Checkpointer.restore`, with the checkpoint's directory in the spool, which holds this node's own parts if
        they exist; None on a fresh start.

    Raises:
        As `StorageReader`; the message names the rank that failed, if it is another one. Errors other than corruption
        never cause a fallback.
        StateMismatch: DCP cannot plan this load, for example because the state has a key that the checkpoint lacks; or
            values that ranks saved under one name differ and cannot be combined. The message names them. No tensor has
            changed then.
        Some tensors may have been loaded if a checkpoint in the spool proves corrupt and no older one can be loaded.
    """
    with made_of(checkpointer).ranks.attending(), made_of(checkpointer).launch.restoring():
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
            failure: BaseException | None = None
            try:
                stand_ins = StandIns(state, reader.metadata, reader.value)
                reader.check = stand_ins.check
                dcp_load(stand_ins.state, storage_reader=reader, planner=planner or CheckedLoadPlanner())
                stand_ins.take()
            except BaseException as raised:
                failure = raised
            own_error = _own_failure(failure)
            if own_error is not None and not isinstance(own_error, Exception):
                raise own_error  # an interrupt, of which `attending` notifies the other ranks
            if not restorer.settle(candidate, own_error, unfit=isinstance(own_error, UNFIT)).load:
                continue
            if failure is not None:
                raise StoreUnavailable(
                    f"a process of another launch in this group could not load: {failure}"
                ) from failure
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


def _own_failure(failure: BaseException | None) -> BaseException | None:
    """Return why this rank could not load, or None.

    Failures of other ranks are left out, because those ranks report them.
    """
    if not isinstance(failure, CheckpointException):
        return failure
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    error = failure.failures[rank][0] if rank in failure.failures else None
    if isinstance(error, RuntimeError | ValueError | KeyError) and not isinstance(error, UNFIT):
        # DCP's planner raises these types; tierd's own findings are a TierdError.
        mismatch = StateMismatch(f"DCP cannot load this into the state: {type(error).__name__}: {error}")
        mismatch.__cause__ = error
        return mismatch
    return error
