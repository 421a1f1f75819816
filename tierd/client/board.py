"""Where the ranks of a launch leave notes for each other: small values by key.

Law: no call waits for another rank. A note is there whole or not at all, and the latest one of a key counts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tierd.trust import check_room

MEETINGS = "meetings"  # a room of `.tierd/`
_KEPT_S = 86400.0  # that a directory of notes stays after its last use


class Board(Protocol):
    """Raises `RuntimeError` or `OSError` where it cannot be reached.

    Attributes:
        what: for messages.
        poll_s: the longest pause between two looks for a note.
        beat_s: between two signs of life.
    """

    what: str
    poll_s: float
    beat_s: float

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def remove(self, key: str) -> None: ...


class StoreBoard:
    """A `torch.distributed.Store`: the default process group's, or the one of torchrun's agent.

    Only calls that return at once are made, because a store's lock is shared with the process group's own threads. It
    is not kept alive: a group that is made anew at the same address would find the server of the one before.
    """

    poll_s, beat_s = 0.05, 2.0

    def __init__(self, store: Any, prefix: str, what: str) -> None:
        self._weak, self._prefix, self.what = weakref.ref(store), prefix, what

    def put(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        name, store = f"{self._prefix}/{key}", self._store
        return bytes(store.get(name)) if store.check([name]) else None

    def remove(self, key: str) -> None:
        self._store.delete_key(f"{self._prefix}/{key}")

    @property
    def _store(self) -> Any:
        store = self._weak()
        if store is None:
            raise RuntimeError("it is gone, because the process group was destroyed: make a new Checkpointer")
        return store


class DirectoryBoard:
    """A directory in the spool, for a launch whose ranks are all on this node: `.tierd/meetings/<launch>/`.

    Args:
        control: the spool's `.tierd/`.
        launch: names the launch and its restart; the same on every rank.

    Raises:
        SpoolUnusable: the directory is a link, or another user's.
    """

    poll_s, beat_s = 0.02, 2.0

    def __init__(self, control: Path, launch: str) -> None:
        self._room = control / MEETINGS
        self._path = self._room / hashlib.blake2b(launch.encode(), digest_size=16).hexdigest()
        self.what = str(self._path)
        self._make()
        os.utime(self._path)
        _sweep(self._room)

    def put(self, key: str, value: bytes) -> None:
        path = self._file(key)
        self._make()  # a launch that ran for long may have been swept
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(value)
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def get(self, key: str) -> bytes | None:
        try:
            fd = os.open(self._file(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def remove(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def _make(self) -> None:
        for path in (self._room, self._path):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            check_room(path)

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "+")


def _sweep(room: Path) -> None:
    """Remove what launches have left that ended long ago."""
    for path in room.iterdir():
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(path)
