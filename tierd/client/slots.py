"""A slot: an arena with a layout over it, so that copying a state is nothing but copying.

Law: a slot is one snapshot's until that is durable. Its arena is reused from save to save and never grows past the
memory that is there: a state that does not fit goes through a small arena piece by piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from tierd.arena import Arena, available
from tierd.client import cuda
from tierd.client.owned import leaves, tensors_in
from tierd.client.pinning import Pinning
from tierd.client.tensorfile import Layout, Targets, targets

log = logging.getLogger("tierd")

_SPARE = 1 << 20  # bytes worth giving back
_HEADER = 1 << 20  # bytes; a tensor file's header rarely takes more
_SMALLEST, _BOUND = 16 << 20, 256 << 20  # bytes of an arena that a state is streamed through


class Slot:
    """One arena, made when it is first needed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arena: Arena | None = None
        self._layout: Layout | None = None
        self._targets: Targets = {}
        self._backed = 0  # bytes of the arena that have pages
        self._pinning: Pinning | None = None

    def has(self, size: int) -> bool:
        """Whether memory for `size` bytes is there already, touched. Any thread may ask."""
        return self.arena is not None and not self.arena.shared and self._backed >= size

    def fit(self, size: int) -> bool:
        """Have memory for `size` bytes, touched; whether there is that much. If not, the arena is a small one."""
        if self.arena is not None and self.arena.shared:
            self.drop()
        if self.arena is not None and self.arena.size < size:
            self._unpin()
            self.arena.trim(0)  # the daemon's mapping would keep the memory from the next one
            self.drop()
        if self._backed >= size:
            return True
        self._unpin()  # a copy must not lie in what was pinned at two times
        spare = available()
        if size <= spare + self._backed:
            try:
                self.arena = self.arena or Arena(size)
                self.arena.prefault()
                self._backed = self.arena.size
                return True
            except MemoryError:
                pass
        self.drop()
        bound = min(_BOUND, max(_SMALLEST, spare // 4))
        log.warning(
            "a snapshot of %d bytes does not fit into the %d bytes of memory that are left: save() streams it through "
            "%d bytes, and blocks until it is written",
            size,
            spare,
            bound,
        )
        self.arena = Arena(bound)
        return False

    def adopt(self, arena: Arena) -> None:
        """Use an arena that a predecessor left."""
        self.drop()
        self.arena, self._backed = arena, arena.size

    def drop(self) -> None:
        """Let go of the arena. Whoever else maps it keeps what is in it."""
        if self.arena is not None:
            self._unpin()
            self.arena.close()
        self.arena, self._layout, self._targets, self._backed = None, None, {}, 0

    def lay_out(self, layout: Layout) -> Targets:
        """Where the tensors of `layout` go; the same object as long as the layout is the same."""
        assert self.arena is not None
        if self._layout is not layout:
            self._targets = targets(layout, self.arena.view)
            self._layout = layout
        elif self._backed - layout.size >= _SPARE and not self.pinned:
            # The second save of one structure: an optimizer has all that it will have. Not what a device writes to.
            self.arena.trim(layout.size)
            self._backed = layout.size
        self.arena.view[: len(layout.header)] = layout.header
        return self._targets

    def image(self, layout: Layout) -> memoryview:
        assert self.arena is not None
        return self.arena.view[: layout.size]

    def pin(self, device: torch.device) -> bool:
        """Have CUDA know the next slice of the arena; whether another is left."""
        if self.arena is None:
            return False
        if self._pinning is None:
            self._pinning = Pinning(self.arena, self._backed, device)
        if self._pinning.left:
            self._pinning.go_on()
        return self._pinning.left

    @property
    def pinned(self) -> int:
        """Bytes of the arena that a device may write to beside the host."""
        return self._pinning.size if self._pinning is not None else 0

    def _unpin(self) -> None:
        if self._pinning is not None:
            self._pinning.undo()
            self._pinning = None


def estimate(state: Mapping[str, object]) -> int:
    """About how many bytes the tensor file of a state will take, without asking anything for its state: what has not
    taken a step yet has none, and a loader's `state_dict` may start workers."""
    seen: dict[int, int] = {}
    extra = 0
    for value in leaves(state):
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(value, torch.nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.optim.Optimizer):
            tensors = tensors_in(value.state)
            if not value.state:
                own = sum(p.nbytes for group in value.param_groups for p in group["params"] if p.requires_grad)
                extra += _moments(value.defaults) * own
        elif isinstance(value, torch.Tensor):
            tensors = (value,)
        seen |= {tensor.data_ptr() if not tensor.is_meta else id(tensor): tensor.nbytes for tensor in tensors}
    return sum(seen.values()) + extra + _HEADER


def device_of(state: Mapping[str, object]) -> torch.device | None:
    """The CUDA device that a state lies on, or the first of them; None without one."""
    for value in leaves(state):
        tensors: Iterable[torch.Tensor] = (value,) if isinstance(value, torch.Tensor) else ()
        if isinstance(value, torch.nn.Module):
            tensors = chain(value.parameters(), value.buffers())
        if device := cuda.api.device_in(tensors):
            return device
    return None


def _moments(defaults: Mapping[str, object]) -> int:
    """Tensors of a parameter's size that an optimizer will keep for each."""
    if "betas" in defaults:
        return 3 if defaults.get("amsgrad") else 2
    return 1 if defaults.get("momentum", 1) else 0
