"""The note of a pin: shown by `ls` and `show`, kept by a second pin and by a copy, gone with the pin."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.world import Daemon, commit, part

from tierd.cli import run
from tierd.core.ids import pin_key
from tierd.daemon.tiers import intents
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

NOTE = "baseline of the paper: <b>"


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """The command line's names of a spool and a tier with one checkpoint."""
    spool, store = Spool(tmp_path / "spool"), FileStore(tmp_path / "tier")
    for name in ("tier", "other"):
        (tmp_path / name).mkdir()
    commit(spool, part(5))
    asyncio.run(flush(spool, part(5), TierUploadContext(store)))
    return [str(tmp_path / "tier"), "--spool", str(spool.root)]


def note(capsys: pytest.CaptureFixture[str], *where: str) -> str:
    """What `ls` says, which `show` says as well."""
    capsys.readouterr()
    assert run(["ls", *where, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert run(["show", "run", "5", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["note"] == listed["note"]
    return listed["note"]


def test_note_is_shown_in_each_place_until_the_pin_is_gone(places: list[str], tmp_path: Path, capsys) -> None:
    assert note(capsys, *places) == ""
    assert run(["pin", "run", "5", *places, "--note", NOTE]) == 0
    for where in (places, places[:1], places[1:]):
        assert note(capsys, *where) == NOTE
    assert run(["pin", "run", "5", *places]) == 0
    assert note(capsys, *places[:1]) == note(capsys, *places[1:]) == NOTE  # a pin without a note keeps it
    assert run(["ls", *places[:1]]) == 0 and NOTE in capsys.readouterr().out
    assert run(["show", "run", "5", *places[:1]]) == 0
    assert f"step 5, pinned: {NOTE}" in capsys.readouterr().out
    assert run(["unpin", "run", "5", *places]) == 0
    assert note(capsys, *places) == ""


def test_copy_copies_the_note(places: list[str], tmp_path: Path, capsys) -> None:
    assert run(["pin", "run", "5", *places, "--note", NOTE]) == 0
    assert run(["copy", places[0], str(tmp_path / "other"), "--run", "run"]) == 0
    assert note(capsys, str(tmp_path / "other")) == NOTE


def test_daemon_pins_with_the_note(tmp_path: Path, capsys) -> None:
    spool = Spool(tmp_path / "spool")
    commit(spool, part(5))
    (tmp_path / "tier").mkdir()
    with Daemon(spool.root, lambda: {"disk": FileStore(tmp_path / "tier")}) as daemon:
        daemon.settle()
        assert run(["pin", "run", "5", "--spool", str(spool.root), "--note", NOTE]) == 0
        assert note(capsys, "--spool", str(spool.root)) == NOTE
    assert note(capsys, str(tmp_path / "tier")) == NOTE


def test_pins_of_an_older_tierd_have_no_note(places: list[str], tmp_path: Path, capsys) -> None:
    asyncio.run(FileStore(tmp_path / "tier").put(pin_key(part(5).checkpoint), b""))
    assert note(capsys, places[0]) == ""
    assert asyncio.run(intents.read_pin(FileStore(tmp_path / "tier"), part(5).checkpoint)) == b""


@pytest.mark.parametrize("text", ["two\nlines", "x" * 1001])
def test_note_is_one_line_of_a_bounded_length(places: list[str], capsys, text: str) -> None:
    assert run(["pin", "run", "5", *places, "--note", text]) == 3
    assert "one line of at most 1000 characters" in capsys.readouterr().err
