"""Existing checkpoints of other programs become verified ones of a run, as their files, in the order of steps."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import layouts
from support.doubles import Double, Killed, contents, dying, flipped, is_chunk
from support.layouts import WRITERS
from support.watched_run import RUN, files
from support.world import commit, part, steps_on

from tierd.cli import run
from tierd.core.manifest_codec import decode
from tierd.daemon.intake import unit_import
from tierd.daemon.intake.unit_files import open_directory_source
from tierd.daemon.intake.unit_import import ImportedRun, import_units
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore

POINTERS = ("latest", "latest_checkpointed_iteration.txt", "checkpoint")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "tier").mkdir()
    return tmp_path / "out"


def checkpoint(root: Path, step: int, seconds: int) -> Path:
    """An HF checkpoint of a step, that was last written at a time."""
    layouts.version = float(step)
    here = layouts.trainer(root / "scratch")
    (here / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "log_history": [{"step": step, "eval_loss": 1 / step}]})
    )
    here = here.rename(root / f"checkpoint-{step}")
    (root / "scratch").rmdir()
    for path in here.rglob("*"):
        os.utime(path, (seconds, seconds))
    return here


def imported(path: Path, tier: Path | str, capsys: pytest.CaptureFixture[str], *more: str, code: int = 0):  # type: ignore[no-untyped-def]
    capsys.readouterr()
    assert run(["import", str(path), "--run", RUN, "--to", str(tier), *more, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def check_put_back(root: Path, tmp_path: Path, unit: str) -> None:
    """The newest checkpoint of the run on the tier is put back as the files that were written below `root`."""
    assert run(["restore", str(tmp_path / "tier"), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    restored, written = files(tmp_path / "back"), files(root)
    for name in POINTERS:  # which are written anew
        restored.pop(name, None)
    assert restored and {name: written[name] for name in restored} == restored
    assert {name for name in written if name.startswith(f"{unit}/")} <= restored.keys()


@pytest.mark.parametrize("writer", WRITERS, ids=[writer.__name__ for writer in WRITERS])
def test_every_layout_is_imported_and_put_back_in_place(
    writer: Callable[[Path], Path], root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, step = WRITERS[writer]
    writer(root)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    more = () if step is not None else ("--step", "7")
    (unit,) = imported(root, tmp_path / "tier", capsys, *more)["imported"]["units"]
    assert (unit["program"], unit["step"]) == (program, 7 if step is None else step)
    kept = [path for path in tmp_path.rglob("*") if "tier" not in path.relative_to(tmp_path).parts]
    assert {path: path.lstat().st_mtime_ns for path in kept} == {
        path: at for path, at in before.items() if path in kept
    } and len(kept) == len(before) - 1
    check_put_back(root, tmp_path, unit["path"])


def test_several_checkpoints_are_imported_in_the_order_of_their_steps_at_any_times(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cp -r` gives them the times of the copy, in the order of names: 1000 before 500."""
    for seconds, step in enumerate((1000, 1500, 500), 1_800_000_000):
        checkpoint(root, step, seconds)
    tier = tmp_path / "tier"
    answer = imported(root, tier, capsys)
    assert [(one["step"], one["was_there"]) for one in answer["imported"]["units"]] == [
        *((500, False), (1000, False), (1500, False))
    ]
    assert answer["unkept"] == [] and not answer["imported"]["refused"]
    assert len({one["attempt"] for one in answer["imported"]["units"]}) == 1
    assert run(["ls", str(tier), "--json"]) == 0
    first, *_ = found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (first["step"], first["resumes"], first["metrics"]) == (1500, True, {"eval_loss": 1 / 1500})
    assert [one["step"] for one in found] == [1500, 1000, 500]
    checkpoint(root, 2000, 1_800_000_009)
    again = imported(root, tier, capsys)
    assert [(one["step"], one["was_there"], bool(one["sent"])) for one in again["imported"]["units"]] == [
        *((500, True, False), (1000, True, False), (1500, True, False), (2000, False, True))
    ]
    assert again["unkept"] == [500]  # the default keeps three
    assert run(["verify", str(tier)]) == 0
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    two = imported(root / "checkpoint-500", f"file://{tmp_path}/other", capsys)
    assert [one["path"] for one in two["imported"]["units"]] == ["checkpoint-500"]


