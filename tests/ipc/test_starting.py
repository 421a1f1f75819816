"""A message that says that no daemon runs names the ways to start one on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierd.core.errors import DaemonAbsent
from tierd.ipc import daemon_connection
from tierd.ipc.daemon_connection import DaemonConnection, ways_to_start
from tierd.spool.spool import Spool
from tierd.spool.spool_access import account_name


def test_the_ways_to_start_a_daemon_begin_with_the_units_that_are_installed(tmp_path: Path) -> None:
    root, units = tmp_path / "spool", tmp_path / "units"
    by_hand = f"tierd run --config FILE or tierd run --spool {root} --to URL"
    assert ways_to_start(root, [units]) == by_hand
    units.mkdir()
    (units / "tierd@.service").touch()
    one = f"systemctl start tierd@{account_name(os.geteuid())}"
    assert ways_to_start(root, [tmp_path / "none", units]) == f"{one} or {by_hand}"
    (units / "tierd.service").touch()
    root.mkdir()
    assert ways_to_start(root, [units]) == f"systemctl start tierd or {one} or {by_hand}"


def test_a_link_without_a_daemon_names_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(daemon_connection, "ways_to_start", lambda root: f"a way for {root.name}")
    with pytest.raises(DaemonAbsent, match=r"none is running.*start one: a way for spool"):
        DaemonConnection(Spool(tmp_path / "spool"))
