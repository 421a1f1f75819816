"""A save in which an unknown program was killed is no checkpoint, and one that it finished is, whatever lies beside it.

Judged by the words of docs/explanation/watching.md. The gate's kind `watched` found each of these.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.watched_run import RUN, Home, Reported, files, flush, observed, take
from support.whole_layouts import Files, pt, tensors, text, write

from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool.spool import Spool
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.step_in_name import step_in
from tierd.watching.unit import Unit
from tierd.watching.unit_detection import units


def save(step: int) -> Files:
    return {f"step_{step}/{name}.pt": pt(step) for name in "ab"}


def listed(root: Path) -> dict[str, Unit]:
    with DirectoryTree(root) as tree:
        return {unit.path: unit for unit in units(tree.listing())}


def complete(root: Path) -> list[str]:
    return [path for path, unit in listed(root).items() if not unit.missing_reason]


TEMPORARY = ("step_10.tmp", "tmp_step_10", "tmp-step_10", ".step_10.tmp", "step_10.incomplete", "step_10.partial")


@pytest.mark.parametrize("name", TEMPORARY)
def test_directory_with_a_temporary_name_is_no_checkpoint(root: Path, name: str) -> None:
    write(root, save(20) | {f"{name}/model.pt": pt(10)}, 10)
    assert complete(root) == ["step_20"]


@pytest.mark.parametrize("name", ["save_5.tmp", "tmp_save_5", ".v5.tmp"])
def test_directory_with_a_temporary_name_and_no_step_is_left(home: Home, name: str, capsys) -> None:
    flush(home.spool, home.tier)
    write(home.root, {f"{name}/config.json": text({}), f"{name}/w_1.pth": pt(1)}, 10)
    assert not complete(home.root)
    before = files(home.root)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"unknown"}
    assert files(home.root) == before


@pytest.mark.parametrize("name", ["checkpoint.bv-000000080-tmp", "step_80.tmp"])
def test_directory_with_a_temporary_name_and_no_weights_is_reported_and_left(home: Home, name: str, capsys) -> None:
    """big_vision: the names of its final directories, with a zarr for each array, end in `-tmp`."""
    write(home.root, {f"{name}/params~head/{file}": b"1" for file in (".zarray", "0.0")}, 10)
    reported = take(home.spool, home.root)
    assert list(reported.reasons) == [name] and "temporary one" in reported.reasons[name]
    flush(home.spool, home.tier)
    before = files(home.root)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"unknown"}
    assert files(home.root) == before


@pytest.mark.parametrize("name", ["b.pt.tmp", ".b.pt.tmp", "tmp_b.pt", "b.pt.part"])
def test_directory_with_a_file_that_was_not_renamed_is_no_checkpoint(root: Path, name: str) -> None:
    write(root, {"step_10/a.pt": pt(10), f"step_10/{name}": pt(10)}, 10)
    assert not complete(root)
    write(root, {"step_10/b.pt": pt(10)}, 10)
    assert complete(root) == ["step_10"]


@pytest.mark.parametrize("where", ["step_10/", ""])
def test_shards_of_ranks_need_no_index(root: Path, where: str) -> None:
    names = [f"{where}{'' if where else 'step_10_'}net-0000{rank}-of-00002.bin" for rank in (0, 1)]
    write(root, dict.fromkeys(names, pt(10)), 10)
    assert len(complete(root)) == 1
    (root / names[1]).unlink()
    assert not complete(root)


@pytest.mark.parametrize("where", ["step_10/", "step_10_"])
def test_shards_of_a_model_need_their_index(root: Path, where: str) -> None:
    names = [f"{where}model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    write(root, dict.fromkeys(names, tensors(10)), 10)
    assert not complete(root)


def test_shards_with_the_step_behind_their_number_are_one_checkpoint(root: Path) -> None:
    names = [f"net-0000{rank}-of-00002-step10.bin" for rank in (0, 1)]
    write(root, dict.fromkeys(names, pt(10)), 10)
    (path,) = complete(root)
    assert listed(root)[path].files == tuple(names)


def test_state_of_an_unknown_program_belongs_to_the_file_beside_it(root: Path) -> None:
    for step in (4, 8):
        write(root, {f"lora-{step:06}.safetensors": tensors(step), f"lora-{step:06}-state/model.pt": pt(step)}, step)
    found = listed(root)
    assert {(unit.step, len(unit.files), unit.missing_reason) for unit in found.values()} == {
        (4, 2, None),
        (8, 2, None),
    }
    write(root, {"lora-000012.safetensors": tensors(12)}, 12)
    assert listed(root)["lora-000012.safetensors"].missing_reason


def test_newest_of_files_beside_each_other_is_no_checkpoint_without_the_files_of_all_others(root: Path) -> None:
    for step in (10, 20):
        write(root, {f"G_{step}.pth": pt(step), f"D_{step}.pth": pt(step)}, step)
    write(root, {"G_30.pth": pt(30)}, 30)
    assert len(complete(root)) == 2
    write(root, {"D_30.pth": pt(30)}, 30)
    (root / "D_10.pth").unlink()  # older states may be removed
    assert len(complete(root)) == 3


def test_lone_directories_in_directories_of_steps_are_one_series(root: Path) -> None:
    whole = {"model.pt": pt(1), "optimizer.pt": pt(1)}
    for epoch in (1, 2):
        write(root, {f"epoch_{epoch}/step_{epoch}0/{name}": data for name, data in whole.items()}, 10)
    assert complete(root) == ["epoch_1/step_10", "epoch_2/step_20"]
    write(root, {"epoch_3/step_30/model.pt": pt(1)}, 10)
    assert complete(root) == ["epoch_1/step_10", "epoch_2/step_20"]


def test_directory_without_a_step_is_one_checkpoint_with_its_ckpt_file(root: Path) -> None:
    write(root, {"best/trainer.ckpt": pt(1), "best/unet/model.pt": pt(1), "best/rng.dat": b"\1"}, 10)
    assert [unit.files for unit in listed(root).values()] == [
        ("best/rng.dat", "best/trainer.ckpt", "best/unet/model.pt")
    ]


def test_file_and_directory_without_a_step_are_one_checkpoint(root: Path) -> None:
    write(root, {"best.pt": pt(1), "latest/ema.pt": pt(1)}, 10)
    assert [unit.files for unit in listed(root).values()] == [("best.pt", "latest/ema.pt")]


def test_prepare_leaves_sound_files_beside_a_damaged_file_in_a_directory_without_a_step(home: Home, capsys) -> None:
    flush(home.spool, home.tier)
    write(home.root, {f"exp/v{step}/unet/{name}.pt": pt(step) for step in (1, 2) for name in "ab"}, 10)
    write(home.root, {"exp/v2/unet/b.pt": pt(2)[:-40]}, 10)
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == {name: data for name, data in before.items() if name != "exp/v2/unet/b.pt"}


def looked(watch: UnitWatch, spool: Spool, *times_s: float) -> None:
    for now_s in times_s:
        watch.observe(observed(spool), now_s)


def test_files_without_a_step_are_taken_again_after_a_file_was_removed(root: Path, spool: Spool) -> None:
    write(root, {"last.pt": pt(1), "best.pt": pt(1), "ema.pt": pt(1)}, 10)
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=1.0)
    looked(watch, spool, 1.0, 3.0)
    (root / "best.pt").unlink()
    write(root, {"last.pt": pt(2)}, 20)
    looked(watch, spool, 5.0, 7.0)
    assert len(reported.parts) == 2


def test_rank_that_is_the_step_as_well_is_of_the_same_series(root: Path) -> None:
    for step in (1, 2):
        write(root, {f"rank{rank}_{step}_steps.pth": pt(step) for rank in (0, 1)}, step)
    assert len(complete(root)) == 2


@pytest.mark.parametrize(("name", "step"), [("data_parallel_1.pkl", None), ("ema_10_steps.pth.tar", 10)])
def test_step_in_name(name: str, step: int | None) -> None:
    assert step_in(name) == step


def test_take_reports_the_save_that_was_not_renamed(home: Home) -> None:
    write(home.root, save(20) | {"step_30/b.pt.tmp": pt(30), "step_30/a.pt": pt(30)}, 10)
    reported = take(home.spool, home.root)
    assert list(reported.reasons) == ["step_30"] and "temporary name" in reported.reasons["step_30"]


def test_temporary_directory_without_weights_is_of_no_checkpoint_around_it(root: Path) -> None:
    saved = {f"exp/v{number}/unet/model.pt": pt(number) for number in (1, 2)}
    write(root, saved | {"exp/v3.tmp/args.dat": b"\1"}, 10)
    assert [unit.files for unit in listed(root).values()] == [tuple(saved)]


def test_temporary_pointer_is_not_restored(home: Home, capsys) -> None:
    write(home.root, save(10) | {"latest": b"step_10", "latest.tmp": b"step_10"}, 10)
    home.taken()
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == save(10) | {"latest": b"step_10"}


def test_prepare_keeps_a_newer_file_without_a_step_beside_a_damaged_file(home: Home, capsys) -> None:
    write(home.root, {"last.pt": pt(1), "ema.pt": pt(1)}, 1000)
    home.taken()
    write(home.root, {"last.pt": pt(2), "ema.pt": pt(2)[:-40]}, 2000)
    home.prepare(capsys)
    assert files(home.root) == {"last.pt": pt(2)}


def test_loop_that_keeps_one_checkpoint_is_taken_from_the_second_on(root: Path, spool: Spool) -> None:
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0)
    for step in (10, 20, 30):
        write(root, {f"step_{step}/{name}": pt(step) for name in ("model.pt", "optimizer.pt")}, step)
        if step > 10:
            shutil.rmtree(root / f"step_{step - 10}")
        for now_s in (step, step + 1):
            watch.observe(observed(spool), float(now_s))
    assert sorted(part.checkpoint.step for part in spool.parts(RUN)) == [20, 30]


def test_rest_of_a_checkpoint_that_its_program_deletes_is_no_checkpoint(root: Path, spool: Spool) -> None:
    for step in (10, 20):
        write(root, {f"{name}_{step}.pt": pt(step) for name in ("a", "b", "c")}, step)
    assert len(take(spool, root).parts) == 2
    (root / "a_10.pt").unlink()
    assert take(spool, root).parts == []


def test_metric_in_a_name_is_of_no_series(root: Path) -> None:
    for step, loss in ((10, "0.50"), (20, "0.25")):
        write(root, {f"{name}-epoch{step:03}-{loss}.pt": pt(step) for name in ("a", "b")}, step)
    (root / "b-epoch020-0.25.pt").unlink()
    assert [unit.step for unit in listed(root).values() if unit.missing_reason] == [20]


def test_json_that_is_cut_is_not_taken(root: Path, spool: Spool) -> None:
    for step in (10, 20):
        write(root, {f"step_{step}/w.pt": pt(step), f"step_{step}/config.json": text({"a": [1, 2]})}, step)
    (root / "step_20/config.json").write_bytes(b'{"a": [1, 2.')
    assert [part.checkpoint.step for part in take(spool, root).parts] == [10]


def test_hidden_temporary_directory_makes_no_checkpoint_of_its_parent(root: Path) -> None:
    write(root, {"epoch_2/0000040/w.pt": pt(40), "epoch_2/.0000050.tmp/w.pt": b""}, 10)
    assert complete(root) == ["epoch_2/0000040"]


def test_temporary_file_is_of_no_checkpoint_beside_it(root: Path) -> None:
    write(root, {"model-epoch001-0.1.pt": pt(1), "optim-epoch001-0.1.pt.incomplete": pt(1)}, 10)
    assert [unit.files for unit in listed(root).values() if not unit.missing_reason] == [("model-epoch001-0.1.pt",)]


@pytest.mark.parametrize("name", ["ckpt_20_ema.pth.tar", "ckpt_20_weights.npy", "ckpt_20_state"])
def test_empty_file_of_weights_is_not_taken(root: Path, spool: Spool, name: str) -> None:
    for step in (10, 20):
        content = {f"ckpt_{step}_G.pth": pt(step), name.replace("20", str(step)): pt(step) if step == 10 else b""}
        write(root, content, 1_000_000 + step)
    # An ending that is of no weights may be that of a marker, which is empty.
    assert len(take(spool, root).parts) == (1 if "." in name else 2)


def test_empty_file_of_a_format_that_is_not_known_is_not_moved(home: Home, capsys) -> None:
    """Seed 7701169 of the kind watched: killed when the file was opened. A program may also write it so."""
    for step in (10, 20):
        saved = {f"step_{step}/model.pt": pt(step), f"step_{step}/args.state": b"1" if step == 10 else b""}
        write(home.root, saved, 1_000_000 + step)
    home.taken()
    before = files(home.root)
    verdicts = {path: unit["verdict"] for path, unit in home.prepare(capsys).items()}
    assert verdicts == {"step_10": "verified", "step_20": "unknown"} and files(home.root) == before


def test_directory_below_a_temporary_name_is_of_no_checkpoint_without_a_step(root: Path) -> None:
    for step in (10, 20):
        write(root, {f"models/part_{step}/a/b/model.pt": pt(step)}, 1_000_000 + step)
    write(root, {"models/part_30.partial/a/b/model.pt": pt(30)}, 1_000_030)
    assert [listed(root)[path].files for path in complete(root)] == [
        ("models/part_10/a/b/model.pt", "models/part_20/a/b/model.pt")
    ]
