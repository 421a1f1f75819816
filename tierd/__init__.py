"""tierd: training saves to local NVMe and goes on; a daemon verifies, compresses, uploads, retains and restores.

Law: importing this package loads nothing of the daemon (no asyncio, no S3 client, no zstd, no watchdog), and torch only
when the first name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierd import dcp as dcp
    from tierd.client.checkpointer import Checkpointer
    from tierd.client.launch import new_attempt
    from tierd.client.restore import Restored, Skipped
    from tierd.client.rng import RngState
    from tierd.client.save import Save
    from tierd.observing import observe

__version__ = "0.1.0"

_HOMES = {
    "Checkpointer": "tierd.client.checkpointer",
    "Restored": "tierd.client.restore",
    "Save": "tierd.client.save",
    "Skipped": "tierd.client.restore",
    "new_attempt": "tierd.client.launch",
    "RngState": "tierd.client.rng",
    "observe": "tierd.observing",
}

__all__ = ["Checkpointer", "RngState", "Restored", "Save", "Skipped", "new_attempt", "observe", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "dcp":
        return import_module("tierd.dcp")
    if name not in _HOMES:
        raise AttributeError(f"module 'tierd' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
