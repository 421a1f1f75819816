"""A checkpoint that is touched or added to after newer ones were taken, and files that no copy has.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.watched_run import RUN, Home, files, flush, take
from support.whole_layouts import pt, text, write

from tierd.cli import run
from tierd.daemon.intake.directory_changes import QUARANTINE_NAME
from tierd.watching.checkpoint_names import series_of
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.unit_detection import units


def saves(home: Home, *steps: int) -> None:
    for step in steps:
        saved = {f"step_{step}/m.pt": pt(step), f"step_{step}/config.json": text({"step": step})}
        write(home.root, saved, 1_000_000 + step)
        take(home.spool, home.root)


def newest(home: Home, capsys: pytest.CaptureFixture[str]) -> dict[str, bytes]:
    """What comes back into an empty directory."""
    flush(home.spool, home.tier)
    target = home.root.parent / "new"
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(target)]) == 0
    capsys.readouterr()
    return files(target)


@pytest.mark.parametrize("names", [("step_10/m.pt",), ("step_10/m.pt", "step_10/config.json")], ids=["one", "all"])
def test_touched_checkpoint_becomes_no_newer(home: Home, capsys, names: tuple[str, ...]) -> None:
    saves(home, 10, 20, 30)
    for name in names:
        os.utime(home.root / name, (2_000_000, 2_000_000))
    reported = take(home.spool, home.root)
    assert reported.parts == [] and not reported.reasons
    assert set(newest(home, capsys)) == {"step_30/m.pt", "step_30/config.json"}


def touch(root: Path, *names: str) -> None:
    """Give these files times of now, one after the other, as `cp -r` does."""
    for second, name in enumerate(names):
        os.utime(root / name, (2_000_000 + second, 2_000_000 + second))


def delete(home: Home, *steps: int) -> None:
    """Delete these checkpoints, as retention does."""
    home.spool.remove([part for part in home.spool.parts(RUN) if part.checkpoint.step in steps])


@pytest.mark.parametrize("deleted", [(), (10, 20), (10, 20, 30)], ids=["none", "the older", "all but the newest"])
@pytest.mark.parametrize("is_back", [False, True], ids=["", "after a clock was set back"])
def test_order_of_checkpoints_that_were_all_touched_is_that_of_their_contents(
    home: Home, capsys, deleted: tuple[int, ...], is_back: bool
) -> None:
    for step in (10, 20, 30, 40):
        write(home.root, {f"step_{step}.pt": pt(step)}, 1_000_000 - step if is_back else 1_000_000 + step)
        take(home.spool, home.root)
    before = {part.checkpoint for part in home.spool.parts(RUN)}
    delete(home, *deleted)
    touch(home.root, "step_40.pt", "step_30.pt", "step_20.pt", "step_10.pt")
    reported = take(home.spool, home.root)
    assert reported.doubts == {} and home.spool.pins() == set()
    assert {part.checkpoint for part in home.spool.parts(RUN)} == before
    assert set(newest(home, capsys)) == {"step_40.pt"}


def test_record_of_an_older_tierd_orders_checkpoints_that_were_all_touched(home: Home) -> None:
    saves(home, 10, 20, 30)
    before = {part.checkpoint for part in home.spool.parts(RUN)}
    (path,) = (home.spool.control / "watched").iterdir()
    members = json.loads(path.read_text())
    path.write_text(json.dumps({name: members[name] for name in members.keys() - {"saved", "doubts", "doubted"}}))
    delete(home, 10, 20)
    touch(home.root, *(f"step_{step}/{name}" for step in (30, 20, 10) for name in ("m.pt", "config.json")))
    take(home.spool, home.root)
    assert {part.checkpoint for part in home.spool.parts(RUN)} == before


def test_order_of_files_without_a_step_that_were_all_touched_is_that_of_their_contents(home: Home, capsys) -> None:
    names = [f"{name}/saves/model.pt" for name in "abc"]
    for number, name in enumerate(names):
        write(home.root, {name: pt(number)}, 1_000_000 + number)
        take(home.spool, home.root)
    write(home.root, {names[0]: pt(7)}, 1_000_007)
    take(home.spool, home.root)
    before = home.spool.parts(RUN)
    touch(home.root, *reversed(names))
    assert take(home.spool, home.root).parts == [] and home.spool.parts(RUN) == before
    write(home.root, {names[0]: pt(0)}, 3_000_000)  # the bytes of its first save, by hand
    assert len(take(home.spool, home.root).parts) == 1
    assert newest(home, capsys)[names[0]] == pt(0)


def test_late_file_of_an_older_checkpoint_is_taken_and_makes_it_no_newer(home: Home, capsys) -> None:
    saves(home, 10, 20, 30)
    write(home.root, {"step_10/eval.json": text({"loss": 1})}, 2_000_000)
    (part,) = take(home.spool, home.root).parts
    assert "step_10/eval.json" in {file.path for file in home.spool.manifest(part).files}
    assert take(home.spool, home.root).parts == []
    flush(home.spool, home.tier)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"verified"}
    assert set(newest(home, capsys)) == {"step_30/m.pt", "step_30/config.json"}


def test_part_that_was_taken_early_is_not_restored_beside_newer_checkpoints(home: Home, capsys) -> None:
    write(home.root, {"step_10/m.pt": pt(10)}, 1_000_010)
    take(home.spool, home.root)
    write(home.root, {"step_10/opt.pt": pt(11)}, 1_000_030)
    take(home.spool, home.root)
    write(home.root, {"step_20/m.pt": pt(20), "step_20/opt.pt": pt(21)}, 1_000_050)
    take(home.spool, home.root)
    assert set(newest(home, capsys)) == {"step_20/m.pt", "step_20/opt.pt"}


def test_damaged_file_that_no_copy_has_is_moved_alone(home: Home, capsys) -> None:
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    write(home.root, {"step_10/opt.pt": pt(11)}, 2_000_000)
    assert home.prepare(capsys)["step_10"]["verdict"] == "sound"
    data = bytearray((home.root / "step_10/opt.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (home.root / "step_10/opt.pt").write_bytes(data)
    before = files(home.root)
    unit = home.prepare(capsys)["step_10"]
    assert unit["verdict"] == "damaged" and unit["moved"] == [f"{QUARANTINE_NAME}/step_10/opt.pt"]
    assert files(home.root) == {name: content for name, content in before.items() if name != "step_10/opt.pt"}


@pytest.mark.parametrize("directory", ["rank_{}", "agent_{}", "fold{}", "seed-{}", "llama-{}b"])
def test_number_of_a_rank_or_model_distinguishes_series(home: Home, capsys, directory: str) -> None:
    for step in (10, 20):
        for number in (7, 13):
            write(home.root, {f"{directory.format(number)}/step_{step}.pt": pt(step, number)}, 1_000_000 + step)
        take(home.spool, home.root)
    assert set(newest(home, capsys)) == {f"{directory.format(number)}/step_20.pt" for number in (7, 13)}


@pytest.mark.parametrize(
    ("paths", "series"),
    [
        (["step_100/m.pt"], "step_#"),
        (["step_100/a/m.pt", "step_100/a/opt.pt"], "step_#"),
        (["version_0/epoch=1-loss=0.25.ckpt"], "version_#/epoch=#-loss=#.ckpt"),
        (["G_10.pth", "D_10.pth"], "D_#.pth"),
        (["fold_0/epoch_1/m.pt"], "fold_0/epoch_#"),
    ],
)
def test_series_is_the_path_of_the_checkpoint_without_numbers(paths: list[str], series: str) -> None:
    assert series_of(paths) == series


def test_saves_with_two_numbers_in_their_names_are_of_one_series(home: Home) -> None:
    """fairseq: `checkpoint2.pt` at the end of the epoch in which `checkpoint_2_1000.pt` was saved."""
    for number, names in enumerate(
        (("checkpoint_1_500.pt", "checkpoint1.pt"), ("checkpoint_2_1000.pt", "checkpoint2.pt"))
    ):
        write(home.root, {name: pt(number) for name in names}, 1_000_000 + number)
        assert len(take(home.spool, home.root).parts) == 1


def test_model_in_the_watched_directory_itself_has_its_config(root: Path) -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    write(root, dict.fromkeys({*names, "README.md", "results.json", "train.log"}, b"{}"), 1_000_000)
    with DirectoryTree(root) as tree:
        (unit,) = units(tree.listing())
    assert set(unit.files) == names


def test_directories_of_numbers_within_an_array_are_no_steps(root: Path) -> None:
    """levanter: `step-100/opt_state/inner_state/1/0/mu/.zarray`."""
    for step in (100, 200):
        names = ("metadata.json", "opt_state/inner_state/1/0/mu/.zarray", "opt_state/inner_state/1/0/mu/0.0")
        write(root, {f"run/step-{step}/{name}": b"{}" for name in names}, step)
    with DirectoryTree(root) as tree:
        assert {unit.path for unit in units(tree.listing())} == {"run/step-100", "run/step-200"}


def test_json_with_the_number_of_weights_is_taken_with_them(root: Path) -> None:
    """nanochat: `model_001000.pt`, `meta_001000.json`, `optim_001000_rank0.pt`."""
    names = {"model_001000.pt", "meta_001000.json", "optim_001000_rank0.pt"}
    write(root, dict.fromkeys({*names, "config_1000.json", "meta_002000.json"}, b"{}"), 1)
    with DirectoryTree(root) as tree:
        (unit,) = units(tree.listing())
    assert set(unit.files) == names


def test_checkpoint_that_retention_deleted_is_taken_again_when_it_is_written_again(home: Home) -> None:
    saves(home, 10, 20)
    oldest = min(home.spool.parts(RUN), key=lambda part: part.checkpoint)
    home.spool.remove([oldest])
    for name in ("step_10/m.pt", "step_10/config.json"):
        os.utime(home.root / name, (2_000_000, 2_000_000))
    assert [part.checkpoint.step for part in take(home.spool, home.root).parts] == [10]


def test_number_that_is_no_step_distinguishes_files_of_a_checkpoint(root: Path) -> None:
    for step in (1, 20):
        write(root, {f"epoch_{step}/states_{rank}.pth": pt(step, rank) for rank in (0, 1)}, step)
    (root / "epoch_20/states_1.pth").unlink()
    with DirectoryTree(root) as tree:
        assert [unit.step for unit in units(tree.listing()) if unit.missing_reason] == [20]


STATES = ("states_0.pt", "states_1.pt", "states_2.pt")


def save(home: Home, step: int, second: int, number: int) -> None:
    """Save a checkpoint whose args.json lies there from the first save of its path on, and keeps that one's time."""
    if not (home.root / f"step_{step}/args.json").exists():
        write(home.root, {f"step_{step}/args.json": text({"step": step})}, second - 5)
    for at, name in enumerate(STATES):
        save_anew(home, f"step_{step}/{name}", second, 1000 * number + at)


