"""A store behind a guard of deletions keeps the contract, and the ability of the store below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stores.conformance import Conformance

from tierd.stores.base import Store
from tierd.stores.file_store import FileStore
from tierd.stores.store_wrappers import DeletionGuard


class TestGuardedFileStore(Conformance):
    many = operations = 60
    can_digest = True

    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: DeletionGuard(FileStore(tmp_path))
