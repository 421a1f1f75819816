"""How the daemon ends: what is left is told apart from what is done, to the log, to systemd and to the caller."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from support.doubles import Double, is_chunk
from support.waiting import until
from support.world import commit, config, part

from tierd.core.errors import StoreUnavailable
from tierd.daemon import daemon_service


@pytest.fixture
def stores(monkeypatch) -> dict[str, Double]:
    found = {"nfs": Double(), "s3": Double()}

    async def opened(config, stack, *, trial):
        return found

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    return found


@pytest.fixture
def states(monkeypatch) -> list[str]:
    """What systemd is told."""
    found: list[str] = []
    monkeypatch.setattr(daemon_service, "notify", found.append)
    return found


def serve_and_stop(spool, stores, ready, **options):
    """Serve until `ready` holds of the stores, then SIGTERM; what was left."""

    async def work():
        daemon = asyncio.ensure_future(daemon_service.serve(config(spool, "nfs", "s3", **options)))
        await until(spool.socket.exists)
        await until(ready)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            return await daemon

    return asyncio.run(work())


def refuses_chunks(operation: str, key: str) -> None:
    if operation == "put" and is_chunk(key):
        raise StoreUnavailable("503 Slow Down")


def test_unfinished_drain_names_parts_on_no_tier_and_parts_that_a_single_tier_lacks(spool, stores, states, caplog):
    stores["s3"].before = refuses_chunks
    for step in range(3):
        commit(spool, part(step))
    left = serve_and_stop(
        spool, stores, lambda: len(stores["nfs"].puts(lambda key: "/manifests/" in key)) == 3, drain="1s"
    )
    assert {(one.part, one.on, one.lacks) for one in left} == {(part(step), ("nfs",), ("s3",)) for step in range(3)}
    assert "drain time is up: 3 parts are on nfs and not on s3" in caplog.text
    assert "only in the spool" not in caplog.text
    assert any(state.startswith("STATUS=draining: 3 parts are on nfs and not on s3") for state in states)
    assert states[-1] == "STATUS=not drained: 3 parts are on nfs and not on s3"


def test_a_finished_drain_leaves_nothing(spool, stores, states, caplog):
    commit(spool, part(1))
    assert serve_and_stop(spool, stores, lambda: True) == ()
    assert "drain time" not in caplog.text
    assert states[-1] == "STATUS=drained: nothing is left: every part is on every tier that wants it"


def test_drain_while_paused_ends_at_once_and_names_the_unflushed_parts(spool, stores, states, caplog):
    from tierd.daemon.tiers.tier_pauses import TierPause

    asyncio.run(TierPause(spool).begin(None))
    commit(spool, part(1))
    observed = lambda: all(("scan", "run/") in store.calls for store in stores.values())  # noqa: E731
    [left] = serve_and_stop(spool, stores, observed, drain="1d")
    assert (left.part, left.on, left.lacks) == (part(1), (), ("nfs", "s3"))
    assert f"paused: 1 part is on no tier: {part(1)}" in caplog.text
