"""`tierd doctor` says what it found, why it matters and what to do; its exit code is the worst severity."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from doctor.test_tier import LIFECYCLE, LOCK, UPLOADS, VERSIONS
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving
from support.timed import timed_cli
from support.world import Daemon, commit, part

from tierd import __version__
from tierd.cli import run
from tierd.cli.command_runtime import EXIT_ALERT, EXIT_WARNING
from tierd.core.diagnosis.findings import CHECKS, Finding, finding
from tierd.doctor import node_checks
from tierd.spool.spool import Spool
from tierd.spool.spool_access import command_as_account, describe_owner
from tierd.stores.file_store import FileStore

__all__ = ["credentials"]  # the fixture


def asked(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    """The exit code, and each finding by place and check."""
    code = run(["doctor", *command, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {0: "ok", EXIT_WARNING: "warning", EXIT_ALERT: "error"}[code] == answer["severity"]
    return code, {(one["place"], one["check"]): one for one in answer["findings"]}


@pytest.fixture
def alone(monkeypatch) -> None:
    """This machine as one where nothing is wrong, and the system without a unit."""
    monkeypatch.setattr(node_checks, "examine_machine", lambda state: [finding("local", "memory", "enough")])
    no_unit = lambda pid, drain_s: [finding("system", "no unit", f"{drain_s:g}")]  # noqa: E731
    monkeypatch.setattr(node_checks, "examine_endings", no_unit)
    ext4 = finding("local", "local disk", "ext4")
    monkeypatch.setattr(node_checks.machine_findings, "file_system", lambda mount: ext4)
    monkeypatch.setattr(
        "tierd.doctor.tier_checks.tier_findings.throughput", lambda place, *_: finding(place, "measured", "fast")
    )


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


def test_a_tier_without_room_for_one_state_is_an_error(tmp_path: Path, capsys, alone, monkeypatch) -> None:
    (tmp_path / "tier").mkdir()
    spool = Spool(tmp_path / "spool")
    commit(spool, part(1), {"weights": bytes(1 << 16)})
    at, real = str(tmp_path / "tier"), os.statvfs

    def few(path: str | Path) -> os.statvfs_result:
        members = list(real(path))[:10]
        members[1], members[4] = 4096, 15  # bytes in a block; blocks that are free for this account: 60 KiB
        return os.statvfs_result(members if str(path) == at else real(path))

    monkeypatch.setattr(os, "statvfs", few)
    code, found = asked(capsys, "--spool", str(spool.root), at)
    room = found["file", "room"]
    assert (code, room["finding"], room["severity"]) == (EXIT_ALERT, "nearly full", "error")
    assert "60.0 KiB of" in room["found"] and "one state has 64.0 KiB" in room["found"]
    assert room["why"] == CHECKS["room"] and "Free space there" in room["do"]
    monkeypatch.undo()


def test_a_bucket_that_fights_retention_is_explained(capsys, monkeypatch) -> None:
    """Each finding says what the server said, why that matters, and what to do."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "A-SECRET")
    behind = lambda self, timestamp=None: formatdate(time.time() - 1200, usegmt=True)  # noqa: E731
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", behind)
    bucket = Bucket()
    bucket.settings = {"lifecycle": LIFECYCLE, "object-lock": LOCK, "versioning": VERSIONS, "uploads": UPLOADS}
    with serving(bucket):
        code, found = asked(capsys, bucket.url())
    wanted = {
        "clock": ("clock too far off", "s ahead of the server", "more than 15 minutes", "NTP"),
        "credentials": ("credentials expire", "nothing renews them", "in some hours' time", "a role or a profile"),
        "lifecycle": ("expires", "rule 'old' (prefix 'p/') deletes", "share chunks", "Take the prefix out"),
        "object lock": ("lock by default", "COMPLIANCE, 30 days", "under a lock", "remove the default retention"),
        "versioning": ("old versions stay", "old version, for good", "frees no space", "NoncurrentVersionExpiration"),
        "multipart": ("leftover uploads", "the oldest of 2026-01-02", "cost money", "AbortIncompleteMultipartUpload"),
    }
    assert code == EXIT_ALERT and "A-SECRET" not in str(found)
    for check, (name, words, why, do) in wanted.items():
        one = next(one for (_, of), one in found.items() if of == check)
        assert one["finding"] == name
        assert words in one["found"] and why in one["why"] and do in one["do"], one


