"""A file that decayed after it was taken is no new version of its checkpoint, whatever its program writes beside it.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.doubles import flipped
from support.watched_run import Home, files, take
from support.whole_layouts import pt, tensors, text, write


def flip(path: Path) -> None:
    """Flip a bit, as a disk does: the file keeps its size and its time."""
    stat = path.stat()
    path.write_bytes(flipped(path.read_bytes(), -1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


LAYOUTS = {
    "files without a step": ("best.safetensors", "last.safetensors", "last.safetensors"),
    "directory without a step": ("final/model.safetensors", "final/opt.pt", "final/ema.pt"),
    "directory of a step": ("step_200/net.safetensors", "step_200/opt.pt", "step_200/eval.json"),
    "files of a step": ("net_200.safetensors", "opt_200.pt", "ema_200.pt"),
}
layouts = pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)


def content(name: str, number: int) -> bytes:
    return tensors(number) if name.endswith("safetensors") else text(number) if name.endswith("json") else pt(number)


def save(home: Home, names: tuple[str, str, str]) -> None:
    write(home.root, {name: content(name, 1) for name in names[:2]}, 1_000_000)


@layouts
def test_decayed_file_is_not_taken_when_its_program_writes_beside_it(
    home: Home, names: tuple[str, str, str], capsys
) -> None:
    save(home, names)
    home.taken()
    before = files(home.root)
    flip(home.root / names[0])
    write(home.root, {names[2]: content(names[2], 2)}, 1_000_010)
    reported = take(home.spool, home.root)
    assert reported.parts == []
    assert [why.startswith(f"{names[0]} was damaged since it was taken") for why in reported.reasons.values()] == [True]
    home.prepare(capsys)
    assert files(home.root)[names[0]] == before[names[0]]
    assert len(take(home.spool, home.root).parts) == (names[2] in files(home.root))


@layouts
def test_unchanged_file_is_taken_with_a_new_file_beside_it(home: Home, names: tuple[str, str, str]) -> None:
    save(home, names)
    home.taken()
    write(home.root, {names[2]: content(names[2], 2)}, 1_000_010)
    assert len(take(home.spool, home.root).parts) == 1


def test_decay_is_known_after_the_times_of_a_checkpoint_were_changed(home: Home) -> None:
    names = LAYOUTS["directory of a step"]
    save(home, names)
    home.taken()
    os.utime(home.root / names[0], (2_000_000, 2_000_000))
    assert take(home.spool, home.root).parts == []
    flip(home.root / names[0])
    write(home.root, {names[2]: content(names[2], 2)}, 3_000_000)
    reported = take(home.spool, home.root)
    assert reported.parts == [] and list(reported.reasons) == ["step_200"]


def test_checkpoint_written_again_is_taken_if_its_program_wrote_over_the_first_copys_blocks(home: Home) -> None:
    names = LAYOUTS["directory of a step"][:2]
    save(home, LAYOUTS["directory of a step"])
    [first] = take(home.spool, home.root).parts
    for name in names:  # in place: if the spool's files are hard links, they have these bytes, too
        (home.root / name).write_bytes(content(name, 2))
    is_linked = not home.spool.is_whole(first)
    for name in names:
        (home.root / name).unlink()
    write(home.root, {name: content(name, 1) for name in names}, 1_000_020)
    parts = take(home.spool, home.root).parts
    assert len(parts) == is_linked
    assert home.spool.is_whole([first, *parts][-1])


@pytest.mark.parametrize("cut", [0, 40, -40])
def test_best_file_that_was_cut_in_its_writing_is_put_back_beside_newer_files(home: Home, cut: int, capsys) -> None:
    """YOLO writes last.pt at each epoch, and best.pt after it if it is better, both in place."""
    write(home.root, {"weights/last.pt": pt(1), "weights/best.pt": pt(1)}, 1_000_000)
    write(home.root, {"results.csv": b"1"}, 1_000_000)
    home.taken()
    write(home.root, {"weights/last.pt": pt(2), "weights/best.pt": pt(2)[:cut]}, 1_000_010)
    home.prepare(capsys)
    assert files(home.root) == {"weights/last.pt": pt(2), "weights/best.pt": pt(1), "results.csv": b"1"}
    assert [path.name for path in home.root.rglob(".tierd-quarantine/**/*") if path.is_file()] == ["best.pt"]
    assert len(take(home.spool, home.root).parts) == 1
