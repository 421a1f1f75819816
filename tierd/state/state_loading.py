"""Load a restored state into the objects of the running job, from typed JSON and tensors, and release its file.

In that form every tensor has exactly one name, and no pickle is used. Tied weights, which
are the same memory with the same form, are stored once and restored as one tensor. Tensors that only overlap in memory
are restored as independent tensors. Containers are stored once per reference.

Entries with `load_state_dict` receive their saved state. An `nn.Module` receives views into the restored file, because
it copies them. Other objects receive tensors that own their memory, because an object may keep the tensors that it
receives. An optimizer does keep them and has most of the bytes, so it receives views as well if the file's memory may
be kept. Plain values are restored in place: containers keep their identity and receive the saved content, and tensors
and arrays are overwritten. Any other value is replaced.

Invariants:

- Nothing is loaded until everything that can be checked has been checked (`tierd.state.load_check`).
- A page of the restored file is released only if every tensor in it is gone, by torch's own reference count of the
  tensor's storage. The mapping is kept open meanwhile. Released pages of private memory read as zeros.
"""

from __future__ import annotations

import copy
import mmap
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tierd.core.errors import StateMismatch, as_both
from tierd.core.units import list_few
from tierd.spool.direct_io import PAGE
from tierd.state.kinds import loader_arguments, loader_fingerprint
from tierd.state.kinds.dtensors import tensors_in
from tierd.state.kinds.live_parameters import meshes_of, place_optimizer_shards
from tierd.state.kinds.random_generators import RngState
from tierd.state.kinds.training_objects import load_module
from tierd.state.load_check import LoadFit, check_fit, filled_pairs, is_loaded_in_place, is_sequence_of, is_simple
from tierd.state.single_values import fill_tensor, path_text
from tierd.state.state_tree import pair_values, walk
from tierd.state.tensor_file import Buffer, tensor_view
from tierd.state.tensor_header import parse_layout, tensors_elsewhere
from tierd.state.tree_parser import parse_tree
from tierd.state.value_kinds import IMMUTABLE, LoadKind, Stateful, load_kind_of


def unflatten(
    tree: bytes | bytearray | memoryview,
    file: Buffer,
    *,
    is_read: bool = True,
    siblings: Mapping[str, Buffer] = MappingProxyType({}),
) -> dict[str, Any]:
    """Rebuild a state from its tree and its tensor file.

    The returned tensors are views into `file`, so `file` must outlive them. It must be writable, because torch warns
    otherwise. NumPy arrays own their memory. One stored tensor is one tensor object, however often the tree names it.

    `is_read` is as for `parse_tree`: False if only the header of `file` has been read; an empty tensor then stands for
    each tensor in another file that is not in `siblings`. `siblings` are other ranks'
    tensor files, by `sibling_path`, in which some of the tensors lie; they must outlive the state, too. Raises
    `StateMismatch`, which names the defect, if tierd did not write this tree or these files.
    """
    layout = parse_layout(file)
    entries, views = layout.entries, tensors_elsewhere(layout, siblings)

    def stored(name: str) -> torch.Tensor:
        if name not in views:
            is_unread = not is_read and name in layout.elsewhere
            views[name] = torch.empty(0) if is_unread else tensor_view(file, entries[name])
        return views[name]

    value = parse_tree(tree, stored, is_read=is_read)
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise StateMismatch("the state tree: its root is no mapping of names")
    return value


class ReclaimedMemory:
    """Watches tensors that are views of one mapped file, each with a storage of its own as `unflatten` makes them.

    `file` is a mapping or a view of one, because other memory is never released, and neither is memory outside
    `tensors`.
    """

    def __init__(self, file: Buffer, tensors: Iterable[torch.Tensor]) -> None:
        mapping = file if isinstance(file, mmap.mmap) else memoryview(file).obj
        self._mapping = mapping if isinstance(mapping, mmap.mmap) and len(mapping) else None
        self._watched: dict[tuple[int, int], list[StorageWeakRef]] = {}
        if self._mapping is None:
            return
        first = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr() - first
            if 0 <= begin < begin + storage.nbytes() <= len(self._mapping):
                span = begin, begin + storage.nbytes()
                self._watched.setdefault(span, []).append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def release(self) -> int:
        """Release the pages that contain only tensors that are gone. Returns the number of bytes released."""
        if self._mapping is None:
            return 0
        runs: list[tuple[int, int]] = []
        for (begin, end), storages in sorted(self._watched.items()):
            if all(storage.expired() for storage in storages):  # type: ignore[no-untyped-call]
                if runs and runs[-1][1] == begin:
                    runs[-1] = runs[-1][0], end
                else:
                    runs.append((begin, end))
        released = 0
        for begin, end in runs:
            begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
                released += end - begin
        return released


def load_restored(
    state: Mapping[str, object],
    restored: Mapping[str, object],
    *,
    handed_over: bool = True,
    files: Sequence[Buffer] = (),
    staged: Mapping[int, torch.Tensor] = MappingProxyType({}),
    fitting: LoadFit | None = None,
) -> None:
    """Check as `check_fit` does, unless that was done, then load.

    The objects with `load_state_dict` are loaded first, and then the plain values. Of the objects, those that yield
    samples come first, because their own `load_state_dict` refuses a state most often, and `RngState` comes last.

    Args:
        handed_over: whether the memory of the restored tensors is reused after the load. If not, optimizers keep views
            of large tensors, which keep the file's memory.
        files: the memory of the restored tensors, if it is not reused. Of each mapping, the parts that no object kept
            are returned to the system; `restored`, if it is a dict, and `fitting` are emptied for that.
        staged: by the id of a restored tensor, a tensor with the same values on the target's device. Nothing else
            refers to it.
        fitting: the result of `check_fit` for the same arguments, if nothing has changed since.

    Raises:
        StateMismatch: as `check_fit`, and then nothing was loaded; or an object's own `load_state_dict` raised
            (chained), and then the message says which entries were loaded before it.
    """
    tensors = list(tensors_in(restored)) if files and not handed_over else []
    reclaimed = [ReclaimedMemory(file, tensors) for file in files] if not handed_over else []
    del tensors
    _load(state, restored, handed_over, staged, fitting or check_fit(state, restored))
    if reclaimed:
        if isinstance(restored, dict):
            restored.clear()
        if fitting is not None:
            fitting.stateful.clear()  # it has the saved states, too
        for memory in reclaimed:
            memory.release()


