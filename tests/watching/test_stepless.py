"""What has no step beside checkpoints that have one, pointers, and several series: all of it comes back.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.watched_run import RUN, Home, files, flush, take
from support.whole_layouts import Files, pt, tensors, write

from tierd.cli import run
from tierd.watching.checkpoint_names import stepless_run
from tierd.watching.unit_file import Pointer, pointer_to_newest


def entries(root: Path) -> dict[str, bytes | str]:
    """Every file, and every link with its target, below a directory but tierd's own."""
    links = {str(path.relative_to(root)): str(path.readlink()) for path in root.rglob("*") if path.is_symlink()}
    return files(root) | links


def restore(home: Home) -> None:
    shutil.rmtree(home.root)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(home.root)]) == 0


def saves(home: Home, *steps: int) -> None:
    """A loop with `last.pt` and `best.pt` beside its checkpoints, and with a text and a link that name the newest."""
    for step in steps:
        saved: Files = {f"epoch_{step}.pt": pt(step), "last.pt": pt(step, 3)}
        saved |= {"best.pt": pt(step, 5)} if step != 30 else {}
        write(home.root, saved, 1_000_000 + step)
        (home.root / "last_checkpoint").write_text(f"out/epoch_{step}.pt\n")
        (home.root / "newest").unlink(missing_ok=True)
        (home.root / "newest").symlink_to(f"epoch_{step}.pt")
        take(home.spool, home.root)


@pytest.mark.parametrize("command", ["prepare", "restore"])
def test_lost_directory_is_restored_with_files_without_a_step_and_pointers(home: Home, capsys, command: str) -> None:
    saves(home, 10, 20, 30)
    flush(home.spool, home.tier)
    before = entries(home.root)
    if command == "restore":
        restore(home)
    else:
        shutil.rmtree(home.root)
        home.prepare(capsys)
    newest = {"epoch_30.pt", "last.pt", "best.pt", "last_checkpoint", "newest"}
    assert entries(home.root) == {name: before[name] for name in newest}


PIPELINE: Files = {
    "model_index.json": b'{"_class_name": "StableDiffusionPipeline"}',
    "scheduler/scheduler_config.json": b"{}",
    "tokenizer/tokenizer_config.json": b"{}",
    "tokenizer/merges.txt": b"a b",
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": tensors(1),
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": tensors(2),
}
SENTENCE_TRANSFORMER: Files = {
    "modules.json": b"[]",
    "config.json": b"{}",
    "config_sentence_transformers.json": b"{}",
    "sentence_bert_config.json": b"{}",
    "model.safetensors": tensors(3),
    "1_Pooling/config.json": b"{}",
}


@pytest.mark.parametrize("model", [PIPELINE, SENTENCE_TRANSFORMER], ids=["diffusers", "sentence-transformers"])
@pytest.mark.parametrize("steps", [(), (10, 20)], ids=["alone", "beside steps"])
@pytest.mark.parametrize("place", ["", "final/"], ids=["at the top", "in a directory"])
def test_model_of_parts_is_restored_with_parts_that_have_no_weights(
    home: Home, model: Files, steps: tuple[int, ...], place: str
) -> None:
    """Its program writes it beside its own states, when training ends."""
    for step in steps:
        write(home.root, {f"checkpoint-{step}/random_states_0.pkl": pt(step)}, 1_000_000 + step)
        write(home.root, {f"checkpoint-{step}/model.safetensors": tensors(step)}, 1_000_000 + step)
    write(home.root, {"logs/run/config.json": b"{}"}, 1_000_100)
    saved = {f"{place}{name}": data for name, data in model.items()}
    write(home.root, saved, 1_000_100)
    home.taken()
    newest = {
        name: data
        for name, data in files(home.root).items()
        if name.startswith(f"checkpoint-{max(steps, default='')}/")
    }
    restore(home)
    assert files(home.root) == saved | newest


