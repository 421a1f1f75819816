"""`tierd diff`: which entries of two checkpoints differ, and how far, from the spool and from a tier."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saved import put
from support.world import attempt, corrupt, part
from torch.distributed import checkpoint as dcp

import tierd
import tierd.dcp
from tierd.cli import run
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path


def save(home: Path, step: int, *ranks: dict[str, Any], launch: int = 1) -> None:
    """Have a checkpoint in the spool and on the tier."""

    async def work() -> None:
        store = FileStore(home / "tier")
        for rank, state in enumerate(ranks):
            await put(Spool(home / "spool"), part(step, launch, rank, len(ranks)), state, store)
        await store.aclose()

    asyncio.run(work())


@pytest.fixture
def compare(home: Path, capsys: pytest.CaptureFixture[str]):
    """Run `diff` on the spool and on the tier, which give the same answer."""

    def compared(first: str, second: str, code: int = 8) -> dict[str, Any]:
        answers = []
        for place in (["--spool", str(home / "spool")], [str(home / "tier")]):
            assert run(["diff", first, second, *place, "--run", "run", "--json"]) == code
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[0] == answers[1]
        return answers[0]

    return compared


def by_entry(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {difference["entry"]: difference for difference in answer["differences"]}


def test_diff_names_added_removed_and_changed_entries_with_their_distance(home: Path, compare) -> None:
    noise = torch.Generator().manual_seed(1)
    weight, frozen = torch.randn(300, 20, generator=noise), torch.randn(50, generator=noise)
    changed = weight.clone()
    changed[7, 3] += 0.5
    changed[200] *= -1
    state = {"model": {"weight": weight, "frozen": frozen}, "lr": 0.1, "names": ["a", "b"], "old": torch.ones(3)}
    other = {"model": {"weight": changed, "frozen": frozen}, "lr": 0.01, "names": ["a", "b"], "new": (1, None)}
    save(home, 1, state)
    save(home, 2, other)
    answer = compare("1", "2")
    assert (answer["first"], answer["second"]) == tuple(f"run step {step} (attempt {attempt(1)})" for step in (1, 2))
    entries = by_entry(answer)
    assert {name: entry["change"] for name, entry in entries.items()} == {
        "lr": "changed",
        "model/weight": "changed",
        "new/0": "added",
        "new/1": "added",
        "old": "removed",
    }
    assert entries["lr"]["form"] == "0.1 → 0.01" and entries["old"]["form"] == "float32 [3]"
    distance = entries["model/weight"]
    assert distance["elements"] == int((changed != weight).sum()) and distance["ranks"] == [0]
    apart = (changed.double() - weight.double()).abs()
    assert distance["max_abs"] == pytest.approx(float(apart.max()))
    assert distance["relative_norm"] == pytest.approx(float(apart.norm() / weight.double().norm()))
    assert answer["equal"] == 3  # model/frozen, names/0, names/1
    assert compare("2", "2", code=0)["differences"] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64])
def test_diff_computes_with_each_dtype(home: Path, compare, dtype: torch.dtype) -> None:
    before = torch.tensor([0, 1, 1, 0]).to(dtype)
    after = torch.tensor([0, 1, 0, 0]).to(dtype)
    save(home, 1, {"x": before})
    save(home, 2, {"x": after})
    entry = by_entry(compare("1", "2"))["x"]
    assert (entry["elements"], entry["max_abs"]) == (1, 1.0)
    assert entry["relative_norm"] == pytest.approx(math.sqrt(0.5))


def test_values_that_compare_equal_and_have_other_bits_differ_and_nan_is_equal_to_itself(home: Path, compare) -> None:
    save(home, 1, {"zero": torch.tensor([0.0]), "nan": torch.tensor([math.nan]), "lost": torch.tensor([1.0]), "k": 1})
    save(
        home,
        2,
        {"zero": torch.tensor([-0.0]), "nan": torch.tensor([math.nan]), "lost": torch.tensor([math.nan]), "k": 1.0},
    )
    entries = by_entry(compare("1", "2"))
    assert entries.keys() == {"zero", "lost", "k"}
    assert (entries["zero"]["elements"], entries["zero"]["max_abs"]) == (1, 0.0)
    assert (entries["lost"]["elements"], entries["lost"]["max_abs"], entries["lost"]["relative_norm"]) == (
        1,
        None,
        None,
    )


def test_other_shape_or_dtype_is_a_change_without_a_distance(home: Path, compare) -> None:
    save(home, 1, {"a": torch.ones(3, 4), "b": torch.ones(3)})
    save(home, 2, {"a": torch.ones(4, 3), "b": torch.ones(3).half()})
    entries = by_entry(compare("1", "2"))
    assert entries["a"]["form"] == "float32 [3, 4] → float32 [4, 3]" and entries["a"]["max_abs"] is None
    assert entries["b"]["form"] == "float32 [3] → float16 [3]"


def test_diff_compares_entries_that_each_rank_has_for_itself(home: Path, compare) -> None:
    states = [{"model": torch.arange(1000.0), "own": torch.arange(100) * rank, "seen": rank} for rank in range(3)]
    save(home, 1, *states)
    states[2] = {**states[2], "own": states[2]["own"] + 1, "seen": 5}
    save(home, 2, *states)
    answer = compare("1", "2")
    assert {name: entry["ranks"] for name, entry in by_entry(answer).items()} == {"own": [2], "seen": [2]}
    assert answer["equal"] == 1


def test_other_number_of_ranks_is_compared_as_whole_tensors(home: Path, compare) -> None:
    model = torch.arange(1000.0)
    save(home, 1, {"model": model, "step": 1})
    save(home, 2, *[{"model": model, "step": 2}] * 2)
    assert {name: entry["ranks"] for name, entry in by_entry(compare("1", "2")).items()} == {"step": []}


def test_diff_reads_checkpoints_of_dcp(home: Path, compare, capsys) -> None:
    weight = torch.randn(30, 20)
    with tierd.Checkpointer(home / "spool", run="run", to=[str(home / "tier")]) as ckpt:
        for step in (1, 2):
            state = {"model": {"weight": weight + (torch.arange(20) == 3) * (step - 1)}, "step": step}
            dcp.save(state, storage_writer=tierd.dcp.StorageWriter(ckpt, step))
        ckpt.save(3, {"x": 1}).wait("file", timeout=100)
        assert run(["drain", "--spool", str(home / "spool"), "--deadline", "100s"]) == 0
    capsys.readouterr()
    entries = by_entry(compare("1", "2"))
    assert entries["model.weight"]["elements"] == 30 and entries["model.weight"]["max_abs"] == pytest.approx(1.0)
    assert entries["step"]["form"] == "1 → 2"


def test_equal_chunks_are_not_read(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = torch.arange(5000.0)
    save(home, 1, {"frozen": frozen, "weight": torch.zeros(2000)})
    save(home, 2, {"frozen": frozen, "weight": torch.ones(2000)})
    first, second = (
        {chunk.xxh3_128 for file in Spool(home / "spool").manifest(part(step)).files for chunk in file.chunks[5:]}
        for step in (1, 2)
    )  # without the first ones, which hold the headers
    files = [path for path in (home / "tier").rglob("*") if path.is_file()]
    deleted = [path for path in files if any(name in path.name for name in first & second)]
    assert len(deleted) > 10
    for path in deleted:
        path.unlink()
    assert run(["diff", "1", "2", str(home / "tier"), "--json"]) == 8
    assert by_entry(json.loads(capsys.readouterr().out)).keys() == {"weight"}


def test_diff_of_damaged_bytes_fails_and_leaves_them_where_they_are(home: Path, capsys) -> None:
    save(home, 1, {"weight": torch.zeros(2000)})
    save(home, 2, {"weight": torch.ones(2000)})
    corrupt(Spool(home / "spool").path(part(2)) / "tensors.safetensors")
    assert run(["diff", "1", "2", "--spool", str(home / "spool")]) == 6
    assert "changes nothing" in capsys.readouterr().err
    assert Spool(home / "spool").has(part(2))


def test_diff_compares_launches_and_runs_and_refuses_other_names(home: Path, capsys) -> None:
    save(home, 5, {"x": 1})
    save(home, 5, {"x": 2}, launch=2)
    place = ["--spool", str(home / "spool")]
    assert run(["diff", "5@00000001", "run:5@00000002", *place]) == 8
    title, _, line = capsys.readouterr().out.splitlines()
    assert title == f"run run: step 5 ({attempt(1)}) → step 5 ({attempt(2)}): 1 entry differs, 0 equal"
    assert line.split() == ["x", "changed", "1", "→", "2"]
    assert run(["diff", "five", "5", *place]) == 3
    assert "write STEP, RUN:STEP or STEP@ATTEMPT" in capsys.readouterr().err
    assert run(["diff", "5", "6", *place]) == 4
