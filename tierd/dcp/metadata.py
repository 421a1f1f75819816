"""DCP's `.metadata`: a pickle, read as data, from which DCP's objects are made.

Invariant: metadata is never executed. `core/dcp_pickle` interprets the pickle without any class of this process, and
names are resolved only through tables that are built before any pickle is read. Each member of the result is checked
before the constructors of DCP's own classes receive it. A key is hashed only after its type and size were checked.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierd.core.dcp_pickle import DCP_GLOBALS, PickledDict, PickledGlobal, PickledInstance, interpret
from tierd.core.errors import ManifestError, StateRefused

_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_LAYOUTS = {str(member): member for member in vars(torch).values() if isinstance(member, torch.layout)}
_DTYPES = {name: member for name, member in vars(torch).items() if isinstance(member, torch.dtype)}
NAMES = {(module, name): PickledGlobal(kind, f"{module}.{name}") for module, name, kind in DCP_GLOBALS}
NAMES |= {("torch", name): PickledGlobal("dtype", name) for name in _DTYPES}


def raise_misplaced(pickled: Any, place: str) -> NoReturn:
    actual = (
        pickled.of.name
        if type(pickled) is PickledInstance
        else pickled.name
        if type(pickled) is PickledGlobal
        else type(pickled).__name__
    )
    raise ManifestError(f"{actual} where {place} belongs")


def dtype(pickled: Any) -> torch.dtype:
    if type(pickled) is not PickledGlobal or pickled.kind != "dtype":
        raise_misplaced(pickled, "a dtype")
    return _DTYPES[pickled.name]


def layout(pickled: Any) -> torch.layout:
    if type(pickled) is PickledInstance and pickled.of.kind == "layout" and len(pickled.arguments) == 1:
        [name] = pickled.arguments
        if type(name) is str and name in _LAYOUTS:
            return _LAYOUTS[name]
    raise_misplaced(pickled, "a layout")


def memory_format(pickled: Any) -> torch.memory_format:
    arguments = pickled.arguments if type(pickled) is PickledInstance else ()
    if type(pickled) is PickledInstance and pickled.of.kind == "memory format" and len(arguments) == 1:
        [value] = arguments
        if type(value) is int and 0 <= value < len(_FORMATS):
            return list(_FORMATS.values())[value]
    elif type(pickled) is PickledInstance and pickled.of.kind == "getattr" and len(arguments) == 2:
        of, name = arguments
        if type(of) is PickledGlobal and of.kind == "memory format" and type(name) is str and name in _FORMATS:
            return _FORMATS[name]
    raise_misplaced(pickled, "a memory format")


NAME = ".metadata"  # in the coordinator's part; without collectives each part has its own `__<rank>.metadata`
MAX_SIZE = 1 << 30  # bytes; larger metadata is not read

_DEPTH = 32  # levels of nesting in a planner's own data
_DIMENSIONS = 256
_KEY_ITEMS = 64  # items of a tuple that is a key
_SAME = 16  # keys with one hash in a dict; regular keys have a hash each
_SPARE = 10_000  # values that even short metadata may hold
_TRUSTED = (
    "If you trust who wrote it: `tierd restore --to DIR`, copy its .metadata from rank 0's directory to DIR, and "
    "torch's own dcp.FileSystemReader(DIR) loads it"
)

# Members that Megatron adds for its own next save. They say nothing of the entries, so they are not read.
_OF_MEGATRON = ("all_local_plans", "mcore_data")
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})


def check_readable(metadata: Metadata, where: str) -> None:
    """Raise `StateRefused` if a custom planner's data in the metadata could not be read again."""
    stripped = dataclasses.replace(metadata, state_dict_metadata={}, storage_data={})
    try:
        _read(pickle.dumps(stripped))
    except (StateRefused, ManifestError) as error:
        raise StateRefused(
            f"{where}: {error}. So it could never be loaded: planner_data holds None, bool, int, float, str, bytes, "
            "lists, tuples and dicts of those"
        ) from None


def read_metadata(data: bytes | bytearray | memoryview, where: str) -> Metadata:
    """Read metadata from bytes, in time and memory proportional to their number, even if they claim larger sizes.

    Raises:
        StateRefused: it holds values that DCP's own metadata does not. That proves no corruption, because a custom
            planner may have written them.
        ManifestError: the bytes are not metadata; the message begins with `where`.
    """
    try:
        return _read(bytes(data))
    except StateRefused as error:
        raise StateRefused(f"{where}: {error}. {_TRUSTED}") from None
    except ManifestError as error:
        raise ManifestError(f"{where}: no metadata of DCP: {error}") from None


def _read(data: bytes) -> Metadata:
    return _Builder(_SPARE + len(data)).metadata(interpret(data, NAMES))