def test_damaged_file_that_was_taken_by_another_name_is_put_over_no_sound_file(home: Home, capsys) -> None:
    """A loop renames `last.ckpt` to `prev.ckpt` before it writes the next one."""
    for number in (1, 2, 3):
        if number > 1:
            (home.root / "last.ckpt").replace(home.root / "prev.ckpt")
        write(home.root, {"last.ckpt": pt(number)}, 1_000_000 + number)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    path = home.root / "prev.ckpt"
    status = path.stat()
    path.write_bytes(pt(2)[:-1] + b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    units = home.prepare(capsys)
    assert (home.root / "last.ckpt").read_bytes() == pt(3) and units["last.ckpt"]["verdict"] == "verified"
    assert units["prev.ckpt"]["moved"] == [".tierd-quarantine/prev.ckpt"]


def test_file_that_was_cut_in_its_writing_is_replaced_at_once(home: Home, capsys) -> None:
    for number in (1, 2):
        write(home.root, {"model.pt": pt(number), "optim.pt": pt(number, 3)}, 1_000_000 + number)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    before = files(home.root)
    write(home.root, {"model.pt": pt(3)[:-200]}, 1_000_003)
    home.prepare(capsys)
    assert files(home.root) == before


def test_newest_file_under_the_name_of_an_older_file_is_not_moved(home: Home, capsys) -> None:
    """A loop renames `ckpt.pt` before it writes the next one, and is killed between the two."""
    for number in (1, 2):
        if number > 1:
            (home.root / "ckpt.pt").replace(home.root / "ckpt.pt.bak")
        write(home.root, {"ckpt.pt": pt(number)}, 1_000_000 + number)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    write(home.root, {"ckpt.pt": pt(3)}, 1_000_003)
    (home.root / "ckpt.pt").replace(home.root / "ckpt.pt.bak")
    for _ in range(2):
        home.prepare(capsys)
        assert (home.root / "ckpt.pt.bak").read_bytes() == pt(3)


def test_emptied_directory_of_a_step_beside_other_series_is_restored(home: Home, capsys) -> None:
    for step in (1, 2):
        names = (f"template_{step}/m.pt", f"attempt_{step}/m.pt", f"tmpl/step_{step}/m.pt")
        write(home.root, {name: pt(step, number) for number, name in enumerate(names)}, 1_000_000 + step)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    before = files(home.root)
    (home.root / "tmpl/step_2/m.pt").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


def test_intact_directory_is_left_as_it_is(home: Home, capsys) -> None:
    saves(home, 10, 20, 30)
    flush(home.spool, home.tier)
    before = entries(home.root)
    units = home.prepare(capsys)
    assert {unit["verdict"] for unit in units.values()} == {"verified"} and set(units) == {
        *("epoch_10.pt", "epoch_20.pt", "epoch_30.pt", "*"),
    }
    assert entries(home.root) == before and not (home.root / ".tierd-quarantine").exists()


def test_damaged_file_without_a_step_is_replaced(home: Home, capsys) -> None:
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    path, before = home.root / "last.pt", entries(home.root)
    status = path.stat()
    path.write_bytes(before["last.pt"][:-1] + b"?")  # type: ignore[operator]
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert home.prepare(capsys)["*"]["replaced"]
    assert entries(home.root) == before


def test_file_without_a_step_is_restored_if_its_program_was_killed_before_it_wrote_it_anew(home: Home, capsys) -> None:
    """Lightning removes `last.ckpt` before it writes the next one, and begins at 0 without it."""
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    before = entries(home.root)
    write(home.root, {"epoch_30.pt": pt(30)}, 1_000_030)
    take(home.spool, home.root)
    for name in ("last.pt", "best.pt"):
        (home.root / name).unlink()
    home.prepare(capsys)
    assert entries(home.root) == before | {"epoch_30.pt": pt(30)}


def test_directory_that_its_program_deleted_is_not_restored(home: Home, capsys) -> None:
    for step in (10, 20):
        saved: Files = {f"{at}/{name}": pt(step) for at in ("old", "new") for name in (f"epoch_{step}.pt", "last.pt")}
        write(home.root, saved, 1_000_000 + step)
        take(home.spool, home.root)
    write(home.root, {"new/epoch_30.pt": pt(30), "new/last.pt": pt(30)}, 1_000_030)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    shutil.rmtree(home.root / "old")
    before = entries(home.root)
    home.prepare(capsys)
    assert entries(home.root) == before


def test_going_back_brings_no_newer_file_without_a_step(home: Home, capsys) -> None:
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(home.root), "--step", "10"]) == 0
    home.prepare(capsys)
    assert {name for name in entries(home.root) if name.endswith(".pt")} == {"epoch_10.pt"}


def detectron2(home: Home, *names: str) -> None:
    """fvcore, Checkpointer.save: a checkpoint without a step at the end, `model_final.pth`."""
    for second, name in enumerate(names):
        write(home.root, {name: pt(second), "last_checkpoint": name.encode()}, 1_000_000 + second)
        take(home.spool, home.root)
    flush(home.spool, home.tier)


