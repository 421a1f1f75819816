"""Whether the tiers have what a run's policy wants there, or are behind: the one decision that the page, `top` and
`status` show.

Invariant: a run is `current` only if nothing that a tier wants is on no tier. A tier that never answered may hold
anything, so a run that it may lack is `unknown`, and never `current`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from tierd.core.ids import CheckpointId, PartId, checkpoint_order
from tierd.core.planning.inventory import Inventory, observed_runs
from tierd.core.units import format_age

_SAVES = 2  # intervals between saves that a checkpoint may wait, because a flush is spread over half of one
_LEAST_S, _MOST_S = 300.0, 4 * 3600.0  # bounds of that time; the upper one is that of `TierdCheckpointTooOld`
_UNKNOWN_S = 3600.0  # the time while a run has too few checkpoints to show how often it saves
_COUNTED = 9  # newest checkpoints by which the interval is judged


@dataclass(frozen=True, slots=True)
class FlushLag:
    """How far the tiers are behind a run.

    Attributes:
        state: `current`: a tier has all that any tier wants; `sending`: something waits, and not for too long; `late`:
            it waits for longer than `allowed_s`; `unknown`: a tier that may have it has not answered yet; `local`: the
            run's launch names no tier; `none`: no tier has a whole checkpoint, and nothing is to be sent.
        text: the state, for people.
        tier_step: the newest checkpoint that a tier holds whole; None: there is none.
        unsent: the number of checkpoints that a tier wants and that are, whole or in part, on no tier.
        oldest_step: the oldest of these; None: there is none.
        waited_s: the seconds since that one was made, or since the first save after `tier_step` if a newer one has
            taken the place of that in the policy since.
        allowed_s: the seconds that they may wait: two of the run's intervals between saves, at least 5 minutes and at
            most 4 hours.
        lacking: the tiers that want any of these.
    """

    run: str
    state: Literal["current", "sending", "late", "unknown", "local", "none"]
    text: str
    tier_step: int | None
    unsent: int = 0
    oldest_step: int | None = None
    waited_s: float = 0.0
    allowed_s: float = 0.0
    lacking: tuple[str, ...] = ()


def flush_lags(
    inventory: Inventory,
    planned: Iterable[tuple[PartId, str]],
    unknown: Collection[str],
    saves_of: Callable[[str], Iterable[tuple[CheckpointId, float]]],
    now_s: float,
) -> tuple[FlushLag, ...]:
    """Judge every run of an inventory.

    Args:
        inventory: with a tier that does not answer now as it was last observed.
        planned: the part and the tier of each flush that the inventory's plan has.
        unknown: the tiers that have never answered, which the inventory shows as empty.
        saves_of: a run's last saves and when they were made, in seconds since 1970, also those that were deleted since.
        now_s: the time in seconds since 1970.
    """
    tiers = [place for place in inventory.tiers.values() if place]
    unsent: dict[str, dict[CheckpointId, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part, tier in planned:
        if inventory.spool.lists(part) and not any(place.has(part) for place in tiers):
            unsent[part.checkpoint.run][part.checkpoint].add(tier)
    runs = sorted({*observed_runs(inventory), *inventory.spool.local_only})
    return tuple(_judge(inventory, run, unsent.get(run, {}), unknown, saves_of, now_s) for run in runs)


def _judge(
    inventory: Inventory,
    run: str,
    unsent: Mapping[CheckpointId, set[str]],
    unknown: Collection[str],
    saves_of: Callable[[str], Iterable[tuple[CheckpointId, float]]],
    now_s: float,
) -> FlushLag:
    latest = (place.run(run).latest_usable for place in inventory.tiers.values() if place)
    on_tiers = [checkpoint for checkpoint in latest if checkpoint]
    newest = max(on_tiers, key=checkpoint_order, default=None)
    tier_step = newest.step if newest else None
    safe = "on no tier" if newest is None else f"step {newest.step} is on a tier"
    if not unsent:
        if run in inventory.spool.local_only:
            return FlushLag(run, "local", "in the spool alone: its launch names no tier", tier_step)
        return FlushLag(run, "none" if newest is None else "current", safe, tier_step)
    certain = {checkpoint: names for checkpoint, names in unsent.items() if names.isdisjoint(unknown)}
    if not certain:
        return FlushLag(run, "unknown", f"not known, because {' and '.join(unknown)} did not answer yet", tier_step)
    oldest = min(certain, key=lambda checkpoint: (_made_s(inventory, checkpoint, now_s), checkpoint))
    made_s = [_made_s(inventory, oldest, now_s)]
    if ahead := [checkpoint for checkpoint in certain if newest is None or checkpoint > newest]:
        after = newest or CheckpointId(run, min(ahead).attempt, -1)
        made_s += [saved_s for checkpoint, saved_s in saves_of(run) if checkpoint > after]
    waited_s, allowed_s = max(0.0, now_s - min(made_s)), _allowed_s(inventory, run)
    lacking = tuple(name for name in inventory.tiers if any(name in names for names in certain.values()))
    is_late = waited_s > allowed_s
    waiting = f"step {oldest.step} waits" if len(certain) == 1 else f"{len(certain)} wait"
    text = f"{safe}; {waiting} for {format_age(waited_s)}" + f" (allowed: {format_age(allowed_s)})" * is_late
    state: Literal["late", "sending"] = "late" if is_late else "sending"
    return FlushLag(run, state, text, tier_step, len(certain), oldest.step, round(waited_s, 3), allowed_s, lacking)


def _made_s(inventory: Inventory, checkpoint: CheckpointId, unread_s: float) -> float:
    """When a checkpoint was made, by its trainer's clock; `unread_s` if no manifest of it was read."""
    facts = inventory.spool.checkpoints[checkpoint].metadata_facts
    return facts.created.timestamp() if facts else unread_s


def _allowed_s(inventory: Inventory, run: str) -> float:
    """How long a checkpoint of a run may wait, by the median interval between the newest launch's last saves."""
    made_s: dict[CheckpointId, float] = {}
    for place in inventory.places.values():
        for copy in place.run(run).copies.values():
            if facts := copy.metadata_facts:
                made_s[copy.id] = facts.created.timestamp()
    newest = max((checkpoint.attempt for checkpoint in made_s), default="")
    times = sorted(time_s for checkpoint, time_s in made_s.items() if checkpoint.attempt == newest)[-_COUNTED:]
    if len(times) < 2:
        return _UNKNOWN_S
    return min(_MOST_S, max(_LEAST_S, _SAVES * median(later - time_s for time_s, later in pairwise(times))))
