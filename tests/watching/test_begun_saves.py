"""A program that keeps one checkpoint, killed after the first file of its next save: a part is never the whole.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import shutil

import pytest
from support.watched_run import RUN, Home, files, flush, take
from support.whole_layouts import Files, pt, write

from tierd.watching.checkpoint_names import stepless_run

LAYOUTS = {
    "directory of a step": ("step_{}/a.pt", "step_{}/b.pt"),
    "files of a step": ("model_{}.pt", "optim_{}.pt"),
    "directory without a step": ("checkpoint/model.pt", "checkpoint/optim.pt"),
}
layouts = pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)


def save(home: Home, names: tuple[str, ...], step: int, count: int) -> None:
    """Delete what is there, and write so many files of the next save."""
    shutil.rmtree(home.root)
    written: Files = {name.format(step): pt(step, number) for number, name in enumerate(names[:count])}
    write(home.root, written, 1_000_000 + step)


@layouts
@pytest.mark.parametrize("first", [0, 1], ids=["first file", "last file"])
def test_part_of_the_next_save_is_not_taken(home: Home, names: tuple[str, ...], first: int, capsys) -> None:
    save(home, names, 100, 2)
    assert take(home.spool, home.root).parts
    before = files(home.root)
    save(home, names[first:], 200, 1)
    reported = take(home.spool, home.root)
    assert reported.parts == [] and ["it may be begun" in why for why in reported.reasons.values()] == [True]
    flush(home.spool, home.tier)
    shutil.rmtree(home.root)
    home.prepare(capsys)
    assert files(home.root) == before


@layouts
def test_save_is_taken_as_soon_as_it_has_all_files(home: Home, names: tuple[str, ...]) -> None:
    save(home, names, 100, 2)
    take(home.spool, home.root)
    save(home, names, 200, 1)
    take(home.spool, home.root)
    save(home, names, 200, 2)
    assert take(home.spool, home.root).parts


@layouts
def test_program_that_writes_fewer_files_from_now_on_is_taken_from_its_second_save(
    home: Home, names: tuple[str, ...]
) -> None:
    save(home, names, 100, 2)
    take(home.spool, home.root)
    save(home, names, 200, 1)
    assert take(home.spool, home.root).parts == []
    save(home, names, 300, 1)
    taken = take(home.spool, home.root).parts
    assert [part.checkpoint.run in (RUN, stepless_run(RUN)) for part in taken] == [True]
    save(home, names, 400, 1)
    assert take(home.spool, home.root).parts


def beside(home: Home, *names: str) -> None:
    write(home.root, {name: pt(number) for number, name in enumerate(names)}, 1_000_000)


def test_oldest_checkpoint_whose_deletion_was_begun_is_not_taken(home: Home) -> None:
    beside(home, "model_100.pt", "model_200.pt", "optim_200.pt", "model_300.pt", "optim_300.pt")
    reported = take(home.spool, home.root)
    assert {part.checkpoint.step for part in reported.parts} == {200, 300}
    assert "its deletion may be begun" in reported.reasons["model_100.pt"]


def test_older_checkpoints_without_optimizer_states_are_taken(home: Home) -> None:
    beside(home, "model_100.pt", "model_200.pt", "model_300.pt", "optim_300.pt")
    assert {part.checkpoint.step for part in take(home.spool, home.root).parts} == {100, 200, 300}


def test_unchanged_checkpoint_is_not_refused_because_later_checkpoint_has_more_files(home: Home) -> None:
    for step in (100, 200):
        write(home.root, {f"step_{step}/a.pt": pt(step), f"step_{step}/b.pt": pt(step)}, 1_000_000 + step)
    assert len(take(home.spool, home.root).parts) == 2
    write(home.root, {"step_200/eval.json": b"{}"}, 1_000_300)
    reported = take(home.spool, home.root)
    assert reported.reasons == {} and [part.checkpoint.step for part in reported.parts] == [200]


def test_taken_checkpoint_whose_program_deleted_a_file_is_not_refused(home: Home) -> None:
    write(home.root, {f"step_100/{name}.pt": pt(100) for name in "abc"}, 1_000_100)
    assert take(home.spool, home.root).parts
    write(home.root, {f"step_200/{name}.pt": pt(200) for name in "abc"}, 1_000_200)
    (home.root / "step_100/b.pt").unlink()
    reported = take(home.spool, home.root)
    assert reported.reasons == {} and [part.checkpoint.step for part in reported.parts] == [200]


def test_checkpoint_that_was_not_taken_is_refused_because_it_lacks_a_file(home: Home) -> None:
    write(home.root, {f"step_100/{name}.pt": pt(100) for name in "abc"}, 1_000_100)
    write(home.root, {f"step_200/{name}.pt": pt(200) for name in "ab"}, 1_000_200)
    write(home.root, {f"step_300/{name}.pt": pt(300) for name in "abc"}, 1_000_300)
    reported = take(home.spool, home.root)
    assert {*reported.reasons} == {"step_200"} and {part.checkpoint.step for part in reported.parts} == {100, 300}
