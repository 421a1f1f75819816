"""Decide which versions of a client and of a daemon work together over the spool's sockets.

Invariant: the decision depends on both protocol numbers and on nothing else, so client and daemon always agree on it.

A protocol is written ``major.minor``. A release raises the minor number if it adds request kinds, members, or a promise
that the other side relies on. Such a release removes nothing, and an added member has a default with the meaning of its
absence. A release that changes the meaning of an existing message raises the major number. The greeting itself
(`messages.Hello` and its answer) never changes its form.

1.1: while training may wait for a request, the daemon sends a sign of life every `messages.BEAT` seconds, so that its
silence is found soon. `messages.NotesRequest` is added, by which ranks on several nodes communicate, and
`messages.RunsRequest`.

2.0: parts in the spool are of format 4, which neither side of protocol 1 reads. The messages are those of 1.1.

2.1: `LendSlots` and `FillSlot` of `ipc/message_codec` are added, by which a restore gets chunks without a copy in the
spool.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_TEXT = r"[0-9]{1,4}\.[0-9]{1,4}"
PROTOCOL_TEXT = rf"^{_TEXT}\Z"
VERSION_TEXT = r"^[0-9A-Za-z.+!-]{1,64}\Z"

Side = Literal["client", "daemon"]


class Protocol(NamedTuple):
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @staticmethod
    def parse(text: str) -> Protocol | None:
        if not re.fullmatch(_TEXT, text):
            return None
        major, minor = text.split(".")
        return Protocol(int(major), int(minor))


PROTOCOL = Protocol(2, 1)


class Peer(NamedTuple):
    """One side of a socket; `protocol` is None if it is older than protocol numbers."""

    protocol: Protocol | None
    version: str

    def __str__(self) -> str:
        if self.protocol is None:
            return f"before protocol {Protocol(1, 0)}"
        return f"tierd {self.version}, protocol {self.protocol}"


def outdated_side(client: Protocol | None, daemon: Protocol | None) -> Side | None:
    """Return the side to upgrade before the two work together; None if they do.

    Two protocols work together if their major numbers are equal and their minor numbers are at most one apart.
    """
    client_protocol, daemon_protocol = client or Protocol(0, 0), daemon or Protocol(0, 0)
    if client_protocol.major == daemon_protocol.major and abs(client_protocol.minor - daemon_protocol.minor) <= 1:
        return None
    return "client" if client_protocol < daemon_protocol else "daemon"


def explain_outdated(client: Peer, daemon: Peer) -> str:
    """Name both versions and the side to upgrade; empty if the two work together."""
    versions = f"(daemon: {daemon}; client: {client})"
    match outdated_side(client.protocol, daemon.protocol):
        case "daemon":
            return (
                f"the daemon speaks too old a protocol for the client {versions}: upgrade the daemon to the client's "
                "version of tierd and restart it (systemctl restart tierd)"
            )
        case "client":
            return (
                f"the client speaks too old a protocol for the daemon {versions}: upgrade the client, which is the "
                "tierd that training or the command line runs"
            )
        case None:
            return ""
