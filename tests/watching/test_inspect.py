"""`tierd inspect`: what its how-to says of it, on checkpoints of every layout."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.layouts import (
    WRITERS,
    accelerate,
    composer,
    deepspeed,
    distributed,
    hf_model,
    lightning,
    megatron,
    nemo,
    orbax,
    plain_dcp,
    pt,
    tensors,
    trainer,
)
from support.timed import timed_cli

from tierd.cli import run
from tierd.core.dcp_pickle import DTYPES
from tierd.formats.byte_source import ByteSource
from tierd.watching import directory_tree
from tierd.watching import unit as programs
from tierd.watching.named_directory import FollowingTree
from tierd.watching.unit import ListedEntry, Listing
from tierd.watching.unit_detection import units
from tierd.watching.unit_inspection import InspectedUnit, inspect_unit

ROOT = Path(__file__).parents[2]
EXITS = {"sound": 0, "damaged": 5, "unreadable": 6, "incomplete": 4, "changing": 4, "unknown": 4}
# Names in the fixtures whose content has no structure, by the how-to; and markers, which are no part of a unit.
PLAIN = {"merges.txt", "model.yaml", "a" * 32, "checkpoint", "latest", "latest_checkpointed_iteration.txt"}

Ask = Callable[..., tuple[int, list[dict]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The exit code and the units of `tierd inspect`, which have to agree."""
    timed_cli(monkeypatch, recheck_delay_s=0.0)

    def asked(*paths: Path) -> tuple[int, list[dict]]:
        code = run(["inspect", "--json", *map(str, paths)])
        found = json.loads(capsys.readouterr().out)["units"]
        codes = {EXITS[one["status"]] for one in found}
        assert code == next(one for one in (5, 6, 4, 0) if one in codes)
        assert all(finding["status"] != "sound" for one in found for finding in one["findings"])
        return code, found

    return asked


