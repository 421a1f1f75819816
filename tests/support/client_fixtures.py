"""Fixtures of the client's tests: a spool, a checkpointer on it, a daemon, and timeouts of milliseconds."""

from contextlib import suppress

import pytest
from support.doubles import Double
from support.fakecuda import fake  # noqa: F401
from support.timed import timed, timed_client
from support.world import Daemon, hurry

import tierd
from tierd.core.errors import SaveFailed
from tierd.spool.spool import Spool


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


@pytest.fixture
def local(spool):
    """A checkpointer with nothing but the spool. A test may end after a save that it made fail."""
    with suppress(SaveFailed), tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        yield checkpointer


@pytest.fixture
def quick(monkeypatch):
    """A daemon and a restore that wait for milliseconds where they would for seconds. A daemon on a busy machine greets
    in time for the save that connects."""
    hurry(monkeypatch)
    timed(monkeypatch, tick_s=0.02)
    timed_client(monkeypatch, greeting_s=1.0, start_s=0.2)


@pytest.fixture
def daemon(spool, quick):
    """A daemon with one tier that keeps everything."""
    with Daemon(spool.root, {"tier": Double()}, keep=100, keep_local=100) as daemon:
        yield daemon
