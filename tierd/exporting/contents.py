"""The contents of a checkpoint of `Checkpointer.save` or of `tierd.dcp`, in one form: tensors and other values."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tierd.client.restoring.ranged_reader import PartFiles, PartRanges
from tierd.client.restoring.saved_entries import check_written_by_save
from tierd.client.restoring.tensor_locations import read_tensor
from tierd.core.errors import ManifestError, StateMismatch, StateRefused, printable
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, Manifest
from tierd.dcp import metadata as dcp_metadata
from tierd.dcp.load_sources import SavedState, position_of
from tierd.dcp.rank_contents import NativeLeaf, SavedArray
from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, TensorPiece
from tierd.state.kinds.random_generators import SavedGenerator
from tierd.state.state_tree import instances, replace_values

_untyped: Any = torch  # the calls below have no types
# What the reader and the unpickler raise for a file that is no such archive.
_UnpicklingError = _untyped._weights_only_unpickler.UnpicklingError
ARCHIVE_ERRORS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, _UnpicklingError)


class TorchArchive:
    """An open archive, whose `value` is what was saved, with tensors on the meta device.

    Raises `ARCHIVE_ERRORS`: the stream is no archive of `torch.save`, is big-endian, or holds what the reader refuses.
    """

    def __init__(self, stream: IO[bytes] | io.RawIOBase) -> None:
        self._records = _untyped._C.PyTorchFileReader(stream)
        if self._records.has_record("byteorder") and self._records.get_record("byteorder") != b"little":
            raise ValueError("its bytes are big-endian")
        self._storages: dict[str, Any] = {}  # also keeps them, so that no two have one address
        self._keys: dict[int, str] = {}  # by address
        unpickler = _untyped._weights_only_unpickler.Unpickler(io.BytesIO(self._records.get_record("data.pkl")))
        unpickler.persistent_load = self._storage
        self.value: Any = unpickler.load()

    def _storage(self, saved: tuple[Any, ...]) -> Any:
        _, kind, key, _, count = saved
        of = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if key not in self._storages:
            self._storages[key] = _untyped.UntypedStorage(count * of.itemsize, device="meta")
            self._keys[self._storages[key]._cdata] = str(key)
        return _untyped.storage.TypedStorage(wrap_storage=self._storages[key], dtype=of, _internal=True)

    def offset(self, tensor: torch.Tensor) -> int:
        """Return where the bytes of a tensor of `value` begin in the archive.

        Raises:
            ValueError: its elements do not lie row-major in one record, or are conjugates or negatives of its bytes.
        """
        if tensor.is_conj() or tensor.is_neg():  # torch stores the bytes as they were, and computes when it reads them
            raise ValueError(
                "the tensor was saved lazily conjugated or negated, so that it cannot be streamed; `tierd restore` "
                "copies it, or save x.resolve_conj().resolve_neg()"
            )
        key = self._keys.get(tensor.untyped_storage()._cdata)
        if key is None or not tensor.is_contiguous():
            raise ValueError("the tensor is not row-major, so that it cannot be streamed; `tierd restore` copies it")
        begin: int = self._records.get_record_offset(f"data/{key}")
        return begin + int(tensor.storage_offset()) * tensor.dtype.itemsize


EntryPath = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NonTensorValue:
    """A value that is not a tensor. `load` returns it, and `archive` its bytes as `torch.save` writes them."""

    load: Callable[[], Any]
    archive: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries that are exported."""

    tensors: dict[str, StreamedTensor]
    values: dict[str, NonTensorValue]
    paths: dict[str, EntryPath]
    tree: Callable[[], tuple[Any, dict[int, str]]]  # the nested state with meta tensors, and their names by `id`
    metadata: Mapping[str, str] = field(default_factory=dict)  # the texts of `__metadata__` in its files of safetensors
    contradicting: tuple[str, ...] = ()  # the keys of `__metadata__` that differ between its files
    unreadable: tuple[str, ...] = ()  # the names of values that are in no format, because only a restore makes them


