"""`tierd.dcp.load`: a load that steps back from what is proven corrupt.

Law: ranks step back together, for the reason that DCP's own gather told them all, and for corruption alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tierd.client.dcp.reader import StorageReader
from tierd.client.restore import Restored, Skipped
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StoreUnavailable, TierdError

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer

log = logging.getLogger("tierd")

_LOOKS = 3  # at what there is, when parts vanish between a look and the reading


def load(
    state: MutableMapping[str, Any],
    checkpointer: Checkpointer,
    step: int | None = None,
    *,
    attempt: str | None = None,
    planner: LoadPlanner | None = None,
    weights_only: bool = True,
) -> Restored | None:
    """`dcp.load` the newest checkpoint that can be verified; where one is proven corrupt, all ranks step back.

    Args:
        state: as for `dcp.load`: it is loaded in place.
        step, attempt, weights_only: as for `StorageReader`.
        planner: as for `dcp.load`.

    Returns:
        As `Checkpointer.restore`, with the checkpoint's directory in the spool, where this node's own parts lie if they
        are there; None on a fresh start.

    Raises:
        As `StorageReader`; a failure of another rank is told with its number. What is no corruption never steps back.
        Where a checkpoint that lay in the spool turns out corrupt and no older one can be had, some tensors may have
        been loaded.
    """
    skipped: tuple[Skipped, ...] = ()
    vanished = 0
    while vanished < _LOOKS:
        reader = StorageReader(checkpointer, step, attempt=attempt, weights_only=weights_only, skipped=skipped)
        checkpoint = reader.checkpoint
        try:
            if checkpoint is None:
                return None
            dcp_load(state, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            assert checkpoint is not None
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            corrupt = _corruption(failures, checkpointer._launch.world)
            if corrupt:
                log.error("restore skips %s: %s", checkpoint, corrupt)
                skipped = (*reader.skipped, Skipped(checkpoint.step, checkpoint.attempt, corrupt))
            else:
                vanished += 1
            continue
        finally:
            reader.close()
        return Restored(
            step=checkpoint.step,
            attempt=checkpoint.attempt,
            tier=reader.tier,
            metrics=reader.metrics,
            skipped=reader.skipped,
            unreached=reader.unreached,
            directory=checkpointer._spool.root / checkpoint.run / checkpoint.name,
        )
    raise StoreUnavailable(f"{checkpoint} vanished while it was read, {_LOOKS} times; try again")


def _corruption(failures: Mapping[int, BaseException], world: int) -> str:
    """What was proven corrupt, by these ranks' failures; empty where parts have only vanished.

    Raises:
        TierdError: a failure that is neither, the same on every rank: nobody steps back for it.
    """
    name = "rank {}: {}" if world > 1 else "{1}"
    corrupt = {}
    for rank, error in sorted(failures.items()):
        if isinstance(error, CorruptChunk | ManifestError):
            corrupt[rank] = error
        elif not isinstance(error, ObjectNotFound):
            if world == 1:
                raise error
            kind = type(error) if isinstance(error, TierdError) else StoreUnavailable
            what = error if isinstance(error, TierdError) else f"{type(error).__name__}: {error}"
            raise kind(name.format(rank, what)) from error
    return "; ".join(name.format(rank, error) for rank, error in corrupt.items())