@pytest.mark.parametrize("command", ["prepare", "restore"])
@pytest.mark.parametrize("names", [("model_0004999.pth", "model_final.pth"), ("model_final.pth", "model_0005999.pth")])
def test_pointer_on_a_new_node_names_the_newest_with_or_without_a_step(
    home: Home, capsys, command: str, names: tuple[str, ...]
) -> None:
    detectron2(home, "model_0003999.pth", *names)
    shutil.rmtree(home.root)
    home.root.mkdir()
    if command == "restore":
        restore(home)
    else:
        home.prepare(capsys)
    assert (home.root / "last_checkpoint").read_text() == names[1]


@pytest.mark.parametrize("is_newest", [True, False])
def test_lost_file_without_a_step_is_restored_with_the_pointer_only_if_it_is_the_newest(
    home: Home, capsys, is_newest: bool
) -> None:
    names = ["model_0004999.pth", "model_final.pth", "model_0005999.pth"]
    detectron2(home, *names[: 2 if is_newest else 3])
    before = files(home.root)
    (home.root / "model_final.pth").unlink()
    home.prepare(capsys)
    assert files(home.root) == before


def test_lost_pointer_is_put_back_and_another_choice_is_left(home: Home, capsys) -> None:
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    before = entries(home.root)
    (home.root / "last_checkpoint").unlink()
    (home.root / "newest").unlink()
    home.prepare(capsys)
    assert entries(home.root) == before
    (home.root / "last_checkpoint").write_text("out/epoch_10.pt\n")
    home.prepare(capsys)
    assert (home.root / "last_checkpoint").read_text() == "out/epoch_10.pt\n"


def test_versions_without_a_step_leave_checkpoints_with_a_step(home: Home) -> None:
    write(home.root, {"epoch_10.pt": pt(10)}, 1_000_010)
    for number in range(5):
        write(home.root, {"last.pt": pt(number)}, 1_000_100 + number)
        take(home.spool, home.root)
    steps = {part.checkpoint.step for part in home.spool.parts(RUN)}
    assert steps == {10}
    assert {part.checkpoint.step for part in home.spool.parts(stepless_run(RUN))} == set(range(1_000_100, 1_000_105))


def test_ls_shows_an_order_and_not_a_step(home: Home, capsys) -> None:
    saves(home, 10)
    flush(home.spool, home.tier)
    assert run(["ls", str(home.tier), "--run", stepless_run(RUN)]) == 0
    assert "order 1000010" in capsys.readouterr().out
    assert run(["ls", str(home.tier), "--run", RUN]) == 0
    assert "order" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("latest", "epoch_10"), ("counter", "10\n"), ("at.json", '{"step": 10}')])
def test_text_that_names_a_checkpoint_is_restored(home: Home, name: str, text: str) -> None:
    write(home.root, {"a/epoch_10.pt": pt(10), f"a/{name}": text.encode(), "notes.md": b"epoch_100"}, 1_000_010)
    home.taken()
    restore(home)
    assert files(home.root) == {"a/epoch_10.pt": pt(10), f"a/{name}": text.encode()}


def test_directory_without_a_step_is_restored_beside_the_files_that_lie_in_it_now(home: Home, capsys) -> None:
    """Alone in `saves/`, `v10` and the logs beside it are one checkpoint; beside `v20` it is one by itself."""
    for step in (10, 20):
        write(home.root, {f"saves/v{step}/{name}": pt(step) for name in ("a.pt", "b.pt")}, 1_000_000 + step)
        write(home.root, {"saves/.lock": b""}, 1_000_000)
        take(home.spool, home.root)
        flush(home.spool, home.tier)
    write(home.root, {f"saves/v30/{name}": pt(30) for name in ("a.pt", "b.pt")}, 1_000_030)
    for name in ("saves/v10", "saves/v20"):
        shutil.rmtree(home.root / name)
    before = files(home.root)
    assert run(["restore", str(home.tier), "--run", RUN, "--into", str(home.root)]) == 0
    assert files(home.root).items() >= before.items()


