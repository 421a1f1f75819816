"""What ranks tell the coordinator of a save, by the checkpoint's name.

Law: the ranks of one save write one checkpoint. It is judged by what they wrote: a planner that caches plans drops what
a writer would put on a plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from tierd.core.errors import ConfigError


class Written(list[WriteResult]):
    """What a rank wrote of `checkpoint`."""

    def __init__(self, checkpoint: str, results: Iterable[WriteResult]) -> None:
        super().__init__(results)
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return Written, (self.checkpoint, list(self))


def check_same(results: Iterable[list[WriteResult]], own: str) -> None:
    """That all ranks wrote `own`, the coordinator's.

    Raises:
        ConfigError: another one.
    """
    for rank, written in enumerate(results):
        if isinstance(written, Written) and written.checkpoint != own:
            raise ConfigError(
                f"rank {rank} saved {written.checkpoint}, and the coordinator {own}: every rank of a launch saves "
                "the same step, after the same restore"
            )
