"""Input takes no more memory, time, threads or connections than its bounds allow."""

from __future__ import annotations

from faults.fences import Fence
from faults.fences.edits import Answer, Assume, LeaveOut, Uncaught

_BOUNDS = "docs/explanation/attackers.md#bounds"

FENCES = (
    Fence(
        "a manifest may be of any size",
        _BOUNDS,
        "bound",
        "unseal",
        Assume(False, "limit"),
        "hostile --only 254",
        "a manifest of 33554433 bytes was taken",
    ),
    Fence(
        "a compressed frame may expand to any size",
        _BOUNDS,
        "bound",
        "codec.zstd_frames:expand_frame",
        Assume(False, "declared_size"),
        "hostile --only 5",
        "MiB were taken",
    ),
    Fence(
        "DCP's metadata may refer to one object without end",
        _BOUNDS,
        "bound",
        "_Builder._spend",
        Assume(False, "_left"),
        "hostile --only 10",
        "computed past its deadline",
    ),
    Fence(
        "a message may be nested without end",
        _BOUNDS,
        "bound",
        "ipc.message_codec:_decode",
        Uncaught("RecursionError"),
        "hostile --only 3",
        "RecursionError",
    ),
    Fence(
        "the HTTP server accepts any number of connections",
        "docs/explanation/attackers.md#the-http-server",
        "bound",
        "HttpServer.run",
        Assume(False, "_MOST serving"),
        "pytest tests/daemon/http/test_access.py -k more_connections",
    ),
    Fence(
        "the daemon accepts any number of control connections",
        "docs/explanation/failures.md#what-a-failure-does",
        "bound",
        "daemon.client_connections:has_control_room",
        Assume(True, "MAX_CONTROL_CONNECTIONS"),
        "pytest tests/daemon/test_control.py -k crowd",
    ),
    Fence(
        "a store's call has no deadline",
        "docs/explanation/failures.md#what-a-failure-does",
        "bound",
        "RetryingStore._within",
        Answer("timeout", "asyncio.timeout(None)"),
        "pytest tests/stores/test_retry.py -k every_call_ends",
    ),
    Fence(
        "a server's Retry-After is ignored",
        "docs/explanation/failures.md#what-a-failure-does",
        "bound",
        "CongestionWindow._refused",
        LeaveOut("_closed_until wait_s"),
        "pytest tests/stores/test_window.py -k nothing_begins",
    ),
)
