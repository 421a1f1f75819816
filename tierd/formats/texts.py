"""JSON files, read as a whole. Covered: their syntax. Bound: 64 MiB; a larger file is not read."""

from __future__ import annotations

from typing import Any

import msgspec

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, UncheckedFile

_MAX = 64 << 20
CUT = "JSON that ends early"
EMPTY = "an empty file, and no JSON"


def read_json(source: ByteSource) -> Any:
    """Read the value in a file. NaN and infinities, which Python's `json` writes, become None.

    Raises:
        DamagedFile: the file is empty, truncated, or not JSON.
        UncheckedFile: the file is too large or nested too deep.
    """
    if source.size > _MAX:
        raise UncheckedFile(f"JSON of {source.size} bytes, more than {_MAX}")
    data = source.read(0, source.size)
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        if b"NaN" in data or b"Infinity" in data:
            return _read_with_constants(data)
        text = data.strip()
        if not text:
            raise DamagedFile(source.size, EMPTY) from None
        if text[:1] in (b"{", b"[") and text[-1:] not in (b"}", b"]"):
            raise DamagedFile(source.size, f"{CUT}: {error}") from None
        raise DamagedFile(0, f"no JSON: {error}") from None


def _read_with_constants(data: bytes) -> Any:
    import json  # only this decoder accepts NaN; used only for files that may hold it

    try:
        return json.loads(data, parse_constant=lambda _: None)
    except RecursionError:
        raise UncheckedFile("JSON that is nested too deep") from None
    except ValueError as error:
        raise DamagedFile(getattr(error, "pos", 0), f"no JSON: {error}") from None


def check_json(source: ByteSource) -> Sound:
    """Check a file; raises as `read_json`."""
    read_json(source)
    return Sound("JSON", "the format holds no digest")
