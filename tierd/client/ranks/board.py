"""Boards: where the ranks of a launch leave small notes for each other, by key.

Invariant: no call waits for another rank. A note is there whole or not at all, and the latest note of a key counts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tierd.spool.permissions import check_room

RANK_NOTES = "meetings"  # a directory of `.tierd/`
_KEPT_S = 86400.0  # how long a directory of notes is kept after its last use


class Board(Protocol):
    """A set of notes. Raises `RuntimeError` or `OSError` if it cannot be reached. One thread at a time uses it.

    Attributes:
        what: the board's description, for messages.
        poll_s: the longest pause between two reads while waiting for a note, in seconds.
        beat_s: seconds between two signs of life.
        outlives: whether notes remain after the ranks have ended, until somebody removes them.
        exclusive: whether no other launch, and no earlier start of this one, has left notes.
    """

    what: str
    poll_s: float
    beat_s: float
    outlives: bool = False
    exclusive: bool = False

    def put(self, key: str, value: bytes) -> None: ...

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the notes among `keys` that are there. All keys have the same components except the last."""
        ...

    def remove(self, keys: Collection[str]) -> None: ...

    def forget(self, prefix: str) -> None:
        """Remove every note whose key begins with `prefix`, which ends with ``/``. For boards that outlive ranks."""
        return

    def holds(self, prefix: str) -> bool:
        """Whether there is a note whose key begins with `prefix`, which ends with ``/``."""
        return False

    def beside(self) -> Board:
        """Return a board over the same notes, which another thread may use."""
        return self

    def close(self) -> None:
        """Close connections. The board can be used again."""
        return

    def get(self, key: str) -> bytes | None:
        return self.read((key,)).get(key)


class StoreBoard(Board):
    """A `torch.distributed.Store`: the default process group's, or the one of torchrun's agent.

    Only calls that return at once are made, because a store's lock is shared with the process group's own threads. The
    board holds the store by a weak reference. Otherwise a process group that is made again at the same address would
    find the previous group's server.

    Args:
        exclusive: as `Board.exclusive`.
    """

    poll_s, beat_s = 0.05, 2.0

    def __init__(self, store: Any, prefix: str, label: str, exclusive: bool = False) -> None:
        self._weak, self._prefix, self.what, self.exclusive = weakref.ref(store), prefix, label, exclusive

    def put(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        store, names = self._store, {key: f"{self._prefix}/{key}" for key in keys}
        return {key: bytes(store.get(name)) for key, name in names.items() if store.check([name])}

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    @property
    def _store(self) -> Any:
        store = self._weak()
        if store is None:
            raise RuntimeError("it is gone, because the process group was destroyed: make a new Checkpointer")
        return store


class DirectoryBoard(Board):
    """A directory in the spool, for a launch whose ranks are all on this node: `.tierd/meetings/<launch>/`.

    Args:
        control: the spool's `.tierd/`.
        launch: a name of the launch and its restart, the same on every rank.

    Raises:
        SpoolUnusable: the directory is a link, or belongs to another user.
    """

    poll_s, beat_s = 0.02, 2.0
    outlives = True

    def __init__(self, control: Path, launch: str) -> None:
        self._room = control / RANK_NOTES
        self._path = self._room / hashlib.blake2b(launch.encode(), digest_size=16).hexdigest()
        self.what = str(self._path)
        self._make()
        os.utime(self._path)
        _sweep(self._room)

    def put(self, key: str, value: bytes) -> None:
        path = self._file(key)
        self._make()  # another launch may have swept the directory if this one ran for long
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(value)
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        notes = {}
        for key in keys:
            with suppress(FileNotFoundError):
                fd = os.open(self._file(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with os.fdopen(fd, "rb") as file:
                    notes[key] = file.read()
        return notes

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def forget(self, prefix: str) -> None:
        for path in self._under(prefix):
            path.unlink(missing_ok=True)

    def holds(self, prefix: str) -> bool:
        return bool(self._under(prefix))

    def _under(self, prefix: str) -> list[Path]:
        name = self._file(prefix).name
        return [path for path in self._path.iterdir() if path.name.startswith(name)]

    def _make(self) -> None:
        for path in (self._room, self._path):
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            check_room(path)

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "+")


def _sweep(room: Path) -> None:
    """Remove the directories of launches that ended long ago."""
    for path in room.iterdir():
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(path)