@pytest.mark.parametrize("name", ["describe_unit", "_inspect"])
def test_checkpoint_with_an_unforeseen_error_stops_no_other(
    name: str, root: Path, tmp_path: Path, capsys, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    for step in (500, 1000):
        checkpoint(root, step, 1_800_000_000 + step)
    real = getattr(unit_import, name)

    def fails(*given: object) -> object:
        if any(getattr(one, "path", "") == "checkpoint-500" for one in given):
            raise ZeroDivisionError("nobody foresaw this")
        return real(*given)

    monkeypatch.setattr(unit_import, name, fails)
    found = imported(root, tmp_path / "tier", capsys, code=4)["imported"]
    assert [one["step"] for one in found["units"]] == [1000]
    ((path, reason),) = [(one["path"], one["reason"]) for one in found["refused"]]
    assert path == "checkpoint-500" and "ZeroDivisionError: nobody foresaw this" in reason


def test_one_step_is_chosen_or_given(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (500, 1000):
        checkpoint(root, step, 1_800_000_000 + step)
    layouts.tensors(root / "final" / "weights.safetensors")
    tier = tmp_path / "tier"
    answer = imported(root, tier, capsys, "--step", "1000")
    assert [one["step"] for one in answer["imported"]["units"]] == [1000] and not answer["imported"]["refused"]
    assert run(["import", str(root), "--run", RUN, "--to", str(tier), "--step", "7"]) == 4
    assert "the steps there are: 500, 1000" in capsys.readouterr().err
    answer = imported(root, tier, capsys, code=4)
    (left,) = answer["imported"]["refused"]
    assert (left["path"], left["status"]) == ("final/weights.safetensors", "stepless")
    file = root / "final" / "weights.safetensors"
    answer = imported(file, tier, capsys, "--step", "1200")
    assert [(one["path"], one["step"]) for one in answer["imported"]["units"]] == [("weights.safetensors", 1200)]


def test_unsound_checkpoint_is_named_and_left_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (500, 1000, 1500):
        checkpoint(root, step, 1_800_000_000 + step)
    (root / "checkpoint-500" / "trainer_state.json").unlink()
    answer = imported(root, tmp_path / "tier", capsys, code=4)
    assert [one["step"] for one in answer["imported"]["units"]] == [1000, 1500]
    assert [(one["path"], one["status"]) for one in answer["imported"]["refused"]] == [("checkpoint-500", "incomplete")]
    optimizer = root / "checkpoint-1500" / "optimizer.pt"
    optimizer.write_bytes(flipped(optimizer.read_bytes()))
    (tmp_path / "second").mkdir()
    answer = imported(root, tmp_path / "second", capsys, code=5)
    assert [one["step"] for one in answer["imported"]["units"]] == [1000]
    assert [one["status"] for one in answer["imported"]["refused"]] == ["incomplete", "damaged"]
    answer = imported(root, tmp_path / "tier", capsys, code=4)  # what is there keeps its bytes
    assert [one["status"] for one in answer["imported"]["refused"]] == ["taken", "incomplete"][::-1]
    assert run(["verify", str(tmp_path / "tier")]) == 0


def bring(root: Path, home: Path, store: Store) -> ImportedRun:
    async def main() -> ImportedRun:
        with open_directory_source(root) as origin:
            return await import_units(origin, {"tier": store}, Spool(home / "spool"), RUN, None, Progress())

    return asyncio.run(main())


@pytest.mark.parametrize("last", ["inspect_unit", "stage_unit"])
def test_checkpoint_that_changes_while_it_is_read_is_left_out(
    last: str, root: Path, tmp_path: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    """After the check, or after the last byte was read."""
    here = checkpoint(root, 500, 1_800_000_000)
    work = getattr(unit_import, last)

    def meddling(*arguments):  # type: ignore[no-untyped-def]
        found = work(*arguments)
        (here / "optimizer.pt").write_bytes((here / "scheduler.pt").read_bytes())
        return found

    monkeypatch.setattr(unit_import, last, meddling)
    store = MemoryStore()
    done = bring(root, tmp_path, store)
    assert not done.units and [one.status for one in done.refused] == ["changing"]
    assert steps_on(asyncio.run(contents(store))) == []


def test_an_import_that_is_killed_continues(root: Path, tmp_path: Path) -> None:
    for step in (500, 1000):
        checkpoint(root, step, 1_800_000_000 + step)
    whole = Double()
    bring(root, tmp_path / "whole", whole)
    wanted = asyncio.run(contents(whole.inner))
    for at in range(1, len(whole.calls), len(whole.calls) // 6):
        target, home = MemoryStore(), tmp_path / f"{at}"
        with pytest.raises(Killed):
            bring(root, home, dying(target, at, after=bool(at % 2)))
        spool = Spool(home / "spool")
        spool.remove(spool.parts())  # as the command does
        done = bring(root, home, target)
        assert [one.step for one in done.units] == [500, 1000] and not spool.parts()
        left = {key: data for key, data in asyncio.run(contents(target)).items() if "/flushing/" not in key}
        assert left == wanted, f"request {at}"


def test_second_tier_gets_its_missing_objects(root: Path, tmp_path: Path) -> None:
    checkpoint(root, 500, 1_800_000_000)
    first, second = Double(), Double()
    bring(root, tmp_path, first)
    first.calls = []
    with open_directory_source(root) as origin:
        both = import_units(origin, {"a": first, "b": second}, Spool(tmp_path / "spool"), RUN, None, Progress())
        (unit,) = asyncio.run(both).units
    assert not unit.was_there and not first.puts() and second.puts(is_chunk)
    manifests = [
        decode(data)
        for store in (first, second)
        for key, data in asyncio.run(contents(store.inner)).items()
        if "/manifests/" in key
    ]
    assert manifests[0].same_content(manifests[1])


def test_a_run_of_another_origin_is_refused(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(root, 500, 1_800_000_000)
    spool, own = Spool(tmp_path / "spool"), part(3, run=RUN)
    commit(spool, own)
    asyncio.run(flush(spool, own, TierUploadContext(FileStore(tmp_path / "tier"))))
    assert run(["import", str(root), "--run", RUN, "--to", str(tmp_path / "tier")]) == 3
    assert "two histories do not mix" in "".join(capsys.readouterr().err.split("\n"))


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("https://bucket/x", 3, "unknown scheme"),
        ("missing", 4, "no such file"),
        ("out", 4, "no checkpoint of a program"),
    ],
)
def test_import_refusal_names_a_remedy(
    path: str, code: int, says: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = path if "://" in path else str(tmp_path / path)
    assert run(["import", given, "--run", RUN, "--to", str(tmp_path / "tier")]) == code
    assert says in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []
