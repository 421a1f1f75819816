"""What the daemon's tests share."""

import pytest
from support.world import hurry

from tierd.spool import Spool


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)
    monkeypatch.setattr("tierd.daemon.service.lower", lambda: None)  # these processes have other tests to run


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")
