"""Files of older versions of torch and directories of TensorFlow are taken as their bytes, and whole."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.bundles import write_bundle
from support.watched_run import RUN, files

from tierd.cli import run


def before_1_6(path: Path) -> None:
    state = {"weight": torch.arange(300.0), "step": 7}
    torch.save(state, path / "model_10.pt", _use_new_zipfile_serialization=False)


def before_0_2(path: Path) -> None:
    with tarfile.open(path / "checkpoint_10.pth.tar", mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            info = tarfile.TarInfo(name)
            info.size = 5000
            archive.addfile(info, io.BytesIO(bytes(range(250)) * 20))


def saved_model(path: Path) -> None:
    (path / "step_10" / "variables").mkdir(parents=True)
    write_bundle(path / "step_10" / "variables" / "variables", {"kernel": bytes(1200), "bias": b"b" * 80}, shards=1)
    (path / "step_10" / "assets").mkdir()
    (path / "step_10" / "assets" / "vocabulary.txt").write_text("a\nb\n")
    (path / "step_10" / "saved_model.pb").write_bytes(b"\x08\x01\x12\x00")


@pytest.mark.parametrize("write", [before_1_6, before_0_2, saved_model])
def test_checkpoint_of_an_older_format_is_sound_and_restored_byte_for_byte(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("out", "tier"):
        (tmp_path / name).mkdir()
    write(tmp_path / "out")
    assert run(["inspect", str(tmp_path / "out"), "--json"]) == 0
    [unit] = json.loads(capsys.readouterr().out)["units"]
    assert (unit["status"], unit["step"]) == ("sound", 10)
    assert [note["note"].partition(":")[0] for note in unit["notes"]] == {
        before_1_6: ["a file of torch.save from before torch 1.6, a pickle with the tensors behind it"],
        before_0_2: ["a tar archive of torch.save from before torch 0.2"],
        saved_model: [],
    }[write]
    assert run(["inspect", str(tmp_path / "out")]) == 0
    assert all(note["note"] in capsys.readouterr().out for note in unit["notes"])
    assert run(["import", str(tmp_path / "out"), "--run", RUN, "--to", str(tmp_path / "tier")]) == 0
    assert run(["restore", str(tmp_path / "tier"), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == files(tmp_path / "out")


def test_saved_model_without_a_step_in_its_name_is_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_model(tmp_path)
    (tmp_path / "step_10").rename(tmp_path / "final")
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    [unit] = json.loads(capsys.readouterr().out)["units"]
    assert (unit["program"], unit["files"]) == ("TensorFlow SavedModel", 4)
    (tmp_path / "final" / "variables" / "variables.index").unlink()
    assert run(["inspect", str(tmp_path / "final"), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["units"][0]["status"] == "incomplete"
