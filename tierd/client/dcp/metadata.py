"""DCP's `.metadata`: a pickle, read as data.

Law: metadata is never executable. Only DCP's plain classes, and what their fields hold, may be named in it; whatever
else it names, or that it is no such pickle, refuses the checkpoint before anything of it is called.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections import OrderedDict
from enum import EnumMeta
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tierd.core.errors import ManifestError, StateRefused

NAME = ".metadata"  # in the coordinator's part; `__<rank>.metadata` in each, of a save without collectives
MAX_SIZE = 1 << 30  # bytes that are read

_DCP = "torch.distributed.checkpoint"
_OWN = {
    (f"{_DCP}.metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # Where DCP had it first.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    # The directory that torch's own writer wrote to.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PurePosixPath"): PurePosixPath,
}


# What follows an opcode: so many bytes; or a length of so many bytes, and that; or so many lines.
_STOP, _PUT, _LONG_BINPUT = b".pr"
_ARGUMENTS = dict(zip(b"GJKMhjqr\x80\x82\x83\x84\x95", (8, 4, 1, 2, 1, 4, 1, 4, 1, 1, 2, 4, 8), strict=True))
_LENGTHS = dict(zip(b"TUXBC\x8c\x8d\x8e\x96\x8a\x8b", (4, 1, 4, 4, 1, 1, 8, 8, 8, 1, 4), strict=True))
_LINES = dict(zip(b"cipgFILSVP", (2, 2, 1, 1, 1, 1, 1, 1, 1, 1), strict=True))
_BEYOND = "it fills a place of its memo that no pickle of its length gets to"
_LONGER = "it names something that is longer than what is left of it"


class _Reader(pickle.Unpickler):
    """A pickle can set attributes of what it names, also of a class, for the whole process; `put_right` undoes that."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        super().__init__(io.BytesIO(data))
        self._named: dict[int, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        members: list[Any] = list(found) if isinstance(found, EnumMeta) else []
        for one in (found, *members):
            if hasattr(one, "__dict__"):
                self._named.setdefault(id(one), (one, dict(vars(one))))
        return found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _OWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise StateRefused(f"it names {module}.{name}, which DCP's own metadata does not hold")

    def put_right(self) -> list[str]:
        """Undo what was done to anything that was named; of which something was."""
        changed = []
        for one, before in self._named.values():
            after = dict(vars(one))
            wrong = [name for name in before | after if after.get(name, self) is not before.get(name, self)]
            for name in wrong:
                if name in before:
                    setattr(one, name, before[name])
                else:
                    delattr(one, name)
            if wrong:
                changed.append(f"{one!r}")
        return changed


def _check_sizes(data: bytes | bytearray | memoryview) -> None:
    """That no place of the memo is beyond what the pickle can have filled, and nothing in it longer than the pickle:
    Python makes room for all of that first, which five bytes can ask 64 GB for."""
    raw = bytes(data)
    at, end = 0, len(raw)
    while at < end:
        code = raw[at]
        at += 1
        if code == _LONG_BINPUT and int.from_bytes(raw[at : at + 4], "little") > end:
            raise ValueError(_BEYOND)
        fixed = _ARGUMENTS.get(code)
        if fixed is not None:
            at += fixed
        elif (width := _LENGTHS.get(code)) is not None:
            at += width + int.from_bytes(raw[at : at + width], "little")
            if at > end:
                raise ValueError(_LONGER)
        elif lines := _LINES.get(code):
            for _ in range(lines):
                start, at = at, raw.index(b"\n", at) + 1
            if code == _PUT and int(raw[start:at]) > end:
                raise ValueError(_BEYOND)
        elif code == _STOP:
            return


def check_readable(metadata: Metadata, where: str) -> None:
    """That what a planner of one's own put into the metadata will be read again. Raises as `read_metadata`."""
    rest = dataclasses.replace(metadata, state_dict_metadata={}, storage_data={})
    read_metadata(pickle.dumps(rest), where)


def read_metadata(data: bytes | bytearray | memoryview, where: str) -> Metadata:
    """The metadata in these bytes.

    Raises:
        StateRefused: it names what is none of DCP's plain classes. That proves no corruption: a planner of one's own
            may have written it.
        ManifestError: no metadata; `where` says of what.
    """
    reader = _Reader(data)
    try:
        _check_sizes(data)
        found = reader.load()
    except StateRefused as error:
        raise StateRefused(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise ManifestError(f"{where}: no metadata of DCP: {type(error).__name__}: {error}") from None
    finally:
        changed = reader.put_right()
    if changed:
        raise StateRefused(f"{where}: it would change {', '.join(changed)}, which DCP's own metadata does not do")
    if not isinstance(found, Metadata):
        raise ManifestError(f"{where}: no metadata of DCP, but {type(found).__name__}")
    for name in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(found, name, None), dict):
            raise ManifestError(f"{where}: its {name} is no dict")
    return found
