"""What the client's tests share."""

import pytest

import tierd
from tierd.spool import Spool


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


@pytest.fixture
def local(spool):
    """A checkpointer with nothing but the spool."""
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        yield checkpointer
