"""Telling systemd: ready, alive, stopping. The sd_notify(3) protocol is a datagram to the socket that it names.

Law: the watchdog is fed by the event loop itself, so a loop that hangs is restarted; without systemd all of it is a
no-op.
"""

from __future__ import annotations

import asyncio
import os
import socket

from tierd.core.printable import printable


def notify(state: str) -> None:
    """Send one `sd_notify` state, such as ``READY=1``; what is not for the eye, line feeds among it, goes escaped."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.sendto(printable(state).encode(), address)
    except OSError:
        pass  # a supervisor that went away is no reason to stop


def watchdog_interval() -> float | None:
    """Seconds between signs of life, half of what systemd allows; None where it expects none."""
    allowed = os.environ.get("WATCHDOG_USEC", "")
    ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(allowed) / 2e6 if allowed.isdigit() and int(allowed) > 0 and ours else None


async def feed_watchdog() -> None:
    """Show life until cancelled; returns at once where nobody watches."""
    interval = watchdog_interval()
    while interval is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
