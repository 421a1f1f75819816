"""How `tierd watch` ends: what it could not take or list shows in its exit code and in the status."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from support import layouts
from support.waiting import wait_until
from support.watched_run import watched, watching
from support.world import commit, part

from tierd.core.config import WatchConfig
from tierd.daemon.daemon_status import make_status
from tierd.daemon.intake import active_watch, intake, unit_watch
from tierd.daemon.intake.active_watch import DirectoryId
from tierd.spool.spool import Spool
from tierd.watching import directory_tree

pytestmark = pytest.mark.usefixtures("quick", "tier")


def test_a_watch_that_did_not_take_everything_ends_with_9(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = layouts.torch_save(root)
    torch.save({"w": torch.ones(3)}, root / "model_step200.pt")
    path.write_bytes(path.read_bytes()[:-50])
    assert watched(root) == 9
    assert f"{path} was not taken" in caplog.text
    assert list((root.parent / "tier" / "r").iterdir())


def test_a_trainers_run_is_not_watched(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts.torch_save(root)
    commit(Spool(root.parent / ".out.tierd"), part(7, run="r"))
    assert watched(root) == 3
    assert "a trainer saved" in capsys.readouterr().err
    assert [one.checkpoint.step for one in Spool(root.parent / ".out.tierd").parts("r")] == [7]


def test_status_names_units_that_are_not_taken_until_they_are(root: Path) -> None:
    path = layouts.torch_save(root)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with watching(root.parent, "spool") as daemon:

        def problems() -> list[str]:
            return [one.why for one in make_status(daemon.reconciler, 0, 0).problems if "model_step100.pt" in one.why]

        wait_until(lambda: len(problems()) == 1)
        assert "is not taken: it is damaged" in problems()[0]
        path.write_bytes(whole)
        wait_until(lambda: problems() == [])


def test_the_alert_of_a_watch_that_was_taken_out_ends(root: Path) -> None:
    (root / "file").write_text("")
    with watching(root.parent, "spool", "out/file") as daemon:
        reconciler = daemon.reconciler

        async def take_out() -> None:
            reconciler.config = msgspec.structs.replace(reconciler.config, watch=())

        wait_until(lambda: [one.doing for one in reconciler.journal.alerts()] == ["observe"])
        daemon.call(take_out())
        wait_until(lambda: reconciler.journal.alerts() == ())


@pytest.mark.parametrize(("where", "code"), [("secret", 0), ("lost+found", 0), ("step-100/secret", 9)])
def test_a_directory_below_that_may_not_be_read_stops_nothing_else(
    where: str, code: int, root: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root).rename(root / "model_step7.pt")
    if "/" in where:
        layouts.torchtitan(root)
    (root / where).mkdir()
    scandir = os.scandir

    def refused(place: int | str) -> object:
        if isinstance(place, int) and os.readlink(f"/proc/self/fd/{place}") == str(root / where):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refused)
    assert watched(root) == code
    assert len(list((root.parent / "tier" / "r" / "manifests").iterdir())) == 1


def test_a_name_that_is_not_utf_8_is_refused_and_stops_nothing_else(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No manifest can have it. The watch ended without a word, and nothing beside it was taken."""
    layouts.torch_save(root)
    torch.save({"w": torch.ones(3)}, root / os.fsdecode(b"m\xff_step300.pt"))
    assert watched(root) == 9
    assert "m\\xff_step300.pt" in caplog.text and "not UTF-8" in caplog.text
    assert list((root.parent / "tier" / "r").iterdir())


def test_a_unit_with_a_file_whose_name_is_not_utf_8_is_not_taken_without_it(root: Path, tmp_path: Path) -> None:
    (root / "checkpoint-10").mkdir()
    save_file({"w": torch.ones(2)}, root / "checkpoint-10" / "model.safetensors")
    (root / "checkpoint-10" / "trainer_state.json").write_text("{}")
    with open(os.fsencode(root) + b"/checkpoint-10/\xfe.safetensors", "wb"):
        pass
    assert watched(root) == 9
    assert not list((root.parent / "tier").glob("r/manifests/*"))


