"""Objects of the standard library that are plain data: each becomes a tag of typed JSON, and is made anew by a restore.

Invariant: only the exact types of `ENCODERS` are stored, and a restore calls only their own constructors, with text and
numbers that it has checked.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

from tierd.state.json_tree import SCALARS

_PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _bytes_io(value: io.BytesIO) -> object:
    return {"$bytesio": [base64.b64encode(value.getvalue()).decode(), value.tell()]}  # raises if it is closed


def _zoned(tag: str) -> Callable[[Any], object]:
    """Return an encoder of times, whose zone is None or a fixed offset without a name of its own."""

    def encode(value: Any) -> object:
        zone = value.tzinfo
        if zone is not None and (type(zone) is not datetime.timezone or zone != _zone_of(value) or _is_named(zone)):
            kind = type(zone)
            raise ValueError(
                f"with the zone {kind.__module__}.{kind.__qualname__}, which is no plain offset; pass "
                ".astimezone(datetime.timezone.utc)"
            )
        return {tag: [value.isoformat(), value.fold]}

    return encode


def _zone_of(value: Any) -> datetime.timezone:
    return datetime.timezone(value.utcoffset())


def _is_named(zone: datetime.timezone) -> bool:
    return len(zone.__getinitargs__()) > 1  # type: ignore[attr-defined]


def _path(value: pathlib.PurePath) -> object:
    kind = "Path" if isinstance(value, pathlib.Path) else type(value).__name__
    return {"$path": [kind, SCALARS[str](str(value))]}


# Exact type -> encoder, which raises `ValueError` for a value that has no encoding.
ENCODERS: dict[type, Callable[[Any], object]] = {
    io.BytesIO: _bytes_io,
    datetime.datetime: _zoned("$datetime"),
    datetime.time: _zoned("$time"),
    datetime.date: lambda value: {"$date": value.isoformat()},
    datetime.timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    type(pathlib.Path()): _path,
    pathlib.PurePosixPath: _path,
    pathlib.PureWindowsPath: _path,
    uuid.UUID: lambda value: {"$uuid": str(value)},
    decimal.Decimal: lambda value: {"$decimal": str(value)},
}


def _parts(payload: object, *kinds: type) -> list[Any]:
    if type(payload) is not list or [type(part) for part in payload] != list(kinds):
        raise ValueError(f"not {len(kinds)} parts of {', '.join(kind.__name__ for kind in kinds)}")
    return payload


def _text(payload: object) -> str:
    if type(payload) is not str:
        raise ValueError(f"{type(payload).__name__} in the place of str")
    return payload


def _made_bytes_io(payload: object) -> io.BytesIO:
    data, position = _parts(payload, str, int)
    stream = io.BytesIO(base64.b64decode(data, validate=True))
    stream.seek(position)
    return stream


def _made_time(kind: Any) -> Callable[[object], object]:
    def build(payload: object) -> object:
        text, fold = _parts(payload, str, int)
        return kind.fromisoformat(text).replace(fold=fold)

    return build


def _made_path(payload: object) -> object:
    kind, text = _parts(payload, str, str)
    if kind not in _PATHS:
        raise ValueError(f"{kind[:40]!r} is no kind of path")
    return _PATHS[kind](text)


def _made_decimal(payload: object) -> decimal.Decimal:
    try:
        return decimal.Decimal(_text(payload))
    except decimal.DecimalException as error:  # an ArithmeticError
        raise ValueError("not the text of a Decimal") from error


TAGS: dict[str, Callable[[Any], object]] = {
    "$bytesio": _made_bytes_io,
    "$datetime": _made_time(datetime.datetime),
    "$time": _made_time(datetime.time),
    "$date": lambda text: datetime.date.fromisoformat(_text(text)),
    "$timedelta": lambda parts: datetime.timedelta(*_parts(parts, int, int, int)),
    "$path": _made_path,
    "$uuid": lambda text: uuid.UUID(_text(text)),
    "$decimal": _made_decimal,
}
