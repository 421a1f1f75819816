"""Archives as `torch.save` writes them, streamed: a pickle of the state, and a record for each tensor's bytes.

Invariant: nothing is unpickled. The pickle that is written names only functions and classes that torch itself names
there. Tensors are streamed; the other values of the state are in memory at once.

Source: torch 2.13, `torch/serialization.py` (`_save`): the records `data.pkl`, `data/<key>`, `byteorder` and `version`
below one directory; each tensor is a call of `torch._utils._rebuild_tensor_v2`, or `_v3` for a dtype without a storage
class; its storage is a persistent id `("storage", class, key, location, elements)`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from tierd.core.errors import StateRefused

_HOME = "archive"
_ALIGNMENT = 64  # bytes; so that `torch.load(mmap=True)` gets aligned tensors
_LOCAL_HEADER, _ZIP64_EXTRA, _PADDING_HEADER = 30, 20, 4
_NARROW = (1 << 31) - 1  # bytes; a longer record gets sizes of 64 bits, as Python's zipfile wants it
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of every record, so that equal states are equal files


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: torch.dtype
    count: int


class _Pickler(pickle.Pickler):
    """Pickles a state with meta tensors; `storages` receives a key, in order, for each distinct tensor."""

    def __init__(self, file: IO[bytes], names: Mapping[int, str], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(file, protocol=2)
        self._names, self._dtypes = names, dtypes
        self.storages: dict[str, str] = {}  # name -> key

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) not in self._names:
            return NotImplemented
        name = self._names[id(value)]
        key = self.storages.setdefault(name, str(len(self.storages)))
        storage = _Storage(key, self._dtypes[name], value.numel())
        hooks: OrderedDict[Any, Any] = OrderedDict()  # not `OrderedDict[Any, Any]()`, which would be pickled with Any
        place = storage, 0, tuple(value.shape), _strides(tuple(value.shape)), False, hooks
        if storage.dtype in torch.storage._dtype_to_storage_type_map():
            return torch._utils._rebuild_tensor_v2, place
        return torch._utils._rebuild_tensor_v3, (*place, storage.dtype)

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not _Storage:
            return None
        storage_types = torch.storage._dtype_to_storage_type_map()
        if value.dtype in storage_types:
            return "storage", getattr(torch, storage_types[value.dtype]), value.key, "cpu", value.count
        return "storage", torch.UntypedStorage, value.key, "cpu", value.count * value.dtype.itemsize


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


class ArchiveWriter:
    """Writes one archive into a file, from its present position on.

    Args:
        state: the state, with meta tensors.
        names: by `id`, the name of each such tensor.
        dtypes: by name, the dtype in which it is written.

    Attributes:
        order: the names of the tensors, in the order in which `write` wants their bytes.

    Raises:
        StateRefused: the state holds a value that cannot be pickled.
    """

    def __init__(
        self, file: IO[bytes], state: Any, names: Mapping[int, str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        text = io.BytesIO()
        pickler = _Pickler(text, names, dtypes)
        try:
            pickler.dump(state)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise StateRefused(f"a value that torch.save cannot write: {str(error)[:300]}") from error
        self._keys = pickler.storages
        self.order = list(self._keys)
        self._base = file.tell()
        self._file = file
        self._zip = zipfile.ZipFile(_Shifted(file), "w", zipfile.ZIP_STORED)
        self._record("data.pkl", text.getvalue())
        self._record("byteorder", sys.byteorder.encode())

    def write(self, name: str, size: int, slabs: Iterator[memoryview]) -> None:
        """Write a tensor's bytes, `size` in all."""
        path = f"{_HOME}/data/{self._keys[name]}"
        info = zipfile.ZipInfo(path, _EPOCH)
        info.file_size = size
        wide = size > _NARROW
        begin = self._file.tell() - self._base + _LOCAL_HEADER + len(path) + _ZIP64_EXTRA * wide + _PADDING_HEADER
        padding = -begin % _ALIGNMENT
        info.extra = b"FB" + struct.pack("<H", padding) + bytes(padding)  # torch's own mark of padding
        with self._zip.open(info, "w", force_zip64=wide) as record:
            for slab in slabs:
                record.write(slab)

    def close(self) -> int:
        """End the archive, and return its size in bytes."""
        self._record("version", b"3\n")
        self._zip.close()
        return self._file.tell() - self._base

    def _record(self, name: str, data: bytes) -> None:
        self._zip.writestr(zipfile.ZipInfo(f"{_HOME}/{name}", _EPOCH), data)


class _Shifted(io.RawIOBase):
    """A file from its present position on, as one that begins there, because a zip archive counts from its start."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file, self._base = file, file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset + self._base * (whence == io.SEEK_SET), whence) - self._base

    def tell(self) -> int:
        return self._file.tell() - self._base

    def flush(self) -> None:
        self._file.flush()
