"""`tierd doctor` says what it found, why it matters and what to do; its exit code is the worst severity."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support.world import Daemon

from tierd import __version__
from tierd.cli import run
from tierd.cli.reading.status import EXIT_ALERT, EXIT_WARNING
from tierd.core.diagnosis.findings import CHECKS, Finding, finding
from tierd.doctor import disk, examine, service
from tierd.spool.spool import Spool
from tierd.stores.file import FileStore


def asked(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    """The exit code, and each finding by place and check."""
    code = run(["doctor", *command, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {0: "ok", EXIT_WARNING: "warning", EXIT_ALERT: "error"}[code] == answer["severity"]
    return code, {(one["place"], one["check"]): one for one in answer["findings"]}


@pytest.fixture
def alone(monkeypatch) -> None:
    """This machine as one where nothing is wrong, and the system without a unit."""
    monkeypatch.setattr(examine.machine, "examine", lambda state: [finding("local", "memory", "enough")])
    monkeypatch.setattr(service, "endings", lambda pid, drain_s: [finding("system", "no unit", f"{drain_s:g}")])
    monkeypatch.setattr(disk.node, "file_system", lambda mount: finding("local", "local disk", "ext4"))
    monkeypatch.setattr("tierd.doctor.tier.tier.throughput", lambda place, *_: finding(place, "measured", "fast"))


def test_everything_named_is_tried_and_left_as_it_was(tmp_path: Path, capsys, alone) -> None:
    (tmp_path / "tier").mkdir()
    Spool(tmp_path / "spool")
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path}/spool"\ndrain = "7s"\n[[tier]]\nname = "nas"\nurl = "{tmp_path}/tier"\n')
    before = sorted(tmp_path.rglob("*"))
    code, found = asked(capsys, "--config", str(file))
    assert code == EXIT_WARNING
    assert [place for place, one in found.items() if one["severity"] == "warning"] == [("nas", "directory")]
    assert found["nas", "directory"]["finding"] == "the spool's disk"
    assert found["nas", "operations"]["finding"] == "read-write"
    assert found["system", "stop timeout"]["found"] == "7"
    assert all(one["found"] and one["why"] == CHECKS[one["check"]] for one in found.values())
    assert sorted(tmp_path.rglob("*")) == before


def test_the_exit_code_is_the_worst_severity(tmp_path: Path, capsys, alone) -> None:
    spool = Spool(tmp_path / "spool").root
    assert asked(capsys, "--spool", str(spool))[0] == 0
    spool.chmod(0o755)
    code, found = asked(capsys, "--spool", str(spool))
    assert (code, found["local", "owner and mode"]["severity"]) == (EXIT_WARNING, "warning")
    code, found = asked(capsys, "--spool", str(spool), str(tmp_path / "none"))
    assert (code, found["file", "operations"]["severity"]) == (EXIT_ALERT, "error")


def test_a_person_reads_what_was_found_why_it_matters_and_what_to_do(
    tmp_path: Path, capsys, alone, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor", str(tmp_path / "none")]) == EXIT_ALERT
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("ERROR", "does not exist: mount it", CHECKS["operations"], "-> See the error", "1 ERROR"):
        assert text in shown


def test_a_key_that_cannot_be_used_is_a_finding(tmp_path: Path, capsys, alone) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "key").write_text("5e" * 31)
    (tmp_path / "key").chmod(0o600)
    code, found = asked(capsys, str(tmp_path / "tier"), "--key-file", str(tmp_path / "key"))
    assert (code, found["file", "key"]["finding"]) == (EXIT_ALERT, "key unusable")
    assert "5e5e" not in str(found)
    (tmp_path / "key").write_text("5e" * 32)
    code, found = asked(capsys, str(tmp_path / "tier"), "--key-file", str(tmp_path / "key"))
    assert (found["file", "key"]["finding"], found["file", "operations"]["finding"]) == ("key read", "read-write")
    assert "5e5e" not in str(found)


def test_the_daemon_is_asked_for_its_version(tmp_path: Path, capsys, alone, monkeypatch) -> None:
    (tmp_path / "tier").mkdir()
    with Daemon(tmp_path / "spool", lambda: {"file": FileStore(tmp_path / "tier")}):
        _, found = asked(capsys, "--spool", str(tmp_path / "spool"))
        assert found["local", "daemon"]["finding"] == "daemon answers"
        monkeypatch.setattr(service, "__version__", "0.0.9")
        _, found = asked(capsys, "--spool", str(tmp_path / "spool"))
        assert found["local", "daemon"]["finding"] == "other version"
        assert f"tierd {__version__} answers" in found["local", "daemon"]["found"]


@pytest.mark.parametrize("where", ["disk", "daemon", "tier"])
def test_what_hangs_is_said_and_the_rest_is_still_tried(tmp_path: Path, capsys, alone, monkeypatch, where: str) -> None:
    hung = threading.Event()
    monkeypatch.setattr(examine, "_GROUP_S", 0.6)
    (tmp_path / "tier").mkdir()
    Spool(tmp_path / "spool")

    def hang(*_: object) -> list[Finding]:
        hung.wait(60)
        return []

    name = {"disk": "doctor.disk.examine", "daemon": "doctor.service.daemon", "tier": "doctor.tier.mount_of"}[where]
    monkeypatch.setattr(f"tierd.{name}", hang)
    _, found = asked(capsys, "--spool", str(tmp_path / "spool"), str(tmp_path / "tier"))
    hung.set()
    place = {"disk": ("local", "spool"), "daemon": ("local", "daemon"), "tier": ("file", "directory")}[where]
    assert found[place]["finding"] == "not answered" and "no answer within" in found[place]["found"]
    assert ("local", "memory") in found and ("system", "stop timeout") in found


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "nothing to try"),
        (["--config", "x", "--spool", "y"], "leave the others out"),
        (["--spool", "y", "--key-file", "k"], "--key-file is for tiers"),
        (["ftp://x/y"], "unknown scheme"),
    ],
)
def test_a_command_that_names_nothing_usable_is_refused(capsys, command: list[str], says: str) -> None:
    assert run(["doctor", *command]) == 3
    assert says in capsys.readouterr().err
