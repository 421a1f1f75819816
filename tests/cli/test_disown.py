"""disown as its users meet it: names that are nobody's go, and nothing that anybody can read without a clear yes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path

import msgspec
import pytest
from support.world import RUN, attempt, commit, converge, hurry, part, reconciler, running, settle, steps_on

from tierd.cli import run
from tierd.cli.commands import prune_commands
from tierd.core.errors import StoreRefused
from tierd.core.ids import PartId
from tierd.core.manifest_codec import seal
from tierd.spool import leases
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

PLANTED = part(9, launch=50)
TOO_NEW = seal(msgspec.defstruct("Later", [("version", int)])(version=99))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spool and a tier with steps 1 to 3 of one launch."""
    hurry(monkeypatch)
    (tmp_path / "tier").mkdir()
    for step in (1, 2, 3):
        commit(spool(tmp_path), part(step))
    work(tmp_path)
    return tmp_path


def spool(home: Path) -> Spool:
    return Spool(home / "spool")


def work(home: Path, keep: int = 100):
    """A daemon on the spool, until nothing is left to do."""
    return asyncio.run(converge(spool(home), {"tier": FileStore(home / "tier")}, keep=keep, keep_local=100))


def plant(home: Path, data: bytes, where: PartId = PLANTED, sort: str = "manifests") -> Path:
    path = home / "tier" / where.manifest_key.replace("manifests", sort)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def steps(home: Path) -> list[int]:
    return steps_on(str(path.relative_to(home / "tier")) for path in (home / "tier").glob("*/manifests/*/*"))


def files(home: Path) -> set[Path]:
    return {path for path in (home / "tier").rglob("*") if path.is_file()}


def taken(home: Path, *options: str, launch: str = PLANTED.checkpoint.attempt) -> int:
    return run(["disown", RUN, launch, str(home / "tier"), *options])


