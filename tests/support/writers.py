"""A small history on a tier and in a spool, what somebody may plant there, and what a restore makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from support.saved import files_of, put
from support.waiting import until
from support.world import RUN, Daemon, commit, converge, part, reconciler, running

import tierd
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Origin
from tierd.core.timeline.launch_chain import Head, LaunchRecord
from tierd.core.timeline.launch_chain import encode_head as encode_head
from tierd.daemon.reconciler import Reconciler
from tierd.reading import Reader
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore

KEEP = 3
Outcome = tuple[int, float, list[tuple[int, str]]]  # step, the value that was loaded, what was skipped with the reason


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), float(value))}


def history(store: Store, spool: Spool, *steps: int, keep: int | None = KEEP, run: str = RUN) -> None:
    """Each step's tensor holds its number; a daemon has put its head and its policy there."""

    async def work() -> None:
        for step in steps or (1, 2, 3):
            await put(spool, part(step, run=run), state(step), store)
        await converge(spool, {"tier": store}, keep=keep, keep_local=KEEP)

    asyncio.run(work())


def forge(store: Store, elsewhere: Spool, which: PartId, origin: CheckpointId | None = None, **more: Any) -> None:
    """A part that verifies, by somebody else: its tensor holds 666."""
    asyncio.run(put(elsewhere, which, state(666), store, origin=origin, **more))


def lie(spool: Spool, which: PartId, value: float = 666, **more: Any) -> None:
    """Commit a part to a spool as no trainer of this project would."""
    commit(spool, which, files_of(state(value)), **more)


def head(name: str, run: str = RUN, by: str = "deadbeef", origin: Origin | None = None) -> bytes:
    """A head that tells of one launch with a newest step 7."""
    launches = {name: LaunchRecord(resumed_from=origin, newest=7)}
    return encode_head(Head(version=1, run=run, by=by, counter=1 << 40, before=None, written="", launches=launches))


def restored(store: Store, run: str = RUN, **asked: Any) -> Outcome:
    """By somebody who has nothing but the tier."""
    with Reader({"tier": store}, run) as reader:
        return _outcome(reader.restore, asked)


def on_a_node(store: Store, spool: Spool, **asked: Any) -> Outcome | None:
    """By a trainer on a node, with the daemon of its spool."""
    with Daemon(spool.root, {"tier": store}, keep=KEEP), tierd.Checkpointer(spool.root, RUN) as ckpt:
        return _outcome(ckpt.restore, asked)


def _outcome(restore: Callable[..., Any], asked: dict[str, Any]) -> Any:
    into = state(0)
    found = restore(into, **asked)
    if found is None:
        return None
    (value,) = set(into["w"].tolist())
    return found.step, value, [(one.step, one.reason) for one in found.skipped]


def raw(store: MemoryStore) -> dict[str, bytes]:
    """What really lies there."""

    async def work() -> dict[str, bytes]:
        return {info.key: bytes(await store.get(info.key)) async for info in store.scan("")}

    return asyncio.run(work())


def replace(store: MemoryStore, objects: dict[str, bytes]) -> None:
    """Have these there and nothing else."""

    async def work() -> None:
        await store.delete([info.key async for info in store.scan("") if info.key not in objects])
        for key, data in objects.items():
            await store.put(key, data)

    asyncio.run(work())


def steps(store: Store, run: str = RUN) -> list[int]:
    """Those that have a manifest."""

    async def work() -> list[int]:
        return sorted([int(info.key.split("/")[2][:12]) async for info in store.scan(f"{run}/manifests/")])

    return asyncio.run(work())


def daemon_until(
    store: Store, spool: Spool, condition: Callable[[Reconciler], object], keep: int | None = KEEP
) -> Reconciler:
    """Have a node's daemon at work until something has come to hold, and two more looks."""

    async def work() -> Reconciler:
        async with running(reconciler(spool, {"tier": store}, keep=keep, keep_local=KEEP)) as daemon:

            def holds() -> object:
                daemon.wake()
                return condition(daemon)

            await until(holds)
            for _ in range(2):
                daemon.wake()
                await asyncio.sleep(0.05)
            return daemon

    return asyncio.run(work())


def kinds(daemon: Reconciler) -> set[str]:
    return {event.what for event in daemon.journal.events}


def failing(daemon: Reconciler) -> str:
    """The reason of an alert; empty where there is none."""
    return next((alert.why for alert in daemon.journal.alerts()), "")
