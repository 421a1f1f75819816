"""The last known status, which outlives the daemon: a file in the spool's `.tierd/`.

Invariant: the file is replaced whole, and a failure to write it changes nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tierd.daemon.status import Status

log = logging.getLogger("tierd.daemon")

LAST_STATUS = "status.json"  # in `.tierd/`
_LARGEST = 64 << 20  # bytes
_WRITE_INTERVAL_S = 60.0  # seconds, so that a killed daemon leaves a status that is not older


async def keep(control: Path, status: Callable[[], Status]) -> None:
    """Write the status now and then, until cancelled."""
    while True:
        await asyncio.sleep(_WRITE_INTERVAL_S)
        await asyncio.to_thread(write, control, status())


def write(control: Path, status: Status) -> None:
    """Write a status to a spool's `.tierd/`, as the last one of a daemon that may end at any time."""
    fresh = control / f"{LAST_STATUS}.new"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(replace(status, running=False)))
        fresh.replace(control / LAST_STATUS)
    except OSError as error:  # for example a full disk
        log.info("local: the last status is not recorded: %s", error)


def recorded_at(control: Path) -> float:
    """Return when a daemon of the spool last recorded its status, in seconds since 1970; `-inf` if none has."""
    try:
        return (control / LAST_STATUS).lstat().st_mtime
    except OSError:
        return -math.inf


def read(control: Path) -> dict[str, Any] | None:
    """Return the last status that a daemon recorded in a spool's `.tierd/`; None if none can be read."""
    try:
        fd = os.open(control / LAST_STATUS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            return msgspec.json.decode(file.read(_LARGEST), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