def test_the_exit_code_is_the_worst_severity(tmp_path: Path, capsys, alone) -> None:
    spool = Spool(tmp_path / "spool").root
    assert asked(capsys, "--spool", str(spool))[0] == 0
    spool.chmod(0o755)
    code, found = asked(capsys, "--spool", str(spool))
    assert (code, found["local", "owner and mode"]["severity"]) == (EXIT_WARNING, "warning")
    code, found = asked(capsys, "--spool", str(spool), str(tmp_path / "none"))
    assert (code, found["file", "directory"]["severity"]) == (EXIT_ALERT, "error")


def test_doctor_prints_problems_first_and_the_rest_on_request(tmp_path: Path, capsys, alone) -> None:
    assert run(["doctor", str(tmp_path / "none"), "--spool", str(tmp_path / "spool")]) == EXIT_ALERT
    first, remedy, count = capsys.readouterr().out.splitlines()
    assert first.startswith("ERROR file, directory: ") and first.endswith("none does not exist")
    assert remedy.startswith("  -> If a disk or a server was mounted there") and count.startswith("1 error, ")
    assert run(["doctor", str(tmp_path / "none"), "--spool", str(tmp_path / "spool"), "--all"]) == EXIT_ALERT
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == first and sum("mounted there" in line for line in lines) == 1
    rows = [line for line in lines if line.startswith("local  ")]
    assert any("spool" in row and "note" in row for row in rows) and len(rows) > 5  # one line each


def test_the_receivers_and_the_port_are_tried(tmp_path: Path, capsys, alone) -> None:
    (tmp_path / "tier").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answers = threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True)
        answers.start()
        file = tmp_path / "tierd.toml"
        file.write_text(
            f'spool = "{tmp_path}/spool"\n[[tier]]\nname = "nas"\nurl = "{tmp_path}/tier"\n'
            f'[http]\nlisten = "127.0.0.1:{port}"\n[[notify]]\nurl = "https://127.0.0.1:1/secret"\n'
            '[[notify]]\ncommand = ["/bin/true"]\n[[notify]]\nurl = "env:TIERD_TEST_NOT_SET"\n'
        )
        code, found = asked(capsys, "--config", str(file))
        answers.join(60)
    assert code == EXIT_ALERT
    names = {place: one["finding"] for (place, _), one in found.items() if place.startswith(("notify", "http"))}
    assert names == {
        "notify[0]": "receiver silent",
        "notify[1]": "receiver connects",
        "notify[2]": "receiver unusable",
        "http": "port taken",
    }
    assert "secret" not in json.dumps([*found.values()])


def test_the_port_of_a_daemon_that_is_stopped_is_not_tried(tmp_path: Path, capsys, alone, monkeypatch) -> None:
    silent = node_checks.DaemonAnswer(finding("local", "silent daemon", "it may be stopped"))
    monkeypatch.setattr(node_checks, "ask_daemon", lambda root: silent)
    (tmp_path / "tier").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        file = tmp_path / "tierd.toml"
        file.write_text(
            f'spool = "{tmp_path}/spool"\n[[tier]]\nname = "nas"\nurl = "{tmp_path}/tier"\n'
            f'[http]\nlisten = "127.0.0.1:{listener.getsockname()[1]}"\n'
        )
        _, found = asked(capsys, "--config", str(file))
    assert found["local", "daemon"]["finding"] == "silent daemon" and ("http", "HTTP port") not in found


def test_a_missing_bucket_is_one_problem(capsys, monkeypatch, credentials) -> None:
    with serving(Bucket()) as bucket:
        bucket.deny("ListBucket", "GetObject", "PutObject", "DeleteObject", status=404, code="NoSuchBucket")
        assert run(["doctor", bucket.url()]) == EXIT_ALERT
    shown = capsys.readouterr().out
    assert shown.count("no such bucket") == 1 and shown.count("ERROR") == 1
    assert "-> Create the bucket" in shown and "s3:Get" not in shown


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
        monkeypatch.setattr(node_checks, "__version__", "0.0.9")
        _, found = asked(capsys, "--spool", str(tmp_path / "spool"))
        assert found["local", "daemon"]["finding"] == "other version"
        assert f"tierd {__version__} answers" in found["local", "daemon"]["found"]


