"""All CUDA calls of a save, behind the object `api`, so that a test can replace the device.

Nothing here initialises CUDA, because the methods are called only for tensors that already lie on a device.

Streams and events are torch's own: a stream has `wait_event` and `query`, an event has `query` and `synchronize`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from tierd.core.numa import pci_address

if TYPE_CHECKING:
    from tierd.state.capture import Capture

log = logging.getLogger("tierd")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices, not only for the caller's
# Torch has a pool of streams for each; a device maps a priority that it lacks to its highest.
_PRIORITIES = (0, -1, -2, -3)
_POOL = 64  # upper bound for the streams in a pool; torch's pools have 32


class Cuda:
    """The parts of torch.cuda that a save needs. Any thread may use it."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._streams_by_device: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._has_warned = False

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Return the CUDA device of a tensor; None if it lies elsewhere."""
        return tensor.device if tensor.is_cuda else None

    def devices_of(self, capture: Capture) -> Sequence[torch.device]:
        return capture.devices

    def device_in(self, tensors: Iterable[torch.Tensor]) -> torch.device | None:
        return next(filter(None, map(self.device_of, tensors)), None)

    def enter(self, device: torch.device) -> None:
        """Make `device` this thread's current device.

        A thread begins with device 0. Many calls would create a context there, even a wait for another device's event.
        A context costs some 500 MB of memory on a device that belongs to another rank.
        """
        torch.cuda.set_device(device)

    def pci_address(self, device: torch.device) -> str | None:
        """Return a device's PCI address, as sysfs names it; None if torch does not report it, as in older versions."""
        properties: Any = torch.cuda.get_device_properties(device)
        try:
            return pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        except AttributeError:
            return None

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream on which saves copy."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side[device]

    def streams(self, device: torch.device) -> Sequence[torch.cuda.Stream]:
        """Return every stream that torch has for a device: its default stream and those of all its pools.

        `torch.cuda.Stream()` takes streams from the pools in rotation. Streams created outside torch are not included.
        """
        if device not in self._streams_by_device:
            streams = {stream.cuda_stream: stream for stream in (torch.cuda.default_stream(device), *_pools(device))}
            self._streams_by_device[device] = list(streams.values())
        return self._streams_by_device[device]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that occurs when `stream` has done its work so far. A host thread that waits sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Enqueue copies between a device and the host on the current stream.

        If the host memory is not registered, CUDA itself waits until the copies are done.
        """
        with torch.no_grad():
            torch._foreach_copy_(into, sources, non_blocking=True)

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, in memory of this thread's current stream."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    def assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the elements of contiguous tensors of one dtype and device as one row, made on the current stream."""
        with torch.no_grad():
            return torch.cat([tensor.view(-1) for tensor in tensors])

    def register(self, address: int, size: int, device: torch.device) -> int:
        """Pin `size` bytes of host memory for all devices. Returns 0, or CUDA's error code."""
        with torch.cuda.device(device):
            failed = int(_runtime().cudaHostRegister(address, size, _PORTABLE))
            if failed:
                self._forget_error(device)
        return failed

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo `register`, in any thread with any current device. Raises nothing if CUDA has failed permanently."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            if int(_runtime().cudaHostUnregister(address)):
                self._forget_error(device)

    def say_once(self, text: str) -> None:
        """Log a warning once per process, because a refusal by CUDA lasts as long as the process."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(text)

    def _forget_error(self, device: torch.device) -> None:
        """Clear the error that CUDA keeps for this thread, by launching a kernel that has no other purpose.

        Otherwise torch would read it after the thread's next kernel launch, and raise it there. Reading clears it.
        """
        with contextlib.suppress(RuntimeError), self.on(self.side_stream(device)):
            torch.ones(1, device=device)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pools(device: torch.device) -> Iterator[torch.cuda.Stream]:
    for priority in _PRIORITIES:
        first = None
        for _ in range(_POOL):
            stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
            if stream.cuda_stream == first:
                break
            first = first or stream.cuda_stream
            yield stream


api = Cuda()
