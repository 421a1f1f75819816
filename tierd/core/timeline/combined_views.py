"""What the run views of all ranks say together, for `candidates`.

Equal views are decoded once, because ranks of one node have equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tierd.core.ids import CheckpointId
from tierd.core.timeline.run_view import CORRUPT, RunView, named, ranks_of


def silent_places(sights: Sequence[RunView]) -> dict[str, tuple[int, ...]]:
    """By details of a place that did not answer, the indices of the run views that lack it."""
    found: dict[str, tuple[int, ...]] = {}
    for number, sight in enumerate(sights):
        for why in (sight.silent[name] for name in sight.unreached if name in sight.silent):
            found[why] = (*found.get(why, ()), number)
    return found


def metric_values(sights: Sequence[RunView], run: str) -> dict[str, dict[CheckpointId, float]]:
    """By metric, the values that any rank's view has, without corrupt ones."""
    found: dict[str, dict[CheckpointId, float]] = {}
    for sight in {msgspec.msgpack.encode(one.values): one for one in sights}.values():
        for metric, attempts in sight.values.items():
            found.setdefault(metric, {}).update(
                (CheckpointId(run, attempt, step), math.nan if value is None else float(value))
                for attempt, steps in attempts.items()
                for step, value in steps.items()
                if value != CORRUPT
            )
    return found


def corrupt_metrics(sights: Sequence[RunView], run: str) -> set[CheckpointId]:
    """The checkpoints whose metrics rank 0's manifest will never give, because it is corrupt in some view."""
    return {
        CheckpointId(run, attempt, step)
        for sight in sights
        for attempts in sight.values.values()
        for attempt, steps in attempts.items()
        for step, value in steps.items()
        if value == CORRUPT
    }


def combined(
    sights: Sequence[RunView], whole: Sequence[dict[CheckpointId, int]], run: str, *, mute: bool
) -> tuple[set[CheckpointId], dict[CheckpointId, int], set[CheckpointId]]:
    """Combine the run views of all ranks.

    Returns:
        Every checkpoint of which any rank observes a part; the complete ones with their world sizes; and the complete
        ones that only names show to be so.
    """
    told: dict[CheckpointId, int] = {}
    bare: dict[CheckpointId, int] = {}
    # Ranks of one node have equal views, each of which is decoded once.
    alike = {
        (id(seen), msgspec.msgpack.encode(one.hollow)): (one, seen) for one, seen in zip(sights, whole, strict=True)
    }
    for sight, seen in alike.values():
        hollow = named(run, sight.hollow)
        for checkpoint, size in seen.items():
            into = bare if checkpoint in hollow else told
            into[checkpoint] = min(size, into.get(checkpoint, size))
    complete = bare | told
    parts: dict[CheckpointId, dict[int, set[int]]] = {}
    for sight in {msgspec.msgpack.encode(one.parts): one for one in sights}.values():
        for checkpoint, sizes in sight.partial(run).items():
            for size, ranks in sizes.items():
                parts.setdefault(checkpoint, {}).setdefault(size, set()).update(ranks)
    found = {*complete, *parts}
    for checkpoint, sizes in parts.items():
        full = [size for size, ranks in sizes.items() if len(ranks) == size != bare.get(checkpoint)]
        if full and checkpoint not in told:
            told[checkpoint] = complete[checkpoint] = min(full)
    if mute:
        for checkpoint in named(run, sights[0].mixed):
            del complete[checkpoint]
    return found, complete, bare.keys() & complete.keys() - told.keys()


def lacking_ranks(
    sights: Sequence[RunView],
    whole: Sequence[dict[CheckpointId, int]],
    complete: dict[CheckpointId, int],
    world: int,
    *,
    everything: bool,
) -> dict[CheckpointId, tuple[int, ...]]:
    """By complete checkpoint, the ranks that do not observe the parts that they need."""
    found: dict[CheckpointId, list[int]] = {}
    absent: dict[int, list[CheckpointId]] = {}
    for rank, (sight, seen) in enumerate(zip(sights, whole, strict=True)):
        if id(seen) not in absent:
            needed = [one for one, size in complete.items() if everything or size == world]
            absent[id(seen)] = [one for one in needed if seen.get(one) != complete[one]]
        for checkpoint in absent[id(seen)]:
            own = sight.parts.get(checkpoint.attempt, {}).get(checkpoint.step, {}).get(complete[checkpoint], [])
            if everything or rank not in ranks_of(own):
                found.setdefault(checkpoint, []).append(rank)
    return {checkpoint: tuple(ranks) for checkpoint, ranks in found.items()}


def complete_by_view(sights: Sequence[RunView], run: str) -> list[dict[CheckpointId, int]]:
    """For each run view, its complete checkpoints with their world sizes. Equal views are decoded once."""
    same: dict[bytes, dict[CheckpointId, int]] = {}
    found = []
    for sight in sights:
        name = msgspec.msgpack.encode(sight.whole)
        if name not in same:
            same[name] = sight.complete(run)
        found.append(same[name])
    return found
