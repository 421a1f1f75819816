"""What must be there after kills, worked out from what writers were told, and nothing of tierd's.

A rank's part of a checkpoint is due from the moment that its writer was told: `wait("local")`, or a tier's name, has
returned; or the daemon was told of its snapshot, and no daemon was killed since (P11): then to anyone who asks the
daemon, once the writer is dead. A checkpoint is due when every rank's part is. A restore must give the newest that is
due, by attempt and step, or one that was begun after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

Name = tuple[str, int]  # attempt, step


@dataclass
class Part:
    """What is known of one rank's part; times are monotonic seconds."""

    begun: float
    launch: int
    given: bool = False
    local: bool = False
    tiers: set[str] = field(default_factory=set)

    @property
    def lasts(self) -> bool:
        return self.local or bool(self.tiers)

    def due(self, death: float) -> bool:
        return self.lasts or (self.given and self.begun > death)


class Expected:
    """The history of one run of `world` ranks, as its writers' log tells it."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.saves: defaultdict[Name, dict[int, Part]] = defaultdict(dict)
        self.death = -math.inf  # when a daemon died last
        self.restored: set[Name] = set()  # verified by all that is to be had, and therefore due
        self._before: dict[tuple[int, int], set[Name]] = {}  # launch, rank -> what was due when it began to restore

    def saw(self, rank: int, what: str, line: dict) -> None:
        """One line of the log, but for restores."""
        name = line["attempt"], line["step"]
        if what == "begun":
            self.saves[name][rank] = Part(line["at"], line["launch"])
        elif what == "returned":
            self.saves[name][rank].given = line["given"]
        elif what == "local":
            self.saves[name][rank].local = True
        elif what == "tier":
            self.saves[name][rank].tiers.add(line["tier"])

    def is_due(self, name: Name) -> bool:
        parts = self.saves[name]
        return name in self.restored or (
            len(parts) == self.world and all(part.due(self.death) for part in parts.values())
        )

    def begin(self, launch: int, rank: int, waited_for: Callable[[int], bool]) -> None:
        """A rank begins to restore: what is due now is due to it. What the daemon only holds is, where it asks the
        daemon, and that waits for the launch that gave it."""
        self._before[launch, rank] = {
            name
            for name, parts in self.saves.items()
            if self.is_due(name)
            and (name in self.restored or all(part.lasts or waited_for(part.launch) for part in parts.values()))
        }

    def wrong(self, launch: int, rank: int, found: Name | None) -> str | None:
        """Why this rank must not have been given `found`; None where it may."""
        # What the daemon only held may have gone with it meanwhile.
        newest = max((name for name in self._before[launch, rank] if self.is_due(name)), default=None)
        if found is None:
            return f"{newest} was due, and nothing was found" if newest else None
        if newest and found < newest:
            return f"{newest} was due, and {found} was found: {self.saves[newest]}"
        if len(self.saves.get(found, ())) < self.world and found not in self.restored:
            return f"{found} was found, which not all of {self.world} ranks had begun"
        return None

    @property
    def newest(self) -> Name:
        """What was begun last, in the order of attempts."""
        return max(self.saves)

    def latest_is_on_a_tier(self) -> bool:
        """Whether the newest attempt left something on a tier to resume from. If it did not, a restore without the
        spool may find nobody to tell what that attempt resumed from: it then refuses, and a person decides."""
        latest = max((attempt for attempt, _ in self.saves), default=None)
        return any(
            attempt == latest and len(parts) == self.world and all(part.tiers for part in parts.values())
            for (attempt, _), parts in self.saves.items()
        )

    def lost_spool(self) -> None:
        """The node is gone: only what a tier is known to hold is due."""
        self.restored.clear()
        for parts in self.saves.values():
            for part in parts.values():
                part.local = part.given = False
