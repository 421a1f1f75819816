"""An entry of a DCP checkpoint: the bytes that `torch.save` wrote for one tensor, or for one other value.

Invariant: torch's weights-only reader unpickles the bytes. Before DCP's planner unpickles an entry without it, that
reader has read the entry.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from tierd.core.errors import ManifestError, StateMismatch, StateRefused
from tierd.core.ids import PartId
from tierd.spool.file_io import flat


def position_of(
    storage: Mapping[Any, Any] | None, index: MetadataIndex, first: PartId, base: str = ""
) -> tuple[PartId, str, int, int]:
    """Return the part, the file, the offset and the length of an entry.

    It lies in the part named at the start of its path, or else in the coordinator's part.

    Args:
        storage: `storage_data` of DCP's metadata, which has a `_StorageInfo` for each entry.
        index: the entry.
        first: the coordinator's part.
        base: the directory of all files in that part, of a checkpoint that DCP wrote by itself; it ends in `/`.

    Raises:
        ManifestError: the metadata does not say where the entry lies.
        StateMismatch: an extension of DCP has transformed its bytes.
    """
    info: Any = (storage or {}).get(index)
    path = getattr(info, "relative_path", None)
    if not isinstance(path, str):
        raise ManifestError(f"{first.checkpoint}: its metadata does not say where {index.fqn!r} lies")
    if getattr(info, "transform_descriptors", None):
        raise StateMismatch(f"{first.checkpoint}: {index.fqn!r} was written through an extension")
    head, _, file_path = path.partition("/")
    part = PartId.parse(first.checkpoint.run, first.checkpoint.name, head)
    if base or part is None or not file_path or part.world != first.world:
        part, file_path = first, base + path
    return part, file_path, info.offset, info.length


def load_tensor(item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
    """Copy the section of a tensor that a plan's item requests to the item's target."""
    tensor = torch.load(cast(IO[bytes], _View(data)), map_location="cpu", weights_only=True)
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if tensor.size(dimension) != length:
            tensor = tensor.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        name = item.storage_index.fqn
        raise StateMismatch(f"{name!r}: {tuple(tensor.size())} in the checkpoint, {tuple(target.size())} in the state")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def check_plain(item: ReadItem, data: memoryview) -> None:
    """Check that loading this entry calls only functions that torch considers safe.

    Without the check DCP's planner would call any function that the entry names.
    """
    try:
        plain_value(data)
    except Exception as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        problem = f"holds {match[1]}" if match else f"cannot be read: {str(error).splitlines()[0]}"
        raise StateRefused(
            f"{item.storage_index.fqn!r} {problem}, which torch's weights-only unpickler refuses. If you trust it: "
            "torch.serialization.add_safe_globals([…]), or weights_only=False"
        ) from error


def plain_value(data: memoryview) -> Any:
    """Return the value of an entry. Raises if torch's weights-only unpickler refuses it."""
    with torch.serialization.safe_globals([io.BytesIO]):  # safe, because it holds bytes and calls nothing
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _View(io.RawIOBase):
    """A stream over memory that copies only the bytes that are read."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = flat(buffer)
        piece = self._data[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
