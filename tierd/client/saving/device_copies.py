"""Copies from devices into an arena: enqueued on side streams, ordered by events, never waiting for a whole device.

Invariant: a copy reads the result of all work that every stream had been given when `save` was called, because any
stream may have written; a moving average is often kept on its own stream. An event follows every copy that was begun,
even after an exception. So no arena is used and no tensor is released while a device still copies.

Memory is pinned in slices, and CUDA refuses a copy that lies partly in pinned memory. So a device's copies are cut at
multiples of `COPY_PIECE_BYTES`. Other users of the bus, such as a `loss.item()`, then wait for one piece only. Small
tensors that are adjacent in the arena are joined on the device and copied as one. An optimizer may have a counter of 4
bytes for each parameter, and separate copies of those would take longer than everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

import torch

from tierd.client.saving.save_jobs import Latch
from tierd.state import cuda
from tierd.state.capture import Capture

COPY_PIECE_BYTES = 16 << 20  # bytes, and a power of two
_SMALL = 64 << 10  # bytes; starting a copy of less takes longer than the copy
_SMALL_RUN = 4  # so few small tensors are not worth joining
_UNDER_WAY = 4  # batches of `COPY_PIECE_BYTES` bytes that are enqueued ahead of the device, so that it is never idle
_GLANCE_S = 0.5e-3  # between two queries of the device; a batch takes longer

# The dtypes that torch can join on every device and in every version; it can copy more than these.
_JOINED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_JOINED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}

TensorPair = tuple[torch.Tensor, torch.Tensor]  # target, source


class DeviceCopies:
    """One snapshot's copies. Created by the thread that calls `save`, in that call; then used by the copying thread."""

    def __init__(self, capture: Capture) -> None:
        self._api = cuda.api
        self.devices = self._api.devices_of(capture)
        self._marks = {device: list(self._busy(device)) for device in self.devices}
        self._ordered: set[torch.device] = set()  # devices whose side streams already wait for the marks
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []  # recorded after all copies that were begun
        self._first: list[tuple[torch.device, torch.cuda.Event]] | None = None  # the events that `save` waits for
        self._compared: list[tuple[torch.device, torch.cuda.Event]] = []  # recorded after the reads that confirm
        self._awaited_events = set[tuple[int, torch.cuda.Stream]]()  # ids of events, and the streams that wait for them
        self._hurried: dict[None, object] = {}
        self._hurry = Latch()
        self._over = Latch()

    def __bool__(self) -> bool:
        return bool(self.devices)

    def _busy(self, device: torch.device) -> Iterator[torch.cuda.Event]:
        current = self._api.current_stream(device)
        for stream in self._api.streams(device):
            if stream != current and not stream.query():
                yield self._api.record(stream)
        yield self._api.record(current)

    # -- the thread that trains ---------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether devices have finished all copies, and the reads that confirm them."""
        return self._over.is_open and not self._compared

    def hold_all(self) -> None:
        """Make every stream wait for the first copies, because any stream may write as soon as `save` returns."""
        for device, event in self._first if self._first is not None and not self._over.is_open else ():
            for stream in self._api.streams(device):
                self._hold(event, stream)
            self._hold(event, self._api.current_stream(device))

    def hold_current(self) -> None:
        """Make later work of this thread's current streams wait for all copies, and for the reads that confirm them."""
        for device, event in [*([] if self._over.is_open else self._events), *self._compared]:
            self._hold(event, self._api.current_stream(device))

    def note_reads(self) -> None:
        """Make `hold_current` wait for the reads that this thread's current streams were just given.

        Otherwise another optimizer, on a stream of its own, could write before those reads, which would take its step
        for a mixture.
        """
        self._compared = [(device, self._api.record(self._api.current_stream(device))) for device in self.devices]

    def _hold(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        key = id(event), stream  # the event lives as long as this object, so its id is unique
        if key not in self._awaited_events:
            stream.wait_event(event)
            self._awaited_events.add(key)

    def hurry(self) -> None:
        """Stop leaving gaps on the bus, because training waits until the host has enqueued all copies."""
        token = object()
        if self._hurried.setdefault(None, token) is token:  # atomic, because a signal handler may be here as well
            self._hurry.open()

    # -- the thread that copies ---------------------------------------------------------------------------------------

    def enter(self) -> None:
        if self.devices:
            self._api.enter(self.devices[0])

    def begin(
        self, arena: memoryview, into: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, gently: bool
    ) -> None:
        """Enqueue the copies of those of `tensors` that are on devices to `into`, the tensors of these names in
        `arena`.

        `gently` leaves gaps for other users of the bus, by enqueuing only a few batches ahead, until `hurry` is called.
        """
        groups: dict[torch.device, list[TensorPair]] = {}
        for name, tensor in tensors.items():
            device = self._api.device_of(tensor)
            if device is not None and tensor.nbytes:
                groups.setdefault(device, []).append((into[name], tensor))
        for device, pairs in groups.items():
            side = self._api.side_stream(device)
            with self._api.on(side):
                try:
                    self._order(device, side)
                    self._enqueue(side, self._joined(arena, pairs), gently=gently)
                finally:
                    self._events.append((device, self._api.record(side)))
        if self._first is None:
            self._first = list(self._events)

    def _order(self, device: torch.device, side: torch.cuda.Stream) -> None:
        if device not in self._ordered:
            for mark in self._marks[device]:
                side.wait_event(mark)
            self._ordered.add(device)

    def _joined(self, arena: memoryview, pairs: list[TensorPair]) -> Iterator[TensorPair]:
        """Yield the copies to make. Small sources are joined on request, in the order of the side stream."""
        base = torch.frombuffer(arena, dtype=torch.uint8, count=1).data_ptr()
        for run in _runs(pairs):
            if len(run) <= _SMALL_RUN:
                yield from chain.from_iterable(split_copy(*pair) for pair in run)
            else:
                first, joined = run[0][0], self._api.join([source for _, source in run])
                offset = first.data_ptr() - base
                yield torch.frombuffer(arena, dtype=first.dtype, count=joined.numel(), offset=offset), joined

    def _enqueue(self, side: torch.cuda.Stream, pairs: Iterator[TensorPair], *, gently: bool) -> None:
        ahead: deque[torch.cuda.Event] = deque()
        for batch in _batches(pairs):
            if gently and not self._hurry.is_open and len(ahead) == _UNDER_WAY:
                self._await(ahead.popleft())
            self._api.copy([into for into, _ in batch], [tensor for _, tensor in batch])
            if gently and not self._hurry.is_open:
                ahead.append(self._api.record(side))

    def _await(self, event: torch.cuda.Event) -> None:
        # Polled, because a wait for the event itself could not be cut short.
        while not event.query() and not self._hurry.wait(_GLANCE_S):  # type: ignore[no-untyped-call]
            pass

    def synchronize(self) -> None:
        for _, event in self._events:
            event.synchronize()
        self._over.open()

    def close(self) -> None:
        self._compared = []
        if not self._events:
            self._over.open()

    def catch_up(self) -> None:
        """Return when devices have done the work enqueued before the save. For a caller that reads tensors itself."""
        for mark in chain.from_iterable(self._marks.values()):
            mark.synchronize()


def split_copy(into: torch.Tensor, source: torch.Tensor) -> Iterator[TensorPair]:
    """Split a copy into several, none of which crosses a multiple of `COPY_PIECE_BYTES` in the contiguous `into`."""
    begin = into.data_ptr()
    room = COPY_PIECE_BYTES - begin % COPY_PIECE_BYTES
    if into.nbytes <= room:
        yield into, source
    elif source.is_contiguous():
        into, source, copied = into.view(-1), source.detach().view(-1), 0
        while copied < into.numel():
            count = min(into.numel() - copied, room // into.element_size())
            yield into[copied : copied + count], source[copied : copied + count]
            copied, room = copied + count, COPY_PIECE_BYTES
    else:
        row, copied = into[0].nbytes, 0
        while copied < len(into):
            room = COPY_PIECE_BYTES - (begin + copied * row) % COPY_PIECE_BYTES
            count = min(len(into) - copied, room // row)
            if count:
                yield into[copied : copied + count], source.detach()[copied : copied + count]
            else:  # a single row crosses a multiple
                yield from split_copy(into[copied], source.detach()[copied])
            copied += count or 1


def _runs(pairs: list[TensorPair]) -> Iterator[list[TensorPair]]:
    """Group the pairs, in order, that can be one copy: small, adjacent in the arena, of one dtype, and in one piece."""
    run: list[TensorPair] = []
    end = 0
    for into, source in pairs:
        begin = into.data_ptr()
        joins = into.nbytes <= _SMALL and source.dtype in _JOINED and source.is_contiguous()
        is_next = bool(run) and begin == end and source.dtype == run[0][1].dtype
        end = begin + into.nbytes
        if joins and is_next and (end - 1) // COPY_PIECE_BYTES == run[0][0].data_ptr() // COPY_PIECE_BYTES:
            run.append((into, source))
            continue
        if run:
            yield run
        run = [(into, source)]
        if not joins:
            yield run
            run = []
    if run:
        yield run


def _batches(pairs: Iterator[TensorPair]) -> Iterator[list[TensorPair]]:
    """Group pairs into batches of at least `COPY_PIECE_BYTES` bytes."""
    batch: list[TensorPair] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += pair[0].nbytes
        if size >= COPY_PIECE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
