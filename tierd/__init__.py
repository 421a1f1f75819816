"""tierd: training saves to local NVMe and goes on; a daemon verifies, compresses, uploads, retains and restores.

Law: importing this package loads nothing of the daemon (no asyncio, no S3 client, no zstd, no watchdog), and torch only
when the first name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierd import logs

if TYPE_CHECKING:
    from tierd import dcp as dcp
    from tierd.client.checkpointer import Checkpointer
    from tierd.client.launch import new_attempt
    from tierd.client.restore import Restored
    from tierd.client.rng import RngState
    from tierd.client.save import Save
    from tierd.client.search import Skipped
    from tierd.core.choose import EarlyStopping, When
    from tierd.core.errors import (
        CheckpointNotFound,
        ConfigError,
        DaemonUnavailable,
        SaveFailed,
        SaveSkipped,
        SpoolFull,
        SpoolUnusable,
        StateMismatch,
        StateRefused,
        StepRefused,
        StoreRefused,
        StoreUnavailable,
        TierdError,
        TornSnapshot,
    )
    from tierd.core.retention import Best
    from tierd.core.retention import RetentionPolicy as Retention
    from tierd.observing import observe
    from tierd.reading import Loaded as Loaded
    from tierd.reading import Reader as Reader
    from tierd.reading import open as open

__version__ = "0.1.0"

logs.install()

_HOMES = {
    "Best": "tierd.core.retention",
    "Checkpointer": "tierd.client.checkpointer",
    "EarlyStopping": "tierd.core.choose",
    "Loaded": "tierd.reading",
    "Reader": "tierd.reading",
    "Restored": "tierd.client.restore",
    "Retention": "tierd.core.retention",
    "Save": "tierd.client.save",
    "Skipped": "tierd.client.search",
    "new_attempt": "tierd.client.launch",
    "RngState": "tierd.client.rng",
    "When": "tierd.core.choose",
    "observe": "tierd.observing",
    "open": "tierd.reading",
    # what a trainer catches
    "CheckpointNotFound": "tierd.core.errors",
    "ConfigError": "tierd.core.errors",
    "DaemonUnavailable": "tierd.core.errors",
    "SaveFailed": "tierd.core.errors",
    "SaveSkipped": "tierd.core.errors",
    "SpoolFull": "tierd.core.errors",
    "SpoolUnusable": "tierd.core.errors",
    "StateMismatch": "tierd.core.errors",
    "StateRefused": "tierd.core.errors",
    "StepRefused": "tierd.core.errors",
    "StoreRefused": "tierd.core.errors",
    "StoreUnavailable": "tierd.core.errors",
    "TierdError": "tierd.core.errors",
    "TornSnapshot": "tierd.core.errors",
}

# Without `open`, `Reader` and `Loaded`: `from tierd import *` must not load the daemon's packages in a trainer.
__all__ = [
    "Best",
    "Checkpointer",
    "EarlyStopping",
    "RngState",
    "Restored",
    "Retention",
    "Save",
    "Skipped",
    "When",
    "new_attempt",
    "observe",
    "CheckpointNotFound",
    "ConfigError",
    "DaemonUnavailable",
    "SaveFailed",
    "SaveSkipped",
    "SpoolFull",
    "SpoolUnusable",
    "StateMismatch",
    "StateRefused",
    "StepRefused",
    "StoreRefused",
    "StoreUnavailable",
    "TierdError",
    "TornSnapshot",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "dcp":
        return import_module("tierd.dcp")
    if name not in _HOMES:
        raise AttributeError(f"module 'tierd' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), {"Retention": "RetentionPolicy"}.get(name, name))
