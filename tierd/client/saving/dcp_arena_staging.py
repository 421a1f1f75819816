"""Copy tensors into an arena, from which DCP's asynchronous saves write them.

Invariant: once `ArenaCopy.wait` has returned, the copies hold the tensors' values of the time of the call to `stage`.
No memory is used again before its reader has released it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import torch

from tierd.client.saving.save_jobs import Latch, Save
from tierd.client.saving.save_pipeline import SavePipeline
from tierd.client.saving.slots import Slot
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.core.errors import ConfigError, SaveFailed
from tierd.core.manifest import Manifest
from tierd.state import cuda
from tierd.state.capture import Capture
from tierd.state.capturer import CapturerPool
from tierd.state.kinds.dtensors import is_dtensor, local_of
from tierd.state.kinds.stored_arrays import STORED_AS
from tierd.state.single_values import form_of
from tierd.state.tensor_file import TensorFileLayout, tensor_view

_ROOT = "dcp"


class ArenaCopy:
    """Tensors that are being copied into an arena.

    Attributes:
        tensors: copies of the given tensors in their order, DTensors as DTensors. Each copy has a storage of exactly
            its size, because torch would copy a slice of a larger storage before writing it.
    """

    def __init__(self, staging: ArenaStaging, snapshot: Snapshot) -> None:
        self._staging, self.snapshot = staging, snapshot
        self.room: _Room | None = None
        self.tensors: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._over = Latch()

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._over.open()

    def wait(self) -> None:
        """Return when everything is copied; raises `TornSnapshot` if something other than an attached optimizer has
        changed a tensor meanwhile.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Allow the reuse of the tensors' memory, which is otherwise released with the last of them."""
        room, self.room = self.room, None
        if room is not None and self._over.is_open:
            self._staging.take_back(room, self.snapshot)


class _Room:
    def __init__(self) -> None:
        self.slot = Slot(0)
        self._layout: TensorFileLayout | None = None
        self._arena: object = None
        self._specs: list[object] = []
        self._tensors: list[torch.Tensor] = []

    def show(self, capture: Capture, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the copies of `tensors`, the same objects while only their content changes."""
        assert self.slot.arena is not None
        specs = [tensor._spec if is_dtensor(tensor) else tensor.dtype for tensor in tensors]
        if self._layout is capture.layout and self._arena is self.slot.arena and _same(specs, self._specs):
            return self._tensors
        memory, places = self.slot.arena.view, _places(capture, tensors)
        copies = []
        for tensor, name in zip(tensors, places, strict=True):
            stored = tensor_view(memory, capture.layout.entries[name])
            dtype = tensor.dtype
            if dtype in STORED_AS:
                stored = torch.view_as_complex(stored) if dtype.is_complex else stored.view(dtype)
            # `DTensor.from_local` would move its tensor to the mesh's device.
            copies.append(type(tensor)(stored, tensor._spec, requires_grad=False) if is_dtensor(tensor) else stored)
        self._layout, self._arena, self._specs, self._tensors = capture.layout, self.slot.arena, specs, copies
        return copies


def _same(specs: list[object], previous: list[object]) -> bool:
    return len(specs) == len(previous) and all(spec is older for spec, older in zip(specs, previous, strict=True))


def _places(capture: Capture, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return each tensor's name in the capture; tensors that share one memory share one name."""
    first: dict[object, str] = {}
    names = []
    for index, tensor in enumerate(map(local_of, tensors)):
        name = f"{_ROOT}/{index}"
        if name not in capture.tensors:
            name = first[tensor.data_ptr(), form_of(tensor)]
        elif tensor.numel():
            first.setdefault((tensor.data_ptr(), form_of(tensor)), name)
        names.append(name)
    return names


class ArenaStaging:
    """Copy tensors, behind training if an attached optimizer allows it.

    It has its own arenas, because DCP does not report a save that it gave up, and such a save must not block others.
    """

    def __init__(self, pipeline: SavePipeline, gate: OptimizerStepGate) -> None:
        self._pipeline, self._gate = pipeline, gate
        self._capturers = CapturerPool()
        self._idle: list[_Room] = []

    def stage(self, save: Save, manifest: Manifest, tensors: Sequence[torch.Tensor]) -> ArenaCopy:
        """Copy tensors. Returns when training may change them, except those that only an attached optimizer changes.

        Raises `StateRefused` if a tensor cannot be copied, and `MemoryError` if there is no memory for the copies.
        """
        self._gate.confirm()  # earlier late copies first, because this one would be copied after them
        capture = self._capturers.capture({_ROOT: list(map(local_of, tensors))})
        dtensors = [(f"{_ROOT}/{index}", tensor) for index, tensor in enumerate(tensors) if is_dtensor(tensor)]
        capture = dataclasses.replace(capture, dtensors=dtensors)
        self._gate.report_interrupted(save.part)
        deferred = self._gate.deferred_tensors(capture)
        staged = ArenaCopy(self, Snapshot(save, capture, lambda: manifest, deferred, self._gate.distrust))
        snapshot = staged.snapshot
        try:
            self._pipeline.behind(lambda: self._copy(staged, tensors))
            if snapshot.deferred_names:
                self._gate.watch(snapshot)
            snapshot.wait()
        except BaseException:
            snapshot.give_up()
            raise
        return staged

    def take_back(self, room: _Room, snapshot: Snapshot) -> None:
        self._idle.append(room)
        if snapshot.copies:
            self._pin(snapshot.copies.devices[0])

    def close(self) -> None:
        for room in self._idle:
            room.slot.drop()
        self._idle.clear()

    # -- the thread that copies ---------------------------------------------------------------------------------------

    def _copy(self, staged: ArenaCopy, tensors: Sequence[torch.Tensor]) -> None:
        snapshot = staged.snapshot
        error: Exception | None = None
        try:
            room = self._idle.pop() if self._idle else _Room()
            device = next(iter(snapshot.copies.devices), None)
            if not room.slot.reserve(snapshot.capture.layout.size, device):
                raise MemoryError(f"no memory for {snapshot.capture.layout.size} bytes of tensors")
            staged.room = room
            staged.tensors = room.show(snapshot.capture, tensors)
            snapshot.copy(room.slot)
            snapshot.await_confirmation()
            if not snapshot.claim():
                raise SaveFailed(f"{snapshot.save.part}: its save was interrupted")
        except Exception as raised:
            error = raised
        snapshot.end(error)
        staged.end(error)

    def _pin(self, device: torch.device) -> None:
        """Pin slices of an idle arena, after pending copies."""

        def pin() -> None:
            if self._idle:
                room = self._idle.pop()
                try:
                    cuda.api.enter(device)
                    unpinned = room.slot.pin(device)
                finally:
                    self._idle.append(room)
                if unpinned:
                    self._pin(device)

        with suppress(ConfigError):  # the pipeline is closing
            self._pipeline.behind(pin)
