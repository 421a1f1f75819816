"""A form of a step that is not sound hides no other form of it: it is named, and the sound one is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.users import as_root, by_nobody
from support.watched_run import RUN, files

from tierd.cli import run


def archive(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.arange(300.0)}, path)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def file_of_a_directory(out: Path) -> None:
    archive(out / "step_100" / "net.pt")
    cut(archive(out / "step_100.pt"))


def directory_of_a_file(out: Path) -> None:
    cut(archive(out / "step_100" / "net.pt"))
    archive(out / "step_100.pt")


def begun_directory(out: Path) -> None:
    (out / "step_100").mkdir()
    archive(out / "step_100.pt")


def another_format(out: Path) -> None:
    save_file({"weight": torch.arange(300.0)}, out / "model-100.safetensors")
    cut(archive(out / "model-100.bin"))
    archive(out / "optim-100.pt")


def another_format_with_companions(out: Path) -> None:
    save_file({"weight": torch.arange(300.0)}, out / "model-100.safetensors")
    cut(archive(out / "model-100.bin"))
    (out / "model-100.bin.yml").write_text("a: 1\n")


def empty_file(out: Path) -> None:
    archive(out / "step_100" / "net.pt")
    (out / "step_100.ckpt").touch()


def in_a_directory(out: Path) -> None:
    archive(out / "step_100" / "trained.pt")
    save_file({"weight": torch.arange(300.0)}, out / "step_100" / "net.safetensors")
    cut(archive(out / "step_100" / "net.bin"))


def another_directory(out: Path) -> None:
    cut(archive(out / "a" / "step_100.pt"))
    archive(out / "b" / "step_100.pt")


TWINS = {  # the sound files, and what is named
    file_of_a_directory: ({"step_100/net.pt"}, {"step_100.pt": "damaged"}),
    directory_of_a_file: ({"step_100.pt"}, {"step_100": "damaged"}),
    begun_directory: ({"step_100.pt"}, {"step_100": "incomplete"}),
    another_format: ({"model-100.safetensors", "optim-100.pt"}, {"model-100.bin": "damaged"}),
    another_format_with_companions: (
        {"model-100.safetensors"},
        {"model-100.bin": "damaged", "model-100.bin.yml": "damaged"},
    ),
    empty_file: ({"step_100/net.pt"}, {"step_100.ckpt": "damaged"}),
    in_a_directory: (
        {"step_100/trained.pt", "step_100/net.safetensors"},
        {"step_100/net.bin": "damaged"},
    ),
    another_directory: ({"b/step_100.pt"}, {"a/step_100.pt": "damaged"}),
}


def imported(out: Path, tier: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = run(["import", str(out), "--run", RUN, "--to", str(tier), "--json", *more])
    return code, json.loads(capsys.readouterr().out)["imported"]


@pytest.mark.parametrize("write", TWINS, ids=lambda write: write.__name__)
def test_sound_twin_is_imported_and_the_other_is_named(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tier = tmp_path / "out", tmp_path / "tier"
    out.mkdir()
    tier.mkdir()
    write(out)
    archive(out / "b" / "step_50.pt") if write is another_directory else None
    sound, named = TWINS[write]
    code, answer = imported(out, tier, capsys)
    assert code == (5 if "damaged" in named.values() else 4)
    assert [one["step"] for one in answer["units"]][-1:] == [100]
    assert {one["path"]: one["status"] for one in answer["refused"]} == named
    assert all(one["reason"] for one in answer["refused"])
    assert run(["restore", str(tier), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    back = {name: data for name, data in files(tmp_path / "back").items() if "step_50" not in name}
    assert back == {name: data for name, data in files(out).items() if name in sound}
    code, answer = imported(out, tier, capsys)  # again: it is there, and nothing is sent
    assert [one["was_there"] for one in answer["units"]][-1:] == [True] and {
        one["path"] for one in answer["refused"]
    } == set(named)
    assert code in (4, 5)
    code, answer = imported(out, tmp_path / "tier", capsys, "--step", "100")
    assert [one["step"] for one in answer["units"]] == [100]


@pytest.mark.parametrize("write", TWINS, ids=lambda write: write.__name__)
def test_inspect_shows_the_sound_twin_and_why_the_other_is_not(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    code = run(["inspect", str(tmp_path), "--json"])
    units = json.loads(capsys.readouterr().out)["units"]
    sound, named = TWINS[write]
    [whole] = [one for one in units if one["status"] == "sound"]
    assert whole["files"] == len(sound) and whole["step"] == 100
    [other] = [one for one in units if one["status"] != "sound"]
    assert other["status"] in named.values() and other["findings"]
    assert code == (5 if other["status"] == "damaged" else 4)


def test_twins_without_a_step_are_distinguished_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tier = tmp_path / "out", tmp_path / "tier"
    out.mkdir()
    tier.mkdir()
    save_file({"weight": torch.arange(300.0)}, out / "model.safetensors")
    cut(archive(out / "model.bin"))
    code, answer = imported(out, tier, capsys, "--step", "7")
    assert (code, [one["path"] for one in answer["units"]]) == (5, ["out/model.safetensors"])
    assert [one["path"] for one in answer["refused"]] == ["out/model.bin"]


def test_files_that_are_no_twins_are_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged optimizer beside a sound model leaves no whole checkpoint; nor do the two files of a Paddle model."""
    out, tier = tmp_path / "out", tmp_path / "tier"
    tier.mkdir()
    archive(out / "model_10.pt")
    cut(archive(out / "optim_10.pt"))
    archive(out / "paddle-20.pdparams")
    cut(archive(out / "paddle-20.pdopt"))
    code, answer = imported(out, tier, capsys)
    assert (code, answer["units"]) == (5, [])
    assert [one["status"] for one in answer["refused"]] == ["damaged", "damaged"]


def test_two_sound_twins_are_imported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tier = tmp_path / "out", tmp_path / "tier"
    tier.mkdir()
    archive(out / "model-100.bin")
    save_file({"weight": torch.arange(300.0)}, out / "model-100.safetensors")
    code, answer = imported(out, tier, capsys)
    assert (code, answer["refused"]) == (0, [])
    assert run(["restore", str(tier), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    assert files(tmp_path / "back") == files(out)


@as_root
def test_directory_that_may_not_be_read_hides_no_other_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    archive(out / "step_100" / "net.pt")
    archive(out / "step_100.pt")
    for directory in (out, *out.parents[: len(out.parents) - 1]):
        directory.chmod(directory.stat().st_mode | 0o055)
    (out / "step_100.pt").chmod(0o644)
    (out / "step_100").chmod(0)
    answer = tmp_path / "answer"
    answer.touch()
    answer.chmod(0o666)

    def inspected() -> int:
        code = run(["inspect", str(out), "--json"])
        answer.write_text(capsys.readouterr().out)
        return code

    assert by_nobody(inspected) == 6
    units = {Path(one["path"]).name: one["status"] for one in json.loads(answer.read_text())["units"]}
    assert units == {"step_100.pt": "sound", "step_100": "unreadable"}
