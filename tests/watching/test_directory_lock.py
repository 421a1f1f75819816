"""Two commands in one directory: every pod of a job may run the same entrypoint on a shared volume."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import layouts
from support.watched_run import RUN, Home, files

from tierd.cli import run
from tierd.core.errors import ConfigError
from tierd.daemon.intake import directory_changes, in_place_restore
from tierd.daemon.intake.directory_changes import LOCK_NAME, locked_directory
from tierd.daemon.intake.directory_preparation import prepare
from tierd.daemon.intake.series_restore import restore_in_place
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.local_files import locked_partial, partial_path
from tierd.stores.base import Store
from tierd.stores.file_store import FileStore


@asynccontextmanager
async def stores(home: Home) -> AsyncIterator[dict[str, Store]]:
    store = FileStore(home.tier)
    try:
        yield {"file": store}
    finally:
        await store.aclose()


def test_a_second_restore_clears_nothing_before_the_first_is_in_place(home: Home, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    layouts.trainer(home.root)
    home.taken()
    right, back, done = files(home.root), home.root.with_name("back"), []
    export, place = in_place_restore.restore_to_directory, in_place_restore.move_into_place
    monkeypatch.setattr(
        in_place_restore, "restore_to_directory", lambda *given, **more: done.append("export") or export(*given, **more)
    )
    monkeypatch.setattr(
        in_place_restore, "move_into_place", lambda *given, **more: (place(*given, **more), done.append("place"))[0]
    )

    async def both() -> None:
        async with stores(home) as there:
            one, two = (restore_in_place(there, RUN, back, None, None, Progress(), None) for _ in range(2))
            await asyncio.gather(one, two, return_exceptions=True)

    asyncio.run(both())
    assert done == ["export", "place"] * 2 and files(back) == right


def test_a_second_prepare_waits_and_finds_all_right(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    path = layouts.trainer(home.root) / "trainer_state.json"
    home.taken()
    right = files(home.root)
    path.write_bytes(b"")

    async def both() -> list[list[str]]:
        async with stores(home) as there:
            found = await asyncio.gather(*(prepare(home.root, RUN, None, there, Progress()) for _ in range(2)))
            return sorted([unit.verdict for unit in one.units] for one in found)

    assert asyncio.run(both()) == [["damaged"], ["verified"]] and files(home.root) == right
    assert len(list((home.root / ".tierd-quarantine").iterdir())) == 1
    assert f"waiting for another `tierd prepare` or `restore --into` of {home.root}" in caplog.text


def test_a_queue_is_no_long_wait_for_one_holder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [0.0]
    quick = {"sleep": lambda _: asyncio.sleep(0.005)}
    monkeypatch.setattr(directory_changes, "asyncio", SimpleNamespace(**{**vars(asyncio), **quick}))
    monkeypatch.setattr(directory_changes, "time", SimpleNamespace(monotonic=lambda: 3600 * hours[0]))
    (root / "weights").write_bytes(b"")  # so that the lock's file stays

    async def one() -> None:
        async with locked_directory(root):
            await asyncio.sleep(0.05)  # the others see who holds it
            hours[0] += 0.7
            await asyncio.sleep(0.05)

    async def all_of_them() -> None:
        await asyncio.gather(*(one() for _ in range(4)))

    asyncio.run(all_of_them())
    assert hours == [pytest.approx(2.8)]


async def test_a_wait_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count()
    monkeypatch.setattr(directory_changes, "time", SimpleNamespace(monotonic=lambda: 3601 * next(hours)))

    async with locked_directory(root):
        with pytest.raises(ConfigError, match=r"\.tierd-lock: another"):
            async with locked_directory(root):
                raise AssertionError


async def entered(root: Path) -> list[str]:
    async with locked_directory(root):
        return os.listdir(root)


@pytest.mark.parametrize("others", [[], ["a.pt"]])
def test_empty_directory_is_still_empty_after_its_lock(root: Path, others: list[str]) -> None:
    """Some training scripts refuse an output directory that is not empty and has no checkpoint."""
    for name in others:
        (root / name).touch()
    assert sorted(asyncio.run(entered(root))) == [LOCK_NAME, *others]
    assert sorted(os.listdir(root)) == ([LOCK_NAME, *others] if others else [])


def test_a_lock_whose_file_was_removed_is_not_held(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removed it after this command had opened it, and a third one made it anew."""
    flock, locked = fcntl.flock, []

    def once_removed(descriptor: int, how: int) -> None:
        if not locked:
            (root / LOCK_NAME).rename(root / "removed")
            (root / LOCK_NAME).touch()
        flock(descriptor, how)
        locked.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(fcntl, "flock", once_removed)
    asyncio.run(entered(root))
    assert locked == [(root / "removed").stat().st_ino, (root / LOCK_NAME).stat().st_ino]


def test_watch_without_locks_warns_and_continues(root: Path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    asyncio.run(entered(root))
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"{root / LOCK_NAME}: this file system refuses locks" in line


def test_a_directory_that_may_not_be_written_to_needs_no_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that is mounted read-only may still be verified."""

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refused)
    assert asyncio.run(directory_changes._locked(root / LOCK_NAME)) is None


def test_prepare_moves_nothing_that_another_restore_may_have_put_right(home: Home, capsys) -> None:  # type: ignore[no-untyped-def]
    """An older tierd that fetches into the directory does not know the lock."""
    path = layouts.trainer(home.root) / "trainer_state.json"
    home.taken()
    path.write_bytes(b"")
    before = files(home.root)
    with locked_partial(partial_path(home.root / in_place_restore.RESTORE_STAGING)):
        assert run(["prepare", str(home.root), "--run", RUN, "--to", str(home.tier)]) == 3
    assert files(home.root) == before and "another restore is filling it" in capsys.readouterr().err
