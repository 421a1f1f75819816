"""The contents of another program's checkpoint that a watch took, or the name of a form that is not converted."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import StateMismatch, StateRefused, printable
from tierd.core.ids import PartId
from tierd.core.manifest import UNIT_NAME
from tierd.dcp import metadata as dcp_metadata
from tierd.exporting.contents import (
    ARCHIVE_ERRORS,
    Contents,
    NonTensorValue,
    TorchArchive,
    archive_bytes,
    chosen_names,
    fixed_place,
    nested_state,
    path_below,
    read_dcp_contents,
)
from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, TensorPiece, as_torch
from tierd.formats.byte_source import DamagedFile, UncheckedFile
from tierd.formats.torch_pickles import is_legacy_save
from tierd.formats.weight_files import HDF5_MAGIC, check_safetensors, looks_like_safetensors, read_safetensors_header
from tierd.formats.zip_archives import ZIP_MAGIC
from tierd.state.state_tree import instances, members, replace_values
from tierd.watching.step_in_name import is_weights

_COPIES = "`tierd restore` copies it"
_SAVED_MODEL = (
    "a SavedModel of TensorFlow, which is a graph with its variables. Export does not convert it: `tierd restore` "
    "copies the directory, tf.saved_model.load reads it, and tf.train.load_checkpoint its variables/"
)
_KERAS = (
    "an archive of Keras, whose weights are an HDF5 file in it. Export does not convert it: "
    f"{_COPIES}, and keras.saving.load_model reads it"
)
_HDF5 = (
    "an HDF5 file, as Keras writes its weights. Export does not convert it: "
    f"{_COPIES}, and h5py, or load_weights of the Keras model, reads it"
)
_SCRIPT = (
    "a TorchScript archive of torch.jit.save, which is a program with its weights. Export does not convert it: "
    f"{_COPIES}, and torch.jit.load(FILE).state_dict() has its weights"
)
_EXPORTED = (
    "an archive of torch.export.save, which is a program with its weights. Export does not convert it: "
    f"{_COPIES}, and torch.export.load(FILE).state_dict has its weights"
)
_LEGACY = (
    "a file of torch.save from before torch 1.6, which cannot be streamed. Export does not convert it: "
    f"{_COPIES}, torch.load reads it, and torch.save of what it returns writes today's format"
)
_OLDEST = _LEGACY.replace(
    "a file of torch.save from before torch 1.6", "a tar archive of torch.save from before torch 0.2"
)
_ENDINGS = {".keras": _KERAS, ".h5": _HDF5, ".hdf5": _HDF5}
_ARCHIVES = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".ts")
_MAX_OPENED = 8  # files of one checkpoint that are opened


def unconvertible_form(reader: ChunkReader, part: PartId, paths: Sequence[str]) -> str | None:
    """Return which file of a checkpoint has a form that is not converted, and what reads it; None if none has.

    Raises: as `PartRanges.fill`.
    """
    for path in paths:
        if PurePosixPath(path).name == "saved_model.pb":
            return f"{PurePosixPath(path).parent!s}: {_SAVED_MODEL}"
    for path in paths:
        if form := _ENDINGS.get(PurePosixPath(path).suffix):
            return f"{path}: {form}"
    archives = [path for path in paths if len(paths) == 1 or path.endswith(_ARCHIVES)]
    for path in archives[:_MAX_OPENED]:
        if form := _form(reader, part, path):
            return f"{path}: {form}"
    return None


def _form(reader: ChunkReader, part: PartId, path: str) -> str | None:
    size = reader.size(part, path)
    head = bytes(reader.read(part, path, 0, min(40, size)))
    if head.startswith(HDF5_MAGIC):
        return _HDF5
    if is_legacy_save(head):
        return _LEGACY
    if size >= 512 and bytes(reader.read(part, path, 257, 5)) == b"ustar":
        return _OLDEST
    if not head.startswith(ZIP_MAGIC):
        return f"neither safetensors, nor DCP, nor an archive of torch.save, which export converts: {_COPIES}"
    try:
        with zipfile.ZipFile(io.BufferedReader(reader.stream(part, path, 0, size))) as archive:
            return _form_of_zip(archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return None  # torch's own reader says why


def _form_of_zip(names: Sequence[str]) -> str | None:
    inner = {name.partition("/")[2] or name for name in names}
    if "model.weights.h5" in inner or "model.weights.h5" in names:
        return _KERAS
    if {"archive_format", "serialized_exported_program.json"} & inner:
        return _EXPORTED
    if "constants.pkl" in inner or "model.json" in inner:
        return _SCRIPT
    return None if "data.pkl" in inner else f"a zip archive, and none of torch.save, which export converts: {_COPIES}"


_MODEL = "model"  # the entry under which weights in safetensors stand


def is_watched(files: PartRanges, first: PartId) -> bool:
    return any(file.path == UNIT_NAME for file in files.manifest(first).files)


def read_watched(files: PartRanges, first: PartId, only: str | None) -> Contents:
    """Read the names, shapes and places of a unit's contents.

    Weights in safetensors are the entry `model`, and their names have no prefix. An archive has the entries of its
    mapping, and a directory of DCP those of its state.

    Raises `StateMismatch` if there is no such entry, or no file has a form that can be exported; `StateRefused` if a
    form is not converted, or torch's weights-only reader refuses it; and as `PartRanges.fill`.
    """
    paths = [file.path for file in files.manifest(first).files if file.path != UNIT_NAME]
    names = {path: PurePosixPath(path).name for path in paths}
    distributed = [path for path in paths if names[path] == dcp_metadata.NAME]
    if len(distributed) == 1:
        return read_dcp_contents(files, first, only, distributed[0].removesuffix(dcp_metadata.NAME))
    reader = ChunkReader(files)
    tensors = [path for path in paths if path.endswith(".safetensors")]
    if not tensors and len(paths) == 1:
        only_file = _File(reader, first, paths[0])
        tensors = paths if looks_like_safetensors(only_file.read(0, min(9, only_file.size)), only_file.size) else []
    if tensors:
        return _of_tensors(reader, first, tensors, only)
    weights = [path for path in paths if names[path].startswith("pytorch_model") and path.endswith(".bin")]
    alone = [path for path in paths if is_weights(names[path])] if len(paths) > 1 else paths
    archives = weights or (alone if len(alone) == 1 else [])
    if form := unconvertible_form(reader, first, archives or paths):
        raise StateRefused(f"{first.checkpoint}: {form}")
    if archives:
        return _of_archives(reader, first, archives, only, _MODEL if weights else None)
    raise StateMismatch(
        f"{first.checkpoint}: {len(paths)} files of another program, and none in a form that is exported: DCP, "
        "safetensors, or one archive of torch.save; `tierd restore` copies them"
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a part, as a source of `formats`."""

    reader: ChunkReader
    part: PartId
    path: str

    @property
    def size(self) -> int:
        return self.reader.size(self.part, self.path)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.reader.read(self.part, self.path, offset, length))


