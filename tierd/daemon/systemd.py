"""Notifications to systemd: ready, alive, stopping. In sd_notify(3) each is a datagram to a socket that systemd names.

Invariant: the event loop itself feeds the watchdog, so a hanging loop is restarted. Without systemd all of this is a
no-op.
"""

from __future__ import annotations

import asyncio
import os
import socket

from tierd.core.printable import printable

_PATIENCE = 5.0  # seconds; without READY=1 systemd would end the daemon as one that did not start


def notify(state: str) -> None:
    """Send one `sd_notify` state, such as ``READY=1``; unprintable characters and line feeds are escaped.

    If the supervisor does not read and its queue is full, READY=1 waits 5 s, and all else is dropped at once, because
    a supervisor that hangs must not hold the daemon.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_PATIENCE if state.startswith("READY=1") else 0.0)
            connection.sendto(printable(state).encode(), address)
    except OSError:
        pass  # the daemon continues without its supervisor


def watchdog_interval() -> float | None:
    """Return the seconds between signs of life, half of systemd's limit; None if systemd expects none."""
    allowed = os.environ.get("WATCHDOG_USEC", "")
    is_own_process = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(allowed) / 2e6 if allowed.isdigit() and int(allowed) > 0 and is_own_process else None


async def feed_watchdog() -> None:
    """Send signs of life until cancelled; return at once if systemd expects none."""
    interval = watchdog_interval()
    while interval is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
