"""`restore --into` and `prepare`: a program's directory has what is whole, where the program looks, nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from support import layouts
from support.doubles import Killed
from support.layouts import WRITERS
from support.watched_run import RUN, Home, files, flush, take

from tierd.cli import run
from tierd.core.manifest import UNIT_NAME
from tierd.core.manifest_codec import decode, seal
from tierd.daemon.intake import directory_changes, in_place_restore
from tierd.formats.byte_source import PIECE_SIZE
from tierd.spool.foreign_files import describe_file
from tierd.watching import directory_tree as watching_files


def flip(path: Path, keep_time: bool = True) -> None:
    """Flip one bit in the middle, as a disk does, or with the time of a write."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def later(root: Path, seconds: int) -> None:
    """Let everything there have been written this much later."""
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(0, path.stat().st_mtime_ns + seconds * 10**9))


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_a_unit_is_put_back_byte_for_byte_with_its_pointers(home: Home, write: Callable[[Path], Path], capsys) -> None:  # type: ignore[no-untyped-def]
    write(home.root)
    home.taken()
    back = home.root.with_name("back")
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(back)]) == 0
    wanted, found = files(home.root), files(back)
    pointer = {"latest", "latest_checkpointed_iteration.txt", "checkpoint"}
    assert {name: data for name, data in found.items() if name not in pointer} == {
        name: data for name, data in wanted.items() if name not in pointer
    }
    assert {name for name in wanted if name in pointer} == {name for name in found if name in pointer}
    for path in home.root.glob("latest-rank*"):
        assert (back / path.name).readlink() == path.readlink()
    assert run(["inspect", str(back)]) == 0
    again = take(home.spool, back)  # its times are those of the program, so that a watch knows it
    assert again.parts == [] and again.failures == []
    capsys.readouterr()


