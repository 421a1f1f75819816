"""tierd: training saves to local NVMe and continues; a daemon verifies, compresses, uploads, retains and restores.

Invariant: importing this package loads nothing of the daemon (no asyncio, no S3 client, no zstd, no watchdog). It loads
torch only when a name that needs torch is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tierd import logs
from tierd.core.errors import importing_extras

if TYPE_CHECKING:
    from tierd import dcp as dcp
    from tierd.client.checkpointer import Checkpointer
    from tierd.client.ranks.attempts import new_attempt
    from tierd.client.restoring.candidate_trials import Skipped
    from tierd.client.restoring.restorer import Restored
    from tierd.client.sample_watch import SampleWatch
    from tierd.client.saving.save_jobs import Save
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
    from tierd.core.retention.policy import Best
    from tierd.core.retention.policy import RetentionPolicy as Retention
    from tierd.core.save_rules import EarlyStopping, When
    from tierd.observing import observe
    from tierd.reading import Loaded as Loaded
    from tierd.reading import Reader as Reader
    from tierd.reading import open as open
    from tierd.state.kinds.random_generators import RngState

__version__ = "0.1.0"

logs.install_escaping()

_HOMES = {
    "Best": "tierd.core.retention.policy",
    "Checkpointer": "tierd.client.checkpointer",
    "EarlyStopping": "tierd.core.save_rules",
    "Loaded": "tierd.reading",
    "Reader": "tierd.reading",
    "Restored": "tierd.client.restoring.restorer",
    "Retention": "tierd.core.retention.policy",
    "Save": "tierd.client.saving.save_jobs",
    "Skipped": "tierd.client.restoring.candidate_trials",
    "new_attempt": "tierd.client.ranks.attempts",
    "RngState": "tierd.state.kinds.random_generators",
    "SampleWatch": "tierd.client.sample_watch",
    "When": "tierd.core.save_rules",
    "observe": "tierd.observing",
    "open": "tierd.reading",
    # the errors that a trainer may catch
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

# `open`, `Reader` and `Loaded` are left out, because `from tierd import *` must not load the daemon's packages.
__all__ = [
    "Best",
    "Checkpointer",
    "EarlyStopping",
    "RngState",
    "SampleWatch",
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
    if name != "dcp" and name not in _HOMES:
        raise AttributeError(f"module 'tierd' has no attribute {name!r}")
    with importing_extras(f"tierd.{name}", "torch,daemon" if _HOMES.get(name) == "tierd.reading" else "torch"):
        if name == "dcp":
            return import_module("tierd.dcp")
        return getattr(import_module(_HOMES[name]), {"Retention": "RetentionPolicy"}.get(name, name))


def __dir__() -> list[str]:
    return sorted({*_HOMES, "dcp", "__version__", "__doc__"})
