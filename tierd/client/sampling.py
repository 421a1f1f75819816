"""Live tensors held against their copies, by a sample: it shows writes that no version counter shows.

Law: elements are compared by their bits, so that a NaN equals itself; no random generator of training's is touched, and
nothing here waits for a device on the thread that trains.

A copy is a mixture where one run of its elements is from before a write and another from after it. A tensor of at most
`_WHOLE` bytes is compared whole. Of a larger one, an element in every `_GRAIN` bytes is compared, at an offset drawn
anew each time, and both ends of each share that a thread of the copy had: a sequential copy and a sequential write that
meet leave their mixture at such an end. So whatever changed a whole tensor, or `_GRAIN` bytes in a row, is noticed.
What changed fewer bytes, and raised no counter, can be missed.
"""

from __future__ import annotations

import ctypes
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from itertools import compress, groupby

import torch

_WHOLE = 16 << 10  # bytes
_GRAIN = 256 << 10  # bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # item size -> what shows a value's bits

_memcmp = ctypes.PyDLL(None).memcmp  # keeps the interpreter's lock: taking it again costs more than the comparison
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_address, _contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_nbytes, _is_cpu = operator.attrgetter("nbytes"), operator.attrgetter("is_cpu")


class Sample:
    """What a sample of live tensors was at one moment of the thread that trains.

    Args:
        live: the tensors, of any device and strides.
        copies: on the host, contiguous, of the same dtypes and shapes; complete for tensors of the host, and for those
            of a device by the time that `changed` is asked.
        stream: gives the CUDA stream on which a device is read.
    """

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> None:
        self._copies = copies
        self._at: dict[tuple[int, int], torch.Tensor] = {}  # count and size of elements -> which are compared
        self._reads: list[_Read] = []
        # Loops in C, because there may be 50,000 small ones.
        tensors, copied = list(live.values()), [copies[name] for name in live]
        sizes = list(map(_nbytes, copied))
        flat = map(operator.and_, map(_is_cpu, tensors), map(_contiguous, tensors))
        small = [size <= _WHOLE and is_flat for size, is_flat in zip(sizes, flat, strict=True)]
        given = (compress(each, small) for each in (map(_address, tensors), map(_address, copied), sizes))
        self._changed = list(compress(compress(live, small), map(_memcmp, *given)))
        large = {name: tensor for (name, tensor), is_small in zip(live.items(), small, strict=True) if not is_small}
        devices = {name: tensor for name, tensor in large.items() if tensor.is_cuda}
        for name in large.keys() - devices.keys():
            if not torch.equal(self._picked(large[name]).cpu(), self._picked(copies[name])):
                self._changed.append(name)
        if devices:
            self._read_devices(devices, stream)

    def changed(self) -> list[str]:
        """Names of the tensors that are not what was copied. Waits for devices, so not on the thread that trains."""
        for read in self._reads:
            read.over.synchronize()
            begin = 0
            for name in read.names:
                expected = self._picked(self._copies[name]).view(torch.uint8)
                if not torch.equal(read.host[begin : begin + expected.nbytes], expected):
                    self._changed.append(name)
                begin += expected.nbytes
        self._reads.clear()
        return self._changed

    def _picked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sampled elements' bits, on the tensor's device."""
        size = tensor.element_size()
        at = self._at.get((tensor.numel(), size))
        if at is None:
            at = self._at[tensor.numel(), size] = self._drawn(tensor.numel(), size)
        if tensor.device.type != "cpu":
            at = at.to(tensor.device, non_blocking=True)
        return torch.take(tensor.detach().view(_BITS[size]), at)

    def _drawn(self, count: int, size: int) -> torch.Tensor:
        if count * size <= _WHOLE:
            return torch.arange(count)
        step = _GRAIN // size
        share = -(-count // torch.get_num_threads())
        ends = {end for begin in range(0, count, share) for end in (begin, min(begin + share, count) - 1)}
        first = random.SystemRandom().randrange(min(step, count))
        return torch.cat([torch.arange(first, count, step), torch.tensor(list(ends))])

    def _read_devices(
        self, live: Mapping[str, torch.Tensor], stream: Callable[[torch.device], torch.cuda.Stream]
    ) -> None:
        by_device = sorted(live, key=lambda name: str(live[name].device))
        for _, group in groupby(by_device, key=lambda name: str(live[name].device)):
            names = list(group)
            device = live[names[0]].device
            with torch.cuda.stream(stream(device)), torch.no_grad():
                self._reads.append(_Read(names, [self._picked(live[name]) for name in names]))


class _Read:
    """Bytes of one device on their way to the host."""

    def __init__(self, names: Iterable[str], picked: list[torch.Tensor]) -> None:
        self.names = list(names)
        joined = torch.cat([one.view(torch.uint8) for one in picked])
        self.host = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
        self.host.copy_(joined, non_blocking=True)
        self.over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.over.record()
