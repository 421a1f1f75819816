"""Calls over TLS, one after another, each through a fault of the connection or of the answer, some cancelled.

What must come of each: the right result, or tierd's own error, which names a wrong certificate. What must be left when
it has ended: no slot taken, no socket open but those that are parked whole, no more threads than slots, and no memory.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import random
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from faults.rounds import Lost
from faults.s3.proxy import BODIES, Fault, Request
from faults.s3.slot import ATTEMPTS, DEADLINE_S, LIMITS, PREFIX, Slot, calm, soon
from support.tls import Authority, Front

from tierd.core.errors import StoreRefused, StoreUnavailable, TierdError
from tierd.core.urls import parse_url
from tierd.stores.retry import RetryingStore
from tierd.stores.s3.connection import Connection
from tierd.stores.s3.s3_store import S3Store

HARMS = ("reset before", "reset within", "half", "mute", "cut")
CERTIFICATES = ("expired", "not yet valid", "another host")
_SAYS = {"expired": "has expired", "not yet valid": "not valid yet", "another host": "is not for 127.0.0.1"}
_SERVER = (
    "500",
    "slow down",
    "reset in request",
    "reset in answer",
    "close in answer",
    "stall in answer",
    "lost answer",
)
MET = tuple(f"tls: {one}" for one in (*HARMS, *CERTIFICATES, *BODIES, "a server's fault", "cancelled"))
_SHARE = 0.08  # of all trials
_MOST_BYTES = 96 << 20  # that the process may have grown by in one call: other trials run beside it
_GRACE_S = 20.0  # for a busy machine
_DAY = datetime.timedelta(days=1)


def is_secure(seed: int) -> bool:
    """Whether this seed's trial is one of these. By numbers of its own, so that all other trials stay what they are."""
    return random.Random(f"secure {seed}").random() < _SHARE


class Watched:
    """Every socket that the transport makes while it `watches`, by the place that it leads to."""

    def __init__(self) -> None:
        self.sockets: defaultdict[str, list[socket.socket]] = defaultdict(list)

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        connect = Connection.connect

        def watched(connection: Connection) -> None:
            try:
                connect(connection)
            finally:
                self.sockets[connection._place].append(connection.sock)

        with mock.patch.object(Connection, "connect", watched):
            yield self


class Certificates:
    """An authority that the trials trust, and the certificates that a server may show."""

    def __init__(self, room: Path) -> None:
        authority = Authority(room)
        self.bundle = authority.bundle
        self.right = authority.server("127.0.0.1")
        self.wrong = {
            "expired": authority.server("127.0.0.1", -3 * _DAY, -_DAY),
            "not yet valid": authority.server("127.0.0.1", _DAY, 3 * _DAY),
            "another host": authority.server("elsewhere.example"),
        }


async def trial(slot: Slot, seed: int, rng: random.Random, certificates: Certificates, watched: Watched) -> None:
    with Front(slot.proxy.port, certificates.right).running() as front:
        place = f"https://127.0.0.1:{front.port}"
        store = S3Store(
            parse_url(f"s3://{slot.bucket}/{PREFIX[:-1]}?endpoint={place}&addressing=path&region=us-east-1"), LIMITS
        )
        store.probe.next_at = None
        try:
            await _Row(slot, seed, rng, front, certificates, store, watched.sockets[place]).whole()
        finally:
            await store.aclose()
            front.hang_up()
        await _settled(watched.sockets.pop(place), [])


