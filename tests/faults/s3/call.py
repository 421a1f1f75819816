"""One call of a store, and some faults in a row on one of its requests: what must come of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import xxhash
from faults.rounds import Lost
from faults.s3.proxy import BROKEN, HARMLESS, LOST, PAGES, REFUSALS, UNHEARD, Fault, Request
from faults.s3.slot import ATTEMPTS, DEADLINE_S, PREFIX, Slot, calm

from tierd.codec.chunk_codec import verify_stored
from tierd.core.errors import CorruptChunk, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.core.manifest import StoredChunk
from tierd.stores.s3.checksums import MD5

_ALL = (*REFUSALS, *UNHEARD, *LOST, *BROKEN, *HARMLESS)
_MORE = {
    "PutObject": ("flipped request", "wrong checksum sent", "wrong checksum answered", "hollow 200", "cut upload"),
    "GetObject": ("flipped answer", "hollow 200"),
    "ListObjectsV2": ("error in 200", "hollow 200", "flipped answer"),
    "DeleteObjects": ("flipped request", "wrong checksum sent", "error in 200", "refused keys", "denied keys"),
}
NEVER = {"GetObject: cut upload", "ListObjectsV2: cut upload"}  # what sends no body is not cut off in one
EVERY = tuple(
    name for one, more in _MORE.items() for fault in (*_ALL, *more) if (name := f"{one}: {fault}") not in NEVER
) + tuple(f"GetObject: {page}" for page in PAGES)
_PAGED = 37  # each such seed's get is answered by a page; the other seeds stay as they were
_REFUSED = ("denied", "denied keys")
_SLOW = ("stall in request", "stall before answer", "stall in answer")
_SIZES = (0, 1, 100, 5_000, 70_000, 300_000)
_LARGE = (2 << 20) + 7  # more than one piece of a line
_GRACE_S = 15.0  # for a busy machine; a drip lasts twice as long


class _Row:
    """`fault` on the `first`-th request of an operation and on those behind it, `count` in all; nothing on others."""

    def __init__(self, operation: str, fault: str, first: int, count: int, rng: random.Random) -> None:
        self.operation, self.fault, self.first, self.count, self._rng = operation, fault, first, count, rng
        self.seen = 0

    def __call__(self, request: Request) -> Fault | None:
        if request.operation != self.operation:
            return None
        self.seen += 1
        if not self.first < self.seen <= self.first + self.count:
            return None
        return Fault(self.fault, self._rng.random())


async def trial(slot: Slot, seed: int, rng: random.Random) -> None:
    operation = rng.choice(list(_MORE))
    fault = rng.choice((*_ALL, *_MORE[operation], *_MORE[operation]))
    if seed % _PAGED == 1:
        operation, fault = "GetObject", list(PAGES)[seed // _PAGED % len(PAGES)]
    if operation == "PutObject" and rng.random() < 0.1:
        _forget_probe(slot)
    await _Call(slot, seed, rng, operation, fault).whole()


def _forget_probe(slot: Slot) -> None:
    """As a new store: the server has proven nothing yet, and is asked at the next put."""
    probe = slot.s3.probe
    probe.next_at, probe.proven, probe.checksum = 0.0, "", MD5


class _Call:
    def __init__(self, slot: Slot, seed: int, rng: random.Random, operation: str, fault: str) -> None:
        self.slot, self.rng, self.operation, self.fault = slot, rng, operation, fault
        self.run = f"t{seed}"
        size = _LARGE if rng.random() < 0.02 else rng.choice(_SIZES)
        if fault in ("flipped request", "flipped answer"):
            size = max(size, 1)
        self.key, self.data = f"{self.run}/k", rng.randbytes(size)
        self.old = rng.choice((None, rng.randbytes(50)))
        self.is_conditional = seed % 3 == 2  # a put that replaces nothing
        self.held = self.old if self.is_conditional and self.old is not None else self.data  # after a put
        self.many = [f"{self.run}/m{number:02}" for number in range(rng.choice((2, 3, 7)))]
        self.count = 1 if fault in (*HARMLESS, "endless drip") else rng.choice((1, 1, 2, ATTEMPTS - 2, ATTEMPTS, 9))
        if fault in _SLOW and rng.random() < 0.8:
            self.count = min(self.count, 2)
        self.first = 0
        if operation == "ListObjectsV2" and len(self.many) > 3:  # so that there is a second page
            self.first = rng.choice((0, 1))
        if operation == "PutObject" and slot.s3.probe.next_at is not None:
            self.first = rng.choice((0, 1))  # on the probe, or behind it
        self.limit = min(self.count, ATTEMPTS) * (DEADLINE_S + 1 + size / 5e3) + _GRACE_S  # below 5 kB/s it is given up

    async def whole(self) -> None:
        await self._prepare()
        probing = self.operation == "PutObject" and self.slot.s3.probe.next_at is not None
        row = self.slot.judge = _Row(self.operation, self.fault, self.first, self.count, self.rng)
        call = getattr(self, f"_{self.operation}")
        result, error = await self._outcome(call)
        self.slot.judge = calm
        if probing:  # an answer to it that was spoilt says nothing, and who says nothing proves nothing
            self._check_class(error, (TierdError,))
        else:
            self._check(result, error, row)
        if isinstance(error, TierdError):
            self._check_reported(error)
        again, failed = await self._outcome(call)
        if failed:
            raise Lost(f"after the faults: {failed!r}") from failed
        self._right(again)
        if self.operation == "PutObject":
            found = await self.slot.store.get(self.key)
            if bytes(found) != self.held:
                raise Lost("what was put is not what is got")

    async def _prepare(self) -> None:
        if self.operation == "PutObject":
            if self.old is not None:
                await self.slot.store.put(self.key, self.old)
        elif self.operation == "GetObject":
            await self.slot.store.put(self.key, self.data)
        else:
            await asyncio.gather(*(self.slot.store.put(key, key.encode()) for key in self.many))

    # -- the calls --------------------------------------------------------------------------------------------------

    async def _PutObject(self) -> Any:
        put = self.slot.store.put_if_absent if self.is_conditional else self.slot.store.put
        return await put(self.key, self.data)

    async def _GetObject(self) -> Any:
        if self.rng.random() < 0.5:
            return bytes(await self.slot.store.get(self.key))
        buffer = bytearray(len(self.data) + self.rng.choice((0, 100)))
        try:
            return bytes(await self.slot.store.get(self.key, memoryview(buffer)))
        except TierdError:
            mark = bytes([self.rng.randrange(256)]) * len(buffer)
            buffer[:] = mark
            await asyncio.sleep(0.005)
            if buffer != mark:
                raise Lost("something wrote to the buffer of a get that had failed") from None
            raise

    async def _ListObjectsV2(self) -> Any:
        return [(info.key, info.size) async for info in self.slot.store.scan(f"{self.run}/m")]

    async def _DeleteObjects(self) -> Any:
        return await self.slot.store.delete(self.many)

    async def _outcome(self, call: Callable[[], Awaitable[Any]]) -> tuple[Any, Exception | None]:
        try:
            async with asyncio.timeout(self.limit) as limit:
                return await call(), None
        except TierdError as error:
            return None, error
        except TimeoutError as error:
            if limit.expired():
                raise Lost(f"no end within {self.limit:.0f} s") from error
            raise

    # -- what must come of them -------------------------------------------------------------------------------------

    def _check(self, result: Any, error: Exception | None, row: _Row) -> None:
        done, fault = self.slot.count, self.fault
        if not done or fault in HARMLESS or fault == "wrong checksum answered":
            if (
                error
                and not (fault == "wrong checksum answered" and done >= ATTEMPTS)
                and not self._is_busy(error, row)
            ):
                raise Lost(f"{fault}: {error!r}") from error
            if not error:
                self._right(result)
        elif fault == "flipped answer":
            if error:
                self._check_class(error, (StoreUnavailable, StoreRefused))
            elif self.operation == "GetObject":
                self._check_noticed(result)
        elif fault == "wrong checksum sent" or (fault == "flipped request" and self.operation == "DeleteObjects"):
            # A signed header, or XML: a server may find the signature wrong first, or the XML, before the checksum.
            if not error:
                self._right(result)
            self._check_class(error, (StoreRefused, StoreUnavailable))
        elif fault in _REFUSED:
            if not isinstance(error, StoreRefused):
                raise Lost(f"{fault}: refused, and the call says {error or result!r}") from error
            if done != 1:
                raise Lost(f"{fault}: asked {done} times, though refused")
        elif done >= ATTEMPTS:
            if not isinstance(error, StoreUnavailable):
                raise Lost(f"{fault}, {done} times: the call says {error or result!r}") from error
            if done > ATTEMPTS:
                raise Lost(f"{fault}: asked {done} times")
        else:
            if error and self._is_busy(error, row):
                return
            if error:
                raise Lost(f"{fault}, {done} times of {ATTEMPTS}: {error!r}") from error
            self._right(result)
            # Of an answer whose head broke off all that matters may have come: the result is right, as was just seen.
            if row.seen <= done and fault != "close in answer":
                raise Lost(f"{fault}: {row.seen} requests, {done} of them spoilt, and yet a result")

    def _is_busy(self, error: Exception, row: _Row) -> bool:
        """Whether time ran out over a request that nobody had harmed: that is this machine's fault.

        The proxy may not even have seen it in time. Then the error says that it was the last of all attempts, of which
        fewer were harmed.
        """
        late = "stalled: no" in str(error) or "no answer within" in str(error)
        last = f"attempt {ATTEMPTS} of {ATTEMPTS}, the last" in str(getattr(error, "__notes__", ""))
        busy = late and (row.seen > self.slot.count or (last and self.slot.count < ATTEMPTS))
        self.slot.notes["time ran out on a busy machine"] += busy
        return busy

    def _check_class(self, error: Exception | None, classes: tuple[type[Exception], ...]) -> None:
        if error and (not isinstance(error, classes) or isinstance(error, ObjectNotFound | CorruptChunk)):
            raise Lost(f"{self.fault}: {error!r}") from error

    def _check_noticed(self, result: bytes) -> None:
        """Each reader of a chunk compares it with its digest, by this function."""
        stored = StoredChunk(codec="raw", size=len(self.data), xxh3_128=xxhash.xxh3_128_hexdigest(self.data), key="k")
        try:
            verify_stored(stored, result, "here")
        except CorruptChunk:
            return
        if result != self.data:
            raise Lost("a flipped bit went unnoticed")

    def _right(self, result: Any) -> None:
        match self.operation:
            case "PutObject":
                if self.slot.mirror.get(PREFIX + self.key) != self.held:
                    raise Lost("a put that succeeded, and the server does not hold it")
                if result is None and not self.is_conditional:
                    raise Lost("a put without a condition says that an object was there")
            case "GetObject":
                if result != self.data:
                    raise Lost(f"a get gave {len(result)} bytes that are not the {len(self.data)} that were put")
            case "ListObjectsV2":
                if result != [(key, len(key)) for key in self.many]:
                    raise Lost(f"a listing shows {result}")
            case "DeleteObjects":
                if left := [key for key in self.many if PREFIX + key in self.slot.mirror]:
                    raise Lost(f"a delete that succeeded, and {left} are there")

    def _check_reported(self, error: TierdError) -> None:
        said = f"{error!r} {error} {getattr(error, '__notes__', '')}"
        if "AWS4-HMAC" in said or "Signature=" in said:
            raise Lost(f"an error tells a secret: {said[:300]}")
