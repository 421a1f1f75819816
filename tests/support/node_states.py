"""What tests of several nodes on one run share: the launches before, and the nodes' rest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from support.nodes import Nodes, one_thread


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Run threads' work in place in every test of the modules that import this fixture, and no clock decides."""
    one_thread(monkeypatch)


@pytest.fixture
def home(tmp_path):
    """In memory where that can be: thousands of small files come and go, and no power is cut."""
    room = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=room if os.access(room, os.W_OK) else tmp_path) as found:
        yield Path(found)


async def first_launch(home, *steps, keep) -> Nodes:
    """Nodes A to D. Launch 1 has saved these on A and B, and the tier has them."""
    nodes = Nodes(home, "A", "B", "C", "D", keep=keep)
    for step in steps:
        nodes.save(step, 1, "AB")
    await nodes.settle()
    return nodes
