"""Fingerprints of replicated tensors, by which the daemon notices that replicas have become different.

Invariant: two ranks that hold the same bytes in memory of the same kind get the same fingerprint, and one flipped bit
changes it. A tensor in host memory is digested with XXH3-128. A large tensor on a device is not copied for this: the
device adds its elements, as integers, in `_ROWS` rows, and the sums are digested. So it is not compared with one on a
host. A device's small tensors are copied, all of them at once, and digested on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping

import torch

from tierd.client.saving.write_sampling import BITS
from tierd.core.replicas.shares import LEAST_DIVIDED
from tierd.spool.file_io import digest
from tierd.state import cuda

_ROWS = 64  # sums of a device's tensor, so that equal changes at two places do not easily cancel out


class ReplicaFingerprints:
    """The fingerprints of some live tensors, by name. Made by the thread that calls `save`, in that call.

    Tensors on devices are read when their current streams reach this point, so later work there does not matter.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        on_devices = {name: tensor for name, tensor in tensors.items() if cuda.api.device_of(tensor) is not None}
        small: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in on_devices.items():
            if tensor.nbytes < LEAST_DIVIDED:
                small.setdefault(tensor.device, {})[name] = tensor.detach().reshape(-1).view(torch.uint8)
        self._small = [
            ({name: len(piece) for name, piece in pieces.items()}, torch.cat([*pieces.values()]))
            for pieces in small.values()
        ]
        self._sums = {name: sums_of(tensor) for name, tensor in on_devices.items() if tensor.nbytes >= LEAST_DIVIDED}
        self._waiting = {name: tensor for name, tensor in tensors.items() if name not in on_devices}
        self._taken: dict[str, str] = {}

    def take(self, leave: Collection[str] = ()) -> None:
        """Read the tensors in host memory that are not read yet, but for those in `leave`, while nothing changes
        them.
        """
        for name in self._waiting.keys() - leave:
            tensor = self._waiting.pop(name, None)  # a signal handler may take it first
            if tensor is not None:
                self._taken[name] = f"xxh3:{_host_digest(tensor)}"

    def result(self) -> dict[str, str]:
        """Return the fingerprints; waits for devices. Tensors that were not read are left out."""
        sums = {name: f"sum:{_host_digest(sums.cpu())}" for name, sums in self._sums.items()}
        for sizes, joined in self._small:
            pieces = torch.split(joined.cpu(), [*sizes.values()])
            sums |= {name: f"xxh3:{_host_digest(piece)}" for name, piece in zip(sizes, pieces, strict=True)}
        return dict(sorted((self._taken | sums).items()))


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sums of a tensor's elements, as integers modulo 2^64, in `_ROWS` rows and a rest; on its device."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1).view(BITS[tensor.element_size()])
        length = flat.numel() // _ROWS
        rows = flat[: length * _ROWS].view(_ROWS, length).sum(dim=1, dtype=torch.int64)
        return torch.cat([rows, flat[length * _ROWS :].sum(dtype=torch.int64)[None]])


def _host_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous()
    return digest(memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B"))
