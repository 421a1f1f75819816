"""The actions of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.place import SPOOL


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a part to a tier: from the spool, or `relayed` from another tier if the spool does not have it."""

    part: PartId
    tier: str
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete a checkpoint from a tier, or its copy from the spool (`tier` is then `SPOOL`)."""

    checkpoint: CheckpointId
    tier: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove a file or directory of the spool by `name`: an abandoned stage, an old quarantined part, or a finished
    run's pin or record of its launch."""

    name: str
    tier: str = SPOOL


@dataclass(frozen=True, slots=True)
class RepairCopy:
    """Repair a part whose manifest is corrupt in one place from another copy, or quarantine it."""

    part: PartId
    tier: str = SPOOL


Action = Flush | Prune | Discard | RepairCopy
