"""The systemd unit: systemd accepts every line of it, and what it bounds is enough. Under it: test_service.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.units import UNIT, allowed, directives, size

from tierd.core.manifest import MAX_CHUNK_SIZE
from tierd.daemon import client_connections
from tierd.daemon.concurrency import FLUSH_BYTES, TRANSFER_BYTES
from tierd.stores import file_store
from tierd.stores.s3 import http1

pytestmark = pytest.mark.system

TEMPLATE = UNIT.with_name("tierd@.service")
OF_AN_INSTANCE = {"ExecStart", "EnvironmentFile", "User", "Group", "ReadWritePaths", "StateDirectory"}


@pytest.mark.parametrize(("unit", "name"), [(UNIT, "tierd.service"), (TEMPLATE, "tierd@alice.service")])
def test_systemd_accepts_the_unit(tmp_path: Path, unit: Path, name: str) -> None:
    tierd = Path(sys.executable).with_name("tierd")
    copy = tmp_path / name
    copy.write_text(unit.read_text().replace("/opt/tierd/bin/tierd", str(tierd)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_lets_the_daemon_lower_its_own_priority() -> None:
    """And does not do it for the whole process: a save waits for what persists it."""
    unit = UNIT.read_text()
    assert "Nice=" not in unit and "IOScheduling" not in unit
    assert {"setpriority", "ioprio_set"} <= allowed(directives(UNIT)["SystemCallFilter"])


def test_the_unit_is_hardened() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout  # exposure at most 1.5 of 10


def test_template_equals_the_unit_but_for_settings_of_an_account() -> None:
    """So all that is shown of the one unit holds for the other."""
    one, each = directives(UNIT), directives(TEMPLATE)
    assert {name for name in one.keys() | each.keys() if one.get(name) != each.get(name)} == OF_AN_INSTANCE
    assert each["User"] == ["%i"] and all("%i" in each[name][0] for name in OF_AN_INSTANCE - {"Group"})


def test_the_unit_takes_no_shared_memory_from_a_training() -> None:
    assert "RemoveIPC" not in directives(UNIT)


def test_unit_bounds_memory_and_threads_above_the_needs_of_the_daemon() -> None:
    unit = directives(UNIT)
    (high,), (most,), (tasks,) = unit["MemoryHigh"], unit["MemoryMax"], unit["TasksMax"]
    assert size(high) // 2 > TRANSFER_BYTES + FLUSH_BYTES  # with the interpreter and its libraries
    assert size(high) + 6 * MAX_CHUNK_SIZE < size(most) <= 4 << 30
    cores, tiers, receivers = 256, 6, 10
    a_tier = (
        2 * 2 * max(file_store._THREADS, http1.DEFAULT_LIMITS.connections)
    )  # hasty and polite ones; a reload has both stores for a while
    pools = 64 + 8 + 32 + 2  # of the hand-off, asyncio's own, and the two that listen
    assert (
        client_connections.MAX_HANDOFF_CONNECTIONS + pools + 2 * cores + tiers * a_tier + receivers
        < int(tasks) * 3 // 4
    )
    assert int(tasks) <= 4096  # fewer than systemd's default, which is 15 % of the machine's
