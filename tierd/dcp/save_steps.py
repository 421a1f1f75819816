"""The steps of a save through DCP: stage the state, digest the files while torch writes them, compare ranks' results.

Tensors are copied into an arena for `dcp.async_save`; torch's own stager handles the rest.

Invariants:

- The copies are not read before they are complete. The writing thread waits for that. Pickling the copies, for a save
  in another process, waits for it as well.
- Bytes are digested as torch hands them over, before they are written. Each file is synced once, through the descriptor
  that wrote it. Writes out of order are refused, because they could not be digested like this.
- The ranks of one save write one checkpoint. The check uses the write results, because a planner that caches plans
  drops data that a writer attaches to a plan.
"""

from __future__ import annotations

import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.saving.dcp_arena_staging import ArenaCopy
from tierd.client.saving.save_jobs import Save
from tierd.core.errors import ConfigError, StateRefused
from tierd.spool.direct_io import write_all
from tierd.spool.file_io import flat_bytes
from tierd.state.kinds.dtensors import is_dtensor, local_of
from tierd.state.single_values import is_storable
from tierd.state.value_kinds import IMMUTABLE

if TYPE_CHECKING:
    from tierd.core.manifest import Manifest

_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
FallbackStager = Callable[[dict[str, Any]], dict[str, Any]]


class StagedState(dict[str, Any]):
    """A state whose tensors may still be being copied."""

    staged: ArenaCopy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.staged is not None:
            self.staged.wait()
            self.staged.room = None  # not reused, because pickling moves its tensors into shared memory
        return dict, (dict(self),)


def stage(
    checkpointer: Checkpointer, draft: Manifest, state: dict[str, Any], fallback: FallbackStager
) -> StagedState | None:
    """Copy a state. Returns when training may change it, except for tensors that only an attached optimizer changes.

    `fallback` stages the values that are neither plain nor tensors that an arena accepts. None if an arena does not
    accept these tensors.
    """
    start_s = time.perf_counter()
    tensors: list[torch.Tensor] = []
    unstaged: dict[str, Any] = {}
    for value in _leaves(state):
        if _fits_arena(value):
            tensors.append(value)
        elif type(value) not in IMMUTABLE:
            unstaged[str(len(unstaged))] = value
    try:
        staged = internals(checkpointer).staging.stage(Save(draft.part, internals(checkpointer).spool), draft, tensors)
    except (StateRefused, MemoryError):
        return None
    copies, fallback_copies = iter(staged.tensors), iter(fallback(unstaged).values() if unstaged else ())

    def copied(value: Any) -> Any:
        if type(value) in _CONTAINERS:
            if isinstance(value, dict):
                return type(value)((key, copied(inner)) for key, inner in value.items())
            return type(value)(copied(inner) for inner in value)
        if _fits_arena(value):
            return next(copies)
        return value if type(value) in IMMUTABLE else next(fallback_copies)

    staged_state = StagedState(copied(state))
    staged_state.staged = staged
    checkpointer.stats.blocked_s += time.perf_counter() - start_s
    return staged_state


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in _CONTAINERS:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _fits_arena(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and is_storable(local_of(value)) and (is_dtensor(value) or is_storable(value))
    )


_BUFFER = 1 << 20  # bytes; buffered because torch writes a few bytes at a time around a tensor


class DigestingFileSystem(FileSystem):
    """torch's file system for a save; each file is digested as it is written, and synced once.

    Attributes:
        digests: file name -> size in bytes and digest of the written data.
        error: the exception of the first stream that failed.
    """

    def __init__(self) -> None:
        self.digests: dict[str, tuple[int, str]] = {}
        self.error: BaseException | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise io.UnsupportedOperation(f"{path}: opened with {mode!r}; a file of a checkpoint is written once")
        raw = _Raw(Path(path))
        try:
            stream = io.BufferedWriter(raw, _BUFFER)
            yield stream
            stream.close()
            self.digests[Path(path).name] = raw.synced()
        except BaseException as error:
            self.error = self.error or raw.failed or error
            raise
        finally:
            raw.end()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing, because the stage's directory is made at the first write."""


class _Raw(io.RawIOBase):
    """A new file whose bytes are digested in the order of the writes; seeking raises `UnsupportedOperation`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._size, self._hash = 0, xxhash.xxh3_128()
        self.failed: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        if self._fd < 0:
            raise ValueError("the stream has ended")
        view = flat_bytes(data)
        self._hash.update(view)
        try:
            write_all(self._fd, view, self._size)
        except OSError as error:
            self.failed = error
            raise
        self._size += len(view)
        return len(view)

    def synced(self) -> tuple[int, str]:
        """Make the written data durable. Returns its size in bytes and its digest."""
        os.fsync(self._fd)
        return self._size, self._hash.hexdigest()

    def end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RankResults(list[WriteResult]):
    """The results of one rank's writes into `checkpoint`."""

    def __init__(self, checkpoint: str, results: Iterable[WriteResult]) -> None:
        super().__init__(results)
        self.checkpoint = checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return RankResults, (self.checkpoint, list(self))


def check_same_checkpoint(results: Iterable[list[WriteResult]], expected: str) -> None:
    """Raise `ConfigError` unless all ranks wrote `expected`, the coordinator's checkpoint."""
    for rank, result in enumerate(results):
        if isinstance(result, RankResults) and result.checkpoint != expected:
            raise ConfigError(
                f"rank {rank} saved {result.checkpoint}, and the coordinator {expected}: every rank of a launch saves "
                "the same step, after the same restore"
            )
