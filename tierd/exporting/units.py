"""The contents of another program's checkpoint that was taken by a watch: in DCP, in safetensors, or in one archive.

Sources of the names: transformers 5.23 `utils/__init__.py` (`WEIGHTS_NAME`, `SAFE_WEIGHTS_NAME`), accelerate 1.15
`utils/constants.py` (`MODEL_NAME`); of a directory of DCP, torch 2.13 `distributed/checkpoint/filesystem.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tierd.client.restoring.ranged_reader import PartRanges
from tierd.core.errors import StateMismatch, StateRefused
from tierd.core.ids import PartId
from tierd.core.printable import printable
from tierd.dcp import metadata as dcp_metadata
from tierd.exporting.archive_reader import NO_ARCHIVE, Archive
from tierd.exporting.chunk_reader import ChunkReader, RangeStream
from tierd.exporting.contents import Contents, Value, archived, at_place, below, chosen_names, nested, of_dcp
from tierd.exporting.other_forms import other_form
from tierd.exporting.tensor_dtypes import as_torch
from tierd.exporting.tensors import Piece, StreamedTensor
from tierd.formats.byte_source import DamagedFile, UncheckedFile
from tierd.formats.safetensors import check_safetensors, looks_like_safetensors, read_header
from tierd.state.containers import instances, members, replaced
from tierd.watching.step_in_name import is_weights
from tierd.watching.unit_file import UNIT_NAME

_MODEL = "model"  # the entry under which weights in safetensors stand


def is_unit(files: PartRanges, first: PartId) -> bool:
    """Return whether a watch took this checkpoint."""
    return any(file.path == UNIT_NAME for file in files.manifest(first).files)


def read_unit(files: PartRanges, first: PartId, only: str | None) -> Contents:
    """Read the names, shapes and places of a unit's contents.

    Weights in safetensors are the entry `model`, and their names have no prefix. An archive has the entries of its
    mapping, and a directory of DCP those of its state.

    Raises:
        StateMismatch: there is no such entry, or no file has a form that can be exported.
        StateRefused: torch's weights-only reader refuses the archive, or a file has a form that is not converted.
        Also as `PartRanges.fill`.
    """
    paths = [file.path for file in files.manifest(first).files if file.path != UNIT_NAME]
    names = {path: PurePosixPath(path).name for path in paths}
    distributed = [path for path in paths if names[path] == dcp_metadata.NAME]
    if len(distributed) == 1:
        return of_dcp(files, first, only, distributed[0].removesuffix(dcp_metadata.NAME))
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
    if form := other_form(reader, first, archives or paths):
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
            header = read_header(source)
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
    values: dict[str, Value] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    full_state: Any = None
    stand_ins: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            archive = Archive(RangeStream(reader, first, path, 0, reader.size(first, path)))
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
                    values[name] = Value(load, partial(archived, load))
        except NO_ARCHIVE as error:
            raise StateRefused(
                f"{first.checkpoint}: {path}: {str(error).splitlines()[0][:300]}; `tierd restore` copies it"
            ) from error
        if entry is None:
            new = {id(flat[name]): stand_in for name, stand_in in stand_ins.items()}
            full_state = replaced(archive.value, torch.Tensor, partial(_stand_in, new))
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


def _offset(archive: Archive, name: str, tensor: torch.Tensor) -> int:
    try:
        return archive.offset(tensor)
    except ValueError as error:
        raise ValueError(f"{printable(name)!r}: {error}") from error


def _stand_in(new: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return new[id(tensor)]


def _return_value(value: Any) -> Any:
    return value


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], place: tuple[PartId, str, int]) -> StreamedTensor:
    piece = Piece(partial(at_place, place), shape, (0,) * len(shape), (0,) * len(shape), shape)
    return StreamedTensor(name, dtype, shape, (piece,), place)


def _add(tensors: dict[str, StreamedTensor], tensor: StreamedTensor, first: PartId) -> None:
    if tensor.name in tensors:
        raise StateMismatch(f"{first.checkpoint}: {printable(tensor.name)!r} is in two files")
    tensors[tensor.name] = tensor


def _contents(
    tensors: dict[str, StreamedTensor],
    values: dict[str, Value],
    paths: dict[str, tuple[Any, ...]],
    only: str | None,
    first: PartId,
) -> Contents:
    names = chosen_names(paths, only, str(first.checkpoint))

    def tree() -> tuple[Any, dict[int, str]]:
        flat = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")
            if name in tensors
            else values[name].load()
            for name in names
        }
        return nested(flat, paths, only), {id(flat[name]): exported for name, exported in names.items()}

    return Contents(
        {new: _with_name(tensors[name], new) for name, new in names.items() if name in tensors},
        {new: values[name] for name, new in names.items() if name in values},
        {new: below(paths[name], only) for name, new in names.items()},
        tree,
    )


def _with_name(tensor: StreamedTensor, name: str) -> StreamedTensor:
    return replace(tensor, name=name)
