"""Names of tierd's own in a directory that other programs write: anything but what tierd leaves there is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierd.core.errors import ConfigError
from tierd.daemon.intake.chosen import read_chosen
from tierd.daemon.intake.in_place import quarantine_files


@pytest.mark.parametrize("shape", ["fifo", "link", "directory"])
def test_choice_that_is_no_plain_file_is_refused_by_name(tmp_path: Path, shape: str) -> None:
    path = tmp_path / ".tierd-chosen"
    if shape == "fifo":
        os.mkfifo(path)
    elif shape == "link":
        path.symlink_to("/etc/hosts")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match=rf"{path}: .*remove it"):
        read_chosen(tmp_path, "run")


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