class _Row:
    def __init__(
        self,
        slot: Slot,
        seed: int,
        rng: random.Random,
        front: Front,
        certificates: Certificates,
        store: S3Store,
        sockets: list[socket.socket],
    ) -> None:
        self.slot, self.rng, self.front, self.certificates = slot, rng, front, certificates
        self.s3, self.store = store, RetryingStore(store, attempts=ATTEMPTS, deadline_s=DEADLINE_S, rng=soon)
        self.sockets, self.run = sockets, f"t{seed}"
        self.data = rng.randbytes(rng.choice((0, 1, 5_000, 300_000)))
        self.many = [f"{self.run}/m{number}" for number in range(4)]
        self.half = False  # whether an object may be cut in half, and nothing in the answer tells

    async def whole(self) -> None:
        await self._calm()
        for _ in range(self.rng.randrange(3, 7)):
            fault = self.rng.choice((*HARMS, *CERTIFICATES, *BODIES, "a server's fault", "cancelled"))
            self.front.hang_up()
            self._plan(fault)
            before = _resident()
            error = await self._outcome(self.rng.choice(("put", "get", "scan", "delete")), fault == "cancelled")
            self.front.harm, self.front.context, self.slot.judge = str, self.certificates.right, calm
            self.half = False
            self.slot.notes[f"tls: {fault}"] += 1
            self.slot.reported.append(f"tls: {fault}: {error!r}")
            self._check(fault, error)
            await self._check_left(fault, before)
        self.front.hang_up()
        await self._calm()
        await self._check_left("calm", _resident())

    def _plan(self, fault: str) -> None:
        rng, rate = self.rng, self.rng.choice((0.35, 0.35, 1.0))
        if fault in HARMS:
            self.front.harm = lambda: fault if rng.random() < rate else ""
        elif fault in CERTIFICATES:
            self.front.context = self.certificates.wrong[fault]
        elif fault != "cancelled":
            name = rng.choice(_SERVER) if fault == "a server's fault" else fault

            def judge(request: Request) -> Fault | None:
                return Fault(name, rng.random()) if rng.random() < rate else None

            self.slot.judge = judge
        self.half = fault == "no xml"

    async def _outcome(self, call: str, cancel: bool) -> TierdError | None:
        """The error of a call, of whose result all that matters was found right."""
        limit_s = ATTEMPTS * (DEADLINE_S + 1) + _GRACE_S
        task = asyncio.ensure_future(getattr(self, f"_{call}")())
        if cancel:
            await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.01, 0.1)))
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=5.0 + _GRACE_S if cancel else limit_s)
        if not done:
            task.cancel()
            raise Lost(f"{call}: no end")
        if task.cancelled():
            return None
        error = task.exception()
        if error is not None and not isinstance(error, TierdError):
            raise Lost(f"{call}: {error!r} left the store") from error
        return error

    async def _put(self) -> None:
        await self.store.put(f"{self.run}/k", self.data)
        if self.slot.mirror.get(f"{PREFIX}{self.run}/k") != self.data:
            raise Lost("a put that succeeded, and the server does not hold it")

    async def _get(self) -> None:
        buffer = memoryview(bytearray(len(self.data) + 100)) if self.rng.random() < 0.5 else None
        found = bytes(await self.store.get(f"{self.run}/k", buffer))
        # Half an object that passes for a whole one only its digest tells from that, which no store knows.
        if found != self.data and not (self.half and (self.data.startswith(found) or found == b"<")):
            raise Lost("a get gave other bytes than were put")

    async def _scan(self) -> None:
        # A deletion that was cancelled, or whose answer was lost, may take effect meanwhile.
        before = self._there()
        found = [info.key async for info in self.store.scan(f"{self.run}/m")]
        if found not in (before, self._there()):
            raise Lost(f"a listing shows {found}, and there are {before}")

    def _there(self) -> list[str]:
        return [key for key in self.many if PREFIX + key in self.slot.mirror]

    async def _delete(self) -> None:
        await self.store.delete([self.many[-1]])
        if PREFIX + self.many[-1] in self.slot.mirror:
            raise Lost("a delete that succeeded, and the object is there")

    async def _calm(self) -> None:
        await asyncio.gather(*(self.store.put(key, key.encode()) for key in self.many))
        for call in (self._put, self._get, self._scan):
            await call()

    def _check(self, fault: str, error: TierdError | None) -> None:
        if error is None:
            return
        if fault in CERTIFICATES:
            if not isinstance(error, StoreRefused) or _SAYS[fault] not in str(error):
                raise Lost(f"{fault}: {error!r}")
        elif not isinstance(error, StoreUnavailable) and not (fault == "endless" and "there is room" in str(error)):
            raise Lost(f"{fault}: {error!r}")
        elif fault in BODIES and "500 Internal" in str(error):
            raise Lost(f"{fault}: no 500 was said: {error!r}")

    async def _check_left(self, fault: str, before: int) -> None:
        """What is left of the calls that have ended."""
        session: Any = self.s3._client._endpoint.http_session
        if session.in_use or session._busy:
            raise Lost(f"{fault}: {session.in_use} slots are taken by nobody")
        parked = [line for lines in session._parked.values() for line in lines]
        if broken := [line.state for line in parked if not line.is_idle()]:
            raise Lost(f"{fault}: parked: {broken}")
        await _settled(self.sockets, [line.connection.sock for line in parked])
        pools, most = (session._threads._hasty, session._threads._polite), session._slots._value
        if any(len(pool._threads) > most for pool in pools):
            raise Lost(f"{fault}: more threads than the {most} slots")
        if (grown := _resident() - before) > _MOST_BYTES:
            raise Lost(f"{fault}: {grown >> 20} MiB more memory")


async def _settled(sockets: list[socket.socket], parked: list[socket.socket]) -> None:
    """Until no other socket is open: the thread of a cancelled call closes its own, soon."""
    for _ in range(1000):
        left = [sock for sock in sockets if sock.fileno() >= 0 and sock not in parked]
        if not left:
            sockets[:] = parked
            return
        await asyncio.sleep(0.01)
    raise Lost(f"{len(left)} sockets are open that nobody uses")


def _resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
