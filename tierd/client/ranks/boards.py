"""Boards: where the ranks of a launch leave small notes for each other, by key.

Ranks on several nodes have a board on a tier: each node's daemon puts and reads its notes. Such a note is compressed.
If it is longer than a request can carry, it is split into pieces:

    <name>          pieces (2 bytes), CRC-32 of all of them together (4 bytes), then the first piece
    <name>.p<n>     the n-th piece, put before the first one

Invariant: no call waits for another rank. A note is there whole or not at all, and the latest note of a key counts.
While a note on a tier is being replaced, its checksum differs, so it counts as absent.
"""

from __future__ import annotations

import copy
import hashlib
import os
import secrets
import shutil
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tierd.client.client_timings import USUAL_TIMINGS
from tierd.core.errors import DaemonSilent, DaemonUnavailable, RequestUnknown, TierdError, VersionMismatch
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.ipc.messages import MAX_NOTE, NotesRequest
from tierd.spool.spool import Spool
from tierd.spool.spool_access import check_own_directory

RANK_NOTES_DIRECTORY = "meetings"  # a directory of `.tierd/`
_KEPT_S = 86400.0  # how long a directory of notes is kept after its last use


class Board(Protocol):
    """A set of notes. Raises `RuntimeError` or `OSError` if it cannot be reached. One thread at a time uses it."""

    description: str
    poll_s: float  # the longest pause between two reads while waiting for a note
    beat_s: float  # between two signs of life
    outlives: bool = False  # whether notes remain after the ranks have ended, until somebody removes them
    exclusive: bool = False  # whether no other launch, and no earlier start of this one, has left notes

    def put(self, key: str, value: bytes) -> None: ...

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the notes among `keys` that are there. All keys have the same components except the last."""
        ...

    def remove(self, keys: Collection[str]) -> None: ...

    def forget(self, prefix: str) -> None:
        """Remove every note whose key begins with `prefix`, which ends with ``/``. For boards that outlive ranks."""
        return

    def holds(self, prefix: str) -> bool:
        """Whether a note's key begins with `prefix`, which ends with ``/``."""
        return False

    def second_connection(self) -> Board:
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
    """

    poll_s, beat_s = 0.05, 2.0

    def __init__(self, store: Any, prefix: str, label: str, exclusive: bool = False) -> None:
        self._weak, self._prefix, self.description, self.exclusive = weakref.ref(store), prefix, label, exclusive

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

    `launch` names the launch and its restart, the same on every rank. Raises `SpoolUnusable` if the directory is a
    link, or belongs to another user.
    """

    poll_s, beat_s = 0.02, 2.0
    outlives = True

    def __init__(self, control: Path, launch: str) -> None:
        self._room = control / RANK_NOTES_DIRECTORY
        self._path = self._room / hashlib.blake2b(launch.encode(), digest_size=16).hexdigest()
        self.description = str(self._path)
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
            check_own_directory(path)

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "+")


def _sweep(room: Path) -> None:
    for path in room.iterdir():
        with suppress(OSError):
            if path.lstat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(path)


_SILENCE_S = 15.0  # without a sign of work from the daemon, which sends one every 5 s
_AGAIN_S = 0.2
_HEAD = struct.Struct(">HI")
_PIECE = MAX_NOTE - _HEAD.size  # bytes
_PIECES = 256  # pieces of one note
_LARGEST = 1 << 28  # bytes of a decompressed note
_BATCH = 256  # notes in one request
_UNLISTED_NOTES = 4  # notes that are read without a listing first