def _load(
    state: Mapping[str, object],
    restored: Mapping[str, object],
    handed_over: bool,
    staged: Mapping[int, torch.Tensor],
    fitting: LoadFit,
) -> None:
    memo: dict[int, object] = dict(staged)  # so that tied tensors are cloned only once
    meshes = meshes_of(state)
    loaded: list[str] = []
    for path, target, saved in sorted(fitting.stateful, key=lambda item: _load_order(item[1])):
        try:
            if not handed_over and isinstance(target, torch.optim.Optimizer):
                _spare(saved, memo)
            if isinstance(target, nn.Module):
                load_module(target, saved, memo, meshes)
            else:
                copied = _copy(loader_fingerprint.without_arguments(saved), memo)
                if isinstance(target, torch.optim.Optimizer):
                    place_optimizer_shards(target, copied, meshes)
                target.load_state_dict(meshes.place_shards(copied))
        except Exception as error:
            before = (
                f"already loaded: {list_few(loaded)}"
                if loaded
                else "nothing was loaded before it, but it may have changed"
            )
            raise as_both(type(error))(
                f"{path_text(path)}: load_state_dict() raised {type(error).__name__}: {error}; {before}"
            ) from error
        loaded.append(path_text(path))
    for key, saved in restored.items():
        value = _place(state[key], saved, memo)
        value = meshes.place_shards(value) if fitting.has_shards else value
        if value is not state[key]:
            state[key] = value  # type: ignore[index]


def _copy(saved: Any, memo: dict[int, object]) -> Any:
    """Return a deep copy. `deepcopy` would copy the plain values of a container one by one."""
    if type(saved) in IMMUTABLE:
        return saved
    if is_simple(saved):
        return _copy_at_once(saved, memo)
    for _, inner, is_container in walk(saved):
        if is_container and is_simple(inner):
            _copy_at_once(inner, memo)
    return copy.deepcopy(saved, memo)


def _copy_at_once(values: Any, memo: dict[int, object]) -> object:
    if id(values) not in memo:
        memo[id(values)] = values if type(values) is tuple else values.copy()
        memo.setdefault(id(memo), []).append(values)  # type: ignore[attr-defined]  # as `deepcopy` keeps its originals
    return memo[id(values)]


def _load_order(target: Stateful) -> int:
    return 2 if isinstance(target, RngState) else 0 if loader_arguments.gives_samples(target) else 1


def _spare(saved: object, memo: dict[int, object]) -> None:
    """Exempt large tensors from `deepcopy`, so that their target keeps views.

    Small tensors are copied, because each view keeps the whole file in memory and may be less aligned than a copy.
    """
    for tensor in tensors_in(saved):
        if tensor.nbytes >= PAGE:
            memo.setdefault(id(tensor), tensor)


def _place(target: Any, saved: Any, memo: dict[int, object]) -> Any:
    """Restore `saved` into `target`. Returns `target` with new content, or the value that replaces it."""
    kind = load_kind_of(target)
    if kind is LoadKind.STATEFUL:
        return target
    if kind is LoadKind.GENERATOR:
        saved.set(target)
        return target
    if kind is LoadKind.MAPPING and isinstance(saved, dict):
        return _place_dict(target, saved, memo)
    if kind is LoadKind.SEQUENCE and is_sequence_of(target, saved):
        return _place_sequence(target, saved, memo)
    if not is_loaded_in_place(target, saved):
        return _copy(saved, memo)
    if kind is LoadKind.ARRAY:
        target[...] = saved
        return target
    for inner, stored in filled_pairs(target, saved):
        source = memo.get(id(stored), stored)
        fill_tensor(inner, source if isinstance(source, torch.Tensor) else stored)
    return target


def _place_dict(target: dict[Any, Any], saved: dict[Any, Any], memo: dict[int, object]) -> object:
    if type(target) is dict and is_simple(target) and is_simple(saved):
        target.clear()
        target.update(saved)
        return target
    new = {key: _place(old, value, memo) for key, old, value in pair_values(target, saved)}
    target.clear()
    for key, value in new.items():
        target[key] = value
    if isinstance(target, OrderedDict):
        # Restores the _metadata of a module's state.
        vars(target).update(copy.deepcopy(getattr(saved, "__dict__", {})))
    return target


def _place_sequence(target: Any, saved: Any, memo: dict[int, object]) -> object:
    is_run = is_simple(target) and is_simple(saved)
    placed = saved if is_run else [_place(old, value, memo) for _, old, value in pair_values(target, saved)]
    if isinstance(target, tuple):
        same = not is_run and len(placed) == len(target) and all(map(operator.is_, placed, target))
        return target if same else tuple(placed)
    if isinstance(target, list):
        target[:] = placed
        return target
    if not is_loaded_in_place(target, saved):  # because the length limit of a deque cannot be changed
        return deque(placed, saved.maxlen)
    target.clear()
    target.extend(placed)
    return target
