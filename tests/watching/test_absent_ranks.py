"""A gap in the numbers of ranks, and an empty JSON file: a part that nothing beside it proves.

Judged by the words of docs/explanation/watching.md and docs/reference/formats.md.
"""

from __future__ import annotations

import pytest
from support.watched_run import Home, files, flush, take
from support.whole_layouts import pt, text, write

from tierd.cli import run


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("state_00000100_rank{}.pt", (0, 1, 3)),
        ("step_100/state_rank_{}.pt", (0, 1, 3)),
        ("step_100/rank{}/model.pt", (0, 2)),
        ("global_step_100/actor/model_world_size_2_rank_{}.pt", (0,)),
        ("last/local_rank0/state_rank{}.pt", (0, 2, 3)),
    ],
)
def test_checkpoint_with_a_gap_in_its_ranks_is_not_taken(home: Home, name: str, ranks: tuple[int, ...], capsys) -> None:
    write(home.root, {name.format(rank): pt(rank) for rank in ranks}, 1_000_000)
    reported = take(home.spool, home.root)
    assert reported.parts == [] and [why.startswith("the file of rank") for why in reported.reasons.values()] == [True]
    flush(home.spool, home.tier)
    before = files(home.root)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} == {"unknown"} and files(home.root) == before
    write(home.root, {name.format(rank): pt(rank) for rank in range(4)}, 1_000_010)
    assert len(take(home.spool, home.root).parts) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("step_100/lora_rank8.pt", "step_100/lora_rank16.pt"),
        ("step_100/a_rank1.pt", "step_100/a_rank3.pt"),
        ("step_100/a_rank0.pt", "step_100/b_rank0.pt", "step_100/b_rank1.pt"),
        ("step_100/a_rank0.pt", "step_100/a_rank8.pt", "step_100/a_rank16.pt"),
        ("step_100/frank0.pt", "step_100/frank2.pt"),
    ],
)
def test_number_that_may_be_of_no_rank_is_no_gap(home: Home, names: tuple[str, ...]) -> None:
    write(home.root, dict.fromkeys(names, pt(1)), 1_000_000)
    assert len(take(home.spool, home.root).parts) == 1


def test_checkpoint_with_an_empty_json_file_is_not_taken(home: Home, capsys) -> None:
    for step in (100, 200):
        saved = {f"step_{step}/model.pt": pt(step), f"step_{step}/meta.json": text({"step": step})}
        write(home.root, saved, 1_000_000 + step)
    write(home.root, {"step_300/model.pt": pt(300), "step_300/meta.json": b""}, 1_000_300)
    reported = take(home.spool, home.root)
    assert {part.checkpoint.step for part in reported.parts} == {100, 200}
    assert "an empty file" in reported.reasons["step_300"]
    assert run(["inspect", str(home.root / "step_300")]) == 4
    flush(home.spool, home.tier)
    before = files(home.root)
    assert home.prepare(capsys)["step_300"]["verdict"] == "unknown" and files(home.root) == before
