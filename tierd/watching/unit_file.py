"""`unit.json`: the description of a unit inside its part, from which it is put back in place.

Invariant: a description from a tier is untrusted: every path in it is checked before it is used.

A part of a watched run holds the unit's files at their paths below the watched directory, and this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierd.core.errors import ManifestError
from tierd.core.manifest import check_path
from tierd.watching.pointers import Pointer, target_of

UNIT_NAME = "unit.json"
MAX_SIZE = 64 << 20  # bytes
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class UnitFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a unit.

    Attributes:
        path: the unit's path below the watched directory.
        program: the program whose layout it has.
        ranks: how many ranks wrote it.
        modified_ns: each file's path, and when its content last changed, in ns since 1970.
        pointers: the files and links beside the unit that named it when it was taken.
    """

    version: Literal[1] = 1
    path: str
    program: str
    ranks: Annotated[int, Meta(ge=1)]
    modified_ns: Mapping[str, _Time]
    pointers: tuple[Pointer, ...] | UnsetType = UNSET

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def decode_unit(data: bytes | memoryview, where: str) -> UnitFile:
    """Decode and check a description.

    Args:
        data: the file's bytes.
        where: the file, for messages.

    Raises:
        ManifestError: it is no description, or a path in it is unsafe.
    """
    try:
        unit_file = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error
    pointers = unit_file.pointers or ()
    for path in (unit_file.path, *unit_file.modified_ns, *(pointer.path for pointer in pointers)):
        check_path(path, where)
    if any(pointer.link and target_of(pointer) is None for pointer in pointers):
        raise ManifestError(f"{where}: a link in it leads out of the directory")
    return unit_file


_decoder = msgspec.json.Decoder(UnitFile)
