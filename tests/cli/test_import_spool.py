"""The spool of `tierd import`: what killed imports left is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tierd.cli.commands.copy_commands import import_spool
from tierd.spool.spool import Spool

PLACES = {"beside": (".tierd-import-", ""), "temporary": ("tierd-import-", "spool")}
IMPORT = """
import sys, time
from pathlib import Path
from tierd.cli.commands.copy_commands import import_spool
with import_spool(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as spool:
    print(spool.root, flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return str(request.param)


def of(place: str, tmp_path: Path) -> Path | None:
    """What an import names whose spool lies there."""
    return tmp_path / "out" if place == "beside" else None


def made_old(home: Path) -> None:
    os.utime(home, (time.time() - 3600.0,) * 2)


def test_next_import_removes_the_files_that_a_killed_import_left(place: str, tmp_path: Path) -> None:
    """SIGKILL left copies of whole checkpoints where temporary files go, for good."""
    killed = [str(tmp_path / "other")] if place == "beside" else []
    with subprocess.Popen([sys.executable, "-c", IMPORT, *killed], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        spool = Path(process.stdout.readline().strip())
        home = spool if place == "beside" else spool.parent
        made_old(home)
        with import_spool(of(place, tmp_path)):
            assert home.exists(), "it is at work"
        process.send_signal(signal.SIGKILL)
    with import_spool(of(place, tmp_path)):
        assert not home.exists()
    assert not list(tmp_path.iterdir())


def test_import_keeps_files_that_no_import_left(place: str, tmp_path: Path) -> None:
    prefix, inside = PLACES[place]

    def spool_in(name: str) -> Path:
        Spool((home := tmp_path / name) / inside).control.joinpath("lock").touch()
        made_old(home)
        return home

    young = spool_in(f"{prefix}young")
    os.utime(young)
    elsewhere, target = spool_in(f"x{prefix}a"), spool_in("target")
    (link := tmp_path / f"{prefix}link").symlink_to(target)
    (strange := tmp_path / f"{prefix}strange").mkdir()
    (strange / "file").touch()
    made_old(strange)
    with import_spool(of(place, tmp_path)):
        pass
    assert sorted(tmp_path.iterdir()) == sorted([young, elsewhere, target, link, strange])


def test_import_keeps_another_accounts_directory(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, one that belongs to somebody else may hold a link to a spool of this account."""
    prefix, inside = PLACES[place]
    Spool((home := tmp_path / f"{prefix}a") / inside).control.joinpath("lock").touch()
    made_old(home)
    real = Path.lstat

    def theirs(path: Path) -> os.stat_result:
        found = list(real(path))
        found[4] = 4711 if path == home else found[4]
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", theirs)
    with import_spool(of(place, tmp_path)):
        pass
    assert home.exists()
