"""Host-to-device copies of a restore: verified bytes are copied while the next ones are read and verified.

Invariant: copies read only verified bytes, and write to new tensors. `load` uses these tensors only after everything
fits and every rank has agreed, so nothing that training uses changes before. However a restore ends, its copies have
ended before the memory on either side is used again.

The file is read into an arena. The arena is pinned slice by slice just before the copies out of it begin; later saves
use the arena and pin it again. If CUDA refuses to pin, the same copies read pageable memory, and take this thread's
time. If a device has no memory for the new tensors, nothing is copied here, and `load` copies from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tierd.client.restoring.part_image import PartImage
from tierd.client.restoring.verified_chunks import VerifiedChunks
from tierd.client.saving import slots
from tierd.client.saving.device_copies import split_copy
from tierd.client.saving.slots import Pinning
from tierd.core.errors import StateMismatch
from tierd.core.manifest import TENSORS, TREE, ChunkPlace, File, Manifest
from tierd.spool.arena import Arena, available
from tierd.spool.verified_reads import check_bytes
from tierd.state import cuda
from tierd.state.kinds.dtensors import tensors_in
from tierd.state.state_loading import unflatten
from tierd.state.state_tree import SEQUENCES, pair_values

log = logging.getLogger("tierd")

_ALWAYS_ON_HOST = "step"  # torch moves an optimizer's value of this name only if a kernel reads it


class DeviceUploads:
    """The copies of one restore, in the thread that restores, to the devices on which the tensors of `state` are.

    Memory is pinned in the context of `device`, one of these. `arena` is the memory that the tensor file was read into,
    if it was; saves may use it after `close` has returned.
    """

    def __init__(self, state: Mapping[str, object], device: torch.device) -> None:
        self._api = cuda.api
        self._state, self._device = state, device
        self.arena: Arena | None = None
        self._pinning: Pinning | None = None
        self._size, self._verified = 0, 0  # of the tensor file, in bytes: all, and verified from its beginning
        self._tree: memoryview | None = None
        self._planned = False
        # Offset in the file, view of the file, target device.
        self._entries: list[tuple[int, torch.Tensor, torch.device]] = []
        self._next, self._copied = 0, 0  # the entry to copy next, and how many of its elements are copied
        self._staged: dict[int, torch.Tensor] = {}  # by offset in the file
        self._events: dict[torch.device, torch.cuda.Event] = {}  # recorded after all copies that were begun

    # -- while the part is read ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget everything that was read and copied so far, after waiting for running copies."""
        self.close()
        self._planned = False
        self._size = self._verified = 0
        if self.arena is not None:
            self.arena.close()
        self.arena = None

    def memory(self, file: File) -> memoryview | None:
        """Return the memory to read a file into; None if any memory will do."""
        if file.path != TENSORS or file.size > available():
            return None
        try:
            self.arena = Arena(file.size)
            slots.place_near_device(self.arena, self._device)
        except MemoryError:
            return None
        self._size = file.size
        return self.arena.view

    def bring(self, image: PartImage, chunks: VerifiedChunks) -> None:
        """Bring a whole part into an image of which `memory` gave the memory, and copy it to devices meanwhile.

        Raises as `VerifiedChunks.each`.
        """
        files = list(enumerate(image.manifest.files))
        # The tree first, because it says which tensor goes to which device.
        for number, file in sorted(files, key=lambda item: item[1].path == TENSORS):
            if is_uploaded := file.path == TENSORS and self.arena is not None:
                self._saw(file, image.files[file.path])

            def done(where: ChunkPlace, number: int = number, is_uploaded: bool = is_uploaded) -> None:
                if is_uploaded:
                    self.copy_up_to(image.brought_bytes(number))

            image.bring(chunks, [where for where in image.missing if where[0] == number], done)
            if not is_uploaded:
                self._saw(file, image.files[file.path])

    def check(self, arena: Arena, files: Mapping[str, memoryview], manifest: Manifest) -> None:
        """Verify files in memory, of which the tensor file is in `arena`, as `check_bytes`, and copy meanwhile."""
        self.arena = arena
        self._size = len(files[TENSORS])
        # The tree first, because it says which tensor goes to which device.
        for file in sorted(manifest.files, key=lambda file: file.path == TENSORS):
            check_bytes(files[file.path], file, self.copy_up_to if file.path == TENSORS else lambda end: None)
            self._saw(file, files[file.path])

    def _saw(self, file: File, data: memoryview) -> None:
        if file.path == TREE:
            self._tree = data
            if self._verified:
                self.copy_up_to(self._verified)
        elif file.path == TENSORS and (self.arena is None or data.obj is not self.arena.view.obj):
            self._planned = True  # the file is in other memory after all, and nothing is copied from there
            self.arena = None

    def copy_up_to(self, end: int) -> None:
        """Begin the copies of the bytes before `end` of the tensor file, which is verified up to there."""
        self._verified = end
        if not self._planned:
            self._plan(end)
        if self._next == len(self._entries) or self._entries[self._next][0] >= end:
            return
        assert self._pinning is not None
        while self._pinning.has_unpinned and self._pinning.size < end:
            self._pinning.pin_next()
        try:
            self._copy(end)
        except torch.cuda.OutOfMemoryError as error:
            log.info("no memory on a device to restore into beside what is there; copying afterwards: %s", error)
            self.close()

    def _plan(self, end: int) -> None:
        """Assign tensors to devices as soon as the header is verified."""
        assert self.arena is not None
        header = 8 + int.from_bytes(self.arena.view[:8], "little")
        if self._tree is None or header > end:
            return
        self._planned = True
        base = torch.frombuffer(self.arena.view, dtype=torch.uint8, count=1).data_ptr()
        try:
            saved = unflatten(self._tree, self.arena.view[: self._size], is_read=False)
            places = {view.data_ptr() - base: (view, where) for view, where in destinations(self._state, saved)}
        except StateMismatch:  # reported when the whole file is there
            return
        self._entries = [(offset, *places[offset]) for offset in sorted(places)]
        if self._entries:
            self._pinning = Pinning(self.arena, self.arena.size, self._device)

    def _copy(self, end: int) -> None:
        batch: list[tuple[torch.device, torch.Tensor, torch.Tensor]] = []
        while self._next < len(self._entries):
            offset, view, where = self._entries[self._next]
            if offset >= end:
                break
            if offset not in self._staged:
                self._staged[offset] = self._api.empty_like(view, where)
            upto = min(view.numel(), (end - offset) // view.element_size())
            host, on_device = view.view(-1)[self._copied : upto], self._staged[offset].view(-1)[self._copied : upto]
            batch += (
                [(where, part, device_part) for part, device_part in split_copy(host, on_device)]
                if upto > self._copied
                else []
            )
            self._copied = upto
            if upto < view.numel():
                break
            self._next, self._copied = self._next + 1, 0
        for device in dict.fromkeys(where for where, _, _ in batch):
            # Earlier work of the current stream may still use the new tensors' memory.
            ready = self._api.record(self._api.current_stream(device))
            side = self._api.side_stream(device)
            with self._api.on(side):
                side.wait_event(ready)
                try:
                    for where, host, on_device in batch:
                        if where == device:
                            self._api.copy([on_device], [host])
                finally:
                    self._events[device] = self._api.record(side)

    # -- when it was read ---------------------------------------------------------------------------------------------

    def device_tensors(self, restored: Mapping[str, object]) -> dict[int, torch.Tensor]:
        """Return the new tensors on their devices, with restored values, by the id of the restored host tensor."""
        self._wait()
        if self.arena is None:
            return {}
        base = torch.frombuffer(self.arena.view, dtype=torch.uint8, count=1).data_ptr()
        by_id = {}
        for tensor in tensors_in(restored):
            on_device = self._staged.get(tensor.data_ptr() - base) if tensor.numel() else None
            if on_device is not None and (on_device.dtype, on_device.shape) == (tensor.dtype, tensor.shape):
                by_id[id(tensor)] = on_device
        return by_id

    def close(self) -> None:
        """Return when all copies that were begun have ended, and forget the tensors that were not taken."""
        self._wait()
        self._staged.clear()
        self._entries, self._tree, self._next, self._copied = [], None, 0, 0

    def _wait(self) -> None:
        for event in self._events.values():
            event.synchronize()
        self._events.clear()
        if self._pinning is not None:
            # CUDA refuses a copy that spans two slices, and `load` may copy a whole tensor from here.
            self._pinning.unpin()
            self._pinning = None


def destinations(target: Any, saved: Any) -> Iterator[tuple[torch.Tensor, torch.device]]:
    """Yield the saved tensors that will be loaded into tensors on a device, with that device.

    This is a guess, because an object may do anything with its state. A wrong guess costs only time.
    """
    api = cuda.api
    if isinstance(saved, torch.Tensor):
        where = api.device_of(target) if isinstance(target, torch.Tensor) else None
        if where is not None and saved.numel() and (target.shape, target.dtype) == (saved.shape, saved.dtype):
            yield saved, where
    elif isinstance(target, nn.Module) and isinstance(saved, dict):
        tensors = {**dict(target.named_parameters(remove_duplicate=False)), **dict(target.named_buffers())}
        for key, value in saved.items():
            yield from destinations(tensors.get(key), value)
    elif isinstance(target, torch.optim.Optimizer):
        yield from _of_optimizer(target, saved)
    elif any(isinstance(target, kind) and isinstance(saved, kind) for kind in (dict, SEQUENCES)):
        for _, old, value in pair_values(target, saved):
            yield from destinations(old, value)


def _of_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[tuple[torch.Tensor, torch.device]]:
    """Follow torch's own `load_state_dict`: a parameter's state is copied to the parameter's device."""
    try:
        owners: dict[Any, tuple[torch.Tensor, dict[str, Any]]] = {}
        first = 0
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            behind = first + len(group["params"])
            # Torch counts so; a long list is packed, and not read yet.
            numbers = saved_group["params"] or range(first, behind)
            owners |= {number: (parameter, group) for parameter, number in zip(group["params"], numbers, strict=True)}
            first = behind
        for number, (parameter, group) in owners.items():
            where = cuda.api.device_of(parameter)
            if where is None:
                continue
            for key, value in saved["state"].get(number, {}).items():
                moved = key != _ALWAYS_ON_HOST or group.get("capturable") or group.get("fused")
                if isinstance(value, torch.Tensor) and value.numel() and moved and value.dtype == parameter.dtype:
                    yield value, where
    except (TypeError, KeyError, ValueError, AttributeError):  # the state does not fit, which `load` reports
        return
