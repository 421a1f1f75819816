"""Sample live tensors' elements to find writes since a save that no version counter shows.

Invariant: elements are compared by their bits, so that a NaN equals itself. Training's random generators are not
touched, and the training thread never waits for a device here.

For a tensor of more than `_WHOLE` bytes, some elements are drawn anew for each save. Their values are recorded when
`save` is called, and compared with their later values. They are not compared with the copy, because a mixture may hold
very few of the earlier values. So a write that changed the whole tensor is noticed, however the write and the copy
overlapped. A smaller tensor is compared with its copy, byte by byte. A write that changed little of a large tensor, and
raised no counter, can be missed.

Contiguous tensors on the host are read by their addresses in one call, because training waits. One call of torch for
each of a few hundred tensors takes half as long as the rest of a `save` that copies behind training.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import random
from array import array
from collections.abc import Callable, Mapping
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import torch

from tierd.state import cuda

_WHOLE = 16 << 10  # bytes
_POINTS = 16  # elements of a tensor that is read element by element
# Item size -> the dtype that shows a value's bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The dtypes of which `torch.take` takes elements; of others it takes the bits.
_TAKEN = {torch.float16, torch.bfloat16, torch.float32, torch.float64, *BITS.values()}

_FEW_TENSORS, _FEW_BYTES = 256, 1 << 20  # so little is copied before another thread has started
_NONE: Mapping[str, torch.Tensor] = MappingProxyType({})

_WORD = 8  # bytes
_LINES, _NEIGHBOURS = 8, 2  # adjacent words are fetched together, because fetching takes most of the time
_LOWEST, _HIGHEST = 1 << 16, 1 << 47  # the range of a process's addresses that is read by address
_Memory = ctypes.c_int64 * ((_HIGHEST - _LOWEST) // _WORD)
# Keeps the interpreter's lock, because taking it again costs more than the comparison.
_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_address, _nbytes = torch.Tensor.data_ptr, operator.attrgetter("nbytes")


class DeferredTensors:
    """Tensors that are copied behind training, with the method of reading each. Valid while their addresses do not
    change.

    Args:
        early: tensors of the capture that are copied before `save` returns, except copies that the capture made itself.

    Attributes:
        names, order, addresses: of the tensors that are copied late; the addresses are in order.
        before: names of the others if they are small and on the host; otherwise None.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], early: Mapping[str, torch.Tensor] = _NONE) -> None:
        self.names, self.order = frozenset(tensors), list(tensors)
        self.addresses = list(map(_address, tensors.values()))
        is_little = len(early) <= _FEW_TENSORS and sum(map(_nbytes, early.values())) <= _FEW_BYTES
        on_host = all(tensor.is_cpu and cuda.api.device_of(tensor) is None for tensor in early.values())
        self.before = list(early) if is_little and on_host else None
        self.small, self.large, self.unsampled = list[str](), list[str](), list[str]()
        first, last = array("q"), array("q")
        for (name, tensor), address in zip(tensors.items(), self.addresses, strict=True):
            is_flat = tensor.is_cpu and tensor.is_contiguous()
            if is_flat and tensor.nbytes <= _WHOLE:
                self.small.append(name)
            elif is_flat and address % _WORD == 0 and _LOWEST <= address < _HIGHEST - tensor.nbytes:
                self.large.append(name)
                first.append((address - _LOWEST) // _WORD)
                last.append(tensor.nbytes // _WORD - _NEIGHBOURS + 1)
            else:
                self.unsampled.append(name)
        self._first = torch.tensor(first, dtype=torch.int64)
        self._last = torch.tensor(last, dtype=torch.float64)
        self._ahead: torch.Tensor | None = None

    def select(self, live: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the late tensors in order; `live` has them in this order, perhaps with others between."""
        tensors = live.values() if len(live) == len(self.order) else map(live.__getitem__, self.order)
        return list(tensors)

    def draw_ahead(self) -> None:
        """Draw the next sample's positions ahead of time. Any thread may call this."""
        if self._ahead is None:
            self._ahead = self._drawn()

    def take_positions(self) -> torch.Tensor:
        """Return the positions of sampled words, flat: `_LINES` times `_NEIGHBOURS` for each large tensor in turn."""
        ahead, self._ahead = self._ahead, None
        return self._drawn() if ahead is None else ahead

    def _drawn(self) -> torch.Tensor:
        dice = torch.Generator().manual_seed(random.SystemRandom().getrandbits(63))
        part = torch.rand((len(self.large), _LINES), generator=dice, dtype=torch.float64)
        words = self._first[:, None] + (part * self._last[:, None]).long()
        return (words[:, :, None] + torch.arange(_NEIGHBOURS)).flatten()


NONE_DEFERRED = DeferredTensors({})


class _Group(NamedTuple):
    """Tensors of one dtype on one device, and the bits of their sampled elements when `save` was called."""

    names: list[str]
    sampled: torch.Tensor


class TensorSample:
    """Elements of live tensors as they are now. Host elements are read at once, a device's when its current stream
    reaches the read.
    """

    def __init__(self, deferred: DeferredTensors, live: Mapping[str, torch.Tensor]) -> None:
        self._deferred = deferred
        self._positions: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and number of elements
        self._places = deferred.take_positions()
        self._words = _read(self._places)
        names_by_form: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name in deferred.unsampled:
            if live[name].numel():
                names_by_form.setdefault((live[name].device, live[name].dtype), []).append(name)
        self._groups = [_Group(names, self.sample(names, live)) for names in names_by_form.values()]

    def compare(
        self,
        live: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> Callable[[], list[str]]:
        """Sample the same tensors again, at the same addresses. Return a function that waits for devices and returns
        the names of the changed tensors.

        Args:
            copies: on the host, contiguous; the copies of small tensors are complete.
            stream: returns the CUDA stream on which a device is read.
        """
        # The loop runs in C, because there may be 50,000 small tensors.
        small = self._deferred.small
        current, copied = [live[name] for name in small], [copies[name] for name in small]
        pairs = map(_address, current), map(_address, copied), map(_nbytes, copied)
        changed = list(compress(small, map(_memcmp, *pairs)))
        differ = (_read(self._places) != self._words).view(-1, _LINES * _NEIGHBOURS)
        changed += compress(self._deferred.large, differ.any(dim=1).tolist())
        on_devices: dict[torch.device, list[_Group]] = {}
        for group in self._groups:
            device = live[group.names[0]].device
            if device.type == "cuda":
                on_devices.setdefault(device, []).append(group)
            else:
                changed += compress(group.names, self.differing(group, live).tolist())
        reads = [_Read(self, groups, live, stream(device)) for device, groups in on_devices.items()]
        return lambda: [*changed, *(name for read in reads for name in read.changed())]

    def sample(self, names: list[str], live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the bits of `_POINTS` elements of each tensor, of one dtype on one device, in one tensor there.

        Each operator is a call of some microseconds on a device, so each tensor has one, and all of them share the
        rest.
        """
        points = torch.cat([self._take(live[name]) for name in names])
        return points.view(BITS[points.element_size()]).view(len(names), -1)

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)  # no integer dtype has 16 bytes
        elif tensor.dtype not in _TAKEN:
            tensor = tensor.view(BITS[tensor.element_size()])
        device, count = tensor.device, tensor.numel()
        if (device, count) not in self._positions:
            draw = random.SystemRandom().randrange
            drawn = torch.tensor([draw(count) for _ in range(_POINTS)], dtype=torch.int64)
            self._positions[device, count] = drawn if tensor.is_cpu else drawn.to(device, non_blocking=True)
        return torch.take(tensor, self._positions[device, count])

    def differing(self, group: _Group, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a flag for each tensor of a group, on its device, true if its sampled elements differ from before."""
        return (self.sample(group.names, live) != group.sampled).any(dim=1)


def _read(places: torch.Tensor) -> torch.Tensor:
    """Read words of this process's memory in one call.

    After a training step, each further torch operator has to be fetched from memory as well, which takes longer than
    its work here.
    """
    return torch.index_select(_memory(), 0, places)


@functools.cache
def _memory() -> torch.Tensor:
    """This process's memory as one tensor, which owns none of it."""
    return torch.frombuffer(_Memory.from_address(_LOWEST), dtype=torch.int64)


class _Read:
    """The comparison of one device's tensors, on its way to the host."""

    def __init__(
        self, sample: TensorSample, groups: list[_Group], live: Mapping[str, torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        self._names = [name for group in groups for name in group.names]
        with torch.cuda.stream(stream), torch.no_grad():
            flags = torch.cat([sample.differing(group, live) for group in groups])
            self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._over = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._over.record()

    def changed(self) -> list[str]:
        self._over.synchronize()
        return list(compress(self._names, self._flags.tolist()))