def read_contents(
    files: PartRanges, first: PartId, only: str | None, rank: int | None = None, *, values: bool
) -> Contents:
    """Read the names, shapes and places of a checkpoint's contents, of one entry (`only`) or of all.

    Args:
        rank: the rank whose value is read where ranks saved different ones under one name.

    Raises `StateMismatch` if there is no such entry, if ranks saved different values under one name, or if neither
    `save` nor DCP wrote the checkpoint; and as `PartRanges.fill`.
    """
    manifest = files.manifest(first)
    paths = [file.path for file in manifest.files]
    if dcp_metadata.NAME in paths:
        return read_dcp_contents(files, first, only)
    if f"__0{dcp_metadata.NAME}" in paths:
        raise StateMismatch(
            f"{first}: saved through DCP with use_collectives=False, each rank for itself; `tierd restore` copies it"
        )
    check_written_by_save(first, paths)
    return _of_save(files, manifest, only, rank, values)


def chosen_names(paths: Mapping[str, EntryPath], only: str | None, where: str) -> dict[str, str]:
    if only is None:
        return {name: name for name in paths}
    chosen = {name: path for name, path in paths.items() if str(path[0]) == only}
    exported = {name: ".".join(map(str, path[1:])) or only for name, path in chosen.items()}
    if not exported:
        entries = ", ".join(dict.fromkeys(printable(str(path[0])) for path in paths.values()))
        raise StateMismatch(f"{where}: {only!r} not in the checkpoint; it has {entries}")
    return exported


def nested_state(
    names: Mapping[str, str],
    tensors: Mapping[str, StreamedTensor],
    values: Mapping[str, NonTensorValue],
    paths: Mapping[str, EntryPath],
    only: str | None,
) -> tuple[Any, dict[int, str]]:
    """Return what `Contents.tree` does of these names; `tensors` and `values` are by their exported names."""
    flat = {
        name: torch.empty(tensors[exported].shape, dtype=tensors[exported].dtype, device="meta")
        if exported in tensors
        else values[exported].load()
        for name, exported in names.items()
    }
    tree = unflatten_state_dict(flat, {name: paths[name] for name in flat})
    state = tree if only is None else tree[paths[next(iter(flat))][0]]
    return state, {id(flat[name]): exported for name, exported in names.items()}


# -- Checkpointer.save ------------------------------------------------------------------------------------------------


def _of_save(files: PartRanges, manifest: Manifest, only: str | None, rank: int | None, values: bool) -> Contents:
    # `SavedState` calls `manifest`, `span`, `fill` and `part`, which every reader of a checkpoint has.
    saved = SavedState(cast(PartFiles, files), 0, 1, rank, remedy="one can be written: say whose (rank=0, --rank 0)")
    paths = dict(saved.metadata.planner_data)
    names = chosen_names(paths, only, str(manifest.part.checkpoint))
    tensors, other_values = {}, {}
    generators = {name for name in names if any(instances(saved.claims.value(name), SavedGenerator))}
    readable = {name: exported for name, exported in names.items() if name not in generators}
    for name, exported in readable.items():
        value = saved.claims.value(name)
        is_tensor = isinstance(value, NativeLeaf)
        if (is_tensor or values) and (reason := saved.claims.contradiction(name)):
            advice = "export less (only=…, --only)" if only is None else "`tierd restore` copies the files"
            raise StateMismatch(f"{manifest.part.checkpoint}: {printable(name)!r}: {reason}; {advice}")
        if is_tensor:
            tensors[exported] = _native_tensor(saved, name, exported, value)
        else:
            load = partial(_native_value, files, value)
            other_values[exported] = NonTensorValue(load, partial(archive_bytes, load))

    def tree() -> tuple[Any, dict[int, str]]:
        full_state, stand_ins = saved.tree
        if not stand_ins.keys() >= names.keys():  # other ranks have more names, as pipeline stages do
            return nested_state(readable, tensors, other_values, paths, only)
        state = _native_value(files, full_state)
        if only is not None:
            state = next(entry for key, entry in state.items() if str(key) == only)
        return state, {id(stand_ins[name]): names[name] for name in names}

    placed = {exported: path_below(paths[name], only) for name, exported in readable.items()}
    unreadable = tuple(exported for name, exported in names.items() if name in generators)
    return Contents(tensors, other_values, placed, tree, unreadable=unreadable)


def path_below(path: EntryPath, only: str | None) -> EntryPath:
    return path if only is None else path[1:] or path


def _native_tensor(saved: SavedState, name: str, exported: str, value: NativeLeaf) -> StreamedTensor:
    pieces, order = [], []
    for leaf, box in saved.blocks(name):
        part, entry = leaf.location
        place = part, TENSORS, entry.offset
        order.append(place)
        pieces.append(TensorPiece(partial(fixed_place, place), leaf.shape, box.local, box.offset, box.size))
    return StreamedTensor(exported, value.dtype, tuple(value.global_shape), tuple(pieces), min(order, default=()))


