"""The newest checkpoint that each tier holds of each run, as a file for schedulers and scripts: `last-verified.json`.

Invariants: the file is replaced whole, and names only checkpoints whose parts are all on the tier, verified. A failure
to write it changes nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierd.core.planning.inventory import Inventory
from tierd.spool.file_io import replace_private

log = logging.getLogger("tierd.daemon")

LAST_VERIFIED = "last-verified.json"  # in `.tierd/`
_INTERVAL_S = 10.0  # seconds between two comparisons of the file with the inventory


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """The newest complete checkpoint of a run on a tier.

    Attributes:
        run: the run's name.
        tier: the tier's name.
        step: the checkpoint's step.
        attempt: the launch that wrote it.
        created: when it was saved, RFC 3339; null: no manifest of it was read yet.
    """

    run: str
    tier: str
    step: int
    attempt: str
    created: str | None


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoints:
    """The content of the file.

    Attributes:
        checkpoints: one for each run of the spool and tier that has a complete checkpoint of it.
    """

    checkpoints: tuple[VerifiedCheckpoint, ...]


class LastVerified:
    """Keeps the file of a spool. A tier that does not answer keeps the entries that the file has of it."""

    def __init__(self, control: Path, inventory: Callable[[], Inventory]) -> None:
        self._path, self._inventory = control / LAST_VERIFIED, inventory
        self._by_tier: dict[str, list[VerifiedCheckpoint]] = {}
        for checkpoint in _read(self._path):
            self._by_tier.setdefault(checkpoint.tier, []).append(checkpoint)

    async def keep(self) -> None:
        """Write the file where it has changed, until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(_INTERVAL_S)
                self.write()
        finally:
            self.write()

    def write(self) -> None:
        """Write the file if it says something else. It is small, so this is done in the event loop."""
        inventory = self._inventory()
        answered = {tier: _newest(inventory, tier) for tier in inventory.tiers if inventory.tiers[tier]}
        self._by_tier = {tier: answered.get(tier, self._by_tier.get(tier, [])) for tier in inventory.tiers}
        checkpoints = tuple(checkpoint for tier in self._by_tier.values() for checkpoint in tier)
        content = msgspec.json.encode(VerifiedCheckpoints(checkpoints))
        try:
            is_there = self._path.is_file()
            if content == self._path.read_bytes() if is_there else not checkpoints:
                return
            replace_private(self._path, content)
        except OSError as error:  # for example a full disk
            log.info("local: %s is not written: %s", LAST_VERIFIED, error)


def _read(path: Path) -> tuple[VerifiedCheckpoint, ...]:
    """Read the file of an earlier daemon; nothing if it is absent or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=VerifiedCheckpoints).checkpoints
    except (OSError, msgspec.MsgspecError):
        return ()


def _newest(inventory: Inventory, tier: str) -> list[VerifiedCheckpoint]:
    """Return the newest complete checkpoint on the tier of each run of the spool."""
    place, newest_by_run = inventory.tiers[tier], []
    for run in sorted(inventory.spool.runs) if place else ():
        assert place is not None
        copies = place.run(run)
        if newest := copies.latest_usable:
            facts = copies.copies[newest].metadata_facts
            created = facts.created.isoformat(timespec="seconds") if facts else None
            newest_by_run.append(VerifiedCheckpoint(run, tier, newest.step, newest.attempt, created))
    return newest_by_run
