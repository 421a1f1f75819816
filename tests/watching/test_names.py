"""A watch lists names, and asks for the sizes of the units' files alone, so that unrelated files cost little."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support import layouts
from support.layouts import WRITERS
from support.watched_run import RUN, Reported, observed

from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool.spool import Spool
from tierd.watching.directory_tree import DirectoryTree
from tierd.watching.settling_units import DueUnit, UnitShape, is_unchanged, shape_of
from tierd.watching.unit import ListedEntry, Listing
from tierd.watching.unit_detection import Unit, units

_UNRELATED = 500


def shapes(listing: Listing) -> dict[str, tuple[Unit, UnitShape]]:
    return {unit.path: (unit, shape_of(unit, listing.entries)) for unit in units(listing)}


def write_unrelated(directory: Path, count: int = _UNRELATED) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (directory / f"sample_{number:06d}.jpg").touch()


@pytest.mark.parametrize("below", ["", "exp/one"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_names_show_each_program_s_units_as_the_full_listing_does(
    write: Callable[[Path], Path], below: str, root: Path
) -> None:
    home = root / below
    home.mkdir(parents=True, exist_ok=True)
    write(home)
    (home / "link").symlink_to("nowhere")
    write_unrelated(home, 20)
    with DirectoryTree(root) as tree:
        whole = shapes(tree.listing())
        assert whole and shapes(tree.list_names()) == whole
        for unit, expected in whole.values():
            assert tuple((path, tree.relist(unit).entries[path]) for path, _ in expected) == expected


def test_names_ask_for_no_size_of_unrelated_files(root: Path) -> None:
    layouts.torch_save(root)
    write_unrelated(root / "data")
    with DirectoryTree(root) as tree:
        entries = tree.list_names().entries
    assert {entries[path] for path in entries if path.startswith("data/")} == {ListedEntry("file")}


@pytest.mark.parametrize("below", ["data", "data/deep"])
def test_unrelated_files_are_listed_once_when_a_unit_is_taken(below: str, root: Path, spool: Spool) -> None:
    layouts.torchtitan(root)
    write_unrelated(root / below)
    signs: list[None] = []
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0, going=lambda: signs.append(None))
    watch.observe(observed(spool), 1.0)
    signs.clear()
    watch.observe(observed(spool), 2.0)
    assert len(reported.parts) == 1
    assert _UNRELATED <= len(signs) < 2 * _UNRELATED


def test_change_of_a_file_of_the_unit_is_noticed_without_a_full_listing(root: Path) -> None:
    layouts.torchtitan(root)
    with DirectoryTree(root) as tree:
        due = DueUnit(*shapes(tree.list_names())["step-100"], 0)
        assert is_unchanged(due, tree.relist(due.unit))
        (root / "step-100" / "added.pt").write_bytes(b"more")
        assert not is_unchanged(due, tree.relist(due.unit))
        (root / "step-100" / "added.pt").unlink()
        assert is_unchanged(due, tree.relist(due.unit))
        (root / "step-100").rename(root / "away")
        assert not is_unchanged(due, tree.relist(due.unit))


def test_unit_whose_files_may_not_be_asked_for_is_not_taken_and_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory may be listed, and not be entered: mode 0644."""
    layouts.torchtitan(root)
    layouts.torch_save(root).rename(root / "model_step7.pt")
    stat = os.stat

    def refused(path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if dir_fd is not None and os.readlink(f"/proc/self/fd/{dir_fd}") == str(root / "step-100"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", refused)
    with DirectoryTree(root, skip=True) as tree:
        found = units(tree.list_names())
        assert "step-100" not in {unit.path for unit in found} and len(found) == 1
        assert tree.unreadable == ["step-100"]


def test_listing_has_ended_when_a_watch_begins_to_read(root: Path, spool: Spool) -> None:
    """The thread lowers its priority there. A listing at nice 19 waited minutes for a CPU beside training."""
    layouts.torchtitan(root)
    write_unrelated(root)
    events: list[str] = []
    watch = UnitWatch(
        *(spool, root, RUN, Reported()),
        settle_s=0.0,
        going=lambda: events.append("name"),
        reads=lambda: events.append("reads"),
    )
    watch.observe(observed(spool), 1.0)
    assert events.count("reads") == 1 and events.index("reads") > _UNRELATED
