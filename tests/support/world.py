"""A small world: parts committed to a spool, and a daemon over it, without a trainer and without a process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from support.timed import QUICK

from tierd.core.config import Config, TierConfig
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import VERSION, Manifest, Origin
from tierd.core.manifest_codec import decode
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.control_socket import ControlServer
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.reconciler import Reconciler
from tierd.spool.file_io import write_file
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import read_file
from tierd.stores.base import Store
from tierd.stores.file_store import FileStore

RUN = "run"
CHUNK = 1000  # bytes: a small file has several chunks


def attempt(number: int) -> str:
    """The n-th launch's name."""
    return f"{0x18_0000_0000 + number:012x}-{number:08x}"


def part(step: int, launch: int = 1, rank: int = 0, world: int = 1, run: str = RUN) -> PartId:
    return PartId(CheckpointId(run, attempt(launch), step), rank, world)


def content(step: int, launch: int = 1, rank: int = 0, chunks: int = 3) -> dict[str, bytes]:
    """What a part holds: different for each, some of it compressible, one file empty, one in a subdirectory."""
    noise = random.Random(f"{step} {launch} {rank}")
    return {
        "weights.bin": noise.randbytes(CHUNK * (chunks - 1)) + bytes([step % 251]) * (CHUNK // 2),
        "deep/er/state.json": b'{"step": %d}' % step,
        "empty": b"",
    }


def described(which: PartId, **more: Any) -> Manifest:
    """A part's manifest without files, of the first moment of 2026; `more`: members that are otherwise."""
    usual = {"resumed_from": None, "created": "2026-01-01T00:00:00+00:00", "writer": "test", "metrics": {}, "files": ()}
    named = {"run": which.checkpoint.run, "step": which.checkpoint.step, "attempt": which.checkpoint.attempt}
    return Manifest(version=VERSION, rank=which.rank, world_size=which.world, **{**named, **usual, **more})


def commit(
    spool: Spool,
    which: PartId,
    files: Mapping[str, bytes] | None = None,
    origin: CheckpointId | None = None,
    metrics: Mapping[str, float] | None = None,
    created: str | None = None,
    homes: Mapping[str, int] | None = None,
    replicas: Mapping[str, str] | None = None,
    senders: Mapping[int, tuple[int, int, bool]] | None = None,
) -> dict[str, bytes]:
    """Commit a part as a trainer would; what its files hold. `created`: what its node's clock says, RFC 3339. `homes`:
    by a file that several ranks hold, the lowest of these. `senders`: as a manifest has it."""
    if files is None:
        files = content(which.checkpoint.step, int(which.checkpoint.attempt[-8:]), which.rank)
    step = which.checkpoint.step
    created = created or f"2026-01-01T{step // 60 % 24:02}:{step % 60:02}:00+00:00"
    with spool.stage(which) as stage:
        written = []
        for name, data in sorted(files.items()):
            (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
            file = write_file(stage.path / name, name, data, CHUNK)
            if homes and name in homes:
                chunks = tuple(msgspec.structs.replace(chunk, home=homes[name]) for chunk in file.chunks)
                file = msgspec.structs.replace(file, chunks=chunks)
            written.append(file)
        resumed = Origin(step=origin.step, attempt=origin.attempt) if origin else None
        more = {"resumed_from": resumed, "created": created, "metrics": dict(metrics or {})}
        more |= {"replicas": dict(replicas or {}), "senders": dict(senders or {})}
        stage.commit(described(which, files=tuple(written), **more))
    return dict(files)


def read(spool: Spool, which: PartId) -> dict[str, bytes]:
    """Every file of a part, verified by tierd."""
    return {file.path: bytes(read_file(spool.path(which) / file.path, file)) for file in spool.manifest(which).files}


def listing(spool: Spool) -> list[str]:
    """Everything below the spool but what a daemon keeps for itself, and the marks of who saves here."""
    own, marks = (
        ("lock", "control.sock", "daemon.log", "status.json", "last-verified.json"),
        {spool.control / name for name in ("saved", "alive", "local-only")},
    )
    found = (path for path in spool.root.rglob("*") if path.name not in own and marks.isdisjoint(path.parents))
    return sorted(str(path.relative_to(spool.root)) for path in found)


def config(
    spool: Spool,
    *tiers: str,
    keep: int | None = 100,
    keep_local: int | None = None,
    every: int | None = None,
    rescan: str = "1h",
    **more: object,
) -> Config:
    """`keep`, `keep_local`: `keep_last` on every tier and in the spool; without `keep`, nobody configured any. `every`:
    the tiers' `keep_every_steps`. `rescan` is far beyond the tests' waits, because an event has to wake the daemon."""
    policy = RetentionPolicy(keep_last=keep, keep_every_steps=every) if keep else None
    local = keep_local or keep
    return Config(
        spool=str(spool.root),
        tier=tuple(TierConfig(name=name, url=f"file:///{name}", retention=policy) for name in tiers),
        retention=RetentionPolicy(keep_last=local) if local else None,
        rescan=rescan,
        **{"min_free_percent": 0.0, "scrub": "0s", **more},
    )


def reconciler(spool: Spool, stores: Mapping[str, Store], **options: object) -> Reconciler:
    return Reconciler(config(spool, *stores, **options), spool, stores)


@contextlib.asynccontextmanager
async def running(daemon: Reconciler) -> AsyncIterator[Reconciler]:
    """The reconciler at work while the context lasts."""
    work = asyncio.ensure_future(daemon.run())
    try:
        yield daemon
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def manifest_on(store: Store, part: PartId) -> Manifest:
    return decode(bytes(await store.get(part.manifest_key)), part)


async def settle(daemon: Reconciler, timeout: float = 60.0) -> None:
    """Until every place answers and, look after look, nothing is left to do."""
    end = time.monotonic() + timeout
    quiet = 0
    while quiet < 3:
        daemon.wake()
        await asyncio.sleep(0.03)
        lanes = list(daemon.workers.values())
        while any(one.doing is not None or one.wake.is_set() for one in lanes):
            # Not woken again before it has looked: on a slow machine it would never be seen at rest.
            assert time.monotonic() < end, f"not settled: {[(one.name, one.doing, one.last_error) for one in lanes]}"
            await asyncio.sleep(0.01)
        world = daemon.inventory()
        calm = not any(one.last_error for one in lanes) and None not in world.tiers.values()
        todo = plan(world, daemon.config, {}, 0.0)
        done = calm and not todo and not world.busy
        quiet = quiet + 1 if done else 0
        reported = [(one.name, one.last_error) for one in lanes], todo, world.busy
        assert done or time.monotonic() < end, f"not settled: {reported}"


async def converge(spool: Spool, stores: Mapping[str, Store], **options: object) -> Reconciler:
    """Run a reconciler until nothing is left to do; the reconciler, for its counters and events."""
    async with running(reconciler(spool, stores, **options)) as daemon:
        await settle(daemon)
    return daemon


def steps_on(objects: Iterable[str]) -> list[int]:
    """The step of every manifest among a store's keys."""
    return [int(key.split("/")[2][:12]) for key in sorted(objects) if "/manifests/" in key]


def steps_in(spool: Spool) -> list[int]:
    return [one.checkpoint.step for one in spool.parts()]


def corrupt(path: Path) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def hurry(monkeypatch) -> None:
    """Backoffs of milliseconds, leftovers at once: the order of things stays, the waiting goes. Chunks of any size are
    shared, because those of tests have `CHUNK` bytes."""
    monkeypatch.setattr("tierd.core.planning.flush_order.SMALLEST_SHARED_BYTES", 1)
    monkeypatch.setattr("tierd.daemon.daemon_timings.given", lambda: QUICK)


class Daemon:
    """A reconciler and its socket in a thread of this process: for the client's tests."""

    def __init__(self, spool: str | Path, stores: Mapping[str, Store] | Callable[[], Mapping[str, Store]], **options):
        self.spool = Spool(spool)
        self._stores, self._options = stores, options
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> Daemon:
        self._thread.start()
        assert self._ready.wait(60), "the daemon did not come up"
        if self._failure:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)
            assert not self._thread.is_alive()

    def call(self, coroutine, timeout: float = 20.0):
        """Run a coroutine on the daemon's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def _taken(self, part, outcome) -> None:
        self.loop.call_soon_threadsafe(self.reconciler.note_commit, part, outcome)

    def _persisting(self, part, under_way) -> None:
        self.loop.call_soon_threadsafe(self.reconciler.save_events.set_persisting, part, under_way)

    def settle(self) -> None:
        self.call(settle(self.reconciler))

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        stores = self._stores() if callable(self._stores) else self._stores
        with self.spool.lock():
            self.reconciler = reconciler(self.spool, stores, **self._options)
            self.handoff = HandoffServer(self.spool, self._taken, self.reconciler.timings, self._persisting)
            self.reconciler.requests.writers = self.handoff.writers
            self.control = ControlServer(self.reconciler, self.handoff)
            with self.handoff.listening(20):
                async with self.control.listening(), running(self.reconciler):
                    self._ready.set()
                    await self._stop.wait()
        for store in stores.values():
            await store.aclose()
            if isinstance(store, FileStore):  # what runs when it is closed is left to itself, and not to the test
                for pool in (store._threads._hasty, store._threads._polite):
                    await asyncio.to_thread(pool.shutdown)
