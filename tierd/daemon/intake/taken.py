"""The record of the units that were taken from a directory: `.tierd/watched/<run>.json`.

A cache: without it, units that retention deleted everywhere, and that their program kept, are taken once more when a
daemon starts.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec

from tierd.spool.file_io import private
from tierd.spool.spool import Spool
from tierd.watching.settle import Shape

_WATCHED = "watched"


class TakenUnits:
    """By path, the size and the time of change of each file of the units that were taken.

    Args:
        spool: the spool.
        run: the watched run.
    """

    def __init__(self, spool: Spool, run: str) -> None:
        self._path = spool.control / _WATCHED / f"{run}.json"
        self._units: dict[str, dict[str, tuple[int, int]]] = {}
        with suppress(OSError, msgspec.DecodeError, ValueError):
            self._units = _decoder.decode(self._path.read_bytes())

    def has(self, path: str, shape: Shape) -> bool:
        """Whether a unit was taken as it is now."""
        return self._units.get(path) == _sizes(shape)

    def add(self, path: str, shape: Shape) -> None:
        """Record that a unit was taken, or that a place has it. Raises nothing."""
        if self.has(path, shape):
            return
        self._units[path] = _sizes(shape)
        self._write()

    def keep(self, paths: set[str]) -> None:
        """Forget the units that are not in the directory any more. Raises nothing."""
        if gone := self._units.keys() - paths:
            for path in gone:
                del self._units[path]
            self._write()

    def _write(self) -> None:
        fresh = self._path.with_name(f".{secrets.token_hex(8)}")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(fresh, "xb", opener=private) as file:
                file.write(msgspec.json.encode(self._units))
            fresh.replace(self._path)


def _sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    return {path: (entry.size, entry.mtime_ns) for path, entry in shape}


_decoder = msgspec.json.Decoder(dict[str, dict[str, tuple[int, int]]])
