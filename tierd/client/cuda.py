"""CUDA: every call of it that a save makes, behind one object, so that a test can put another device in its place.

`api` is that object. Nothing here initialises CUDA: it is called only for tensors that already lie on a device.

Streams and events are torch's own: a stream has `wait_event` and `query`, an event has `query` and `synchronize`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tierd.client.capture import Capture

log = logging.getLogger("tierd")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context, not only for the caller's
_PRIORITIES = (0, -1, -2, -3)  # torch keeps a pool of streams for each; a device maps what it lacks to its highest
_POOL = 64  # streams; torch's pools have 32


class Cuda:
    """torch.cuda, as far as a save needs it. Any thread."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._all: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._said = False

    # -- where tensors lie --------------------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The CUDA device that a tensor lies on; None for any other."""
        return tensor.device if tensor.is_cuda else None

    def devices_of(self, capture: Capture) -> Sequence[torch.device]:
        """The CUDA devices that the tensors of a capture lie on."""
        return capture.devices

    def device_in(self, tensors: Iterable[torch.Tensor]) -> torch.device | None:
        """The first CUDA device that one of the tensors lies on."""
        return next(filter(None, map(self.device_of, tensors)), None)

    def enter(self, device: torch.device) -> None:
        """Make `device` this thread's own. A thread begins with device 0, and many calls, even one that waits for an
        event of another device, would make a context there: some 500 MB of memory of a device that is another rank's.
        """
        torch.cuda.set_device(device)

    # -- streams and events -------------------------------------------------------------------------------------------

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream on which this thread enqueues work for a device."""
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that copies."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._side[device]

    def streams(self, device: torch.device) -> Sequence[torch.cuda.Stream]:
        """Every stream that torch has for a device: its default stream and all of its pools, from which
        `torch.cuda.Stream()` draws in turn. Streams that something else than torch made are not among them.
        """
        if device not in self._all:
            found = {stream.cuda_stream: stream for stream in (torch.cuda.default_stream(device), *_pools(device))}
            self._all[device] = list(found.values())
        return self._all[device]

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event that occurs when `stream` has done all that it was given; who waits for it on the host sleeps."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Within it, this thread enqueues on `stream`."""
        return torch.cuda.stream(stream)

    # -- memory -------------------------------------------------------------------------------------------------------

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Enqueue copies between a device and the host on the current stream. Into memory that is not registered,
        CUDA itself waits until they are done.
        """
        with torch.no_grad():
            torch._foreach_copy_(into, sources, non_blocking=True)

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A tensor of one dimension with the elements of all, made on the current stream. They are contiguous, of one
        dtype, on one device."""
        with torch.no_grad():
            return torch.cat([tensor.view(-1) for tensor in tensors])

    def register(self, address: int, size: int, device: torch.device) -> int:
        """Pin `size` bytes of host memory for all devices. Returns 0, or CUDA's error."""
        with torch.cuda.device(device):
            failed = int(_runtime().cudaHostRegister(address, size, _PORTABLE))
            if failed:
                self._forget_error(device)
        return failed

    def unregister(self, address: int, device: torch.device) -> None:
        """Undo `register`. Any thread, whatever its device. Nothing is raised where CUDA has failed for good."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            if int(_runtime().cudaHostUnregister(address)):
                self._forget_error(device)

    def say_once(self, text: str) -> None:
        """Warn, if nobody was warned before: what CUDA refuses, it refuses for as long as the process lives."""
        if not self._said:
            self._said = True
            log.warning(text)

    def _forget_error(self, device: torch.device) -> None:
        """Take back the error that CUDA remembers for this thread: torch asks for it behind the next kernel that the
        thread launches, and would raise it there. Asking clears it, so a kernel is launched for nothing else.
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
