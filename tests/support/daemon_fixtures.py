"""Fixtures of the daemon's tests: a spool, and timeouts of milliseconds."""

import pytest
from support.world import hurry

from tierd.spool.spool import Spool


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")
