"""Fixtures for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import layouts
from support.timed import timed
from support.watched_run import Home

from tierd.spool.spool import Spool


@pytest.fixture(autouse=True)
def first_version() -> Iterator[None]:
    """Whatever a test wrote, the next one writes the first version of a checkpoint."""
    yield
    layouts.version = 0.0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def tier(root: Path) -> Path:
    (root.parent / "tier").mkdir()
    return root.parent / "tier"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at a directory follow each other at once, and a unit settles at once."""
    timed(monkeypatch, watch_s=0.02, settle_s=0.05)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")
