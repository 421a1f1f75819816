"""The daemon's answers: its greeting, the members of an answer, and errors, which the client raises again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from tierd.core import errors
from tierd.core.errors import DaemonUnavailable, TierdError
from tierd.ipc.messages import Hello
from tierd.ipc.protocol import PROTOCOL, Peer

T = TypeVar("T")


def greeting(version: str) -> dict[str, Any]:
    """Return the daemon's greeting, where `version` is its version of tierd."""
    return {"ok": True, "protocol": str(PROTOCOL), "version": version}


def greeted(reply: dict[str, Any]) -> Peer:
    """Return the daemon that sent the greeting `reply`. A daemon without a protocol number predates the numbers."""
    try:
        return msgspec.convert(reply, Hello).peer
    except (msgspec.ValidationError, UnicodeError):
        return Peer(None, "")


def read_member(reply: dict[str, Any], name: str, kind: type[T]) -> T:
    """Read a member of an answer.

    Raises:
        DaemonUnavailable: the member is missing or differs, because the daemon is of another version.
    """
    try:
        return msgspec.convert(reply[name], kind, str_keys=True)
    except (KeyError, msgspec.ValidationError, UnicodeError) as error:
        raise DaemonUnavailable(
            f"the daemon is of another version of tierd ({type(error).__name__}: {error}): restart it with this version"
        ) from error


def error_reply(error: Exception) -> dict[str, Any]:
    """Encode an error as an answer with the name of its condition, so that the other side raises the same one."""
    condition_names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {"ok": False, "error": next(condition_names, type(error).__name__), "message": str(error)}


def raise_error(reply: dict[str, Any]) -> None:
    """Raise the error of an answer with ``ok: false``."""
    name, message = str(reply.get("error")), str(reply.get("message"))
    if name == "TimeoutError":
        raise TimeoutError(message)
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TierdError):
        raise kind(message)
    raise DaemonUnavailable(f"the daemon failed: {name}: {message}")