def save_anew(home: Home, name: str, second: int, number: int) -> None:
    (home.root / name).unlink(missing_ok=True)
    write(home.root, {name: pt(number)}, second)


def saved(root: Path, step: int) -> dict[str, bytes]:
    return {name: content for name, content in files(root).items() if name.startswith(f"step_{step}/")}


@pytest.mark.parametrize("last", [200, 300], ids=["the newest", "newer ones are there"])
def test_checkpoint_saved_again_in_its_place_is_the_newest(home: Home, capsys, last: int) -> None:
    for step in range(100, last + 1, 100):
        save(home, step, 1_000_000 + step, 1)
        take(home.spool, home.root)
    save(home, 200, 1_000_500, 2)
    reported = take(home.spool, home.root)
    assert [part.checkpoint.step for part in reported.parts] == [200] and reported.doubts == {}
    assert newest(home, capsys) == saved(home.root, 200)
    again = files(home.root)
    assert home.prepare(capsys)["step_200"]["verdict"] == "verified" and files(home.root) == again
    (home.root / "step_200/states_1.pt").unlink()
    home.prepare(capsys)
    assert files(home.root) == again


@pytest.mark.parametrize("last", [200, 300], ids=["the newest", "newer ones are there"])
def test_prepare_leaves_checkpoint_saved_again_in_its_place_before_it_was_taken(home: Home, capsys, last: int) -> None:
    for step in range(100, last + 1, 100):
        save(home, step, 1_000_000 + step, 1)
        home.taken()
    save(home, 200, 1_000_500, 2)
    again = files(home.root)
    assert home.prepare(capsys)["step_200"]["verdict"] == "sound" and files(home.root) == again