class TierBoard(Board):
    """A board on the first tier of the node's daemon. Every node's daemon of the launch has the same first tier.

    A daemon that ends is waited for, or replaced, for seconds. A stopped daemon is an error that names it. The more
    ranks there are, the slower is each: all together make about 1,000 requests per second at most.
    """

    outlives = True
    beat_s = 5.0

    def __init__(
        self,
        spool: Spool,
        run: str,
        launch: str,
        world: int,
        tier: str,
        renew: Callable[[], None] = lambda: None,
        answer_s: float = USUAL_TIMINGS.notes_s,
    ) -> None:
        self._spool, self._run, self._renew, self._answer_s = spool, run, renew, answer_s
        self._launch = hashlib.blake2b(launch.encode(), digest_size=16).hexdigest()
        self.description = f"{tier}, through the daemon of node {socket.gethostname()}"
        self.poll_s = 0.5 + world / 1000
        self._link: DaemonConnection | None = None
        self._pieces: dict[str, int] = {}  # number of pieces of each note that has several

    def put(self, key: str, value: bytes) -> None:
        name, data = _name(key), zlib.compress(value, 1)
        pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
        if len(pieces) > _PIECES:
            raise ValueError(
                f"what the ranks tell each other has {len(data)} bytes, and a note takes {_PIECES * _PIECE}: "
                "initialise torch.distributed before the Checkpointer is made, and they talk over its store"
            )
        for number, piece in reversed(list(enumerate(pieces[1:], 1))):
            self._ask(put={f"{name}.p{number}": piece})
        self._ask(put={name: _HEAD.pack(len(pieces), zlib.crc32(data)) + pieces[0]})
        if len(pieces) > 1:
            self._pieces[name] = len(pieces)

    def read(self, keys: Collection[str]) -> dict[str, bytes]:
        names = {_name(key): key for key in keys}
        note_names = list(names)
        if len(note_names) > _UNLISTED_NOTES:  # most are not there yet, and one listing request shows which are
            existing = set(self._names(note_names[0].rpartition(".")[0] + "."))
            note_names = [name for name in note_names if name in existing]
        notes = {}
        for name, head in self._get(note_names).items():
            value = self._assemble(name, head)
            if value is not None:
                notes[names[name]] = value
        return notes

    def remove(self, keys: Collection[str]) -> None:
        names = [_name(key) for key in keys]
        names += [f"{name}.p{number}" for name in names for number in range(1, self._pieces.pop(name, 0))]
        self._remove(names)

    def forget(self, prefix: str) -> None:
        self._remove(self._names(_name(prefix)))

    def holds(self, prefix: str) -> bool:
        return bool(self._names(_name(prefix)))

    def second_connection(self) -> TierBoard:
        board = copy.copy(self)
        board._link, board._pieces = None, {}
        return board

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _assemble(self, name: str, head: bytes) -> bytes | None:
        count, checksum = _HEAD.unpack_from(head) if len(head) >= _HEAD.size else (0, 0)
        if not 1 <= count <= _PIECES:
            return None
        data = head[_HEAD.size :]
        if count > 1:
            piece_names = [f"{name}.p{number}" for number in range(1, count)]
            pieces = self._get(piece_names)
            data += b"".join(pieces.get(piece_name, b"") for piece_name in piece_names)
            self._pieces[name] = count
        if zlib.crc32(data) != checksum:
            return None
        return zlib.decompressobj().decompress(data, _LARGEST)

    def _names(self, under: str) -> list[str]:
        return read_member(self._ask(under=under), "names", list[str])

    def _get(self, names: Sequence[str]) -> dict[str, bytes]:
        notes: dict[str, bytes] = {}
        for batch in _batches(names):
            notes |= read_member(self._ask(read=tuple(batch)), "notes", dict[str, bytes])
        return notes

    def _remove(self, names: Sequence[str]) -> None:
        for batch in _batches(names):
            self._ask(remove=tuple(batch))

    def _ask(self, **fields: Any) -> dict[str, Any]:
        """Ask the daemon. A request may be repeated, because doing it twice changes nothing."""
        request = NotesRequest(run=self._run, launch=self._launch, **fields)
        end_s = time.monotonic() + self._answer_s
        while True:
            try:
                if self._link is None:
                    self._link = DaemonConnection(self._spool, silence_s=_SILENCE_S)
                return self._link.ask(request, max(0.1, end_s - time.monotonic()))
            except (DaemonSilent, RequestUnknown, VersionMismatch) as error:
                self.close()
                raise OSError(str(error)) from error
            except DaemonUnavailable as error:
                self.close()
                if time.monotonic() >= end_s:
                    raise OSError(str(error)) from error
                self._renew()
                time.sleep(_AGAIN_S)
            except TimeoutError as error:
                self.close()
                raise OSError(f"no answer within {self._answer_s:g} s") from error
            except TierdError as error:
                raise OSError(str(error)) from error


def _name(key: str) -> str:
    return key.replace("/", ".")


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[at : at + _BATCH] for at in range(0, len(names), _BATCH))
