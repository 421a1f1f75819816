"""Place an arena's memory on the NUMA node of the rank's GPU.

A copy to another socket would share the link between the sockets with all other traffic.

Invariant: this is only a preference. It has no effect if the node is full, unknown or the only one, or if the kernel
refuses. It also has none if the process was started with its own memory policy (`numactl`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
from pathlib import Path

import torch

from tierd.core.numa import node_beside
from tierd.spool.arena import Arena
from tierd.state import cuda

log = logging.getLogger("tierd")

SYS = Path("/sys")

_PREFERRED = 1  # MPOL_PREFERRED of <linux/mempolicy.h>; 0 is the default, without a policy
# The system calls mbind(2) and get_mempolicy(2), for which the C library has no functions.
_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)  # bits

_syscall = ctypes.CDLL(None, use_errno=True).syscall


def place(arena: Arena, device: torch.device) -> None:
    """Prefer a device's NUMA node for the pages of an arena that are not allocated yet. Raises nothing.

    The kernel keeps the preference with the shared memory itself. So it holds for any thread that touches a page first,
    such as the thread that reads a file into it.
    """
    try:
        if (address := cuda.api.pci_address(device)) is None:
            return
        node = node_beside(
            (SYS / "bus/pci/devices" / address / "numa_node").read_text(),
            (SYS / "devices/system/node/has_memory").read_text(),
            (SYS / "devices/system/node/has_cpu").read_text(),
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
