"""A trainer on a fresh node that reads a part past its spool, beside a daemon of the same process: for kits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from support.world import running

from tierd.client.restoring.part_source import NodeSource
from tierd.core.ids import PartId
from tierd.daemon.control_socket import ControlServer
from tierd.daemon.handoff_socket import HandoffServer
from tierd.daemon.reconciler import Reconciler
from tierd.spool.spool import Spool


@contextlib.asynccontextmanager
async def serving(daemon: Reconciler) -> AsyncIterator[Reconciler]:
    """Have a daemon serve its spool, as `daemon/daemon_service.py` puts it together."""
    with daemon.spool.lock():
        handoff = HandoffServer(daemon.spool, lambda part, outcome: None)
        control = ControlServer(daemon, handoff)
        with handoff.listening(5):
            async with control.listening(), running(daemon):
                yield daemon


def read_streamed(spool: Spool, part: PartId) -> tuple[dict[str, bytes], bool]:
    """A part's files as a restore gets them, and whether none of them went through the spool."""
    source = NodeSource(spool, part.checkpoint.run, tiers=True)
    try:
        source.run_view()
        _, files, _ = source.obtain(part)
        return {path: bytes(data) for path, data in files.items()}, not spool.has(part)
    finally:
        source.forget()
        source.close()