@pytest.mark.parametrize("name", ["latest", "state.json"])
@pytest.mark.parametrize("length", [0, 7])
def test_pointer_that_was_cut_in_its_writing_is_put_back(home: Home, name: str, length: int, capsys) -> None:
    written = {"latest": b"epoch_20.pt", "state.json": b'{"last": "epoch_20.pt", "best": 3}'}
    write(home.root, {"epoch_20.pt": pt(20), **written}, 1_000_020)
    home.taken()
    (home.root / name).write_bytes(written[name][:length])
    home.prepare(capsys)
    assert (home.root / name).read_bytes() == written[name]


def test_link_that_leads_out_is_no_pointer(home: Home) -> None:
    write(home.root, {"epoch_10.pt": pt(10)}, 1_000_010)
    (home.root / "newest").symlink_to("../out/epoch_10.pt")
    (home.root / "whole").symlink_to(home.root / "epoch_10.pt")
    home.taken()
    restore(home)
    assert entries(home.root) == {"epoch_10.pt": pt(10), "whole": "epoch_10.pt"}


def test_files_that_continue_a_name_are_of_the_checkpoint(home: Home) -> None:
    written: Files = {"model.iter10.pt": pt(10), "model.iter10.pt.yml": b"a: 1", "model.iter10.json": b"{}"}
    written |= {"DONE_10": b""}
    write(home.root, {"model.iter0.pt": pt(0), "DONE_0": b""}, 1_000_000)
    write(home.root, written | {"train.log": b"10", "notes_10.md": b"", "README": b""}, 1_000_010)
    home.taken()
    restore(home)
    assert files(home.root) == written


def test_file_that_another_file_was_renamed_beside_is_restored_as_it_was_last(home: Home) -> None:
    write(home.root, {"epoch_10.pt": pt(10), "a.pt": pt(1), "last.pt": pt(1)}, 1_000_010)
    take(home.spool, home.root)
    (home.root / "a.pt").rename(home.root / "z.pt")
    write(home.root, {"epoch_20.pt": pt(20), "last.pt": pt(2)}, 1_000_020)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    restore(home)
    assert files(home.root) == {"epoch_20.pt": pt(20), "last.pt": pt(2), "z.pt": pt(1)}


def test_pointer_names_the_newest_of_several_series(home: Home) -> None:
    """mmengine: `best_epoch_2.pth` lies beside `epoch_2.pth`, and `last_checkpoint` names the newest."""
    for step in (10, 20):
        saved = {f"epoch_{step}.pt": pt(step), "last_checkpoint": f"./out/epoch_{step}.pt".encode()}
        write(home.root, saved | ({f"best_epoch_{step}.pt": pt(step)} if step == 10 else {}), 1_000_000 + step)
        take(home.spool, home.root)
    flush(home.spool, home.tier)
    restore(home)
    assert files(home.root)["last_checkpoint"] == b"./out/epoch_20.pt"


@pytest.mark.parametrize("command", ["prepare", "restore"])
def test_version_from_before_any_step_gives_way_to_a_newer_version(home: Home, capsys, command: str) -> None:
    """sam2: `checkpoint.pt` after each epoch, and `checkpoint_10.pt` later."""
    write(home.root, {"checkpoint.pt": pt(9)}, 1_000_009)
    take(home.spool, home.root)
    write(home.root, {"checkpoint.pt": pt(10), "checkpoint_10.pt": pt(10)}, 1_000_010)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    if command == "prepare":
        home.prepare(capsys)
    else:
        home.root.mkdir()
        restore(home)
    assert files(home.root) == {"checkpoint.pt": pt(10), "checkpoint_10.pt": pt(10)}


def test_pointer_to_a_moved_checkpoint_names_the_newest_whole_checkpoint(home: Home, capsys) -> None:
    saves(home, 10, 20)
    flush(home.spool, home.tier)
    (home.root / "epoch_30.pt").write_bytes(pt(30)[:-50])
    (home.root / "last_checkpoint").write_text("out/epoch_30.pt\n")
    (home.root / "newest").unlink()
    (home.root / "newest").symlink_to("epoch_30.pt")
    assert home.prepare(capsys)["epoch_30.pt"]["moved"]
    assert (home.root / "last_checkpoint").read_text() == "out/epoch_20.pt\n"
    assert str((home.root / "newest").readlink()) == "epoch_20.pt"


def test_restore_writes_files_without_a_step_if_no_unit_with_a_step_was_taken(home: Home) -> None:
    """Beside it lies a first save in which the program was killed."""
    write(home.root, {"last.pt": pt(1), "step_10/model.pt.tmp": pt(10), "step_10/a.pt": pt(10)}, 10)
    assert [part.checkpoint.run for part in take(home.spool, home.root).parts] == [f"{RUN}.stepless"]
    flush(home.spool, home.tier)
    restore(home)
    assert files(home.root) == {"last.pt": pt(1)}


