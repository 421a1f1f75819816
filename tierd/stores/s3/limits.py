"""The S3 client's limits that no user sets. The store is given them and passes them to its session and its lines."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.stores.base import FIRST_PAGE


@dataclass(frozen=True)
class S3Limits:
    """How many connections the client has, and how long it waits.

    Attributes:
        connections: open at a time; further calls wait.
        connect_s: for TCP and the TLS handshake.
        answer_s: from a request's end until its response begins.
        stall_s: within which a byte must move while a body is transferred.
        idle_s: after which a server or a middlebox may have dropped an idle connection, so it is not used again.
        credentials_s: between two searches of the AWS chain, because a link of it may run a program or ask the
            instance's metadata.
        probe_s: after a probe of the server's checksums that had no usable response.
        first_page: keys in the first page of a listing, because `children` needs one key.
    """

    connections: int = 32
    connect_s: float = 10.0
    answer_s: float = 60.0
    stall_s: float = 20.0
    idle_s: float = 12.0
    credentials_s: float = 3.0
    probe_s: float = 60.0
    first_page: int = FIRST_PAGE


USUAL = S3Limits()
