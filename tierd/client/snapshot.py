"""A snapshot: one state on its way into an arena.

Law: what training may change as soon as `save` has returned is copied before; only what an attached optimizer alone
changes is copied behind forward and backward, and its next step waits for that. Whoever else changes it meanwhile is
found out by the tensors' version counters: such a snapshot is refused, not kept torn.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from tierd.client.capture import Capture
from tierd.client.save import Save
from tierd.client.slots import Slot
from tierd.client.worker import Latch
from tierd.core.errors import TornSnapshot
from tierd.core.manifest import Manifest

_YIELD = 100e-6  # seconds; a thread that was woken is running by then


class Snapshot:
    """What is to be copied, and how far that is. Made by the thread that calls `save`.

    Args:
        late: names of the tensors that are copied behind training; empty for a save that blocks until all is copied.
    """

    def __init__(self, save: Save, capture: Capture, manifest: Manifest, late: frozenset[str] = frozenset()) -> None:
        self.save = save
        self.manifest = manifest
        self.capture = capture
        self.late = late
        self.tree = b""
        self.asked = time.perf_counter()
        self._versions = _versions(capture, late)
        self._marks = {device: torch.cuda.current_stream(device).record_event() for device in capture.devices}
        self._events: list[torch.cuda.Event] = []  # of all copies from devices that were begun
        self._early_events: list[torch.cuda.Event] = []
        # What was settled first counts: `setdefault` is one step for every thread and handler.
        self._fate: dict[None, str] = {}
        self._changed: dict[None, list[str]] = {}
        self._error: Exception | None = None
        self._returns = Latch()
        self._copied = Latch()

    # -- the thread that trains ---------------------------------------------------------------------------------------

    def encode(self) -> None:
        """Encode what is no tensor, unless that is done. Whichever thread has nothing else to do."""
        self.tree = self.tree or self.capture.tree()

    def wait(self) -> None:
        """Return when `save` may. Raises what copying raised."""
        self._returns.wait()
        if self._error is not None:
            raise self._error
        for event in self._early_events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def give_up(self) -> bool:
        """`save` was interrupted: what training changes from then on must not get in. Whether it is not too late."""
        return self._fate.setdefault(None, "given up") == "given up"

    @property
    def over(self) -> bool:
        """Whether nothing of it is still being copied."""
        return self._copied.is_open and all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    @property
    def returned(self) -> bool:
        """Whether training was let go."""
        return self._returns.is_open

    def wait_for_copy(self) -> None:
        """Return when an optimizer may step: on the host nothing is left to copy or to hand over, and a device's next
        work waits."""
        self._copied.wait()
        self._look()  # whatever is enqueued from now on, the device does after the copy
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)

    # -- the thread that copies ---------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Whether the snapshot is still wanted; from here on it cannot be given up."""
        return self._fate.setdefault(None, "claimed") == "claimed"

    def copy(self, slot: Slot) -> None:
        """Copy all of it into the slot's arena; lets training go on as soon as the law allows.

        Raises:
            TornSnapshot: something other than an attached optimizer changed a tensor meanwhile.
        """
        into = slot.lay_out(self.capture.layout)
        if self._marks:
            slot.pin()
        self._early_events = self._begin(into, [name for name in into if name not in self.late])
        if self.late:
            self._returns.open()
            time.sleep(_YIELD)  # else the thread that trains would wait for the interpreter's lock
        try:
            self.encode()
            if self.late:
                self._begin(into, [name for name in into if name in self.late])
                if self._events:
                    self._copied.open()  # the device's next work waits by itself
        finally:  # refused or not, a device may still write into the slot
            for event in self._events:
                event.synchronize()
        if changed := self._look():
            raise TornSnapshot(
                f"{self.save.part}: {changed[0]} was changed while it was copied, and not by an attached "
                "optimizer's step(): change it only after that, or do not attach() the optimizer"
            )

    def catch_up(self) -> None:
        """Return when devices have done what was asked of them before the save; for who reads tensors by himself."""
        for mark in self._marks.values():
            mark.synchronize()

    def done(self, error: Exception | None = None) -> None:
        """The snapshot is taken, or why not: nobody needs to wait for it any more."""
        if not self._returns.is_open:
            self._error = error
        self._returns.open()
        self._copied.open()

    def _begin(self, into: dict[str, torch.Tensor], names: Iterable[str]) -> list[torch.cuda.Event]:
        tensors = self.capture.tensors
        groups: dict[torch.device, list[str]] = {}
        for name in names:
            groups.setdefault(tensors[name].device, []).append(name)
        begun = []
        # Devices first: their copies run beside the host's.
        for device, own in sorted(groups.items(), key=lambda item: item[0].type == "cpu"):
            mark = self._marks.get(device)
            with torch.no_grad():
                if mark is None:
                    torch._foreach_copy_([into[name] for name in own], [tensors[name] for name in own])
                    continue
                side = _side_stream(device)
                with torch.cuda.stream(side):
                    side.wait_event(mark)
                    for name in own:
                        into[name].copy_(tensors[name], non_blocking=True)
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    begun.append(side.record_event(event))
        self._events += begun
        return begun

    def _look(self) -> list[str]:
        """Names of what changed, as seen first: when the copy was over, or before a step was let pass."""
        if self._changed:
            return self._changed[None]
        both = zip(self.late, self._versions, _versions(self.capture, self.late), strict=True)
        return self._changed.setdefault(None, [name for name, was, now in both if was != now])


def _versions(capture: Capture, names: frozenset[str]) -> list[int]:
    """How often each tensor was written to in place, as autograd counts it; views and `detach()` share the count."""
    tensors = [capture.tensors[name] for name in names]
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor has no count
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
