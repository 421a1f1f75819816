"""An entry of a DCP checkpoint: the bytes that `torch.save` made of one tensor, or of a value that is none.

Law: bytes are unpickled by torch's weights-only reader, and what DCP's planner will unpickle otherwise was read by it
before.
"""

from __future__ import annotations

import io
import os
import re
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from tierd.core.errors import StateMismatch, StateRefused
from tierd.persist import flat


def load_tensor(item: ReadItem, data: memoryview, planner: LoadPlanner) -> None:
    """Copy what a plan's item wants of a tensor to where it wants it."""
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
    """That loading this entry calls nothing which torch does not vouch for: DCP's planner would call it."""
    try:
        with torch.serialization.safe_globals([io.BytesIO]):  # holds bytes, and calls nothing
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"holds {named[1]}" if named else f"cannot be read: {str(error).splitlines()[0]}"
        raise StateRefused(
            f"{item.storage_index.fqn!r} {what}, which torch's weights-only unpickler refuses. If you trust it: "
            "torch.serialization.add_safe_globals([…]), or weights_only=False"
        ) from error


class _View(io.RawIOBase):
    """Memory as a stream that copies nothing but what is read."""

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
        found = self._data[self._at : self._at + len(into)]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)