def test_the_daemon_and_this_shell_may_see_a_tier_differently(tmp_path: Path, capsys, alone, monkeypatch) -> None:
    """Credentials, a sandbox and mounts are a process's own, so one of the two may fail where the other works."""
    tier = tmp_path / "tier"
    tier.mkdir()
    says = {"url": f"file://{tier}", "reached": True, "failures": 0, "last_error": None}
    monkeypatch.setattr(node_checks.message_codec, "read_member", lambda *_: {"version": __version__, "tiers": [says]})
    with Daemon(tmp_path / "spool", lambda: {"file": FileStore(tier)}):

        def view() -> tuple[int, dict[str, str] | None]:
            code, found = asked(capsys, "--spool", str(tmp_path / "spool"), str(tier))
            return code, found.get(("file", "daemon's view"))

        _, found = view()
        assert found and found["finding"] == "same view"
        says |= {"failures": 1, "last_error": "put: Read-only file system"}
        code, found = view()
        assert found and (code, found["finding"]) == (EXIT_ALERT, "only here") and "Read-only" in found["found"]
        tier.rename(tmp_path / "elsewhere")
        assert view() == (EXIT_ALERT, None)  # both fail, and the operations say why
        says |= {"failures": 0, "last_error": None}
        _, found = view()
        assert found and found["finding"] == "only the daemon" and "restart the daemon" in found["do"]


def test_another_accounts_spool_names_its_owner(tmp_path: Path, capsys, monkeypatch) -> None:
    spool = Spool(tmp_path / "spool").root
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{spool}"\n[[tier]]\nname = "nas"\nurl = "{tmp_path}/tier"\n')
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path) != spool)  # root may open it
    assert run(["status", "--config", str(file)]) == 3
    assert f"{spool}: it belongs to uid {os.geteuid()}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["drain"], ["prepare", "--run", "r", "out"]])
@pytest.mark.parametrize("below", ["", "sub"])
def test_a_spool_that_this_account_may_not_read_is_refused_once_and_names_its_account(
    tmp_path: Path, capsys, monkeypatch, command: list[str], below: str
) -> None:
    """typer refused it by its own words, which say nothing of whose it is."""
    spool = Spool(tmp_path / "spool").root
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path) != spool)  # root may open it
    assert run([*command, "--spool", str(spool / below)]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"tierd: {spool}: {describe_owner(os.geteuid())}; run as its owner: {command_as_account(os.geteuid())} tierd"
        in said
    )


def test_an_account_without_a_name_is_named_by_its_number() -> None:
    nobodys = 3_999_999_999
    assert describe_owner(nobodys).startswith(f"it belongs to uid {nobodys}, and this is uid {os.geteuid()}")
    assert command_as_account(nobodys) == f"sudo -u '#{nobodys}'"
    assert command_as_account(0) == "sudo -u root"


@pytest.mark.parametrize("where", ["disk", "daemon", "tier"])
def test_doctor_reports_a_check_that_hangs_and_runs_the_others(
    tmp_path: Path, capsys, alone, monkeypatch, where: str
) -> None:
    hung = threading.Event()
    # The daemon may take a third of it. All others have to answer there, and a loaded disk takes a second.
    timed_cli(monkeypatch, check_group_s=9.0 if where == "daemon" else 0.6)
    (tmp_path / "tier").mkdir()
    Spool(tmp_path / "spool")

    def hang(*_: object) -> list[Finding]:
        hung.wait(60)
        return []

    name = {"disk": "node_checks.examine_spool", "daemon": "node_checks.ask_daemon", "tier": "tier_checks.mount_of"}[
        where
    ]
    monkeypatch.setattr(f"tierd.doctor.{name}", hang)
    code, found = asked(capsys, "--spool", str(tmp_path / "spool"), str(tmp_path / "tier"))
    hung.set()
    place = {"disk": ("local", "spool"), "daemon": ("local", "daemon"), "tier": ("file", "directory")}[where]
    name = {"disk": "spool silent", "daemon": "not answered", "tier": "mount fails"}[where]
    assert found[place]["finding"] == name and "no answer within" in found[place]["found"]
    assert (code == EXIT_ALERT) == (where != "daemon")  # else a place that hangs would pass a job's prolog
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
