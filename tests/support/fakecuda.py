"""A CUDA device that is none: it takes the place of `tierd.state.cuda.api`, and is as lazy as a device may be.

What is enqueued on a stream runs later, in any order that streams and events allow: a seed decides which, and how much
of it runs whenever the host calls. Memory is what CUDA makes of it: a tensor's handle lies on the host and never
changes; its bytes are the device's, and its block goes to the next tensor as soon as the handle is gone. Whatever a
real device would answer with an error, a context or wrong bytes is in `faults`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from support.waiting import BOUND_S

from tierd.state import cuda

_STREAMS = 4  # of a device: the default one and those that `stream` gives


class Event:
    """Occurs when what was on the stream before it has run."""

    def __init__(self, device: FakeCuda, where: torch.device) -> None:
        self._device, self.where, self.over = device, where, False

    def query(self) -> bool:
        self._device.call(self.where)
        self._device.go_on()
        return self.over

    def synchronize(self) -> None:
        self._device.call(self.where)
        self._device.note(f"host waits {self.where}")
        self._device.on_synchronize()
        self._device.run_until(lambda: self.over)


class Stream:
    """First in, first out."""

    def __init__(self, device: FakeCuda, where: torch.device, name: str) -> None:
        self._device, self.where, self.name = device, where, name
        self.ops: deque[Callable[[], bool]] = deque()  # each gives whether it could run

    def __repr__(self) -> str:
        return f"<{self.name} of {self.where}>"

    def query(self) -> bool:
        self._device.call(self.where)
        return not self.ops

    def wait_event(self, event: Event) -> None:
        self._device.note(f"{self.name} waits")
        self._device.enqueue(self, lambda: event.over)

    def record_event(self) -> Event:
        event = Event(self._device, self.where)

        def occur() -> bool:
            event.over = True
            return True

        self._device.enqueue(self, occur)
        return event


class Block:
    """Some device's memory; what a handle that is gone has left is the next one's."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


Pool = tuple[torch.device, Stream, int]


