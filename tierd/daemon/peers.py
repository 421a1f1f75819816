"""Version checks of this daemon's clients, with one log line for each client that it does not work with."""

from __future__ import annotations

import logging
from typing import Any

from tierd import __version__
from tierd.core.errors import RequestUnknown, VersionMismatch
from tierd.ipc.decoding import UnknownKind
from tierd.ipc.messages import Hello
from tierd.ipc.protocol import PROTOCOL, Peer, explain
from tierd.ipc.replies import error_reply, greeting

log = logging.getLogger("tierd.daemon")

THIS = Peer(PROTOCOL, __version__)
_MAX_LOGGED_PEERS = 1000  # peers that are remembered as logged


def unknown(error: UnknownKind) -> RequestUnknown:
    """Return the error that answers a request of a newer client; the connection continues after it."""
    return RequestUnknown(f"{error}: the daemon ({THIS}) is older than the client; upgrade the daemon")


class Peers:
    """The clients of one socket.

    Args:
        where: the socket's name, for the log.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._logged: set[tuple[int, Peer]] = set()

    def answer(self, pid: int, hello: Hello) -> dict[str, Any]:
        """Answer a greeting with this daemon's versions, and with an error if it does not work with the client's."""
        why = explain(hello.peer, THIS)
        if not why:
            return greeting(THIS.version)
        self._log(pid, hello.peer, f"turned away pid {pid}: {why}")
        return greeting(THIS.version) | error_reply(VersionMismatch(why))

    def unnamed(self, pid: int) -> None:
        """Log a client that sent a request before any greeting, and so is older than protocol numbers.

        Such a client gets answers, because the requests that it knows have kept their form.
        """
        client = Peer(None, "")
        self._log(pid, client, f"answered pid {pid}, although {explain(client, THIS)}")

    def _log(self, pid: int, client: Peer, text: str) -> None:
        if (pid, client) in self._logged:
            return
        if len(self._logged) >= _MAX_LOGGED_PEERS:
            self._logged.clear()
        self._logged.add((pid, client))
        log.warning("%s: %s", self._where, text)
