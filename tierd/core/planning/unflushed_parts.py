"""Which parts are not on every tier that wants them, and how a message says so.

Invariant: every part of the spool counts as lacking on a tier that did not answer, because that tier may lack anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from tierd.core.errors import DaemonUnavailable
from tierd.core.ids import PartId
from tierd.core.planning.inventory import Inventory
from tierd.core.units import pause_text

_LISTED_PARTS = 5  # parts that a sentence names


class UnflushedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part that some tier lacks. `size_bytes` is 0 if its manifest cannot be read.

    The tiers in `on` hold a verified copy; those in `lacks` want one and have none, or did not answer.
    """

    part: PartId
    size_bytes: int
    on: tuple[str, ...]
    lacks: tuple[str, ...]


class TierReadiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a tier takes checkpoints now, that is, answered the last listing and has no `error`.

    A tier that `refused` needs a person; any other failure may be temporary.
    """

    reached: bool
    error: str | None = None
    refused: bool = False

    @property
    def accepts(self) -> bool:
        return self.reached and self.error is None


class UnflushedParts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A daemon's answer to `messages.BacklogRequest`."""

    left: tuple[UnflushedPart, ...] = ()
    tiers: dict[str, TierReadiness] = {}
    paused: str | None = None  # when the pause ends, in RFC 3339, or "until resumed"; None if the daemon is not paused
    moved_bytes: dict[str, int] = {}  # by tier, the raw bytes of parts in `left` that are confirmed there already
    left_to_nodes: tuple[str, ...] = ()  # what tiers with `backfill` lack and other nodes were to send, in words

    @property
    def left_bytes(self) -> int:
        """The raw bytes that are still to be sent, counted for each tier that lacks them."""
        todo = sum(remainder.size_bytes * len(remainder.lacks) for remainder in self.left)
        return max(0, todo - sum(self.moved_bytes.values()))

    @property
    def problem(self) -> str | None:
        """Why no tier takes checkpoints; None if some tier does, or if the daemon has not listed a tier yet."""
        if self.paused:
            return pause_text(self.paused)
        errors = [f"{name}: {tier.error}" for name, tier in self.tiers.items() if tier.error]
        return "; ".join(errors) if errors and len(errors) == len(self.tiers) else None


def parse_backlog(answer: Mapping[str, Any]) -> UnflushedParts:
    """The backlog in a daemon's answer. Raises `DaemonUnavailable` if a daemon of another version gave another form."""
    try:
        return msgspec.convert(answer["backlog"], UnflushedParts)
    except (KeyError, msgspec.ValidationError) as error:
        raise DaemonUnavailable(f"the daemon is of another version of tierd ({error}): restart it") from error


def list_unflushed(inventory: Inventory, planned: Collection[tuple[PartId, str]]) -> tuple[UnflushedPart, ...]:
    """The parts that some tier lacks and that this daemon sends from the spool or from another tier, newest first.

    `planned` has the part and the tier of each flush in the current plan.
    """
    remainders = []
    parts = {part for part, _ in planned}
    if None in inventory.tiers.values():
        parts.update(inventory.spool.parts())
    for part in sorted(parts, key=lambda part: (part.checkpoint, -part.rank), reverse=True):
        lacks = tuple(
            name
            for name, place in inventory.tiers.items()
            if (part, name) in planned or (place is None and inventory.spool.lists(part))
        )
        if lacks:
            on = tuple(name for name, place in inventory.tiers.items() if place and place.has(part))
            remainders.append(UnflushedPart(part=part, size_bytes=inventory.size_bytes(part), on=on, lacks=lacks))
    return tuple(remainders)


def unflushed_by_tier(remainders: Sequence[UnflushedPart]) -> dict[str, tuple[int, int]]:
    """By tier, the number of parts and of bytes that it lacks; only tiers that lack something."""
    parts, size = Counter[str](), Counter[str]()
    for remainder in remainders:
        parts.update(remainder.lacks)
        size.update(dict.fromkeys(remainder.lacks, remainder.size_bytes))
    return {name: (parts[name], size[name]) for name in parts}


def describe_unflushed(remainders: Sequence[UnflushedPart], silent: Collection[str] = ()) -> str:
    """One sentence about the parts that are left. It lists parts on no tier before parts that only some tiers lack.

    The tiers in `silent` did not answer.
    """
    if not remainders:
        return "nothing is left: every part is on every tier that wants it"
    nowhere = [remainder for remainder in remainders if not remainder.on]
    pieces = []
    if nowhere:
        where = "no tier that answers" if silent else "no tier"
        pieces.append(f"{_parts(len(nowhere))} on {where}: {_names(nowhere)}")
    for (on, lacks), count in Counter(
        (remainder.on, remainder.lacks) for remainder in remainders if remainder.on
    ).items():
        number = f"{count} more {'is' if count == 1 else 'are'}" if pieces else _parts(count)
        pieces.append(f"{number} on {_join_names(on)} and not on {_join_names(lacks)}")
    return "; ".join(pieces) + (f" ({_join_names(tuple(silent))} did not answer)" if silent else "")


def _parts(count: int) -> str:
    return "1 part is" if count == 1 else f"{count} parts are"


def _names(parts: Sequence[UnflushedPart]) -> str:
    listing = ", ".join(str(remainder.part) for remainder in parts[:_LISTED_PARTS])
    return listing + (f", and {len(parts) - _LISTED_PARTS} older ones" if len(parts) > _LISTED_PARTS else "")


def _join_names(names: tuple[str, ...]) -> str:
    return " and ".join(names)