class FakeCuda(cuda.Cuda):
    """The device. Its threads begin with device 0, as CUDA's do.

    Args:
        seed: of the order in which things run.
        registers: what registering answers, given the address; takes `slow_s` seconds.

    Attributes:
        faults: what a real device would not have forgiven.
        contexts: numbers of the devices on which calls made a context.
        registered: address -> size of host memory that is pinned now.
        log: what was asked, in that order.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self._lock = threading.RLock()
        self._threads = threading.local()
        self._streams: dict[torch.device, list[Stream]] = {}
        self._blocks: dict[int, tuple[torch.device, Block]] = {}
        self._free: dict[Pool, list[Block]] = {}
        self._haste: dict[Stream, float] = {}  # how eagerly each runs
        self._pace = self._dice.choice(((0,), (0,), (0, 0, 1), (0, 1, 3), (30,)))  # ops that run while the host calls
        self.faults: list[str] = []
        self.contexts: set[int] = set()
        self.registered: dict[int, int] = {}
        self.registers: Callable[[int], int] = lambda address: 0
        self.slow_s = 0.0
        self.tries = 0
        self.last_error: dict[int, int] = {}  # thread -> what CUDA remembers for it
        self.log: list[str] = []
        self.on_synchronize: Callable[[], None] = lambda: None
        self.held = threading.Event()  # while it is set, side streams do not run by themselves
        self.copied_bytes: list[int] = []
        self.copied_late = 0  # tensors that were copied between host and device one by one, when all had been read
        self.room: int | None = None  # bytes that new tensors may still take; None: any

    # -- what training does -------------------------------------------------------------------------------------------

    def tensor(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        """A tensor on a device: a handle, whose bytes on the host are noise that nobody may read."""
        handle = self.empty_like(values, torch.device("cuda", index))
        self.write(handle, values.detach().clone())
        return handle

    def write(self, tensor: torch.Tensor, values: torch.Tensor | float) -> None:
        """Have the current stream of this thread write into a tensor."""
        where, memory = self._memory(tensor)
        values = values.clone() if isinstance(values, torch.Tensor) else values

        def run() -> bool:
            memory.copy_(values) if isinstance(values, torch.Tensor) else memory.fill_(values)
            return True

        self.enqueue(self.current_stream(where), run)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is there when all has run."""
        self.finish()
        return self._memory(tensor)[1].clone()

    def look(self, tensor: torch.Tensor, found: list[float]) -> None:
        """Have the current stream of this thread read a tensor's first element into `found`."""
        where, memory = self._memory(tensor)

        def run() -> bool:
            found.append(float(memory.view(-1)[0]))
            return True

        self.enqueue(self.current_stream(where), run)

    def stream(self, number: int, index: int = 0) -> Stream:
        """A stream for training to use."""
        return self._of(torch.device("cuda", index))[1 + number]

    def finish(self) -> None:
        """Run all that can."""
        with self._lock:
            while self._step():
                pass

    # -- what CUDA does -----------------------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        found = self._blocks.get(tensor.untyped_storage().data_ptr())
        return found[0] if found else None

    def devices_of(self, capture) -> Sequence[torch.device]:
        return tuple(dict.fromkeys(filter(None, map(self.device_of, capture.tensors.values()))))

    def pci_address(self, device: torch.device) -> str | None:
        return f"0000:{0x10 + device.index:02x}:00.0"

    def enter(self, device: torch.device) -> None:
        self._threads.device = device.index

    def current_stream(self, device: torch.device) -> Stream:
        return getattr(self._threads, "streams", {}).get(device) or self._of(device)[0]

    def side_stream(self, device: torch.device) -> Stream:
        return self._of(device)[-1]

    def streams(self, device: torch.device) -> Sequence[Stream]:
        return self._of(device)

    def record(self, stream: Stream) -> Event:
        self.call(stream.where)
        self.note(f"{stream.name} records")
        return stream.record_event()

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.call(stream.where)
        streams = self._threads.__dict__.setdefault("streams", {})
        before = streams.get(stream.where)
        streams[stream.where] = stream
        yield
        streams[stream.where] = before
        self.call(stream.where)  # going back sets the thread's own device, and makes a context there

    def empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.room is not None:
            self.room -= tensor.nbytes
            if self.room < 0:
                raise torch.cuda.OutOfMemoryError("there is no more memory")
        shell = np.zeros(max(tensor.numel(), 1), dtype=np.uint8).repeat(tensor.element_size())
        handle = torch.from_numpy(shell).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        with self._lock:
            pool = device, self.current_stream(device), shell.nbytes  # a block goes to the stream that it was made on
            reused = self._free.get(pool)
            block = reused.pop() if reused else Block(torch.empty(shell.nbytes, dtype=torch.uint8))
            self._blocks[shell.ctypes.data] = device, block
        weakref.finalize(shell, self._freed, shell.ctypes.data, pool)
        return handle

    def assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        there, here = self.device_of(target), self.device_of(source)
        if there is None and here is None:
            super().assign(target, source)
        elif there is None or here is None:
            self.copied_late += 1
            self.copy([target], [source])
        else:
            assert there == here
            into, memory = self._memory(target)[1], self._memory(source)[1]

            def run() -> bool:
                into.copy_(memory)
                return True

            self.enqueue(self.current_stream(there), run)

    def copy(self, into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(into, sources, strict=True):
            back = self.device_of(source) is None
            where, memory = self._memory(target if back else source)
            host = source if back else target
            pinned = self._is_pinned(host)
            stream = self.current_stream(where)
            self.call(where)
            self.enqueue(stream, lambda *a, h=host, m=memory, b=back, p=pinned: self._moved(h, m, b, p))
            self.copied_bytes.append(host.nbytes)
            if not pinned:  # CUDA copies through memory of its own, and the caller waits
                self.run_until(lambda stream=stream: not stream.ops)

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        where = self.device_of(tensors[0])
        assert {self.device_of(tensor) for tensor in tensors} == {where}
        assert all(tensor.is_contiguous() for tensor in tensors) and len({tensor.dtype for tensor in tensors}) == 1
        joined = self.tensor(torch.zeros(sum(t.numel() for t in tensors), dtype=tensors[0].dtype), where.index)
        into = self._memory(joined)[1].split([tensor.numel() for tensor in tensors])
        parts = [(part, self._memory(tensor)[1].view(-1)) for part, tensor in zip(into, tensors, strict=True)]

        def run() -> bool:
            for part, memory in parts:
                part.copy_(memory)
            return True

        self.enqueue(self.current_stream(where), run)
        return joined

    def register(self, address: int, size: int, device: torch.device) -> int:
        time.sleep(self.slow_s)
        self.tries += 1
        self.contexts.add(device.index)
        failed = self.registers(address)
        if any(begin < address + size and address < begin + length for begin, length in self.registered.items()):
            failed = failed or 712  # CUDA's: it is registered already
        if failed:
            self.last_error[threading.get_ident()] = failed
            self.forget_error(device)
        else:
            self.registered[address] = size
        return failed

    def unregister(self, address: int, device: torch.device) -> None:
        self.contexts.add(device.index)
        if self.registered.pop(address, None) is None:
            self.faults.append("unregistered what was not registered")

    def forget_error(self, device: torch.device) -> None:
        self.last_error.pop(threading.get_ident(), None)

    def note(self, line: str) -> None:
        self.log.append(line)

    def call(self, where: torch.device) -> None:
        """A call that makes a context on the thread's own device, as most do; and time passes."""
        self.contexts.add(getattr(self._threads, "device", 0))
        with self._lock:
            for _ in range(self._dice.choice(self._pace)):
                self._step()

    def go_on(self) -> None:
        """Time passes, whatever the pace."""
        with self._lock:
            self._step()

    def enqueue(self, stream: Stream, op: Callable[[], bool]) -> None:
        with self._lock:
            stream.ops.append(op)
        self.call(stream.where)

    def run_until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + BOUND_S
        while not done():
            with self._lock:
                moved = self._step()
            if not moved:
                time.sleep(0.001)  # another thread may let it go on
                if time.monotonic() > end:
                    self.faults.append("deadlock")
                    raise RuntimeError("the streams wait for each other")

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _of(self, where: torch.device) -> list[Stream]:
        with self._lock:
            if where not in self._streams:
                names = ["default", *(f"stream {number}" for number in range(_STREAMS)), "side"]
                self._streams[where] = [Stream(self, where, name) for name in names]
                self._haste |= {stream: self._dice.choice((0.01, 1.0, 100.0)) for stream in self._streams[where]}
            return self._streams[where]

    def _step(self) -> bool:
        """Run the first op of one stream, whichever can; the dice prefer some streams to others."""
        waiting = [stream for streams in self._streams.values() for stream in streams if stream.ops]
        if self.held.is_set():
            waiting = [stream for stream in waiting if stream.name != "side"]
        while waiting:
            stream = self._dice.choices(waiting, [self._haste[stream] for stream in waiting])[0]
            if stream.ops[0]():
                stream.ops.popleft()
                return True
            waiting.remove(stream)
        return False

    def _memory(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        """Where a tensor lies, and its bytes there, of its shape."""
        storage = tensor.untyped_storage()
        where, block = self._blocks[storage.data_ptr()]
        with torch.no_grad():
            bytes_ = torch.empty(0, dtype=tensor.dtype).set_(
                block.content.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        return where, bytes_

    def _moved(self, host: torch.Tensor, memory: torch.Tensor, back: bool, pinned: bool) -> bool:
        if pinned and not self._is_pinned(host):
            self.faults.append("a copy ran into memory that is not pinned any more")
        with torch.no_grad():
            memory.copy_(host) if back else host.copy_(memory)
        return True

    def _is_pinned(self, host: torch.Tensor) -> bool:
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        within = [at <= begin and end <= at + size for at, size in self.registered.items()]
        touching = [begin < at + size and at < end for at, size in self.registered.items()]
        if sum(touching) > 1 or (any(touching) and not any(within)):
            self.faults.append(f"one copy of {host.nbytes} bytes spans memory that is pinned and memory that is not")
        return any(within)

    def _freed(self, address: int, pool: Pool) -> None:
        with self._lock:
            self._free.setdefault(pool, []).append(self._blocks.pop(address)[1])


@pytest.fixture
def fake(monkeypatch):
    """A device in the place of CUDA, in no order in particular; nothing it would not have forgiven has happened."""
    device = FakeCuda(random.randrange(1 << 30))
    monkeypatch.setattr(cuda, "api", device)
    yield device
    assert not device.faults
