"""Archives as `torch.save` writes them, streamed, of values that torch's weights-only reader takes.

An archive is a pickle of the state, and a record for each tensor's bytes.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from tierd.core.errors import StateMismatch, StateRefused, printable
from tierd.state.kinds import stored_arrays

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
    """Writes one archive into a file, from its present position on: a state with meta tensors.

    Each tensor has a name, by `id`, and a dtype in which it is written, by name. `write` wants their bytes in `order`.
    Raises `StateRefused` for a value that cannot be pickled.
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

    def flush(self) -> None:
        self._file.flush()


_MAX_INT_BITS = 8 * 255 - 1  # the reader has no opcode for longer integers
_UNCHANGED_TYPES = frozenset((type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device))
_ABSENT = object()


class LoadableState:
    """A state in which each value is of a type that the weights-only reader takes; it is changed in place.

    Arrays become tensors of the same dtype; NumPy scalars become numbers or texts, deques lists, a `defaultdict` a
    dict, a frozenset a set. Other values are left out: without their key in a mapping, as None in a sequence. `names`
    are by `id`, of the tensors whose bytes lie in the checkpoint; `in_memory` are the others.

    Raises `StateMismatch` if nothing is left.
    """

    def __init__(self, state: Any, names: Mapping[int, str]) -> None:
        self._names = names
        self._entered: dict[int, object] = {}
        self.in_memory: dict[int, torch.Tensor] = {}
        self.converted: list[str] = []
        self.left_out: list[str] = []
        self.value = self._loadable(state, ())
        if self.value is _ABSENT:
            raise StateMismatch(f"torch.load takes no {type(state).__name__} with weights_only=True, its default")

    def _loadable(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _UNCHANGED_TYPES or _is_short_int(value):
            return value
        if kind is bytes:
            return value or _EmptyBytes()
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is list:
            return self._fill_list(value, path)
        if kind is tuple:
            return tuple(self._fill_list(list(value), path))
        if kind is deque:
            return self._converted(self._fill_list(list(value), path), value, path)
        if isinstance(value, dict):
            is_same = kind in (dict, OrderedDict, Counter)
            mapping = self._mapping(value if is_same else dict(value), path)
            return mapping if is_same else self._converted(mapping, value, path)
        if kind in (set, frozenset) and all(map(_is_key, value)):
            return value if kind is set else self._converted(set(value), value, path)
        if stored_arrays.is_array(value) or stored_arrays.is_scalar(value):
            return self._of_numpy(value, path)
        return self._absent(path)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self._names:
            return value
        tensor = value.detach().contiguous()
        self.in_memory[id(tensor)] = tensor
        return tensor

    def _fill_list(self, items: list[Any], path: tuple[Any, ...]) -> list[Any]:
        if self._is_entered(items):
            return items
        for index, item in enumerate(items):
            new = self._loadable(item, (*path, index))
            items[index] = None if new is _ABSENT else new
        return items

    def _mapping(self, mapping: dict[Any, Any], path: tuple[Any, ...]) -> dict[Any, Any]:
        if self._is_entered(mapping):
            return mapping
        for key, item in tuple(mapping.items()):
            new = self._loadable(item, (*path, key)) if _is_key(key) else self._absent((*path, key))
            if new is _ABSENT:
                del mapping[key]
            elif new is not item:
                mapping[key] = new
        return mapping

    def _of_numpy(self, value: Any, path: tuple[Any, ...]) -> Any:
        new: Any = None
        if stored_arrays.is_array(value):
            try:
                native = value.astype(value.dtype.newbyteorder("="), order="C", copy=False)
                new = self._tensor(torch.from_numpy(native))
            except TypeError:  # torch lacks the dtype
                return self._absent(path)
        elif value.dtype.kind in "biufcSU":  # `item` of a moment in time is a number without its unit
            new = value.item()
        if not isinstance(new, torch.Tensor | bool | int | float | complex | str | bytes):
            return self._absent(path)
        return self._converted(_EmptyBytes() if new == b"" else new, value, path)

    def _converted(self, new: Any, value: object, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.converted.append(f"{_name(path)} ({module}{kind.__name__})")
        return new

    def _absent(self, path: tuple[Any, ...]) -> object:
        self.left_out.append(_name(path))
        return _ABSENT

    def _is_entered(self, container: object) -> bool:
        """Return whether this very container was met before, as in an archive that another program wrote."""
        if id(container) in self._entered:
            return True
        self._entered[id(container)] = container
        return False


class _EmptyBytes:
    """`b""`, whose own pickle names a function that the reader refuses."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key != b"" and (type(key) in (str, bytes, bool, float, complex, type(None)) or _is_short_int(key))


def _is_short_int(value: object) -> bool:
    return type(value) is int and value.bit_length() <= _MAX_INT_BITS


def _name(path: Iterable[object]) -> str:
    return printable(".".join(map(str, path))) or "the entry"