def contents(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_a_checkpoint_of_each_program_is_recognised_and_sound(write: Callable, tmp_path: Path, ask: Ask) -> None:
    path = write(tmp_path)
    before = {one: (one.read_bytes(), one.stat().st_mtime_ns) for one in contents(tmp_path)}
    for asked in (path, tmp_path):
        code, [found] = ask(asked)
        assert (code, found["status"], found["findings"]) == (0, "sound", [])
        assert (found["program"], found["step"]) == WRITERS[write]
    unit = [one for one in contents(tmp_path) if one.name not in {"latest", "checkpoint", *programs_markers(write)}]
    if write.__name__ == "trainer_on_deepspeed":
        unit.append(path / "latest")
    assert found["files"] == len(unit) and found["bytes"] == sum(one.stat().st_size for one in unit)
    assert {one: (one.read_bytes(), one.stat().st_mtime_ns) for one in contents(tmp_path)} == before


def programs_markers(write: Callable) -> set[str]:
    return {"latest_checkpointed_iteration.txt"} if write.__name__.startswith("megatron") else set()


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_file_that_is_truncated_or_zeroed_is_detected(write: Callable, tmp_path: Path, ask: Ask) -> None:
    """Each file of each layout in turn; whole again, the checkpoint is sound again."""
    write(tmp_path)
    for path in contents(tmp_path):
        if path.name in PLAIN:
            continue
        whole = path.read_bytes()
        for torn in (whole[: len(whole) // 2], whole[:-1], b"", bytes(len(whole))):
            if torn.strip() == whole.strip():  # the last byte was an end of line
                continue
            path.write_bytes(torn)
            code, found = ask(tmp_path)
            assert code in (4, 5), (path, len(torn), found)
        path.write_bytes(whole)
    assert ask(tmp_path)[0] == 0


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
NEEDED = {
    "trainer": ("trainer_state.json", *SHARDS),
    "trainer_on_deepspeed": ("trainer_state.json", "latest", *SHARDS),
    "accelerate": ("random_states_0.pkl",),
    "lightning_sharded": (".metadata", "meta.pt", "__0_0.distcp"),
    "plain_dcp": (".metadata", "__0_0.distcp"),
    "torchtitan": (".metadata", "__0_0.distcp"),
    "torch_checkpointing": ("model_0.pt", "optimizer_0.pt"),
    "deepspeed": ("latest", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    "megatron": ("latest_checkpointed_iteration.txt", ".metadata", "metadata.json", "__0_0.distcp"),
    "megatron_by_ranks": ("latest_checkpointed_iteration.txt", "model_optim_rng.pt"),
    "nemo": (".metadata", "__0_0.distcp"),
    "tensorflow": ("ckpt-5.index", "ckpt-5.data-00000-of-00002", "ckpt-5.data-00001-of-00002"),
    "composer": ("ep0-ba10-rank0.pt",),
    "hf_model": SHARDS,
    "shards_alone": SHARDS,
}


@pytest.mark.parametrize("write", [one for one in WRITERS if one.__name__ in NEEDED], ids=lambda one: one.__name__)
def test_missing_file_is_detected_where_another_file_names_it(write: Callable, tmp_path: Path, ask: Ask) -> None:
    write(tmp_path / "out")
    assert {path.name for path in contents(tmp_path / "out")} >= set(NEEDED[write.__name__])
    for path in contents(tmp_path / "out"):
        if path.name in NEEDED[write.__name__]:
            away = path.rename(tmp_path / "away")
            code, found = ask(tmp_path / "out")
            assert code in (4, 5), (path.name, found)
            away.rename(path)


def test_undetected_bit_flip_of_dcps_files_changes_no_loaded_value(tmp_path: Path, ask: Ask) -> None:
    """Every 47th byte of the tensors' file, from a drawn one on. The judge is torch."""
    path = plain_dcp(tmp_path) / "__0_0.distcp"
    whole = path.read_bytes()
    missed = []
    for place in range(random.randrange(47), len(whole), 47):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        code, _ = ask(tmp_path)
        if code != 5:
            missed.append(place)
        if code == 0:
            state = {"model": {"weight": torch.zeros(300)}, "optimizer": {"steps": [0, 0], "lr": torch.zeros(20)}}
            dcp.load(state, checkpoint_id=path.parent, no_dist=True)
            assert torch.equal(state["model"]["weight"], torch.arange(300.0)) and state["optimizer"]["steps"] == [1, 2]
    begin = whole.index(torch.arange(300.0).numpy().tobytes())
    assert not set(missed) & set(range(begin, begin + 1200))


# -- what is told, and how --------------------------------------------------------------------------------------------


def test_the_file_the_byte_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    path = trainer(tmp_path) / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(300.0).numpy().tobytes()) + 500] ^= 1
    path.write_bytes(data)
    code, [found] = ask(tmp_path)
    [finding] = found["findings"]
    assert code == 5 and finding["file"] == str(path) and "CRC-32" in finding["reason"]
    assert finding["offset"] == data.index(torch.arange(125.0).numpy().tobytes())
    assert run(["inspect", str(tmp_path)]) == 5
    out = capsys.readouterr().out
    assert f"{path}: byte {finding['offset']}: damaged: " in out and "HF Trainer" in out


def test_an_index_that_names_the_wrong_shard(tmp_path: Path, ask: Ask) -> None:
    here = hf_model(tmp_path)
    index = here / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["b.weight"] = SHARDS[0]
    index.write_text(json.dumps(said))
    code, [found] = ask(tmp_path)
    [finding] = found["findings"]
    assert code == 5 and finding["file"] == str(here / SHARDS[0])
    assert finding["reason"] == "it lacks tensor 'b.weight', which 'model.safetensors.index.json' places in it"


def test_several_paths_and_several_checkpoints(tmp_path: Path, ask: Ask) -> None:
    first, second = trainer(tmp_path / "a"), megatron(tmp_path / "b")
    (second / ".metadata").unlink()
    code, found = ask(first, tmp_path / "b")
    assert code == 4 and [(one["path"], one["status"]) for one in found] == [
        (str(first), "sound"),
        (str(second), "incomplete"),
    ]
    shutil.copytree(first, tmp_path / "a" / "checkpoint-600")
    (tmp_path / "a" / "checkpoint-600" / "model-00002-of-00002.safetensors").unlink()
    _, found = ask(tmp_path / "a")
    assert [one["step"] for one in found] == [500, 600] and [one["status"] for one in found] == ["sound", "incomplete"]


def test_inspect_reports_uncovered_files(tmp_path: Path, ask: Ask) -> None:
    path = trainer(tmp_path)
    _, [found] = ask(path)
    reported = {one["file"]: one["reason"] for one in found["uncovered"]}
    assert "no digest" in reported[str(path / "model-00001-of-00002.safetensors")]
    assert "no format" in reported[str(path / "merges.txt")]
    assert str(path / "optimizer.pt") not in reported


def test_a_path_that_is_not_there_or_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert run(["inspect", str(tmp_path / "nothing")]) == 4
    assert run(["inspect", str(tmp_path / "pipe")]) == 3
    assert run(["inspect", str(tmp_path / "loop")]) == 3
    assert run(["inspect"]) == 3
    err = capsys.readouterr().err
    assert "no such file" in err and "neither a file nor a directory" in err and "Traceback" not in err


def test_a_path_that_is_not_there_hides_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pt(tmp_path / "right.pt")
    bad = tmp_path / "bad.pt"
    bad.write_bytes((tmp_path / "right.pt").read_bytes()[:-100])
    absent, other = str(tmp_path / "absent"), str(tmp_path / "other")
    for paths, code in (([str(bad), absent], 5), ([absent, str(tmp_path / "right.pt"), other], 4)):
        assert run(["inspect", "--json", *paths]) == code
        reported = capsys.readouterr()
        assert len(json.loads(reported.out)["units"]) == 1 and f"{absent}: no such file" in reported.err
    assert f"{other}: no such file" in reported.err


def test_quarantine_directory_of_tierd_is_not_inspected(tmp_path: Path, ask: Ask) -> None:
    deepspeed(tmp_path / "d")
    bad = tmp_path / "d" / ".tierd-quarantine" / "bad.pt"
    pt(bad)
    bad.write_bytes(bad.read_bytes()[:-100])
    for path in (tmp_path / "d", tmp_path):
        assert ask(path)[0] == 0
    for path in (bad, bad.parent):  # unless it is named
        assert ask(path)[0] == 5


def test_directory_without_a_checkpoint_is_unknown(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    code, [found] = ask(tmp_path)
    assert (code, found["status"], found["program"]) == (4, "unknown", None)
    code, [found] = ask(tmp_path / "notes.txt")
    assert (code, found["status"]) == (4, "unknown")
    (tmp_path / "weights.index").write_bytes(b"faiss")  # nobody's but TensorFlow's with data beside it
    assert ask(tmp_path / "weights.index")[0] == 4


# -- not complete -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "change", "reason"),
    [
        (trainer, lambda path: (path / "checkpoint-is-incomplete.txt").write_text("..."), "checkpoint-is-incomplete"),
        (trainer, lambda path: (path / "trainer_state.json").unlink(), "neither trainer_state.json"),
        (trainer, lambda path: pt(path / "rng_state_3.pth"), "rank 2"),
        (deepspeed, lambda path: (path.parent / "latest").unlink(), "latest is not there"),
        (deepspeed, lambda path: (path.parent / "latest").write_text("global_step10"), "global_step10"),
        (deepspeed, lambda path: pt(path / "zero_pp_rank_9_mp_rank_00_optim_states.pt"), "rank 3 0"),
        (megatron, lambda path: (path.parent / "latest_checkpointed_iteration.txt").write_text("20"), "names '20'"),
        (nemo, lambda path: (path.parent / f"{path.name}-unfinished").touch(), "-unfinished is there"),
        (lightning, lambda path: (path.parent / f"{path.stem}-unfinished").touch(), "-unfinished is there"),
        (megatron, lambda path: (path / "metadata.json").unlink(), "metadata.json is not there"),
        (orbax, lambda path: path.rename(f"{path}.orbax-checkpoint-tmp-17"), "being written"),
        (
            orbax,
            lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'),
            "when the checkpoint was committed",
        ),
        (plain_dcp, lambda path: (path / ".metadata").rename(path / ".metadata.tmp"), ".metadata is not there"),
        (composer, lambda path: pt(path.with_name("ep0-ba10-rank3.pt")), "rank 2"),
    ],
)
def test_incomplete(write: Callable, change: Callable, reason: str, tmp_path: Path, ask: Ask) -> None:
    change(write(tmp_path))
    code, [found] = ask(tmp_path)
    assert (code, found["status"]) == (4, "incomplete") and reason in found["findings"][0]["reason"]


def test_accelerates_registered_objects_are_those_of_the_checkpoint_before(tmp_path: Path, ask: Ask) -> None:
    home = accelerate(tmp_path)
    for number in (4, 5):
        shutil.copytree(home, home.with_name(f"checkpoint_{number}"))
    for path in (home, home.with_name("checkpoint_5")):
        pt(path / "custom_checkpoint_0.pkl")
    code, found = ask(tmp_path)
    assert (code, [one["status"] for one in found]) == (4, ["sound", "incomplete", "sound"])
    assert "0 of 1 custom_checkpoint_N.pkl" in str(found[1]), "it was killed before its registered object"


def test_later_step_in_the_tracker_makes_earlier_steps_complete(tmp_path: Path, ask: Ask) -> None:
    path = deepspeed(tmp_path)
    (tmp_path / "latest").write_text("global_step500\n")
    assert ask(path)[0] == 0
    (tmp_path / "latest").write_text("best")
    os.utime(tmp_path / "latest", ns=(1, path.stat().st_mtime_ns + 10**10))
    assert ask(path)[0] == 0
    os.utime(tmp_path / "latest", ns=(1, 1))
    assert ask(path)[0] == 4


# -- what others write meanwhile --------------------------------------------------------------------------------------


class Meddling(FollowingTree):
    """Does something to the files the first time that one is opened."""

    act: Callable[[], object]
    early = False  # before it is opened, or after

    def opened(self, path: str, listed: ListedEntry):  # type: ignore[no-untyped-def]
        act, type(self).act = type(self).act, lambda: None
        if type(self).early:
            act()
        found = super().opened(path, listed)

        class Opened:
            def __enter__(self) -> ByteSource:
                source = found.__enter__()
                if not Meddling.early:
                    act()
                return source

            def __exit__(self, *error: object) -> bool | None:
                return found.__exit__(*error)

        return Opened()


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: os.truncate(path, 10),
        lambda path: path.unlink(),
        lambda path: os.replace(shutil.copy(path, f"{path}.new"), path),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: os.utime(path, ns=(5, 5)),
    ],
    ids=["grows", "is cut", "is deleted", "is replaced", "becomes a link", "becomes a pipe", "is written to"],
)
@pytest.mark.parametrize("early", [True, False], ids=["before it is opened", "while it is read"])
def test_a_file_that_changes_is_still_being_written(
    act: Callable, early: bool, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    pt(path)
    monkeypatch.setattr("tierd.watching.named_directory.FollowingTree", Meddling)
    monkeypatch.setattr(Meddling, "early", early)
    Meddling.act = lambda: act(path)
    code, [found] = ask(path)
    assert (code, found["status"]) == (4, "changing") and "still being written" in found["findings"][0]["reason"]


def test_damage_in_a_file_that_is_written_to_a_moment_later_is_none(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    pt(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    monkeypatch.setattr("tierd.cli.commands.inspect_command.time.sleep", lambda _: path.write_bytes(whole[:2000]))
    assert ask(path)[1][0]["status"] == "changing"
    monkeypatch.setattr("tierd.cli.commands.inspect_command.time.sleep", lambda _: None)
    assert ask(path)[1][0]["status"] == "damaged"


# -- hostile input ----------------------------------------------------------------------------------------------------


def test_links_and_special_files_are_named_and_not_followed(tmp_path: Path, ask: Ask) -> None:
    path = trainer(tmp_path / "out")
    secret = tmp_path / "secret.json"
    secret.write_text("no JSON")
    (path / "link.json").symlink_to(secret)
    os.mkfifo(path / "pipe.pt")
    (path / "directory").symlink_to(tmp_path)
    code, [found] = ask(tmp_path / "out")
    assert (code, found["status"]) == (4, "unknown")
    named = {one["file"] for one in found["findings"]}
    assert named == {str(path / name) for name in ("link.json", "pipe.pt", "directory")}
    link = tmp_path / "latest-checkpoint"
    link.symlink_to(path)
    code, [found] = ask(link)
    assert found["path"] == str(link) and found["program"] == "HF Trainer"


def test_metadata_that_leads_elsewhere_is_damage(tmp_path: Path, ask: Ask) -> None:
    path = plain_dcp(tmp_path)
    data = (path / ".metadata").read_bytes()
    for name in (b"../../x.distc", b"/etc/shadow_", b"__1_0.distcp_"):
        (path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", name[:12]))
        code, [found] = ask(tmp_path)
        assert (code, found["findings"][0]["offset"]) == (5, None) and "not there" in found["findings"][0]["reason"]


def test_nothing_is_unpickled(tmp_path: Path, ask: Ask) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    path = tmp_path / "save"
    distributed(path)
    torch.save(Evil(), tmp_path / "model.pt")
    torch.save(Evil(), path / "other.pt")
    assert ask(tmp_path)[0] == 0
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    code, found = ask(path)
    assert code == 4 and "posix.system" in found[0]["findings"][0]["reason"]
    assert not (tmp_path / "executed").exists()


def test_names_that_claim_millions_of_ranks_take_no_time(tmp_path: Path, ask: Ask) -> None:
    many = "9" * 60
    pt(tmp_path / "a" / f"zero_pp_rank_{many}_mp_rank_{many}_optim_states.pt")
    pt(tmp_path / "a" / "zero_pp_rank_0_mp_rank_0_optim_states.pt")
    pt(tmp_path / f"b-rank{many}.pt")
    tensors(tmp_path / f"model-00001-of-{many}.safetensors")
    (tmp_path / "checkpoint-7").mkdir()
    for name in ("rng_state_0.pth", f"rng_state_{many}.pth", "trainer_state.json"):
        (tmp_path / "checkpoint-7" / name).write_text("{}")
    code, found = ask(tmp_path)
    assert code == 4 and len(found) == 4 and {one["status"] for one in found} <= {"incomplete", "damaged"}


def test_names_that_a_terminal_obeys_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pt(tmp_path / "a\x1b[31m\nb.pt")
    os.truncate(tmp_path / "a\x1b[31m\nb.pt", 300)
    run(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b" in out


def test_too_many_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(directory_tree, "MAX_NAMES", 5)
    trainer(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 3
    assert "more than 5 names" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path: Path, ask: Ask) -> None:
    path = trainer(tmp_path)
    (path / "optimizer.pt").chmod(0)
    code, [found] = ask(path)
    assert (code, found["status"]) == (6, "unreadable")


def test_an_error_of_the_disk_is_not_damage(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trainer(tmp_path)

    def failing(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tierd.watching.directory_tree.os.pread", failing)
    code, [found] = ask(path)
    assert (code, found["status"]) == (6, "unreadable") and "Input/output" in found["findings"][0]["reason"]


# -- the pure part ----------------------------------------------------------------------------------------------------


def test_units_of_a_listing_touch_no_file() -> None:
    """Names alone: 40 launches of 50 checkpoints each, and one that is still to come."""
    one = ListedEntry("file", 10)
    names = {f"run{run}/checkpoint-{step}/trainer_state.json": one for run in range(40) for step in range(50)}
    names |= {"run0/checkpoint-50/optimizer.pt": one}
    directories = {str(Path(name).parent): ListedEntry("directory") for name in names}
    directories |= {f"run{run}": ListedEntry("directory") for run in range(40)}
    found = units(Listing(directories | names))
    assert len(found) == 2_001 and [unit.path for unit in found if unit.missing_reason] == ["run0/checkpoint-50"]


def test_a_unit_whose_opener_fails_is_unreadable() -> None:
    [unit] = units(Listing({"model.pt": ListedEntry("file", 10)}))

    def failing(path: str):  # type: ignore[no-untyped-def]
        raise PermissionError(13, "Permission denied")

    found = inspect_unit(unit, {"model.pt": 10}, failing)
    assert isinstance(found, InspectedUnit) and found.status == "unreadable"


def test_the_names_of_dtypes_are_those_of_torch() -> None:
    assert set(DTYPES) >= {name for name, one in vars(torch).items() if isinstance(one, torch.dtype)}


def test_the_how_to_s_table_is_that_of_the_programs() -> None:
    section = (
        (ROOT / "docs" / "reference" / "formats.md")
        .read_text()
        .split("<!-- layouts: made of tierd/watching/unit.py -->\n")[1]
    )
    rows = [f"| {one.program} | {one.unit} | {one.complete} |" for one in programs.LAYOUTS]
    assert section.split("<!-- layouts: end -->")[0].splitlines()[2:] == rows
