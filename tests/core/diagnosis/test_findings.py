"""The table of findings is whole, and each observation amounts to the finding that it should."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import tierd
from tierd.core.diagnosis import machine_findings, tier_findings
from tierd.core.diagnosis.findings import CHECKS, FINDINGS, finding, worst_severity
from tierd.core.diagnosis.machine_findings import Mount, Ownership, Space
from tierd.core.diagnosis.tier_findings import Credentials, LifecycleRule

GIB = 1 << 30
DAY = 86400.0


def test_every_finding_belongs_to_a_check_and_names_a_remedy_where_something_is_wrong() -> None:
    assert {kind.check for kind in FINDINGS.values()} == set(CHECKS)
    assert [name for name, kind in FINDINGS.items() if kind.severity in ("warning", "error") and not kind.do] == []
    assert [name for name, kind in FINDINGS.items() if kind.severity == "ok" and kind.do] == []
    assert {kind.check for kind in FINDINGS.values() if kind.severity == "ok"} == set(CHECKS)


def test_every_finding_of_the_table_is_made_somewhere_and_no_other() -> None:
    made = set()
    for path in Path(tierd.__file__).parent.rglob("*.py"):
        if path.parent.name in ("diagnosis", "doctor") or path.name == "doctor_command.py":
            for item in ast.walk(ast.parse(path.read_text())):
                if isinstance(item, ast.Constant) and item.value in FINDINGS and path.name != "findings.py":
                    made.add(item.value)
    assert made == set(FINDINGS)


def test_worst_severity_decides_and_an_untried_check_does_not() -> None:
    ok, note, unknown = (finding("t", name, "") for name in ("direct", "no daemon", "rules unknown"))
    warning, error = finding("t", "not direct", ""), finding("t", "rename fails", "")
    assert worst_severity([]) == worst_severity([ok, note, unknown]) == "ok"
    assert worst_severity([ok, warning, note]) == "warning"
    assert worst_severity([warning, error, ok]) == "error"


@pytest.mark.parametrize(
    ("mount", "name"),
    [
        (Mount("ext4", "/dev/nvme0n1p1"), "local disk"),
        (Mount("ext4", "/dev/nvme0n1p1", read_only=True), "read-only"),
        (Mount("tmpfs", "tmpfs"), "in memory"),
        (Mount("overlay", "overlay"), "container's layer"),
        (Mount("nfs4", "nas:/x"), "network file system"),
        (Mount("fuse.sshfs", "host:"), "network file system"),
        (Mount("minix", "/dev/sda"), "other file system"),
        (None, "other file system"),
    ],
)
def test_file_systems(mount: Mount | None, name: str) -> None:
    assert machine_findings.file_system(mount).finding == name


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (Ownership(5, 5, 0o700, True, 0o755), "private"),
        (Ownership(5, 5, 0o750, True, 0o755), "readable by others"),
        (Ownership(5, 5, 0o777, False, 0o755), "readable by others"),
        (Ownership(5, 5, 0o777, True, 0o755), "writable by others"),
        (Ownership(5, 5, 0o700, True, 0o777), "replaceable"),
        (Ownership(5, 5, 0o700, True, 0o1777), "private"),
        (Ownership(6, 5, 0o700, True, 0o755), "another's"),
    ],
)
def test_owners_and_modes(found: Ownership, name: str) -> None:
    assert machine_findings.ownership(found).finding == name


@pytest.mark.parametrize(
    ("free", "total", "used", "state", "name"),
    [
        (4 * GIB, 4 * GIB, 0, GIB, "room"),
        (GIB, 4 * GIB, 3 * GIB, GIB, "room"),
        (GIB, 40 * GIB, 2 * GIB, GIB, "room short"),
        (4 * GIB, 4 * GIB - 1, 0, GIB, "room too small"),
        (4 * GIB, 4 * GIB, 0, None, "state unknown"),
    ],
)
def test_space_finding_needs_room_for_the_kept_checkpoints_and_the_next_save(free, total, used, state, name) -> None:
    assert machine_findings.space(Space(free, total, used, state, "r", keep_last=3)).finding == name


@pytest.mark.parametrize(
    ("total", "limit", "state", "name"),
    [
        (16 * GIB, None, None, "memory"),
        (16 * GIB, None, 7 * GIB, "memory"),
        (16 * GIB, None, 8 * GIB, "memory short"),
        (16 * GIB, 4 * GIB, 2 * GIB, "memory short"),
        (16 * GIB, 400 << 20, None, "memory too small"),
    ],
)
def test_memory(total: int, limit: int | None, state: int | None, name: str) -> None:
    assert machine_findings.memory(total, total, limit, state).finding == name


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"files": 1024, "threads": None, "address space": None, "file size": None}, "limits"),
        ({"files": 256, "threads": None, "address space": None, "file size": None}, "low limits"),
        ({"files": 1024, "threads": 100, "address space": None, "file size": None}, "low limits"),
        ({"files": 1024, "threads": None, "address space": GIB, "file size": None}, "low limits"),
        ({"files": 1024, "threads": None, "address space": None, "file size": 1 << 40}, "file size limit"),
    ],
)
def test_limits(limits: dict[str, int | None], name: str) -> None:
    assert machine_findings.limits(limits).finding == name


def test_times_of_a_disk() -> None:
    assert (machine_findings.sync_time(0.001).finding, machine_findings.sync_time(2.0).finding) == (
        "syncs",
        "slow sync",
    )
    assert (machine_findings.direct_write(True, 1e9).finding, machine_findings.direct_write(False, 1e9).finding) == (
        "direct",
        "not direct",
    )


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        (3.0, "in time"),
        (-61.0, "clock off"),
        (61.0, "clock off"),
        (-900.0, "clock too far off"),
        (None, "clock unknown"),
    ],
)
def test_clocks(seconds: float | None, name: str) -> None:
    assert tier_findings.clock_skew("t", seconds).finding == name


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (None, "no credentials"),
        (Credentials("env", temporary=False, renewed=False), "credentials"),
        (Credentials("iam-role", temporary=True, renewed=True, left_s=900), "credentials"),
        (Credentials("env", temporary=True, renewed=False), "credentials expire"),
    ],
)
def test_credentials(found: Credentials | None, name: str) -> None:
    assert tier_findings.credentials("t", found).finding == name


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (LifecycleRule("a", "", expires=True), "expires"),
        (LifecycleRule("a", "p/", expires=True), "expires"),
        (LifecycleRule("a", "p/run/", expires=True), "expires"),
        (LifecycleRule("a", "q/", expires=True), "no rules"),
        (LifecycleRule("a", "pp", expires=True), "no rules"),
        (LifecycleRule("a", "", tagged=True, expires=True), "no rules"),
        (LifecycleRule("a", "p/", moves_to=("STANDARD_IA", "DEEP_ARCHIVE")), "archives"),
        (LifecycleRule("a", "p/", moves_to=("GLACIER_IR",)), "no rules"),
        (LifecycleRule("a", "p/", old_versions=True), "no rules"),
    ],
)
def test_rules_of_a_bucket(rule: LifecycleRule, name: str) -> None:
    assert tier_findings.lifecycle("t", [LifecycleRule("other", "z/", expires=True), rule], "p/").finding == name


@pytest.mark.parametrize(
    ("free", "state", "name"),
    [(GIB, GIB, "room there"), (GIB - 1, GIB, "nearly full"), (0, 1, "nearly full"), (3 << 20, None, "room unknown")],
)
def test_room_on_a_tier_for_one_state_more(free: int, state: int | None, name: str) -> None:
    found = tier_findings.directory_room("t", free, 4 * GIB, state)
    assert found.finding == name and "of 4.0 GiB free" in found.found


def test_versions_locks_uploads_and_checksums() -> None:
    cleaner = LifecycleRule("a", "", old_versions=True)
    elsewhere = LifecycleRule("a", "q/", old_versions=True)
    assert tier_findings.versioning("t", "Suspended", [], "p/").finding == "no versions"
    assert tier_findings.versioning("t", "Enabled", [elsewhere], "p/").finding == "old versions stay"
    assert tier_findings.versioning("t", "Enabled", [cleaner], "p/").finding == "old versions expire"
    assert tier_findings.object_lock("t", "", "").finding == "no lock"
    assert tier_findings.object_lock("t", "GOVERNANCE", "30 days").finding == "lock by default"
    assert tier_findings.uploads("t", 0, "", "p/").finding == "no uploads"
    assert tier_findings.uploads("t", 2, "2026-01-01", "p/").finding == "leftover uploads"
    assert (tier_findings.verified_by("t", "crc64nvme").finding, tier_findings.verified_by("t", "").finding) == (
        "verifies",
        "verifies none",
    )
    assert tier_findings.conditions("t", is_honored=True).finding == "leaves objects"
    assert tier_findings.conditions("t", is_honored=False).finding == "replaces objects"
    assert tier_findings.throughput("t", 1 << 20, 0.1, 0.1).finding == "measured"
    assert tier_findings.throughput("t", 1 << 20, 0.1, 5.0).finding == "slow"
    assert tier_findings.certificate("t", "TLSv1.3", 30 * DAY).finding == "encrypted"
    assert tier_findings.certificate("t", "TLSv1.3", 3 * DAY).finding == "certificate expires"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2min", 120), ("1min 30s", 90), ("90s", 90), ("infinity", math.inf), ("", None), ("soon", None), ("5", None)],
)
def test_spans_of_systemd(text: str, seconds: float | None) -> None:
    assert machine_findings.span_s(text) == seconds


def test_who_ends_a_daemon_has_to_leave_it_the_time_to_drain() -> None:
    assert machine_findings.stop_timeout("u", 120, 60).finding == "stops in time"
    assert machine_findings.stop_timeout("u", math.inf, 60).finding == "stops in time"
    assert machine_findings.stop_timeout("u", 60, 60).finding == "stopped too soon"
    assert machine_findings.stop_timeout("u", None, 60).finding == "no unit"
    config = "Configuration data\nKillOnBadExit           = 0\nKillWait                = 30 sec\n"
    assert machine_findings.kill_wait_s(config) == 30
    assert machine_findings.job_end(machine_findings.kill_wait_s(config), 60).finding == "job ends too soon"
    assert machine_findings.job_end(90, 60).finding == "job ends in time"
    assert machine_findings.job_end(machine_findings.kill_wait_s(""), 60).finding == "job's end unknown"
    assert machine_findings.pod_end(120, 60).finding == "pod ends in time"
    assert machine_findings.pod_end(30, 60).finding == "pod ends too soon"
    assert machine_findings.pod_end(None, 60).finding == "pod's grace unknown"