def _known_members(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the values that this torch's class has as fields: an older one lacks some that a newer one records."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


class _Builder:
    """Makes DCP's objects from the description of a pickle.

    A pickle can refer to one object many times, so following every reference might never end. At most `values`
    references are followed, which is more than metadata of that size holds.
    """

    def __init__(self, values: int) -> None:
        self._left = values
        # By the id of their description, which the interpreted pickle keeps alive.
        self._sizes: dict[int, torch.Size] = {}

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise StateRefused("it holds more values than bytes, because it refers to the same ones many times")

    def _members(self, pickled: Any, kind: str, required: list[str], optional: Iterable[str] = ()) -> dict[str, Any]:
        """Return an instance's members by name, not yet interpreted; DCP writes the `required` ones in this order."""
        if (
            type(pickled) is not PickledInstance
            or pickled.of.kind != kind
            or pickled.arguments
            or type(pickled.state) is not PickledDict
        ):
            raise_misplaced(pickled, f"{kind} with its members")
        state = pickled.state
        self._spend(len(state))
        names = state[::2]
        if names == required:
            return dict(zip(required, state[1::2], strict=True))
        if any(type(name) is not str for name in names):
            raise ManifestError(f"{kind} has a member whose name is no text")
        members = dict(zip(names, state[1::2], strict=True))
        if missing := set(required) - members.keys():
            raise ManifestError(f"{kind} has no {min(missing)}")
        if unknown := members.keys() - set(required) - set(optional):
            raise StateRefused(f"{kind} has a member {min(unknown)[:100]!a}, which torch 2.6 to 2.13 do not write")
        return members

    def metadata(self, pickled: Any) -> Metadata:
        optional = {"planner_data": None, "storage_meta": None, "version": None}
        members = optional | self._members(
            pickled, "Metadata", ["state_dict_metadata", "storage_data"], (*optional, *_OF_MEGATRON)
        )
        states, storage = members["state_dict_metadata"], members["storage_data"]
        for name in ("state_dict_metadata", "storage_data"):
            if type(members[name]) is not PickledDict:
                raise_misplaced(members[name], f"the dict {name}")
            self._spend(len(members[name]))
        if type(members["version"]) not in (str, type(None)):
            raise_misplaced(members["version"], "version")
        members["state_dict_metadata"] = self._dict(states[::2], [self._stored(state) for state in states[1::2]])
        members["storage_data"] = self._dict(storage[::2], [self._info(entry) for entry in storage[1::2]])
        members["planner_data"] = self._plain(members["planner_data"], _DEPTH)
        members["storage_meta"] = self._storage_meta(members["storage_meta"])
        for name in _OF_MEGATRON:
            members.pop(name, None)
        return Metadata(**_known_members(members, Metadata))

    def _stored(self, pickled: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if (
            type(pickled) is PickledInstance
            and pickled.of.kind == "BytesStorageMetadata"
            and not pickled.arguments
            and not pickled.state
        ):
            return BytesStorageMetadata()
        members = self._members(pickled, "TensorStorageMetadata", ["properties", "size", "chunks"])
        chunks = members["chunks"]
        if type(chunks) is not list:
            raise_misplaced(chunks, "a list of chunks")
        self._spend(len(chunks))
        properties, size = self._properties(members["properties"]), self._size(members["size"])
        return TensorStorageMetadata(properties, size, [self._chunk(chunk) for chunk in chunks])

    def _chunk(self, pickled: Any) -> ChunkStorageMetadata:
        members = self._members(pickled, "ChunkStorageMetadata", ["offsets", "sizes"])
        return ChunkStorageMetadata(self._size(members["offsets"]), self._size(members["sizes"]))

    def _properties(self, pickled: Any) -> TensorProperties:
        state = pickled.state if type(pickled) is PickledInstance and pickled.of.kind == "TensorProperties" else None
        if type(state) is not tuple or len(state) != 5 or pickled.arguments:
            raise_misplaced(pickled, "TensorProperties with its five members")
        of_dtype, of_layout, requires_grad, of_format, pin_memory = state
        if type(requires_grad) is not bool or type(pin_memory) is not bool:
            raise_misplaced(requires_grad, "requires_grad or pin_memory")
        return TensorProperties(
            dtype=dtype(of_dtype),
            layout=layout(of_layout),
            requires_grad=requires_grad,
            memory_format=memory_format(of_format),
            pin_memory=pin_memory,
        )

    def _size(self, pickled: Any) -> torch.Size:
        """Return a `torch.Size`; also from a tuple or list, which extensions of DCP write instead."""
        if (cached := self._sizes.get(id(pickled))) is not None:
            return cached
        numbers = pickled
        if type(pickled) is PickledInstance and pickled.of.kind == "Size" and len(pickled.arguments) == 1:
            [numbers] = pickled.arguments
        if type(numbers) not in (tuple, list) or len(numbers) > _DIMENSIONS:
            raise_misplaced(pickled, f"a size of at most {_DIMENSIONS} dimensions")
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise_misplaced(pickled, "a size of integers of 63 bits")
        self._spend(len(numbers))
        size = self._sizes[id(pickled)] = torch.Size(numbers)
        return size

    def _index(self, pickled: Any) -> MetadataIndex:
        members = self._members(pickled, "MetadataIndex", ["fqn", "index"], ("offset",))
        fqn, offset, index = members["fqn"], members.get("offset"), members["index"]
        if type(index) not in (int, type(None)):
            raise_misplaced(index, "an index")
        # Integers are allowed because a planner that does not flatten the state keeps integer keys.
        if type(fqn) is not str and type(fqn) is not int:
            raise_misplaced(fqn, "a name")
        return MetadataIndex(fqn, None if offset is None else self._size(offset), index)  # type: ignore[arg-type]

    def _info(self, pickled: Any) -> _StorageInfo:
        required = ["relative_path", "offset", "length"]
        members = self._members(pickled, "_StorageInfo", required, ("transform_descriptors",))
        if type(members["relative_path"]) is not str:
            raise_misplaced(members["relative_path"], "a path")
        for name in ("offset", "length"):
            if type(members[name]) is not int or not 0 <= members[name] < 1 << 63:
                raise_misplaced(members[name], f"{name}, an integer of 63 bits,")
        if "transform_descriptors" in members:
            members["transform_descriptors"] = self._texts(members["transform_descriptors"])
        fitting = _known_members(members, _StorageInfo)
        if len(fitting) < len(members) and members["transform_descriptors"]:
            raise StateRefused("an entry was written through an extension, which this torch does not know: use a newer")
        return _StorageInfo(**fitting)

    def _storage_meta(self, pickled: Any) -> StorageMeta | None:
        if pickled is None:
            return None
        members = self._members(pickled, "StorageMeta", [], ("checkpoint_id", "save_id", "load_id", "modules"))
        if "modules" in members:
            members["modules"] = self._texts(members["modules"]) or []
        for name in members.keys() - {"modules"}:
            members[name] = self._plain(members[name], 1)
            if type(members[name]) not in (str, type(None), PurePosixPath):
                raise_misplaced(members[name], name)
        return StorageMeta(**_known_members(members, StorageMeta))

    def _texts(self, pickled: Any) -> list[str] | None:
        if pickled is None:
            return None
        if type(pickled) not in (list, tuple) or any(type(text) is not str for text in pickled):
            raise_misplaced(pickled, "a list of texts")
        self._spend(len(pickled))
        return list(pickled)

    def _plain(self, pickled: Any, levels: int) -> Any:
        kind = type(pickled)
        if kind in _LEAVES:
            return pickled
        if not levels:
            raise StateRefused(f"a planner's data is nested deeper than {_DEPTH} levels")
        if kind is list or kind is tuple:
            self._spend(len(pickled))
            values = [value if type(value) in _LEAVES else self._plain(value, levels - 1) for value in pickled]
            return values if kind is list else tuple(values)
        if kind is PickledDict:
            self._spend(len(pickled))
            return self._dict(pickled[::2], [self._plain(value, levels - 1) for value in pickled[1::2]])
        if kind is PickledGlobal and pickled.kind == "dtype":
            return dtype(pickled)
        if kind is PickledInstance and pickled.of.kind == "Size":
            return self._size(pickled)
        if kind is PickledInstance and pickled.of.kind == "MetadataIndex":
            return self._index(pickled)
        if (
            kind is PickledInstance
            and pickled.of.kind == "path"
            and all(type(piece) is str for piece in pickled.arguments)
        ):
            self._spend(len(pickled.arguments))
            return PurePosixPath(*pickled.arguments)
        raise StateRefused(f"{(pickled.of if kind is PickledInstance else pickled).name} where plain data belongs")

    def _dict(self, keys: list[Any], values: list[Any]) -> dict[Any, Any]:
        if any(type(key) is not str for key in keys):
            keys = [self._key(key) for key in keys]
            hashes = sorted(map(hash, keys))
            if any(lower == upper for lower, upper in zip(hashes, hashes[_SAME:], strict=False)):
                raise StateRefused(f"more than {_SAME} keys of a dict have one hash, which slows it down without end")
        return dict(zip(keys, values, strict=True))

    def _key(self, pickled: Any) -> Any:
        """Return a key, after checking that it is short enough to be hashed quickly."""
        if type(pickled) is PickledInstance:
            return self._index(pickled)
        items = pickled if type(pickled) is tuple else (pickled,)
        if len(items) <= _KEY_ITEMS and all(type(item) in (str, int, bool, type(None)) for item in items):
            return pickled
        raise StateRefused("a dict's key is neither text, a number, a MetadataIndex nor a short tuple of such")
