"""Packets of the hand-off socket: sent without waiting, received within a bounded silence.

Invariant: a forked child holds no connection, because its end is how the daemon sees that a trainer died.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from tierd.core.errors import DaemonUnavailable
from tierd.ipc.daemon_connection import close_in_child
from tierd.ipc.message_codec import MAX_PACKET, AnyHandoff, raise_error

_INTERVALS = 4  # intervals into which a wait for silence is divided


class ConnectionClosed(DaemonUnavailable):
    """The daemon closed the connection."""


class AnswerTimeout(DaemonUnavailable):
    """The daemon sent nothing within the time limit."""


def open_packet_socket() -> socket.socket:
    """Make a socket that never blocks; raises `OSError` if no descriptor is available."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    close_in_child(connection)
    return connection


def send_packet(connection: socket.socket, message: AnyHandoff, *fds: int) -> None:
    """Send a message with its descriptors.

    Raises `ConnectionError` if the connection has ended, and another `OSError` if the daemon does not read.
    """
    if connection.fileno() < 0:
        raise ConnectionError("the connection is closed")
    socket.send_fds(connection, [msgspec.json.encode(message)], fds, socket.MSG_NOSIGNAL)


def receive_packet(
    connection: socket.socket, silence_s: float, most_fds: int = 0, on_sign_of_life: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], list[int]]:
    """Wait for the next answer and its descriptors, which the caller then owns, while the daemon shows that it works.

    Args:
        silence_s: seconds without a packet that end the wait; 0 checks without waiting.
        most_fds: how many descriptors the answer may bring. The kernel closes further ones.
        on_sign_of_life: called for each packet by which the daemon shows that it works; what it raises is raised.

    Raises:
        TierdError: the condition that the daemon answered with.
        AnswerTimeout: nothing arrived for `silence_s` seconds.
        ConnectionClosed: the daemon closed the connection, or died.
        DaemonUnavailable: the packet is no answer.
    """
    ready = select.poll()
    if connection.fileno() < 0:  # the thread that waited for an earlier answer has closed the connection
        raise ConnectionClosed("the daemon closed the connection")
    try:
        ready.register(connection, select.POLLIN)
        while True:
            # Waits in intervals, because a pause of the whole machine or of this process uses up only one of them. A
            # daemon that was paused as well and continues is heard in the next.
            if not any(ready.poll(silence_s * 1000 / _INTERVALS) for _ in range(_INTERVALS)):
                raise AnswerTimeout(f"the daemon was silent for {silence_s:g} s")
            packet, fds, _, _ = socket.recv_fds(connection, MAX_PACKET, most_fds, socket.MSG_CMSG_CLOEXEC)
            try:
                reply = _answer(packet)
                if reply is not None:
                    answered, fds = fds, []
                    return reply, answered
                on_sign_of_life()
            finally:
                close_fds(fds)
    except ConnectionError as error:  # the daemon died with unread packets, or before it accepted the connection
        raise ConnectionClosed(f"the daemon is gone: {error}") from error
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise DaemonUnavailable(f"the daemon's connection broke: {error}") from error


def _answer(packet: bytes) -> dict[str, Any] | None:
    """Return the answer in a packet; None for a sign of life."""
    if not packet:
        raise ConnectionClosed("the daemon closed the connection")
    reply = msgspec.json.decode(packet, type=dict[str, Any])
    if reply.get("working"):
        return None
    if not reply.get("ok"):
        raise_error(reply)
    return reply


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
