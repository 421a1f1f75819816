"""`tierd.dcp.load`: a load that steps back from what is proven corrupt.

Law: ranks step back together, for the reason that DCP's own gather told them all, and for corruption alone.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tierd.client.dcp_agree import corruption
from tierd.client.dcp_reader import StorageReader, skip
from tierd.client.restore import Restored, Skipped

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer


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
    while True:
        reader = StorageReader(checkpointer, step, attempt=attempt, weights_only=weights_only, skipped=skipped)
        checkpoint = reader.checkpoint
        try:
            if checkpoint is None:
                return None
            dcp_load(state, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            assert checkpoint is not None
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            skipped = (*reader.skipped, skip(checkpoint, corruption(failures, checkpointer._launch.world)))
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