def fixed_place(place: tuple[PartId, str, int], reader: ChunkReader) -> tuple[PartId, str, int]:
    return place


def _native_value(files: PartRanges, value: Any) -> Any:
    return replace_values(value, SavedArray, lambda array: array.rebuild(read_tensor(files, array.location)))


def archive_bytes(load: Callable[[], Any]) -> bytes:
    file = io.BytesIO()
    torch.save(load(), file)
    return file.getvalue()


# -- DCP --------------------------------------------------------------------------------------------------------------


def read_dcp_contents(files: PartRanges, first: PartId, only: str | None, base: str = "") -> Contents:
    """Read the contents of a DCP checkpoint. `base` is its directory in rank 0's part, with a slash, if it has one."""
    reader = ChunkReader(files)
    path = base + dcp_metadata.NAME
    size = reader.size(first, path)
    if size > dcp_metadata.MAX_SIZE:
        raise ManifestError(f"{first}: {path}: {size} bytes; at most {dcp_metadata.MAX_SIZE} are read")
    metadata = dcp_metadata.read_metadata(reader.read(first, path, 0, size), f"{first}: {path}")
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths: dict[str, EntryPath] = {}
    for name in metadata.state_dict_metadata:
        planned_path = planned.get(name)
        paths[name] = planned_path if type(planned_path) is tuple and planned_path else tuple(str(name).split("."))
    names = chosen_names(paths, only, str(first.checkpoint))
    tensors, other_values = {}, {}
    for name, exported in names.items():
        stored = metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            tensors[exported] = _dcp_tensor(metadata, first, name, exported, stored, base)
        else:
            data = partial(_bytes, reader, position_of(metadata.storage_data, MetadataIndex(name), first, base))
            load = partial(_dcp_value, data, f"{first.checkpoint}: {printable(str(name))!r}")
            other_values[exported] = NonTensorValue(load, data)

    tree = partial(nested_state, names, tensors, other_values, paths, only)
    return Contents(tensors, other_values, {names[name]: path_below(paths[name], only) for name in names}, tree)


_Position = tuple[PartId, str, int, int]


def _bytes(reader: ChunkReader, place: _Position) -> bytes:
    return bytes(reader.read(*place))


def _dcp_value(data: Callable[[], bytes], where: str) -> Any:
    try:
        return torch.load(io.BytesIO(data()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateRefused(
            f"{where}: torch's weights-only reader refuses it: {str(error).splitlines()[0][:200]}; export less "
            "(only=…, --only), or the formats safetensors and hf, which hold tensors alone"
        ) from error


def _dcp_tensor(
    metadata: Metadata, first: PartId, name: str, exported: str, stored: TensorStorageMetadata, base: str
) -> StreamedTensor:
    pieces, order = [], []
    dtype = stored.properties.dtype
    for chunk in stored.chunks:
        place = position_of(metadata.storage_data, MetadataIndex(name, chunk.offsets), first, base)
        shape = tuple(chunk.sizes)
        order.append(place)
        locate = partial(_locate, place, dtype, shape, f"{first.checkpoint}: {printable(str(name))!r}")
        pieces.append(TensorPiece(locate, shape, (0,) * len(shape), tuple(chunk.offsets), shape))
    return StreamedTensor(exported, dtype, tuple(stored.size), tuple(pieces), min(order, default=()))


def _locate(
    place: _Position, dtype: torch.dtype, shape: tuple[int, ...], where: str, reader: ChunkReader
) -> tuple[PartId, str, int]:
    """Find a tensor's bytes in `torch.save`'s archive of it, without reading them. Raises `StateMismatch`."""
    part, path, offset, length = place
    try:
        archive = TorchArchive(reader.stream(part, path, offset, length))
        tensor = archive.value
        is_tensor = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not is_tensor or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise ValueError("it holds no such tensor")
        begin = archive.offset(tensor)
        if begin + tensor.numel() * dtype.itemsize > length:
            raise ValueError("the tensor reaches over its end")
    except ARCHIVE_ERRORS as error:
        raise StateMismatch(f"{where}: the entry of {path}: {str(error).splitlines()[0][:200]}") from error
    return part, path, offset + begin
