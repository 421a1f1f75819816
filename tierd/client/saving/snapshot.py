"""A snapshot: one state that is being copied into an arena.

Invariant: tensors that training may change as soon as `save` has returned are copied before it returns. Only tensors
that an attached optimizer alone changes are copied late, behind forward and backward, and the optimizer's next step
waits for that copy.

A late copy is kept only after it was confirmed. The training thread confirms it at a point where none of its calls is
still at work. The thread compares the tensors' version counters and a sample of their elements with those of the copy.
If they differ, something else wrote to the tensors, and the snapshot is refused, because it may be a mixture.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

import msgspec
import torch

from tierd.client.client_timings import USUAL_TIMINGS, ClientTimings
from tierd.client.saving.device_copies import DeviceCopies
from tierd.client.saving.fingerprints import ReplicaFingerprints
from tierd.client.saving.save_jobs import Latch, Save, give_way
from tierd.client.saving.slots import Slot
from tierd.client.saving.write_sampling import DeferredTensors, TensorSample
from tierd.core.errors import TornSnapshot
from tierd.core.manifest import Manifest
from tierd.state import cuda
from tierd.state.capture import Capture

_version = operator.attrgetter("_version")
_YIELD = 100e-6  # seconds; enough for a woken thread to run
_WAIT_S = 0.5  # seconds


class Snapshot:
    """The tensors to copy, and the progress of the copy. Made by the thread that calls `save`.

    Args:
        deferred: the tensors that are copied behind training; none for a save that blocks until everything is copied.
        replicas: the tensors whose fingerprints are taken.
        late_replicas: the names of those that may be read behind training.
        torn: called with the names of late tensors that something other than an attached optimizer changed.

    Attributes:
        manifest: the part's manifest, without files. First used by the thread that copies.
        interrupted: whether `save` was interrupted: what is read of the tensors from then on may have changed.
    """

    def __init__(
        self,
        save: Save,
        capture: Capture,
        manifest: Callable[[], Manifest],
        deferred: DeferredTensors,
        torn: Callable[[list[str]], None] = lambda names: None,
        timings: ClientTimings = USUAL_TIMINGS,
        replicas: Mapping[str, torch.Tensor] = MappingProxyType({}),
        late_replicas: Collection[str] = (),
    ) -> None:
        self.save, self._timings = save, timings
        self._make_manifest = manifest
        self.capture = capture
        self.deferred_names, self._deferred = deferred.names, deferred
        self._fingerprints, self._late_replicas = ReplicaFingerprints(replicas), late_replicas
        self.tree = b""
        self.asked_at_s = time.perf_counter()
        self._witness: _Witness | None = _Witness(capture, deferred)
        self._thread = threading.get_ident()
        self._torn = torn
        self.copies = DeviceCopies(capture)
        # The first decision counts: `setdefault` is atomic for threads and signal handlers.
        self._fate: dict[None, str] = {}
        self.interrupted = False
        self._verdict: dict[None, Callable[[], list[str]]] = {}  # returns the names of the changed tensors
        self._into: Mapping[str, torch.Tensor] | None = None
        self._arena: memoryview | None = None
        self._error: Exception | None = None
        self._encoder: dict[None, object] = {}
        self._encoded = Latch()
        self._is_encoded_soon = False  # whether the work after the copy takes at most a few milliseconds
        self._returns = Latch()
        self._copied = Latch()
        self._confirmed = Latch()
        self._passed_on = Latch()

    # -- the thread that trains ---------------------------------------------------------------------------------------

    def encode(self) -> None:
        """Encode the values that are no tensors, once: the first thread encodes, and a second one waits for it."""
        me = object()
        try:
            if self._encoder.setdefault(None, me) is me:
                self.tree = self._encoded_tree()
        finally:
            if self._encoder.get(None) is me:
                self._encoded.open()
        self._encoded.wait(self._timings.encoded_s)
        if not self.tree:  # the first thread failed, was interrupted, or runs a signal handler that waits here
            self.tree = self._encoded_tree()

    def _encoded_tree(self) -> bytes:
        return self.capture.tree(give_way) if self.deferred_names else self.capture.tree()

    def copy_if_few(self) -> bool:
        """If few tensors are to be copied before `save` returns, copy them here and now, so that `save` waits for no
        other thread; return whether.
        """
        if (names := self._deferred.before) is None:
            return False
        tensors = self.capture.tensors
        for name in names:
            tensors[name] = tensors[name].clone()
        self._fingerprints.take(self._late_replicas)
        self._returns.open()
        return True

    def wait(self) -> None:
        """Return when `save` may return. Raises the error of the copy."""
        self._returns.wait()
        if self._error is not None:
            raise self._error
        self.copies.hold_all()

    def give_up(self) -> bool:
        """Give the snapshot up because `save` was interrupted: later changes must not get in. False if it is late."""
        self.interrupted = True
        return self._fate.setdefault(None, "given up") == "given up"

    @property
    def is_copied(self) -> bool:
        """Whether the host has finished copying."""
        return self._copied.is_open

    @property
    def is_released(self) -> bool:
        """Whether training may continue."""
        return self._returns.is_open

    def confirm(self) -> None:
        """Return when an optimizer may step: the host has nothing left to copy or to hand over, and a device's next
        work waits for the device's copies. The copies are compared with the tensors' present values, so earlier writes
        by the calling thread show.
        """
        if not self.deferred_names:
            return
        self.copies.hurry()
        self._copied.wait()
        self.copies.hold_current()  # the device runs later work of this thread after the copy
        witness, into = self._witness, self._into  # `end` clears both, in the reverse order
        if not self._verdict and witness is not None and into is not None:
            changed = witness.compare(into, cuda.api.current_stream)
            self.copies.note_reads()  # before the verdict, after which the thread that copies may end the snapshot
            self._judge(changed)
        if not self.copies and self._is_encoded_soon:  # a crash in the next step must not lose the copy
            self._passed_on.wait()

    def confirm_if_copied(self, timeout: float | None) -> None:
        """Call `confirm` if the copy is done within `timeout` seconds and this is the thread that called `save`.

        Another thread cannot know which writes that thread has begun.
        """
        if threading.get_ident() == self._thread and self._copied.wait(timeout):
            self.confirm()

    # -- the thread that copies ---------------------------------------------------------------------------------------

    @functools.cached_property
    def manifest(self) -> Manifest:
        self._fingerprints.take()  # of a state that is streamed; nothing changes it meanwhile
        return msgspec.structs.replace(self._make_manifest(), replicas=self._fingerprints.result())

    def claim(self) -> bool:
        """Whether the snapshot is still needed. After this call it cannot be given up."""
        return self._fate.setdefault(None, "claimed") == "claimed"

    def copy(self, slot: Slot) -> None:
        """Copy everything into the slot's arena, and let training continue as soon as the invariant allows it."""
        self._into = into = slot.lay_out(self.capture.layout)
        self._arena = slot.image(self.capture.layout)
        self.copies.enter()
        try:
            self._copy_tensors(into, [name for name in into if name not in self.deferred_names])
            if not self._returns.is_open:
                self._fingerprints.take(self._late_replicas)
            if self.deferred_names and not self._returns.is_open:
                self._returns.open()
                time.sleep(_YIELD)  # otherwise the training thread would wait for the interpreter's lock
            if self.deferred_names:  # late tensors before the encoding, because a step waits for them
                self._copy_tensors(into, [name for name in into if name in self.deferred_names])
                self._fingerprints.take()
                self._is_encoded_soon = self.capture.is_encoded_soon()
                self._copied.open()  # a device's next work waits by itself
            self.encode()
            if self.deferred_names:
                self._deferred.draw_ahead()
        finally:  # refused or not, a device may still write into the slot
            self.copies.synchronize()

    def await_confirmation(self) -> None:
        """Return when the copy is known not to be a mixture; at once if it was made before `save` returned.

        Raises `TornSnapshot` if something other than an attached optimizer has changed a tensor since `save`.
        """
        if not self.deferred_names or self._fate:
            return
        assert self._into is not None
        end = time.monotonic() + self._timings.overlapped_s
        while not self._verdict:  # polled, because a signal may arrive between the verdict and the latch
            if (left_s := end - time.monotonic()) > 0:
                self._confirmed.wait(min(left_s, _WAIT_S))
                continue
            assert self._witness is not None
            later = self._witness.compare(self._into, _side_stream)
            if not later():  # only an empty result counts: a step may have begun meanwhile, which has confirmed before
                self._judge(later)
            end = time.monotonic() + self._timings.overlapped_s
        if changed := self._verdict[None]():
            self._torn(changed)
            raise TornSnapshot(
                f"{changed[0]} was changed between save() and the next step(), and not by an "
                "attached optimizer: the checkpoint may be a mixture, and is not kept. Later saves copy it before they "
                "return; or change it after step(), or do not attach() its optimizer"
            )

    def catch_up(self) -> None:
        self.copies.enter()
        self.copies.catch_up()

    def end(self, error: Exception | None = None) -> None:
        """End the snapshot, with the error if it failed: nobody needs to wait for it any more.

        Its tensors are released, because some may exist only for this save, and persisting takes long.
        """
        if not self._returns.is_open:
            self._error = error
        self._into = self._arena = None  # the arena belongs to the next snapshot
        self._witness = None
        self.copies.close()
        self.capture = dataclasses.replace(self.capture, tensors={}, dtensors=(), whole={}, rounds=())
        self._returns.open()
        self._copied.open()
        self._passed_on.open()

    def _copy_tensors(self, into: dict[str, torch.Tensor], names: list[str]) -> None:
        tensors = self.capture.tensors
        if self.copies:  # first, because device copies run concurrently with the host's
            assert self._arena is not None
            self.copies.begin(self._arena, into, {name: tensors[name] for name in names}, gently=self.is_released)
            names = [name for name in names if cuda.api.device_of(tensors[name]) is None]
        if names:
            with torch.no_grad():
                torch._foreach_copy_([into[name] for name in names], [tensors[name] for name in names])

    def _judge(self, changed: Callable[[], list[str]]) -> None:
        if self._verdict.setdefault(None, changed) is changed:
            self._confirmed.open()


