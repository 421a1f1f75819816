"""The planner of `tierd.dcp.load`: DCP's own, but it refuses DTensors that DCP would load into the wrong positions.

DCP assumes that a DTensor's local shard is one block of the whole tensor. A strided placement can give a rank several
blocks, if FSDP and tensor parallelism divide a dimension unevenly.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tierd.core.errors import StateMismatch
from tierd.state.kinds.dtensors import is_dtensor, placement_of


class CheckedLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, with a check of DTensor shards."""

    def create_local_plan(self) -> Any:
        """Called by torch.

        Raises:
            StateMismatch: DCP cannot load into a DTensor's shard.
        """
        for name, value in self.state_dict.items():
            if is_dtensor(value):
                try:
                    placement = placement_of(value)
                    blocks = len(placement.boxes())
                except ValueError as error:
                    raise StateMismatch(f"{name!r}: {error}") from error
                if blocks > 1:
                    raise StateMismatch(
                        f"{name!r}: a DTensor {placement}, whose shard on this rank is {blocks} blocks of the whole; "
                        "DCP loads into one: load it placed otherwise, and redistribute it"
                    )
        return super().create_local_plan()