def test_unforeseen_error_is_logged_and_does_not_end_a_watch(root: Path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root)
    observe, failed = unit_watch.UnitWatch.observe, []

    def fails_once(self: unit_watch.UnitWatch, *given: object, **more: object) -> None:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("nobody foresaw this")
        observe(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_watch.UnitWatch, "observe", fails_once)
    assert watched(root) == 0
    assert "nobody foresaw this" in caplog.text


def test_file_that_may_not_be_read_is_logged_and_lets_a_watch_end(root: Path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    path = layouts.torch_save(root)
    opened = directory_tree.DirectoryTree.opened

    def refused(self: directory_tree.DirectoryTree, name: str, listed: object) -> object:
        if name == path.name:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(self, name, listed)  # type: ignore[arg-type]

    monkeypatch.setattr(directory_tree.DirectoryTree, "opened", refused)
    assert watched(root) == 9
    assert "cannot be read" in caplog.text and "Permission denied" in caplog.text


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Set the first event, and the mount does not answer until the second is set."""
    dies, answers, identify = Event(), Event(), intake.identify_directory

    def hangs(directory: Path) -> DirectoryId:
        if dies.is_set():
            answers.wait(60)
        return identify(directory)

    monkeypatch.setattr(intake, "identify_directory", hangs)
    yield dies, answers
    answers.set()


def test_a_dead_mount_is_reported_until_it_answers(root: Path, dead: tuple[Event, Event], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    dies, answers = dead
    monkeypatch.setattr(active_watch, "SILENT_S", 0.5)
    layouts.torch_save(root)
    with watching(root.parent, "spool") as daemon:
        journal, at_work = daemon.reconciler.journal, daemon.intake  # type: ignore[attr-defined]
        wait_until(lambda: not at_work.busy)
        dies.set()
        (one,) = at_work._watching.values()
        wait_until(lambda: not one.idle and [alert.doing for alert in journal.alerts()] == ["observe"])
        wait_until(lambda: "has not answered for" in str(at_work.failure))
        answers.set()
        wait_until(lambda: not at_work.busy and at_work.failure is None and journal.alerts() == ())


def test_a_dead_mount_does_not_keep_a_daemon_from_its_end(root: Path, dead: tuple[Event, Event], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    dies, answers = dead
    monkeypatch.setattr(active_watch, "_END_S", 0.1)
    with watching(root.parent, "spool") as daemon:
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        dies.set()
        (one,) = daemon.intake._watching.values()  # type: ignore[attr-defined]
        wait_until(lambda: (one.silent_s or 0.0) > 0.3)
    assert not answers.is_set(), "the end did not wait for the mount"


def test_only_silence_of_a_call_that_may_hang_counts() -> None:
    one = active_watch.ActiveWatch(WatchConfig(run="run", directory="/none"))
    assert not one.has_hung(1000), "no call runs"
    one.silent_s = 0.0
    assert not one.has_hung(1000), "the daemon was stopped"
    assert [one.has_hung(1) for _ in range(58)] == [False] * 57 + [True]
    one.give_sign()
    assert not any(one.has_hung(1) for _ in range(59))
    one.allow_silence(2_000_000_000)
    one.give_sign()
    assert [one.has_hung(1) for _ in range(160)] == [False] * 159 + [True], "an fsync of 2 GB may take 100 s"
    one.ending = True
    with pytest.raises(active_watch.WatchStopped):
        one.give_sign()


def test_a_long_listing_gives_signs_of_life(root: Path) -> None:
    layouts.torch_save(root)
    signs: list[None] = []
    with directory_tree.DirectoryTree(root, going=lambda: signs.append(None)) as tree:
        entries = tree.listing().entries
        assert len(signs) == len(entries) > 0
        (name,) = entries
        with tree.opened(name, entries[name]) as source:
            source.read(0, 1)
    assert len(signs) == len(entries) + 1
