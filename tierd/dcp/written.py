"""The results that ranks report to the coordinator of a save, with the checkpoint's name.

Invariant: the ranks of one save write one checkpoint. The check uses the write results, because a planner that caches
plans drops data that a writer attaches to a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from tierd.core.errors import ConfigError


class RankWritten(list[WriteResult]):
    """The results of one rank's writes into `checkpoint`."""

    def __init__(self, checkpoint: str, results: Iterable[WriteResult]) -> None:
        super().__init__(results)
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return RankWritten, (self.checkpoint, list(self))


def check_same(results: Iterable[list[WriteResult]], expected: str) -> None:
    """Check that all ranks wrote `expected`, the coordinator's checkpoint.

    Raises:
        ConfigError: a rank wrote another one.
    """
    for rank, result in enumerate(results):
        if isinstance(result, RankWritten) and result.checkpoint != expected:
            raise ConfigError(
                f"rank {rank} saved {result.checkpoint}, and the coordinator {expected}: every rank of a launch saves "
                "the same step, after the same restore"
            )