def test_restore_into_a_directory_moves_its_checkpoint_and_a_step_can_be_chosen(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.deepspeed(home.root)
    (home.root / "global_step20").rename(home.root / "global_step10")
    layouts.version = 1.0
    later(home.root, -100)
    layouts.deepspeed(home.root)
    home.taken()
    flip(home.root / "global_step10" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    right = files(home.root)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(home.root), "--step", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["moved"] == [".tierd-quarantine/global_step10"] and found["pointers"] == ["latest"]
    assert (home.root / "latest").read_text() == "global_step10"
    now = files(home.root)
    changed = {name for name in right if now[name] != right[name]}
    assert changed == {"latest", "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt"}
    assert (home.root / ".tierd-quarantine" / "global_step10").is_dir()
    assert not (home.root / ".tierd-restored").exists()
    assert not found["was_right"]
    before = files(home.root)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(home.root), "--step", "10", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["was_right"] and again["moved"] == [] and files(home.root) == before


@pytest.mark.parametrize("path", ["../out", "/etc", "global_step21"])
def test_a_description_that_was_made_up_puts_nothing_anywhere(home: Home, path: str, capsys) -> None:  # type: ignore[no-untyped-def]
    layouts.deepspeed(home.root)
    assert take(home.spool, home.root).parts
    (taken,) = home.spool.parts()
    here = home.spool.path(taken)
    about = json.loads((here / UNIT_NAME).read_text())
    text = json.dumps(about | {"path": path})
    (here / UNIT_NAME).write_text(text)
    manifest = decode((here / "manifest.json").read_bytes())
    kept = [file for file in manifest.files if file.path != UNIT_NAME]
    described = describe_file(here / UNIT_NAME, UNIT_NAME)
    (here / "manifest.json").write_bytes(seal(msgspec.structs.replace(manifest, files=(*kept, described))))
    flush(home.spool, home.tier)
    back = home.root.with_name("back")
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(back)]) == 5
    assert files(back) == {} and UNIT_NAME in capsys.readouterr().err


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("renames", range(4))
def test_program_file_is_not_deleted_after_a_kill(can_exchange: bool, renames: int, root: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A command that is killed before any of its renames leaves the program's file for the next one."""
    fresh = root / in_place_restore.RESTORE_STAGING / "part" / "checkpoint-5" / "file"
    for path, text in ((root / "checkpoint-5" / "file", "the program's"), (fresh, "restored")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    rename, exchange, done = Path.rename, directory_changes.exchange_names, [0]

    def killed(do: Callable[..., object], *given: object) -> object:
        if done[0] == renames:
            raise Killed
        done[0] += 1
        return do(*given)

    monkeypatch.setattr(Path, "rename", lambda *given: killed(rename, *given))
    if can_exchange:
        monkeypatch.setattr(directory_changes, "exchange_names", lambda *given: killed(exchange, *given))
    else:
        monkeypatch.setattr(directory_changes, "exchange_names", lambda *given: False)
    with suppress(Killed):
        directory_changes.swap_in(fresh.parent, root, "checkpoint-5")
    in_place_restore._clear(root / in_place_restore.RESTORE_STAGING)
    assert "the program's" in [path.read_text() for path in root.rglob("file")]


def test_a_failed_exchange_leaves_nothing_in_quarantine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = root / in_place_restore.RESTORE_STAGING / "checkpoint-5"
    for path in (root / "checkpoint-5", fresh):
        path.mkdir(parents=True)
    (fresh / "file").touch()

    def busy(*_: object) -> bool:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(directory_changes, "exchange_names", busy)
    with pytest.raises(OSError, match="busy"):
        directory_changes.swap_in(fresh, root, "checkpoint-5")
    assert fresh.is_dir() and list((root / directory_changes.QUARANTINE_NAME).iterdir()) == []


def test_a_link_on_the_way_is_not_followed(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    layouts.plain_dcp(home.root)
    home.taken()
    back, elsewhere = home.root.with_name("back"), home.root.with_name("elsewhere")
    back.mkdir()
    elsewhere.mkdir()
    (back / "save").symlink_to(elsewhere)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(back)]) == 3
    assert list(elsewhere.iterdir()) == [] and "symbolic link" in capsys.readouterr().err


# -- prepare ----------------------------------------------------------------------------------------------------------


def steps(home: Home, *numbers: int) -> None:
    """A Trainer's checkpoints of these steps, a minute apart."""
    for number in numbers:
        layouts.version = float(number)
        later(home.root, -60)
        layouts.trainer(home.root)
        (home.root / "checkpoint-500" / "trainer_state.json").write_text(json.dumps({"global_step": number}))
        (home.root / "checkpoint-500").rename(home.root / f"checkpoint-{number}")


@pytest.mark.parametrize("keep_time", [True, False])
@pytest.mark.parametrize("name", ["optimizer.pt", "model-00001-of-00002.safetensors"])
def test_prepare_replaces_a_unit_with_a_flipped_bit(home: Home, keep_time: bool, name: str, capsys) -> None:  # type: ignore[no-untyped-def]
    steps(home, 100, 200)
    home.taken()
    right = files(home.root)
    flip(home.root / "checkpoint-200" / name, keep_time)
    found = home.prepare(capsys)
    assert [one["verdict"] for one in found.values()] == ["verified", "damaged"]
    assert found["checkpoint-200"]["replaced"] and name in str(found["checkpoint-200"]["why"])
    assert files(home.root) == right
    assert (home.root / ".tierd-quarantine" / "checkpoint-200" / name).is_file()
    assert [one["verdict"] for one in home.prepare(capsys).values()] == ["verified", "verified"]


def test_prepare_moves_unfinished_checkpoints_and_checkpoints_that_were_never_taken(home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    steps(home, 100, 200)
    home.taken()
    steps(home, 300, 400)
    (home.root / "checkpoint-400" / "trainer_state.json").unlink()
    flip(home.root / "checkpoint-300" / "optimizer.pt")
    before = files(home.root / "checkpoint-200")
    later(home.root / "checkpoint-200", 120)  # `steps` has aged it
    later(home.root / "checkpoint-100", 120)
    found = home.prepare(capsys)
    assert {path: one["verdict"] for path, one in found.items()} == {
        "checkpoint-100": "verified",
        "checkpoint-200": "verified",
        "checkpoint-300": "damaged",
        "checkpoint-400": "unfinished",
    }
    assert sorted(path.name for path in home.root.glob("checkpoint-*")) == ["checkpoint-100", "checkpoint-200"]
    assert sorted(path.name for path in (home.root / ".tierd-quarantine").iterdir()) == [
        "checkpoint-300",
        "checkpoint-400",
    ]
    assert files(home.root / "checkpoint-200") == before


@pytest.mark.parametrize("begun", [".tmpk9vdZo", None], ids=["a temporary file", "no file"])
@pytest.mark.parametrize("name", ["checkpoint-400", "checkpoint_3", "epoch=1-step=400.ckpt"])
def test_prepare_moves_a_directory_whose_first_file_was_never_whole(home: Home, capsys, name: str, begun) -> None:  # type: ignore[no-untyped-def]
    """The program resumes from its name alone. `make loaders` killed HF Trainer and Accelerate at their first file."""
    steps(home, 100)
    home.taken()
    (home.root / name).mkdir()
    if begun:
        (home.root / name / begun).write_bytes(b"half of its weights")
    found = home.prepare(capsys)
    assert {path: one["verdict"] for path, one in found.items()} == {"checkpoint-100": "verified", name: "unfinished"}
    assert [path.name for path in home.root.iterdir() if not path.name.startswith(".")] == ["checkpoint-100"]
    assert (home.root / ".tierd-quarantine" / name).is_dir()


def test_prepare_fetches_the_newest_onto_an_empty_disk(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    steps(home, 100, 200)
    home.taken()
    right = files(home.root / "checkpoint-200")
    shutil.rmtree(home.root)
    shutil.rmtree(home.spool.root)
    found = home.prepare(capsys)
    assert [(path, one["verdict"], one["replaced"]) for path, one in found.items()] == [
        ("checkpoint-200", "missing", True)
    ]
    assert files(home.root / "checkpoint-200") == right


def test_prepare_leaves_a_whole_unit_that_was_saved_anew(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    steps(home, 100)
    home.taken()
    shutil.rmtree(home.root / "checkpoint-100")
    layouts.version = 7.0
    layouts.trainer(home.root).rename(home.root / "checkpoint-100")
    (home.root / "checkpoint-100" / "trainer_state.json").write_text('{"global_step": 100}')
    right = files(home.root)
    later(home.root, 5)
    assert home.prepare(capsys)["checkpoint-100"]["verdict"] == "sound"
    assert files(home.root) == right


def test_prepare_corrects_the_pointer(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    layouts.deepspeed(home.root)
    home.taken()
    shutil.copytree(home.root / "global_step20", home.root / "global_step30")
    torn = home.root / "global_step30" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    (home.root / "latest").write_text("global_step30")
    found = home.prepare(capsys)
    assert found["global_step30"]["verdict"] == "damaged" and found["global_step20"]["verdict"] == "verified"
    assert (home.root / "latest").read_text() == "global_step20"


def test_prepare_reads_each_byte_once(home: Home, capsys, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    for number in (1, 2, 3):
        torch.save({"weight": torch.rand(PIECE_SIZE // 2)}, home.root / f"model_step{number}.pt")
    home.taken()
    read = []
    one_read = watching_files.OpenFile.read
    monkeypatch.setattr(
        watching_files.OpenFile, "read", lambda self, at, size: read.append(size) or one_read(self, at, size)
    )
    assert {one["verdict"] for one in home.prepare(capsys).values()} == {"verified"}
    assert sum(read) == sum(path.stat().st_size for path in home.root.glob("*.pt"))


def test_prepare_moves_nothing_while_a_tier_does_not_answer(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    steps(home, 100, 200)
    home.taken()
    (home.root / "checkpoint-200" / "trainer_state.json").unlink()
    before = files(home.root)
    shutil.move(home.tier, home.tier.with_name("away"))
    assert run(["prepare", str(home.root), "--run", RUN, "--to", str(home.tier)]) == 6
    assert files(home.root) == before and "nothing was moved" in capsys.readouterr().err