def _of_tensors(reader: ChunkReader, first: PartId, files: list[str], only: str | None) -> Contents:
    tensors: dict[str, StreamedTensor] = {}
    texts: dict[str, set[str]] = {}
    for path in files:
        source = _File(reader, first, path)
        try:
            check_safetensors(source)
            header = read_safetensors_header(source)
        except (DamagedFile, UncheckedFile) as error:
            raise StateMismatch(f"{first.checkpoint}: {path}: {error}") from error
        for name, place in header.tensors.items():
            begin, end = place.data_offsets
            dtype, shape, is_native = as_torch(place.dtype, place.shape, end - begin)
            tensor = _tensor(name, dtype, shape, (first, path, header.begin + begin))
            _add(tensors, tensor if is_native else replace(tensor, foreign=(place.dtype, place.shape)), first)
        for key, text in header.metadata.items():
            texts.setdefault(key, set()).add(text)
    contents = _contents(tensors, {}, {name: (_MODEL, name) for name in tensors}, only, first)
    metadata = {key: next(iter(variants)) for key, variants in texts.items() if len(variants) == 1}
    return replace(contents, metadata=metadata, contradicting=tuple(sorted(texts.keys() - metadata.keys())))


def _of_archives(reader: ChunkReader, first: PartId, files: list[str], only: str | None, entry: str | None) -> Contents:
    """Read archives of weights, which are the entry `entry`; or, without one, one archive of a mapping."""
    tensors: dict[str, StreamedTensor] = {}
    values: dict[str, NonTensorValue] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    full_state: Any = None
    stand_ins: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            archive = TorchArchive(reader.stream(first, path, 0, reader.size(first, path)))
            if not isinstance(archive.value, dict):
                raise ValueError("it holds no mapping of names")
            flat, own_paths = _flatten(archive.value)
            for name, value in flat.items():
                paths[name] = tuple(own_paths[name]) if entry is None else (entry, name)
                if isinstance(value, torch.Tensor):
                    place = first, path, _offset(archive, name, value)
                    _add(tensors, _tensor(name, value.dtype, tuple(value.shape), place), first)
                    stand_ins[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
                else:
                    load = partial(_return_value, value)
                    values[name] = NonTensorValue(load, partial(archive_bytes, load))
        except ARCHIVE_ERRORS as error:
            why = f"{str(error).splitlines()[0][:300]}; {_COPIES}"
            raise StateRefused(f"{first.checkpoint}: {path}: {why}") from error
        if entry is None:
            new = {id(flat[name]): stand_in for name, stand_in in stand_ins.items()}
            full_state = replace_values(archive.value, torch.Tensor, partial(_stand_in, new))
    contents = _contents(tensors, values, paths, only, first)
    if entry is not None:
        return contents
    # The mapping as it was saved: its keys may be numbers, which names are not.
    names = chosen_names(paths, only, str(first.checkpoint))
    state = full_state if only is None else next(value for key, value in full_state.items() if str(key) == only)
    names_by_id = {id(stand_in): names[name] for name, stand_in in stand_ins.items() if name in names}
    return replace(contents, tree=lambda: (state, names_by_id))


def _flatten(state: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Flatten a state as DCP does, and also the tuples with tensors, which DCP does not enter."""
    flat, paths = flatten_state_dict(state)
    for name in tuple(flat):
        if not isinstance(flat[name], torch.Tensor) and any(True for _ in instances(flat[name], torch.Tensor)):
            base, value = paths.pop(name), flat.pop(name)
            for inner, leaf in _walk_values(value):
                path = (*base, *inner)
                new = ".".join(map(str, path))
                if new in flat:
                    raise ValueError(f"two values have the name {printable(new)!r}")
                flat[new], paths[new] = leaf, path
    return flat, paths


def _walk_values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, torch.Tensor) or not any(True for _ in instances(value, torch.Tensor)):
        yield path, value
        return
    for key, inner in members(value) or ():
        yield from _walk_values(inner, (*path, key))


def _offset(archive: TorchArchive, name: str, tensor: torch.Tensor) -> int:
    try:
        return archive.offset(tensor)
    except ValueError as error:
        raise ValueError(f"{printable(name)!r}: {error}") from error


def _stand_in(new: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return new[id(tensor)]


def _return_value(value: Any) -> Any:
    return value


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], place: tuple[PartId, str, int]) -> StreamedTensor:
    piece = TensorPiece(partial(fixed_place, place), shape, (0,) * len(shape), (0,) * len(shape), shape)
    return StreamedTensor(name, dtype, shape, (piece,), place)


def _add(tensors: dict[str, StreamedTensor], tensor: StreamedTensor, first: PartId) -> None:
    if tensor.name in tensors:
        raise StateMismatch(f"{first.checkpoint}: {printable(tensor.name)!r} is in two files")
    tensors[tensor.name] = tensor


def _contents(
    tensors: dict[str, StreamedTensor],
    values: dict[str, NonTensorValue],
    paths: dict[str, tuple[Any, ...]],
    only: str | None,
    first: PartId,
) -> Contents:
    names = chosen_names(paths, only, str(first.checkpoint))
    tensors = {new: replace(tensors[name], name=new) for name, new in names.items() if name in tensors}
    values = {new: values[name] for name, new in names.items() if name in values}
    tree = partial(nested_state, names, tensors, values, paths, only)
    return Contents(tensors, values, {new: path_below(paths[name], only) for name, new in names.items()}, tree)
