"""What the daemon's tests share."""

import pytest
from support.world import hurry

from tierd.spool import Spool


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")
