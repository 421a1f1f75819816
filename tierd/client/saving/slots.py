"""A slot: an arena with a tensor file's layout over it, so that a save only has to copy.

Invariant: a slot belongs to one snapshot until that snapshot is durable. Its arena is reused from save to save, and
never exceeds the available memory: a state that does not fit is streamed through a small arena.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from tierd.client.saving import numa
from tierd.client.saving.pinning import Pinning
from tierd.spool.arena import Arena, available
from tierd.state import cuda
from tierd.state.containers import leaves
from tierd.state.kinds.dtensors import held_by, local_of, tensors_in
from tierd.state.tensor_file import Targets, TensorFileLayout, targets
from tierd.state.uncollected import uncollected

log = logging.getLogger("tierd")

_SPARE = 1 << 20  # bytes that are worth returning to the system
_GROWTH = 16  # an arena that was too small is made larger than needed by 1/16
_HEADER = 1 << 20  # bytes; a tensor file's header is rarely larger
_SMALLEST, _BOUND = 16 << 20, 256 << 20  # bytes of an arena through which a state is streamed


class Slot:
    """One arena, allocated when it is first needed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arena: Arena | None = None
        self._layout: TensorFileLayout | None = None
        self._targets: Targets = {}
        self._backed = 0  # bytes of the arena that have pages
        self._pinning: Pinning | None = None
        self._streams = False  # the last state fitted into no arena
        self._device: torch.device | None = None  # the device that copies into the arena

    def has(self, size: int) -> bool:
        """Whether memory for `size` bytes is already there and touched. Any thread may ask."""
        return self.arena is not None and not self.arena.shared and self._backed >= size

    def fit(self, size: int, device: torch.device | None = None) -> bool:
        """Prepare touched memory for `size` bytes; return whether there is enough. If not, the arena is a small one.

        Args:
            device: the device that will copy into the arena; if not given, the previous one.
        """
        self._device = device or self._device
        if self.arena is not None and self.arena.shared:
            self.drop()
        grows = self.arena is not None and self.arena.size < size
        if self.arena is not None and grows:
            self._unpin()
            self.arena.trim(0)  # otherwise the daemon's mapping would keep this memory from the next arena
            self.drop()
        if self._backed >= size:
            return True
        self._unpin()  # a copy must not lie in what was pinned at two times
        spare = available()
        reason = f"does not fit into the {spare} bytes of memory that are left"
        if size <= spare + self._backed:
            try:
                # A state that grew once may grow at every save, and touching all memory again takes longer than the
                # copy.
                roomy = size + size // _GROWTH
                self.arena = self.arena or self._new_arena(roomy if grows and roomy <= spare + self._backed else size)
                self.arena.prefault()
                self._backed = self.arena.size
                self._streams = False
                return True
            except MemoryError as error:
                reason = f"finds no memory although {spare} bytes are left ({error})"
        self.drop()
        self.arena = self._small(min(size, spare // 4))
        if not self._streams:  # one warning, and not one for each save
            log.warning(
                "a snapshot of %d bytes %s: save() streams it through %d bytes, and blocks until it is written",
                size,
                reason,
                self.arena.size,
            )
        self._streams = True
        return False

    def _small(self, limit: int) -> Arena:
        size = min(_BOUND, max(_SMALLEST, limit))
        while True:
            try:
                return self._new_arena(size)
            except MemoryError:
                if size <= _SMALLEST:
                    raise
                size = max(_SMALLEST, size // 2)

    def _new_arena(self, size: int) -> Arena:
        arena = Arena(size)
        if self._device is not None:
            numa.place(arena, self._device)
        return arena

    def adopt(self, arena: Arena) -> None:
        """Use an arena that a predecessor left."""
        self.drop()
        self.arena, self._backed = arena, arena.size

    def drop(self) -> None:
        """Release the arena. A daemon that maps it keeps its content."""
        if self.arena is not None:
            self._unpin()
            self.arena.close()
        self.arena, self._layout, self._targets, self._backed = None, None, {}, 0

    def lay_out(self, layout: TensorFileLayout) -> Targets:
        """Return the tensors of `layout` in the arena; the same object as long as the layout is the same."""
        assert self.arena is not None
        if self._layout is not layout:
            with uncollected():
                self._targets = targets(layout, self.arena.view)
            self._layout = layout
        elif self._backed - layout.size >= _SPARE and not self.pinned:
            # At the second save of one structure, an optimizer has all of its state. Memory that a device writes to is
            # not trimmed.
            self.arena.trim(layout.size)
            self._backed = layout.size
        self.arena.view[: len(layout.header)] = layout.header
        return self._targets

    def image(self, layout: TensorFileLayout) -> memoryview:
        assert self.arena is not None
        return self.arena.view[: layout.size]

    def pin(self, device: torch.device) -> bool:
        """Pin the next slice of the arena with CUDA; return whether slices are left."""
        if self.arena is None:
            return False
        if self._pinning is None:
            self._pinning = Pinning(self.arena, self._backed, device)
        if self._pinning.left:
            self._pinning.go_on()
        return self._pinning.left

    @property
    def pinned(self) -> int:
        """Bytes of the arena that a device can write to while the host continues."""
        return self._pinning.size if self._pinning is not None else 0

    def _unpin(self) -> None:
        if self._pinning is not None:
            self._pinning.undo()
            self._pinning = None


def estimate(state: Mapping[str, object]) -> int:
    """Estimate the bytes of a state's tensor file without asking any object for its state: an optimizer before its
    first step has none, and a data loader's `state_dict` may start workers.
    """
    sizes: dict[int, int] = {}
    extra = 0
    for value in leaves(state):
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(value, torch.nn.Module):
            tensors = chain.from_iterable(map(held_by, chain(value.parameters(), value.buffers())))
        elif isinstance(value, torch.optim.Optimizer):
            tensors = tensors_in(value.state)
            if not value.state:
                trainable_bytes = sum(
                    local_of(p).nbytes for group in value.param_groups for p in group["params"] if p.requires_grad
                )
                extra += _moments(value.defaults) * trainable_bytes
        elif isinstance(value, torch.Tensor):
            tensors = held_by(value)
        sizes |= {tensor.data_ptr() if not tensor.is_meta else id(tensor): tensor.nbytes for tensor in tensors}
    return sum(sizes.values()) + extra + _HEADER


def device_of(state: Mapping[str, object]) -> torch.device | None:
    """Return the first CUDA device on which a state has tensors; None without one."""
    for value in leaves(state):
        tensors: Iterable[torch.Tensor] = (value,) if isinstance(value, torch.Tensor) else ()
        if isinstance(value, torch.nn.Module):
            tensors = chain(value.parameters(), value.buffers())
        if device := cuda.api.device_in(tensors):
            return device
    return None


def _moments(defaults: Mapping[str, object]) -> int:
    """Return the number of tensors of a parameter's size that an optimizer will keep for each parameter."""
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return 1 if defaults.get("momentum", 1) else 0
