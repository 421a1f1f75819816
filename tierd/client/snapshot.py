"""A snapshot: one state on its way into an arena.

Law: what training may change as soon as `save` has returned is copied before; only what an attached optimizer alone
changes is copied behind forward and backward, and its next step waits for that. Such a copy is kept only after it was
confirmed: the thread that trains comes to a point behind which nothing that it called is still at work, and there the
tensors' version counters and a sample of their elements are those of the copy. If not, somebody else wrote to them, and
the snapshot is refused, because it may be a mixture.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Mapping

import torch

from tierd.client import cuda
from tierd.client.capture import Capture
from tierd.client.copies import Copies
from tierd.client.sampling import Late, Sample
from tierd.client.save import Save
from tierd.client.slots import Slot
from tierd.client.turns import give_way
from tierd.client.worker import Latch
from tierd.core.errors import TornSnapshot
from tierd.core.manifest import Manifest

_version = operator.attrgetter("_version")
_YIELD = 100e-6  # seconds; a thread that was woken is running by then
_TURN = 0.5  # seconds
_HELD_UP = 5.0  # seconds
_LONG_OVER = 10.0  # seconds after a copy, when a write that it met has ended, and shows


class Snapshot:
    """What is to be copied, and how far that is. Made by the thread that calls `save`.

    Args:
        manifest: makes the part's, without files.
        late: the tensors that are copied behind training; none for a save that blocks until all is copied.
        torn: told the names of late tensors that something else than an attached optimizer changed.
    """

    def __init__(
        self,
        save: Save,
        capture: Capture,
        manifest: Callable[[], Manifest],
        late: Late,
        torn: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        self.save = save
        self._make_manifest = manifest
        self.capture = capture
        self.late, self._late = late.names, late
        self.tree = b""
        self.asked = time.perf_counter()
        self._witness: _Witness | None = _Witness(capture, late)
        self._thread = threading.get_ident()
        self._torn = torn
        self.copies = Copies(capture)
        # What was settled first counts: `setdefault` is one step for every thread and handler.
        self._fate: dict[None, str] = {}
        self._verdict: dict[None, Callable[[], list[str]]] = {}  # gives the names of what changed
        self._into: Mapping[str, torch.Tensor] | None = None
        self._arena: memoryview | None = None
        self._error: Exception | None = None
        self._encoder: dict[None, object] = {}
        self._encoded = Latch()
        self._is_soon = False  # whether what is left after the copy takes no longer than a few milliseconds
        self._returns = Latch()
        self._copied = Latch()
        self._confirmed = Latch()
        self._passed_on = Latch()

    # -- the thread that trains ---------------------------------------------------------------------------------------

    def encode(self) -> None:
        """Encode what is no tensor, once: the thread that comes first does it, and another one waits for it."""
        me = object()
        try:
            if self._encoder.setdefault(None, me) is me:
                self.tree = self._encoded_tree()
        finally:
            if self._encoder.get(None) is me:
                self._encoded.open()
        self._encoded.wait(_HELD_UP)
        if not self.tree:  # whose turn it was is refused, or interrupted, or in a signal's handler that waits for this
            self.tree = self._encoded_tree()

    def _encoded_tree(self) -> bytes:
        return self.capture.tree(give_way) if self.late else self.capture.tree()

    def copy_little(self) -> bool:
        """Copy what must be copied before `save` returns here and now, where it is little; whether it was. `save` then
        waits for no other thread."""
        if (names := self._late.before) is None:
            return False
        tensors = self.capture.tensors
        for name in names:
            tensors[name] = tensors[name].clone()
        self._returns.open()
        return True

    def wait(self) -> None:
        """Return when `save` may. Raises what copying raised."""
        self._returns.wait()
        if self._error is not None:
            raise self._error
        self.copies.hold_all()

    def give_up(self) -> bool:
        """`save` was interrupted: what training changes from then on must not get in. Whether it is not too late."""
        return self._fate.setdefault(None, "given up") == "given up"

    @property
    def copied(self) -> bool:
        """Whether the host is done with copying."""
        return self._copied.is_open

    @property
    def returned(self) -> bool:
        """Whether training was let go."""
        return self._returns.is_open

    def confirm(self) -> None:
        """Return when an optimizer may step: on the host nothing is left to copy or to hand over, and a device's next
        work waits. What was copied is held against what is there now: whatever the calling thread did before shows."""
        if not self.late:
            return
        self.copies.hurry()
        self._copied.wait()
        self.copies.hold_current()  # whatever is enqueued from now on, the device does after the copy
        witness, into = self._witness, self._into  # `done` takes both away, in the other order
        if not self._verdict and witness is not None and into is not None:
            self._judge(witness.look(into, cuda.api.current_stream))
        if not self.copies and self._is_soon:  # what dies in its next step is not to lose what was copied
            self._passed_on.wait()

    def reached(self, timeout: float | None) -> None:
        """`confirm`, if this is the thread that called `save` (any other knows nothing of what that one has begun), and
        if the copy is made within `timeout` seconds."""
        if threading.get_ident() == self._thread and self._copied.wait(timeout):
            self.confirm()

    # -- the thread that copies ---------------------------------------------------------------------------------------

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Of the part, without files. Asked for first by the thread that copies."""
        return self._make_manifest()

    def claim(self) -> bool:
        """Whether the snapshot is still wanted; from here on it cannot be given up."""
        return self._fate.setdefault(None, "claimed") == "claimed"

    def copy(self, slot: Slot) -> None:
        """Copy all of it into the slot's arena; lets training go on as soon as the law allows."""
        self._into = into = slot.lay_out(self.capture.layout)
        self._arena = slot.image(self.capture.layout)
        self.copies.enter()
        try:
            self._begin(into, [name for name in into if name not in self.late])
            if self.late and not self._returns.is_open:
                self._returns.open()
                time.sleep(_YIELD)  # else the thread that trains would wait for the interpreter's lock
            if self.late:  # first, because a step waits for it
                self._begin(into, [name for name in into if name in self.late])
                self._is_soon = self.capture.is_encoded_soon()
                self._copied.open()  # a device's next work waits by itself
            self.encode()
            if self.late:
                self._late.draw()
        finally:  # refused or not, a device may still write into the slot
            self.copies.synchronize()

    def await_confirmation(self) -> None:
        """Return when the copy is known to be no mixture: at once for one that was made before `save` returned.

        Raises:
            TornSnapshot: something other than an attached optimizer has changed a tensor since `save`.
        """
        if not self.late or self._fate:
            return
        assert self._into is not None
        end = time.monotonic() + _LONG_OVER
        while not self._verdict:  # a signal may come between the verdict and the latch, so that is looked at by turns
            if (left := end - time.monotonic()) > 0:
                self._confirmed.wait(min(left, _TURN))
                continue
            assert self._witness is not None
            later = self._witness.look(self._into, _side_stream)
            if not later():  # it counts only if nothing changed: a step may have begun meanwhile, which looked before
                self._judge(later)
            end = time.monotonic() + _LONG_OVER
        if changed := self._verdict[None]():
            self._torn(changed)
            raise TornSnapshot(
                f"{changed[0]} was changed between save() and the next step(), and not by an "
                "attached optimizer: the checkpoint may be a mixture, and is not kept. Later saves copy it before they "
                "return; or change it after step(), or do not attach() its optimizer"
            )

    def catch_up(self) -> None:
        """Return when devices have done what was asked of them before the save; for who reads tensors by himself."""
        self.copies.enter()
        self.copies.catch_up()

    def done(self, error: Exception | None = None) -> None:
        """The snapshot is taken, or why not: nobody needs to wait for it any more. Its tensors are let go, because some
        may be the caller's only for this save, and persisting takes long."""
        if not self._returns.is_open:
            self._error = error
        self._into = self._arena = None  # what it shows is the next snapshot's
        self._witness = None
        self.copies.close()
        self.capture = dataclasses.replace(self.capture, tensors={})
        self._returns.open()
        self._copied.open()
        self._passed_on.open()

    def _begin(self, into: dict[str, torch.Tensor], names: list[str]) -> None:
        tensors = self.capture.tensors
        if self.copies:  # first, because they run beside the host's
            assert self._arena is not None
            self.copies.begin(self._arena, into, {name: tensors[name] for name in names}, gently=self.returned)
            names = [name for name in names if cuda.api.device_of(tensors[name]) is None]
        if names:
            with torch.no_grad():
                torch._foreach_copy_([into[name] for name in names], [tensors[name] for name in names])

    def _judge(self, changed: Callable[[], list[str]]) -> None:
        if self._verdict.setdefault(None, changed) is changed:
            self._confirmed.open()