def test_checkpoint_saved_again_file_by_file_is_the_newest(home: Home, capsys) -> None:
    """FSDP gathers the optimizer for longer than a file has to rest, after it wrote the model."""
    for step in (100, 200, 300):
        save(home, step, 1_000_000 + step, 1)
        take(home.spool, home.root)
    for at, name in enumerate(STATES):
        save_anew(home, f"step_200/{name}", 1_000_500 + at, 7000 + at)
        take(home.spool, home.root)
    assert newest(home, capsys) == saved(home.root, 200)


def test_checkpoint_saved_again_in_files_of_other_names_is_the_newest(home: Home, capsys) -> None:
    for step in (100, 200, 300):
        save(home, step, 1_000_000 + step, 1)
        take(home.spool, home.root)
    for at, name in enumerate(STATES):
        (home.root / "step_200" / name).unlink()
        save_anew(home, f"step_200/states_{at + 3}.pt", 1_000_500, 7000 + at)
    take(home.spool, home.root)
    assert newest(home, capsys) == saved(home.root, 200)


def test_last_version_of_an_older_checkpoint_is_put_back(home: Home, capsys) -> None:
    for step in (100, 200, 300):
        save(home, step, 1_000_000 + step, 1)
        write(home.root, {f"step_{step}/eval.json": text({"loss": 0})}, 1_000_050 + step)
        take(home.spool, home.root)
    for number in range(1, 7):
        (home.root / "step_200/eval.json").unlink()
        write(home.root, {"step_200/eval.json": text({"loss": number})}, 1_000_500 + number)
        take(home.spool, home.root)
    assert newest(home, capsys) == saved(home.root, 300)
    last = files(home.root)
    write(home.root, {"step_200/states_2.pt": pt(9)}, 1_000_200)
    assert home.prepare(capsys)["step_200"]["replaced"]
    assert files(home.root) == last