def test_newer_files_without_a_step_that_may_be_unfinished_are_not_replaced_by_older_files(home: Home, capsys) -> None:
    write(home.root, {"current/model.pt": pt(1), "current/optim.pt": pt(1)}, 1_000_010)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    write(home.root, {"current/model.pt": pt(2), "current/optim.pt.partial": pt(2)}, 1_000_020)
    (home.root / "current/optim.pt").unlink()
    before = files(home.root)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"unknown"}
    assert files(home.root) == before


def grown(home: Home, name: str) -> Path:
    """A directory without a step in which a file decayed after it was taken, and another one was added since."""
    write(home.root, {"run/part-1/model.pt": pt(1), "run/part-1/rng.dat": b"12345678"}, 1_000_000)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    path = home.root / "run/part-1/rng.dat"
    status = path.stat()
    path.write_bytes(b"12345679")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    write(home.root, {f"run/{name}": pt(3)}, 2_000_000)
    return path


@pytest.mark.parametrize("name", ["part-3/model.pt", "part-3/model.pt.partial"])
def test_decayed_file_is_replaced_in_a_directory_that_has_grown(home: Home, name: str, capsys) -> None:
    path = grown(home, name)
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == before | {"run/part-1/rng.dat": b"12345678"} and path.is_file()
    assert (home.root / ".tierd-quarantine/run/part-1/rng.dat").read_bytes() == b"12345679"


def test_file_with_a_time_of_its_own_is_left_in_a_directory_that_has_grown(home: Home, capsys) -> None:
    """An older file that a person copied there is no decay."""
    path = grown(home, "part-3/model.pt")
    os.utime(path, ns=(0, 999_000 * 10**9))
    before = files(home.root)
    home.prepare(capsys)
    assert files(home.root) == before and not (home.root / ".tierd-quarantine").exists()


@pytest.mark.parametrize("cut", ["", "out/epoch_20.pt\n"])
def test_pointer_that_a_killed_program_had_yet_to_write_is_restored(home: Home, capsys, cut: str) -> None:
    saves(home, 10, 20)
    write(home.root, {"epoch_30.pt": pt(30)}, 1_000_030)
    (home.root / "last_checkpoint").write_text(cut)
    (home.root / "newest").unlink()
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert "epoch_30.pt" in files(home.root)
    assert (home.root / "last_checkpoint").read_text() == "out/epoch_30.pt\n"
    assert str((home.root / "newest").readlink()) == "epoch_30.pt"


@pytest.mark.parametrize(
    ("text", "former", "newest", "moved"),
    [
        ("/work/x/epoch_4.pth", "epoch_4.pth", "epoch_5.pth", "/work/x/epoch_5.pth"),
        ("model_0000999", "out/model_0000999.pth", "out/model_0001999.pth", "model_0001999"),
        ("9", "checkpoint-9", "checkpoint-10", "10"),
        ("000900", "900", "1000", "001000"),
        ("epoch_4.pth", "epoch_4.pth", "best_epoch_5.pth", None),
        ("epoch_4.pth", "a/epoch_4.pth", "b/epoch_5.pth", None),
        ("epoch_40.pth", "epoch_4.pth", "epoch_5.pth", None),
    ],
)
def test_pointer_names_a_later_checkpoint_as_it_named_the_former(
    text: str, former: str, newest: str, moved: str | None
) -> None:
    result = pointer_to_newest(Pointer("last", text), former, newest)
    assert (result.text if result else None) == moved


def test_pointer_of_one_directory_is_restored_beside_newer_checkpoints_of_many_others(home: Home, capsys) -> None:
    write(home.root, {"a/epoch_10.pt": pt(10), "a/latest": b"epoch_10"}, 1_000_010)
    take(home.spool, home.root)
    others: Files = {f"{name}/epoch_15.pt": pt(number) for number, name in enumerate("bcdefghij")}
    write(home.root, others, 1_000_015)
    take(home.spool, home.root)
    (home.root / "a/latest").unlink()
    write(home.root, {"a/epoch_20.pt": pt(20)}, 1_000_020)
    take(home.spool, home.root)
    flush(home.spool, home.tier)
    home.prepare(capsys)
    assert (home.root / "a/latest").read_text() == "epoch_20"