class _Witness:
    """What the tensors that are copied late were when `save` was called."""

    def __init__(self, capture: Capture, late: Late) -> None:
        self._late, self._tensors = late, late.of(capture.tensors)
        self._versions = _versions(self._tensors)
        self._sample = Sample(late, capture.tensors)

    def look(
        self, into: Mapping[str, torch.Tensor], stream: Callable[[torch.device], torch.cuda.Stream]
    ) -> Callable[[], list[str]]:
        """What gives the names of the late tensors that are not what was copied. Of the host they are read now; of a
        device when `stream` comes to it."""
        tensors, names = self._tensors, self._late.order
        now = zip(_versions(tensors), map(torch.Tensor.data_ptr, tensors), strict=True)
        was = zip(self._versions, self._late.addresses, strict=True)
        if moved := [name for name, before, after in zip(names, was, now, strict=True) if before != after]:
            return lambda: moved
        try:
            return self._sample.look(dict(zip(names, tensors, strict=True)), into, stream)
        except Exception as error:  # training is not to die of it
            return functools.partial(_raise, error)


def _raise(error: Exception) -> list[str]:
    raise error


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    """How often each tensor was written to in place, as autograd counts it; views and `detach()` share the count."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # an inference tensor has no count
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return cuda.api.side_stream(device)