def test_a_planted_name_ends_pruning_until_it_is_disowned(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(home, TOO_NEW)

    async def observed() -> None:
        async with running(reconciler(spool(home), {"tier": FileStore(home / "tier")}, keep=1)) as daemon:
            await settle(daemon)
            for _ in range(2):  # the first that shows them says nothing
                await daemon.observe("tier")

    with caplog.at_level(logging.WARNING, "tierd.daemon"):
        asyncio.run(observed())
    assert steps(home) == [1, 2, 3, 9]
    reported = [one.getMessage() for one in caplog.records if "tierd disown" in one.getMessage()]
    assert len(reported) == 1
    assert f"tierd disown {RUN} {PLANTED.checkpoint.attempt} URL" in reported[0]
    assert taken(home, "--yes") == 0
    assert steps(home) == [1, 2, 3]
    work(home, keep=1)
    assert steps(home) == [3]


def test_damaged_disown_record_is_quarantined_and_ends_no_command(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    plant(home, b"garbage")
    with caplog.at_level(logging.WARNING, "tierd.daemon"):
        work(home, keep=1)
    assert steps(home) == [3]
    assert not [one for one in caplog.records if "tierd disown" in one.getMessage()]


def test_disown_of_readable_checkpoints_needs_yes(home: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(home, TOO_NEW)
    before = files(home)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(prune_commands.typer, "confirm", lambda *_, **__: pytest.fail("a hasty yes is not enough"))
    assert taken(home) == 3
    said = capsys.readouterr().err
    assert "1 of its checkpoints can be read" in said
    assert "a newer tierd" in said
    assert "--yes" in said
    assert files(home) == before


def test_disown_of_a_real_launch_needs_yes_and_leaves_its_chunks(home: Path, capsys, tmp_path: Path) -> None:
    before = files(home)
    assert taken(home, launch=attempt(1)) == 3
    said = capsys.readouterr().err
    assert "3 of its checkpoints can be read" in said
    assert "3 of them are complete" in said
    assert files(home) == before
    assert taken(home, "--dry-run", "--json", launch=attempt(1)) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["disowned"]
    assert [(one["checkpoints"], one["readable"], one["complete"]) for one in found["places"]] == [(3, 3, 3)]
    assert files(home) == before
    assert taken(home, "--yes", launch=attempt(1)) == 0
    assert steps(home) == []
    assert {path for path in before if "chunks" in path.parts} <= files(home)


def test_disown_asks_a_person_before_it_deletes_unreadable_checkpoints(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(home, b"garbage")
    assert taken(home) == 3  # nobody is there to be asked
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr(prune_commands.typer, "confirm", lambda question, err: bool(asked.append(question)))
    assert taken(home) == 1
    assert "can be read" in asked[0]
    assert steps(home) == [1, 2, 3, 9]
    monkeypatch.setattr(prune_commands.typer, "confirm", lambda *_, **__: True)
    assert taken(home) == 0
    assert steps(home) == [1, 2, 3]


def test_disown_deletes_all_names_of_the_launch_and_of_no_other(home: Path) -> None:
    before = files(home)
    for sort in ("manifests", "quarantine"):
        plant(home, b"garbage", sort=sort)
    pin = home / "tier" / RUN / "pins" / PLANTED.checkpoint.name
    intent = home / "tier" / RUN / "flushing" / PLANTED.checkpoint.name / f"{PLANTED.name}.0123456789ab-01234567"
    for path in (pin, intent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert taken(home, "--yes") == 0
    assert files(home) == before
    assert taken(home, "--yes") == 4


def test_disown_reads_quarantined_manifests_too(home: Path) -> None:
    moved = next((home / "tier").glob("*/manifests/000000000002.*/*"))
    plant(home, moved.read_bytes(), part(2), sort="quarantine")
    for path in (home / "tier").glob("*/manifests/*/*"):
        path.write_bytes(b"garbage")
    assert taken(home, launch=attempt(1)) == 3
    assert steps(home) == [1, 2, 3]


def test_a_launch_of_this_node_is_refused(home: Path, capsys) -> None:
    assert taken(home, "--yes", "--spool", str(home / "spool"), launch=attempt(1)) == 3
    assert "this node's spool" in capsys.readouterr().err
    assert steps(home) == [1, 2, 3]


def test_a_launch_that_lives_here_is_refused_though_its_spool_is_not_named(home: Path, tmp_path: Path, capsys) -> None:
    before, mine = files(home), Spool(tmp_path / "mine")
    leases.acquire_lease(mine.control, part(4))
    try:
        assert taken(home, "--yes", launch=attempt(1)) == 3
        said = capsys.readouterr().err
        assert str(os.getpid()) in said and str(tmp_path / "mine") in said
        assert taken(home, "--yes", launch=attempt(2)) == 4, "another launch"
    finally:
        leases.release_lease(mine.control, part(4))
    assert files(home) == before
    assert taken(home, "--yes", launch=attempt(1)) == 0


def test_garbage_in_the_spool_makes_it_no_launch_of_this_node(home: Path) -> None:
    plant(home, b"garbage")
    garbage = home / "spool" / RUN / PLANTED.checkpoint.name / PLANTED.name / "manifest.json"
    garbage.parent.mkdir(parents=True)
    garbage.write_bytes(b"garbage")
    assert taken(home, "--yes", "--spool", str(home / "spool")) == 0
    assert steps(home) == [1, 2, 3]


def test_disown_deletes_marks_of_the_launch_unless_a_deletion_may_be_running(home: Path) -> None:
    plant(home, b"garbage")
    pruning, now = home / "tier" / RUN / "pruning", time.time_ns() // 1_000_000
    pruning.mkdir(exist_ok=True)
    stamps = [f"{now - age:012x}-01234567" for age in (0, 700_000)]
    names = [f"{where.checkpoint.name}.{stamp}" for where in (PLANTED, part(1)) for stamp in stamps]
    for name in names:
        (pruning / name).touch()
    assert taken(home, "--yes") == 0
    assert {path.name for path in pruning.iterdir()} == {*names} - {names[1]}


def test_disown_deletes_manifests_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(home, b"garbage")
    plant(home, b"garbage", sort="quarantine")
    calls: list[str] = []

    async def delete(self: FileStore, keys: list[str]) -> None:
        calls.extend(keys)
        raise StoreRefused("no")

    monkeypatch.setattr(FileStore, "delete", delete)
    assert taken(home, "--yes") == 6
    assert calls == [PLANTED.manifest_key]


@pytest.mark.parametrize("given", [["no-attempt"], ["ffffffffffff-00000000"]])
def test_disown_refuses_a_malformed_attempt(home: Path, given: list[str]) -> None:
    assert run(["disown", RUN, *given, str(home / "tier"), "--yes"]) == 3
    assert run(["disown", RUN, attempt(1), "--spool", str(home / "spool")]) == 3
