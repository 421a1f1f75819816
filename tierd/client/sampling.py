"""Were live tensors changed since a save? A sample of their elements shows writes that no version counter shows.

Law: elements are compared by their bits, so that a NaN equals itself; no random generator of training's is touched, and
nothing here waits for a device on the thread that trains.

Of a tensor of more than `_WHOLE` bytes, `_POINTS` elements, drawn anew for each save, are noted when `save` is called,
and compared with what they are later. So whatever changed the tensor whole is noticed, however a copy and the write
met: a mixture may hold very little of what was there before. A smaller tensor is compared with its copy, byte by byte.
What changed little of a large tensor, and raised no counter, can be missed.
"""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Callable, Mapping
from itertools import compress, groupby

import torch

_WHOLE = 16 << 10  # bytes
_POINTS = 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # item size -> what shows a value's bits

_memcmp = ctypes.PyDLL(None).memcmp  # keeps the interpreter's lock: taking it again costs more than the comparison
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_address, _contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_nbytes, _is_cpu = operator.attrgetter("nbytes"), operator.attrgetter("is_cpu")


class Sample:
    """Elements of live tensors, as they are now: on the host at once, on a device when its current stream comes to it.

    Args:
        live: the tensors, of any device and strides.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self._at: dict[int, torch.Tensor] = {}  # number of elements -> which are compared
        tensors = live.values()
        flat = map(operator.and_, map(_is_cpu, tensors), map(_contiguous, tensors))
        small = [size <= _WHOLE and is_flat for size, is_flat in zip(map(_nbytes, tensors), flat, strict=True)]
        self._small = list(compress(live, small))
        self._noted = {name: self._picked(live[name]) for name in live.keys() - set(self._small)}

    def look(
        self,
        live: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> Callable[[], list[str]]:
        """Look at the same tensors again; what is returned gives the names of those that were changed, and waits for
        devices.

        Args:
            copies: on the host, contiguous; those of small tensors are complete.
            stream: gives the CUDA stream on which a device is read.
        """
        # A loop in C, because there may be 50,000 small ones.
        mine, copied = [live[name] for name in self._small], [copies[name] for name in self._small]
        pairs = map(_address, mine), map(_address, copied), map(_nbytes, copied)
        changed = list(compress(self._small, map(_memcmp, *pairs)))
        devices = sorted((str(live[name].device), name) for name in self._noted if live[name].is_cuda)
        for name in self._noted.keys() - {name for _, name in devices}:
            if not torch.equal(self._picked(live[name]), self._noted[name]):
                changed.append(name)
        reads = [
            _Read(self, [name for _, name in group], live, stream)
            for _, group in groupby(devices, key=operator.itemgetter(0))
        ]
        return lambda: [*changed, *(name for read in reads for name in read.changed())]

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sampled elements' bits, on the tensor's device."""
        count = tensor.numel()
        at = self._at.get(count)
        if at is None:
            draw = random.SystemRandom().randrange
            at = self._at[count] = torch.tensor(
                [draw(count) for _ in range(_POINTS)] if count else [], dtype=torch.int64
            )
        if not tensor.is_cpu:
            at = at.to(tensor.device, non_blocking=True)
        return torch.take(tensor.view(_BITS[tensor.element_size()]), at)

    def differ(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Whether a tensor's elements are others than noted: a flag on its device."""
        return (self._picked(tensor) != self._noted[name]).any()


class _Read:
    """What one device says of its tensors, on its way to the host."""

    def __init__(
        self,
        sample: Sample,
        names: list[str],
        live: Mapping[str, torch.Tensor],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> None:
        self._names = names
        with torch.cuda.stream(stream(live[names[0]].device)), torch.no_grad():
            flags = torch.stack([sample.differ(name, live[name]) for name in names])
            self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._over.record()

    def changed(self) -> list[str]:
        self._over.synchronize()
        return list(compress(self._names, self._flags.tolist()))
