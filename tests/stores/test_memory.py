"""MemoryStore keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stores.conformance import Conformance

from tierd.stores.base import Store
from tierd.stores.memory_store import MemoryStore


class TestMemoryStore(Conformance):
    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        return MemoryStore
