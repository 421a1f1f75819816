"""The way of a daemon's flushes to one tier."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.core.ids import PartId
from tierd.daemon.pause import Pause, at_once
from tierd.daemon.timings import USUAL, DaemonTimings
from tierd.daemon.transfer.memory_budget import FLUSHES, Budget
from tierd.daemon.transfer.shared_encoding import Encoding
from tierd.daemon.transfer.throughput import Throughput
from tierd.stores.base import Store


@dataclass(slots=True)
class FlushProgress:
    """How far a flush is, in raw bytes: `done` are confirmed on the tier, of `total`."""

    total: int
    done: int = 0


@dataclass(frozen=True, slots=True)
class TierUploadContext:
    """Everything that a flush needs to reach one tier.

    Attributes:
        store: the tier's store.
        tier: the tier's name.
        who: 8 hex digits that identify this node; random if no later process sweeps this node's intents.
        reread: read everything back, even if the server shows that it verifies.
        budget: the budget of encoded bytes in transfer to this tier.
        encoding: the encoder that all flushes of a daemon share.
        pause: awaited before each chunk, because the daemon may be paused.
        moving: how far the flushes under way are.
        timings: the daemon's.
    """

    store: Store
    tier: str = ""
    who: str = ""
    reread: bool = False
    budget: Budget = field(default_factory=lambda: Budget(FLUSHES))
    encoding: Encoding = field(default_factory=Encoding)
    pause: Pause = at_once
    moving: dict[PartId, FlushProgress] = field(default_factory=dict)
    timings: DaemonTimings = USUAL

    @property
    def throughput(self) -> Throughput:
        """The measured throughput, which decides whether compression pays."""
        return self.encoding.throughput
