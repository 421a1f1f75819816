"""A counted store keeps the contract, and counts as an object store bills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stores.conformance import Conformance
from support.doubles import Counting

from tierd.stores.base import Store
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.store_wrappers import CountedStore


class TestCountedMemoryStore(Conformance):
    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return lambda: CountedStore(MemoryStore())


class TestCountedFileStore(Conformance):
    many = operations = 60
    can_digest = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: CountedStore(FileStore(tmp_path))


async def test_a_digest_counts_as_a_get(tmp_path):
    store = CountedStore(FileStore(tmp_path))
    await store.put("a", b"x")
    await store.digest("a")
    assert (store.counts["put"], store.counts["get"]) == (1, 1)
    await store.aclose()


@pytest.mark.parametrize("keys", [0, 1, 16, 17, 1016, 1017, 2500])
async def test_it_counts_as_the_store_below_does(keys):
    inner = Counting()
    store = CountedStore(inner)
    names = [f"a/{number:05}" for number in range(keys)]
    for name in names:
        await store.put(name, b"x")
    assert [info.key async for info in store.scan("a/")] == names
    for name in names[:3]:
        await store.get(name)
    assert not store.can_digest
    await store.delete(names)
    assert store.requests == sum(inner.count.values())


def test_encryption_of_an_inner_store_shows_in_the_outer_store():
    inner = MemoryStore()
    assert not CountedStore(inner).is_authentic
    inner.is_authentic = True
    assert CountedStore(inner).is_authentic