class _Witness:
    """The state of the late tensors when `save` was called."""

    def __init__(self, capture: Capture, deferred: DeferredTensors) -> None:
        self._deferred, self._tensors = deferred, deferred.select(capture.tensors)
        self._versions = _versions(self._tensors)
        # An in-place write to a DTensor raises its own counter, not its local shard's.
        self._dtensors = [(name, tensor) for name, tensor in capture.dtensors if name in deferred.names]
        self._their_versions = _versions([tensor for _, tensor in self._dtensors])
        self._sample = TensorSample(deferred, capture.tensors)

    def compare(
        self, into: Mapping[str, torch.Tensor], stream: Callable[[torch.device], torch.cuda.Stream]
    ) -> Callable[[], list[str]]:
        """Compare the late tensors with the copy; return a function that gives the names of those that differ. Host
        tensors are read now, device tensors when `stream` reaches the read.
        """
        tensors, names = self._tensors, self._deferred.order
        now = zip(_versions(tensors), map(torch.Tensor.data_ptr, tensors), strict=True)
        was = zip(self._versions, self._deferred.addresses, strict=True)
        moved = [name for name, before, after in zip(names, was, now, strict=True) if before != after]
        dtensor_versions = zip(
            self._dtensors, self._their_versions, _versions([dtensor for _, dtensor in self._dtensors]), strict=True
        )
        moved += [name for (name, _), before, after in dtensor_versions if before != after]
        if moved:
            return lambda: moved
        try:
            return self._sample.compare(dict(zip(names, tensors, strict=True)), into, stream)
        except Exception as error:  # training must not fail because of it
            return functools.partial(_raise, error)


def _raise(error: Exception) -> list[str]:
    raise error


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written in place, by autograd's counter, which views and `detach()` share."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # an inference tensor has no counter
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return cuda.api.side_stream(device)
