"""The files of each format: safetensors, Hugging Face's shards, `torch.save`, and torch's distributed checkpoint."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tierd.core.errors import StateMismatch, printable
from tierd.exporting.contents import Contents
from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, as_safetensors, convert_elements, read_ahead
from tierd.exporting.torch_archive import ArchiveWriter, LoadableState
from tierd.spool.direct_io import LARGE, PAGE, write_pages
from tierd.state.tensor_file import MAX_HEADER, METADATA


class NewFile(io.RawIOBase):
    """A file that must not exist, written through `io.BufferedWriter`.

    Large writes go past the page cache, because the cache costs several times the CPU of the write itself, and the
    file is larger than the cache should hold.

    Raises (each method): OSError as the system reports it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_pages(self._fd, view, self._at)
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            self._at = os.fstat(self._fd).st_size + offset
        else:
            self._at = offset + self._at * (whence == io.SEEK_CUR)
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                os.close(self._fd)


SHARD_BYTES = 5_000_000_000  # of tensors in a file of format hf, as transformers cuts them
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ExportJob:
    """The work of one export."""

    contents: Contents
    reader: ChunkReader
    dtype: torch.dtype | None  # the dtype in which floating-point tensors are written; None keeps each one's own
    home: Path
    count: Callable[[int], None]  # called with the size of each piece of a tensor that was read
    file_sizes: dict[str, int] = field(default_factory=dict)  # the files that were written, with their sizes in bytes
    overflowed: dict[str, None] = field(default_factory=dict)  # tensors in which `dtype` made finite values infinite
    converted: list[str] = field(default_factory=list)  # as in `LoadableState`, as `left_out`
    left_out: list[str] = field(default_factory=list)

    def dtype_of(self, tensor: StreamedTensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype in FLOATS else tensor.dtype

    def size_of(self, tensor: StreamedTensor) -> int:
        return tensor.nbytes // tensor.dtype.itemsize * self.dtype_of(tensor).itemsize

    def stream(self, tensors: Sequence[StreamedTensor]) -> Iterator[tuple[int, Iterator[memoryview]]]:
        """Yield the index of each tensor that has bytes, and its slabs as they are written, reading some ahead.

        A slab's memory is used again when the next one is asked for.
        """
        reads = (
            partial(_numbered, number, read)
            for number, tensor in enumerate(tensors)
            for read in tensor.slabs(self.reader)
        )
        slabs = read_ahead(reads, lambda numbered: self.reader.recycle(numbered[1]))
        for number, tensor_slabs in groupby(slabs, lambda numbered: numbered[0]):
            tensor = tensors[number]
            yield number, (self._convert_slab(tensor, slab) for _, slab in tensor_slabs)

    def _convert_slab(self, tensor: StreamedTensor, slab: memoryview) -> memoryview:
        self.count(slab.nbytes)
        new_slab, overflows = convert_elements(slab, tensor.dtype, self.dtype_of(tensor))
        if overflows:
            self.overflowed[tensor.name] = None
        return new_slab

    def file(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        with io.BufferedWriter(NewFile(self.home / name), LARGE) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            self.file_sizes[name] = file.tell()


def _numbered(number: int, read: Callable[[], memoryview]) -> tuple[int, memoryview]:
    return number, read()


def in_file_order(export: ExportJob) -> list[StreamedTensor]:
    """Sort the tensors by element size, so that each is aligned, then by the place of their bytes."""
    tensors = export.contents.tensors.values()
    return sorted(tensors, key=lambda tensor: (-export.dtype_of(tensor).itemsize, tensor.order, tensor.name))


# -- safetensors ------------------------------------------------------------------------------------------------------


def write_safetensors(export: ExportJob) -> None:
    """Write one file, `model.safetensors`. Raises `StateMismatch` for a dtype that the format lacks."""
    _write_tensors(export, "model.safetensors", in_file_order(export))


def write_hf(export: ExportJob) -> None:
    """Write the files that `from_pretrained` loads: one, or shards with an index. Raises as `write_safetensors`."""
    shards: list[list[StreamedTensor]] = [[]]
    size = 0
    for tensor in in_file_order(export):
        nbytes = export.size_of(tensor)
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes
    if len(shards) == 1:
        write_safetensors(export)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_tensors(export, name, shard)
        places |= {tensor.name: name for tensor in shard}
    total = sum(map(export.size_of, export.contents.tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    text = json.dumps(index, indent=2) + "\n"
    export.file("model.safetensors.index.json", lambda file: _write_all(file, text.encode()))


def _write_tensors(export: ExportJob, name: str, tensors: Sequence[StreamedTensor]) -> None:
    header: dict[str, object] = {METADATA: {"format": "pt", **export.contents.metadata}}
    at = 0
    for tensor in tensors:
        dtype = export.dtype_of(tensor)
        described = tensor.foreign or as_safetensors(dtype, tensor.shape)
        if described is None:
            why = f"safetensors does not hold {dtype}; the formats torch and dcp do"
            raise StateMismatch(f"{printable(tensor.name)!r}: {why}")
        if tensor.name in header:
            raise StateMismatch(f"{printable(tensor.name)!r}: no name that safetensors can hold")
        end = at + export.size_of(tensor)
        header[tensor.name] = {"dtype": described[0], "shape": list(described[1]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # so that large tensors begin at a page, and are written without a copy
    if len(text) > MAX_HEADER:
        why = f"a header of {len(text)} bytes; safetensors allows {MAX_HEADER}"
        raise StateMismatch(f"{len(tensors)} tensors need {why}")

    def write(file: IO[bytes]) -> None:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for _, slabs in export.stream(tensors):
            for slab in slabs:
                _write_all(file, slab)

    export.file(name, write)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    file.write(data)


# -- torch ------------------------------------------------------------------------------------------------------------


def write_torch(export: ExportJob) -> None:
    """Write one file, `state.pt`, for `torch.load` with `weights_only=True`.

    Raises `StateRefused` for a value that cannot be pickled, and `StateMismatch` if torch lacks a dtype or takes
    nothing.
    """
    _check_dtypes(export)
    tree, names = export.contents.tree()
    loadable = LoadableState(tree, names)
    export.converted.extend(loadable.converted)
    export.left_out.extend(loadable.left_out)
    tensors = export.contents.tensors
    first: dict[object, str] = {}  # names of the same stored bytes share a storage, as tied parameters do
    alias = {
        name: first.setdefault((tensor.order, tensor.dtype, tensor.shape) if tensor.nbytes else name, name)
        for name, tensor in tensors.items()
    }
    names = {key: alias[name] for key, name in names.items() if name in tensors}
    dtypes = {name: export.dtype_of(tensor) for name, tensor in tensors.items()}
    in_memory = {f"\0{number}": tensor for number, tensor in enumerate(loadable.in_memory.values())}
    names |= {id(tensor): name for name, tensor in in_memory.items()}
    dtypes |= {name: tensor.dtype for name, tensor in in_memory.items()}

    def write(file: IO[bytes]) -> None:
        archive = ArchiveWriter(file, loadable.value, names, dtypes)
        _write_records(export, archive, [tensors[name] for name in archive.order if name in tensors])
        for name, tensor in in_memory.items():
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            archive.write(name, data.nbytes, iter((data,)))
        archive.close()

    export.file("state.pt", write)


def _check_dtypes(export: ExportJob) -> None:
    for name, tensor in export.contents.tensors.items():
        if tensor.foreign:
            kind = f"torch has no dtype for {tensor.foreign[0]} of shape {list(tensor.foreign[1])}"
            raise StateMismatch(f"{printable(name)!r}: {kind}; the formats safetensors and hf hold it")


def _write_records(export: ExportJob, archive: ArchiveWriter, tensors: list[StreamedTensor]) -> None:
    ordered = sorted(tensors, key=lambda tensor: (tensor.order, tensor.name))
    for number, slabs in export.stream(ordered):
        archive.write(ordered[number].name, export.size_of(ordered[number]), slabs)
    for tensor in ordered:
        if not tensor.nbytes:
            archive.write(tensor.name, 0, iter(()))


# -- DCP --------------------------------------------------------------------------------------------------------------


def write_dcp(export: ExportJob) -> None:
    """Write `.metadata` and one file, for `dcp.FileSystemReader`. Raises `StateMismatch` as `write_torch`."""
    _check_dtypes(export)
    name = "__0_0.distcp"
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def tensor_entry(file: IO[bytes], tensor: StreamedTensor, slabs: Iterator[memoryview]) -> None:
        begin, dtype = file.tell(), export.dtype_of(tensor)
        stand_in = torch.empty(tensor.shape, dtype=dtype, device="meta")
        archive = ArchiveWriter(file, stand_in, {id(stand_in): tensor.name}, {tensor.name: dtype})
        archive.write(tensor.name, export.size_of(tensor), slabs)
        shape, zeros = torch.Size(tensor.shape), torch.Size([0] * len(tensor.shape))
        places[MetadataIndex(tensor.name, zeros)] = _StorageInfo(name, begin, archive.close())
        described[tensor.name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), shape, [ChunkStorageMetadata(zeros, shape)]
        )

    def write(file: IO[bytes]) -> None:
        ordered = sorted(export.contents.tensors.values(), key=lambda tensor: (tensor.order, tensor.name))
        for number, slabs in export.stream(ordered):
            tensor_entry(file, ordered[number], slabs)
        for tensor in ordered:
            if not tensor.nbytes:
                tensor_entry(file, tensor, iter(()))
        for key, value in export.contents.values.items():
            begin = file.tell()
            file.write(value.archive())
            places[MetadataIndex(key)] = _StorageInfo(name, begin, file.tell() - begin)
            described[key] = BytesStorageMetadata()

    export.file(name, write)
    metadata = Metadata(described, planner_data=dict(export.contents.paths), storage_data=places)
    export.file(".metadata", lambda file: _write_all(file, pickle.dumps(metadata)))


FORMATS: dict[str, Callable[[ExportJob], None]] = {
    "safetensors": write_safetensors,
    "hf": write_hf,
    "torch": write_torch,
    "dcp": write_dcp,
}
WITH_VALUES = ("torch", "dcp")  # the formats that hold values that are not tensors
