"""Every loader is interrupted by SIGKILL in the middle of an epoch, at its edge and during a save, and compared with an
uninterrupted run: each sample and each loss. A row is exact, or says what it allows; the how-to's table shows the rows.

`make loaders` installs what the rows need and lets none be skipped.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
from check.bed.forked import check_forked

from tierd.check import check_resume

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "data-loaders.md"
STEPS = 24
# Epochs have twelve steps, saves are after steps 2, 5, 8, 11 ...: mid-epoch, the first step of an epoch, a save.
KILLS = ("4", "12", "17+save")


@dataclass(frozen=True)
class Row:
    """A loop of the matrix.

    Attributes:
        name: as the how-to has it.
        loop: the function, below `loaders.`.
        needs: modules that it imports.
        allowance: samples for each resume; 0 is exact.
        word: what the how-to says of the row in the place of "exact".
        began: the step at which each launch goes on.
        advice: what an exact resume needs.
        ignore: the framework's own bookkeeping, which is not the same after each step though samples and losses are.
    """

    name: str
    loop: str
    needs: tuple[str, ...] = ("torchdata",)
    ranks: int = 1
    allowance: int = 0
    began: tuple[int, ...] = (0, 3, 12, 15)
    word: str = "exact"
    advice: str = ""
    ignore: tuple[str, ...] = ()


OWN = "a `generator=` of its own"
BY_EPOCH = f"{OWN}; a sampler with `set_epoch`"
STATE = f"{OWN}; a dataset with a state"
ROWS = (
    Row("`StatefulDataLoader`, map-style, shuffled", "loops_torch:map_0", advice=BY_EPOCH),
    Row("the same with 4 workers", "loops_torch:map_4", advice=BY_EPOCH),
    Row("`StatefulDataLoader`, iterable, shuffled", "loops_torch:iterable_0", advice=STATE),
    Row("the same with 4 workers", "loops_torch:iterable_4", advice=STATE),
    Row("`DataLoader`, a seeded sampler, 2 workers", "loops_torch:seeded", advice=f"{OWN}; training counts samples"),
    Row("`DistributedSampler`, 2 ranks", "loops_torch:distributed", ranks=2, advice="`set_epoch` with the saved epoch"),
    Row(
        "MosaicML `StreamingDataset`, 2 workers",
        "loops_streaming:train",
        ("streaming",),
        advice="`StreamingDataLoader`; `clean_stale_shared_memory()` first",
    ),
    Row(
        "torch-dataloader-utils `StructuredDataset`, 2 workers",
        "loops_structured:train",
        ("torch_dataloader_utils",),
        allowance=2 * 24,
        word="≤ 1 shard a worker again",
        advice="a `DataLoader` of your own with `prefetch_factor=1`",
    ),
    Row("NVIDIA DALI, a CPU pipeline", "loops_dali:train", ("nvidia.dali",), advice="`tierd.adapters.dali`"),
    Row(
        "Lightning",
        "loops_lightning:train",
        ("lightning",),
        advice="`tierd.adapters.lightning`; a `StatefulDataLoader` mid-epoch",
        ignore=('state["lightning"]["loops"]', "_*"),  # counters of batches, moved after a step was observed
    ),
    Row(
        "Hugging Face `Trainer`",
        "loops_transformers:train",
        ("transformers", "accelerate"),
        advice="`tierd.adapters.transformers`",
    ),
    Row("Keras 3 on torch, a loader", "loops_keras:train", ("keras",), advice="`tierd.adapters.keras` with `data=`"),
    Row(
        "Keras 3 on torch, arrays",
        "loops_keras:train_on_arrays",
        ("keras",),
        began=(0, 0, 12, 12),
        word="exact, from the epoch's beginning",
        advice="`tierd.adapters.keras`, saving at an epoch's end",
        ignore=('state["metrics"]',),  # running means of what `fit` shows, which it begins anew when it is called
    ),
)


def missing(row: Row) -> list[str]:
    return [name for name in row.needs if importlib.util.find_spec(name.split(".")[0]) is None]


def table() -> str:
    """What stands in the how-to."""
    head = "| loop | mid-epoch | epoch's edge | during a save | needs |\n| --- | --- | --- | --- | --- |\n"
    return head + "".join(f"| {one.name} | {' | '.join([one.word] * 3)} | {one.advice} |\n" for one in ROWS)


@pytest.mark.loaders
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.loop)
def test_killed_loop_resumes_exactly(row: Row) -> None:
    if absent := missing(row):
        pytest.skip(f"{row.name}: no {' and no '.join(absent)} here")
    # Loops of torch alone begin as a user's do, each with an order of hashes of its own; a framework is imported once.
    # The workers of MosaicML's loader end at once in a fork of an interpreter that has imported it.
    options = {"steps": STEPS, "kill_at": KILLS, "allowance": row.allowance, "patience": 300, "ignore": row.ignore}
    if row.needs in (("torchdata",), ("streaming",)):
        report = check_resume(f"loaders.{row.loop}", ranks=row.ranks, **options)
    else:
        report, _ = check_forked(f"loaders.{row.loop}", ranks=row.ranks, **options)
    assert report.ok, str(report)
    assert report.exact or row.allowance, str(report)
    assert not any(rank.skipped for rank in report.ranks), str(report)
    assert tuple(launch.began for launch in report.launches) == row.began, "a save was not resumed from"


@pytest.mark.loaders
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loop", ["map_0", "map_4", "iterable_0"])
def test_loop_that_saves_after_each_epoch_continues_in_the_next(loop: str) -> None:
    """The loader has read all of an epoch then, and its state must not decide the next one's order (data#1437)."""
    pytest.importorskip("torchdata")
    report = check_resume(f"loaders.loops_torch:{loop}_at_the_end", steps=30, kill_at=("14", "26"), patience=300)
    assert report.exact and report.ok, str(report)
    assert tuple(launch.began for launch in report.launches) == (0, 12, 24)


def test_the_how_to_shows_these_rows() -> None:
    shown = PAGE.read_text().split("<!-- loaders: made of tests/loaders/test_matrix.py -->\n")[1]
    assert shown.split("<!-- loaders: end -->")[0] == table()
