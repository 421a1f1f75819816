"""A slot: an arena with a tensor file's layout over it, on the NUMA node of the rank's GPU, and pinned for it.

A save then only has to copy. A copy to another socket would share the link between the sockets with all other traffic.
A registration with CUDA (pinning) takes locks that training's kernel launches need as well, so it is done in slices,
and saves run first. A copy into a slice that is not pinned yet is correct, but slower.

Invariants:

- A slot belongs to one snapshot until that snapshot is durable. Its arena is reused from save to save, and never
  exceeds the available memory: a state that does not fit is streamed through a small arena.
- Every registration of an arena is undone before the arena's memory is unmapped, whichever code releases it last.
  Otherwise a device could write through the old registration into pages that nobody owns. The next arena, which often
  gets the same address, would keep its earlier content: wrong bytes, digested as if they were right.
- The NUMA node is only a preference. It has no effect if the node is full, unknown or the only one, if the kernel
  refuses, or if the process was started with its own memory policy (`numactl`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch

from tierd.client.saving.device_copies import COPY_PIECE_BYTES
from tierd.core.numa import node_near_device
from tierd.spool.arena import Arena, available
from tierd.spool.direct_io import PAGE
from tierd.state import cuda
from tierd.state.kinds.dtensors import local_of, tensors_held_by, tensors_in
from tierd.state.replicas import ReplicaGroup
from tierd.state.state_tree import leaves, pause_collection
from tierd.state.tensor_file import Targets, TensorFileLayout, target_views

log = logging.getLogger("tierd")

SYSFS = Path("/sys")

_PREFERRED = 1  # MPOL_PREFERRED of <linux/mempolicy.h>; 0 is the default, without a policy
# The system calls mbind(2) and get_mempolicy(2), for which the C library has no functions.
_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)  # bits

_syscall = ctypes.CDLL(None, use_errno=True).syscall


def place_near_device(arena: Arena, device: torch.device) -> None:
    """Prefer a device's NUMA node for the pages of an arena that are not allocated yet. Raises nothing.

    The kernel keeps the preference with the shared memory itself, so it holds for any thread that touches a page first.
    """
    try:
        if (address := cuda.api.pci_address(device)) is None:
            return
        node = node_near_device(
            (SYSFS / "bus/pci/devices" / address / "numa_node").read_text(),
            (SYSFS / "devices/system/node/has_memory").read_text(),
            (SYSFS / "devices/system/node/has_cpu").read_text(),
        )
        if node is not None and not kernel.has_policy():
            kernel.prefer(torch.frombuffer(arena.view, dtype=torch.uint8, count=1).data_ptr(), arena.size, node)
            log.debug("an arena of %d bytes: memory of NUMA node %d is preferred, beside %s", arena.size, node, device)
    except (OSError, ValueError, RuntimeError) as error:
        # The files are missing, the container may not ask, or CUDA failed.
        log.debug("an arena of %d bytes lies on any NUMA node: %s", arena.size, error)


class Kernel:
    """The two system calls; both raise `OSError`."""

    def has_policy(self) -> bool:
        """Whether this thread has a memory policy, set by `numactl` for example."""
        mode = ctypes.c_int()
        self._call(1, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
        return mode.value != 0

    def prefer(self, address: int, size: int, node: int) -> None:
        """Make the kernel take the pages at `address` (page-aligned) from a node if the node has free ones."""
        mask = (ctypes.c_ulong * (node // _WORD + 1))()
        mask[node // _WORD] = 1 << node % _WORD
        bits = ctypes.c_ulong(len(mask) * _WORD + 1)  # the kernel ignores the last bit
        self._call(
            0, ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_long(_PREFERRED), mask, bits, ctypes.c_long(0)
        )

    def _call(self, which: int, *arguments: object) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"no number is known for it on {platform.machine()}")
        if _syscall(ctypes.c_long(numbers[which]), *arguments):
            raise OSError(ctypes.get_errno(), ("mbind", "get_mempolicy")[which])


kernel = Kernel()


SLICE = 4 * COPY_PIECE_BYTES  # bytes; a multiple of `COPY_PIECE_BYTES`, so that no copy lies in two slices


class Pinning:
    """CUDA's registrations of the first `size` bytes of an arena. Only the thread that has the arena's slot may use it.

    They were made in the context of `device`; the memory is pinned for all devices.
    """

    def __init__(self, arena: Arena, size: int, device: torch.device) -> None:
        self.size = 0
        self.device = device
        self._api = cuda.api
        self._pid = os.getpid()
        self._next = torch.frombuffer(arena.view, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._next + -(-size // PAGE) * PAGE
        self._registered: list[int] = []
        arena.before_unmapping = self.unpin

    @property
    def has_unpinned(self) -> bool:
        return self._next < self._end

    def pin_next(self) -> None:
        """Pin the next slice. If CUDA refuses one, it would refuse the others, so they are not tried."""
        begin = self._next
        end = min(self._end, begin - begin % SLICE + SLICE)
        if failed := self._api.register(begin, end - begin, self.device):
            self._next = self._end
            self._api.say_once(
                f"CUDA does not pin memory (error {failed}): copies into {self._end - begin} bytes of an arena will be "
                "slower, and take the time of the thread that copies"
            )
            return
        self._registered.append(begin)
        self.size += end - begin
        self._next = end

    def unpin(self) -> None:
        """Undo all registrations. Any thread may call this, even during garbage collection."""
        registered, self._registered, self.size, self._next = self._registered, [], 0, self._end
        # CUDA does not work in a forked child or at the interpreter's end.
        if os.getpid() != self._pid or sys.is_finalizing():
            return
        for address in registered:
            self._api.unregister(address, self.device)


_SPARE = 1 << 20  # bytes that are worth returning to the system
_GROWTH = 16  # an arena that was too small is made larger than needed by 1/16
_HEADER = 1 << 20  # bytes; a tensor file's header is rarely larger
_UNEVEN = 1.05  # by which a rank's share may exceed the mean, because tensors are not cut
_AHEAD = 256 << 20  # bytes that are touched at a time before a save, so that a save or a restore soon gets its turn
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

    def has_room(self, size: int) -> bool:
        """Whether memory for `size` bytes is already there and touched. Any thread may ask."""
        return self.arena is not None and not self.arena.shared and self._backed >= size

    def reserve(self, size: int, device: torch.device | None = None) -> bool:
        """Prepare touched memory for `size` bytes, into which `device`, or the previous one, will copy.

        Return whether there is enough. If not, the arena is a small one.
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
                self._prefault(self.arena.size if grows else size)
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

    def prefault_slice(self, size: int, device: torch.device | None) -> bool:
        """Touch some more memory for a state of at least `size` bytes before anything is saved; return whether some is
        left to touch. Another `size` bytes stay free at any time, for a restore and for what training allocates.
        """
        end = size if self.arena is None else min(size, self.arena.size)
        if self._layout is not None or self._backed >= end or available() < size + min(_AHEAD, end - self._backed):
            return False
        self._device = device or self._device
        try:
            # With some room, because a state may hold a little more than is known of it: buffers, and a header.
            self.arena = self.arena or self._new_arena(size + size // _GROWTH)
            self._prefault(min(end, self._backed + _AHEAD))
        except MemoryError:
            self.drop()
        return 0 < self._backed < end

    def _prefault(self, size: int) -> None:
        """Touch the arena up to `size` bytes. Raises MemoryError."""
        assert self.arena is not None
        self.arena.prefault(size, self._backed)
        self._backed = min(self.arena.size, -(-size // PAGE) * PAGE)

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
            place_near_device(arena, self._device)
        return arena

    def adopt(self, arena: Arena) -> None:
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
            with pause_collection():
                self._targets = target_views(layout, self.arena.view)
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
        if self._pinning.has_unpinned:
            self._pinning.pin_next()
        return self._pinning.has_unpinned

    @property
    def pinned(self) -> int:
        """Bytes of the arena that a device can write to while the host continues."""
        return self._pinning.size if self._pinning is not None else 0

    def _unpin(self) -> None:
        if self._pinning is not None:
            self._pinning.unpin()
            self._pinning = None


def estimate(state: Mapping[str, object], group: ReplicaGroup | None = None) -> int:
    """Estimate the bytes of a rank's tensor file without asking any object for its state.

    An optimizer before its first step has none, and a data loader's `state_dict` may start workers. With a `group`, the
    ranks of a node divide the replicated entries among them.
    """
    replicated = group.entries(state) if group is not None and len(group.node) > 1 else []
    if group is None or not replicated:
        return _estimated_bytes(state) + _HEADER
    own = {name: value for name, value in state.items() if name not in replicated}
    shared_bytes = _estimated_bytes({name: state[name] for name in replicated})
    return _estimated_bytes(own) + int(shared_bytes / len(group.node) * _UNEVEN) + _HEADER


def _estimated_bytes(state: Mapping[str, object]) -> int:
    sizes: dict[int, int] = {}
    extra = 0
    for value in leaves(state):
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(value, torch.nn.Module):
            tensors = chain.from_iterable(map(tensors_held_by, chain(value.parameters(), value.buffers())))
        elif isinstance(value, torch.optim.Optimizer):
            tensors = tensors_in(value.state)
            if not value.state:
                trainable_bytes = sum(
                    local_of(p).nbytes for group in value.param_groups for p in group["params"] if p.requires_grad
                )
                extra += _moments(value.defaults) * trainable_bytes
        elif isinstance(value, torch.Tensor):
            tensors = tensors_held_by(value)
        sizes |= {tensor.data_ptr() if not tensor.is_meta else id(tensor): tensor.nbytes for tensor in tensors}
    return sum(sizes.values()) + extra


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
