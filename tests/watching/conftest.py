"""Fixtures for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import layouts
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
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")
