"""Close a `Checkpointer`: wait for its saves, then for the tiers if that was asked for, then release its parts.

Invariants:

- The parts are released even if the wait for a tier fails.
- The first close raises if the last state that the job asked to be saved is in no place.
"""

from __future__ import annotations

import logging
import time

from tierd.client import timings
from tierd.client.closing import Closing, check_failed, check_wait, lost
from tierd.client.composition import CheckpointerParts
from tierd.core.errors import SaveFailed, TierdError
from tierd.core.planning.place import SPOOL

log = logging.getLogger("tierd")

_PATIENCE_S = 2.0  # how long `close` waits for events that are still being sent to the daemon
_WAKING_S = 1.0  # how long `close` waits for a daemon that was silent, and may just have been let go on


class Shutdown:
    """The end of one `Checkpointer`; the arguments and errors are those of `Checkpointer.close`."""

    def __init__(self, parts: CheckpointerParts) -> None:
        self._parts = parts
        self._verified: set[str] = set()  # tiers that `close` has waited for with success

    def close(self, wait: str | None, timeout: float | None, deadline: str | float | None) -> None:
        """Close, or after an earlier close wait for a named tier."""
        parts = self._parts
        check_wait(wait, timeout, tiers=parts.daemon.tiers)
        if parts.forked or (parts.closed and (wait in (None, SPOOL) or wait in self._verified)):
            return
        end_s = parts.schedule.end_s(deadline)
        nowhere = ""
        if not parts.closed:
            parts.gate.detach()
            self._drain(end_s)
            nowhere = lost(parts.spool, parts.records.nowhere)
        if end_s is not None:
            left_s = max(0.0, end_s - time.monotonic())
            timeout = left_s if timeout is None else min(timeout, left_s)
        patience_s = _PATIENCE_S
        try:
            self._wait(wait, timeout, node_ends=end_s is not None)
        except (TierdError, TimeoutError) as error:
            patience_s = 0.0 if isinstance(error, TimeoutError) else patience_s
            if nowhere:
                log.error("closed: %s", nowhere)
            raise
        finally:
            parts.release(patience_s)
        if nowhere:
            raise SaveFailed(nowhere)

    def _drain(self, end_s: float | None) -> None:
        """Wait for every save, and log once if that takes longer than until `end_s` of the monotonic clock."""
        pipeline = self._parts.pipeline
        if end_s is not None and not pipeline.drain(max(0.0, end_s - time.monotonic())):
            log.error(
                "closing: the newest save is not durable in the spool at the deadline, and is lost if the node ends "
                "now; `tierd advise --notice` computes what fits"
            )
        pipeline.drain()

    def _wait(self, wait: str | None, timeout: float | None, *, node_ends: bool) -> None:
        """Wait for the tiers of the saves that are durable in the spool."""
        parts = self._parts
        if parts.records.saved and parts.daemon.tiers:
            parts.daemon.renew(_WAKING_S)  # a daemon that woke after the last save may not know this launch's tiers
            closing = Closing(
                parts.spool,
                parts.records.has_saved,
                parts.daemon.renew,
                lambda: parts.daemon.silent,
                node_ends=node_ends,
                timings=timings.given(),
            )
            if wait not in (None, SPOOL):
                closing.wait_for(wait, timeout)
            else:
                closing.end(patient=wait is None, timeout_s=timeout)
        if wait not in (None, SPOOL):
            check_failed(wait, parts.records.failed)
            self._verified.add(wait)
