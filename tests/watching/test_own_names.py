"""Names of tierd's own in a directory that other programs write: anything but what tierd leaves there is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import layouts
from support.watched_run import RUN, Home

from tierd.cli import run
from tierd.core.errors import ConfigError, SpoolUnusable
from tierd.daemon.intake.directory_changes import quarantine_files
from tierd.daemon.intake.series_restore import read_rollback
from tierd.spool.spool import Spool


def occupy(path: Path, shape: str) -> None:
    """Put something else in the place of a file of tierd's."""
    if path.exists():
        path.unlink()
    if shape == "fifo":
        os.mkfifo(path)
    elif shape == "link":
        path.symlink_to("/etc/hosts")
    else:
        path.mkdir()


@pytest.mark.parametrize("shape", ["fifo", "link", "directory"])
@pytest.mark.parametrize("name", [".tierd-lock", ".tierd-chosen"])
def test_prepare_refuses_by_name_a_path_that_is_no_plain_file(name: str, shape: str, home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.deepspeed(home.root)
    home.taken()
    occupy(home.root / name, shape)
    capsys.readouterr()
    assert run(["prepare", str(home.root), "--run", RUN, "--to", str(home.tier)]) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert f"{home.root / name}: not a plain file" in error and "remove it or rename it" in error
    assert (home.root / "global_step20").is_dir()


@pytest.mark.parametrize("shape", ["fifo", "directory"])
@pytest.mark.parametrize("layout", [layouts.tensorflow, layouts.deepspeed])
def test_prepare_ends_if_the_programs_pointer_is_no_file(layout, shape: str, home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    layout(home.root)
    home.taken()
    path = home.root / ("checkpoint" if layout is layouts.tensorflow else "latest")
    occupy(path, shape)
    capsys.readouterr()
    assert run(["prepare", str(home.root), "--run", RUN, "--to", str(home.tier)]) == 3
    assert f"{path}: not a plain file" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("shape", ["fifo", "link", "directory"])
def test_spool_whose_lock_is_no_plain_file_is_refused_by_name(tmp_path: Path, shape: str) -> None:
    spool = Spool(tmp_path / "spool")
    occupy(spool.lock_path, shape)
    with pytest.raises(SpoolUnusable, match=f"{spool.lock_path}: not a plain file.*remove"), spool.lock():
        pass


@pytest.mark.parametrize("shape", ["fifo", "link", "directory"])
def test_choice_that_is_no_plain_file_is_refused_by_name(tmp_path: Path, shape: str) -> None:
    path = tmp_path / ".tierd-chosen"
    occupy(path, shape)
    with pytest.raises(ConfigError, match=rf"{path}: .*remove it"):
        read_rollback(tmp_path, "run")


@pytest.mark.parametrize("shape", ["fifo", "link", "file"])
def test_quarantine_that_is_no_directory_is_refused_by_name_and_nothing_is_moved(tmp_path: Path, shape: str) -> None:
    (tmp_path / "model.pt").write_text("weights")
    path = tmp_path / ".tierd-quarantine"
    if shape == "fifo":
        os.mkfifo(path)
    elif shape == "link":
        path.symlink_to(tmp_path.parent)
    else:
        path.write_text("a note")
    with pytest.raises(ConfigError, match=f"{path}: .*(move|name)"):
        quarantine_files(tmp_path, ["model.pt"])
    assert (tmp_path / "model.pt").read_text() == "weights"
