"""A quarantined copy is verified once more before it is deleted, and is used again if it is right."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.bad_readers import WrongPages
from support.doubles import contents
from support.waiting import until
from support.world import commit, converge, corrupt, part, read, reconciler, running, steps_on

from tierd.core.manifest import MANIFEST_NAME
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

KEEP = {"keep_local": 2}  # so that a quarantined part with two newer ones is deleted


def events(daemon, what: str) -> list[str]:
    return [event.subject for event in daemon.journal.events if event.what == what]


@pytest.fixture
def quarantined(spool: Spool) -> dict[str, bytes]:
    """The files of a right part that was quarantined, beside two newer ones, of which one tier keeps two."""
    data = commit(spool, part(1))
    spool.quarantine(part(1))
    commit(spool, part(2))
    commit(spool, part(3))
    return data


async def test_a_quarantined_part_that_proves_right_is_used_again(spool, quarantined):
    store = MemoryStore()
    daemon = await converge(spool, {"tier": store}, **KEEP)
    assert events(daemon, "released") == [str(part(1))] and not spool.quarantined()
    assert not daemon.journal.quarantined
    assert steps_on(await contents(store)) == [1, 2, 3]


@pytest.mark.parametrize("victim", ["weights.bin", MANIFEST_NAME])
async def test_a_quarantined_part_that_is_wrong_is_deleted(spool, quarantined, victim):
    corrupt(spool.control / "quarantine" / part(1).path / victim)
    daemon = await converge(spool, {"tier": MemoryStore()}, **KEEP)
    assert not events(daemon, "released") and not spool.quarantined() and not spool.has(part(1))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), OSError(errno.EMFILE, "too many open files")])
async def test_a_quarantined_part_that_cannot_be_read_is_kept(spool, quarantined, monkeypatch, error):
    home, preadv = spool.control / "quarantine" / part(1).path, os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(home):
            raise error
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", failing)
    async with running(reconciler(spool, {"tier": MemoryStore()}, **KEEP)) as daemon:
        await until(lambda: daemon.journal.counters["errors"] > 2)
        assert spool.quarantined() and not events(daemon, "released")


def test_quarantined_part_whose_manifest_is_wrong_in_the_page_cache_only_is_used_again(spool, quarantined, monkeypatch):
    """A verdict from a single read would have the daemon delete the right copy."""
    WrongPages(monkeypatch, spool.control / "quarantine" / part(1).path / MANIFEST_NAME)
    assert spool.unquarantine(part(1)) and read(spool, part(1)) == quarantined


def test_a_part_that_was_saved_again_is_not_replaced_by_its_quarantined_copy(spool, quarantined):
    commit(spool, part(1))
    assert not spool.unquarantine(part(1)) and set(spool.quarantined()) == {part(1)}
    assert read(spool, part(1)) == quarantined
