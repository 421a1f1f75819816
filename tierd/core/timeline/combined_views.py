"""What the run views of all ranks say together, for `candidates`.

Equal views are decoded once, because ranks of one node have equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tierd.core.ids import CheckpointId
from tierd.core.timeline.run_view import CORRUPT, RunView, named, ranks_of


def silent_places(views: Sequence[RunView]) -> dict[str, tuple[int, ...]]:
    """By details of a place that did not answer, the indices of the run views that lack it."""
    found: dict[str, tuple[int, ...]] = {}
    for number, view in enumerate(views):
        for why in (view.silent[name] for name in view.unreached if name in view.silent):
            found[why] = (*found.get(why, ()), number)
    return found


def metric_values(views: Sequence[RunView], run: str) -> dict[str, dict[CheckpointId, float]]:
    """By metric, the values that any rank's view has, without corrupt ones."""
    found: dict[str, dict[CheckpointId, float]] = {}
    for view in {msgspec.msgpack.encode(one.values): one for one in views}.values():
        for metric, attempts in view.values.items():
            found.setdefault(metric, {}).update(
                (CheckpointId(run, attempt, step), math.nan if value is None else float(value))
                for attempt, steps in attempts.items()
                for step, value in steps.items()
                if value != CORRUPT
            )
    return found


def corrupt_metrics(views: Sequence[RunView], run: str) -> set[CheckpointId]:
    """The checkpoints whose metrics rank 0's manifest will never give, because it is corrupt in some view."""
    return {
        CheckpointId(run, attempt, step)
        for view in views
        for attempts in view.values.values()
        for attempt, steps in attempts.items()
        for step, value in steps.items()
        if value == CORRUPT
    }


def combined(
    views: Sequence[RunView], whole: Sequence[dict[CheckpointId, int]], run: str, *, isolated: bool
) -> tuple[set[CheckpointId], dict[CheckpointId, int], set[CheckpointId]]:
    """Combine the run views of all ranks.

    Returns:
        Every checkpoint of which any rank observes a part; the complete ones with their world sizes; and the complete
        ones that only names show to be so.
    """
    proven: dict[CheckpointId, int] = {}
    bare: dict[CheckpointId, int] = {}
    # Ranks of one node have equal views, each of which is decoded once.
    alike = {
        (id(seen), msgspec.msgpack.encode(one.hollow)): (one, seen) for one, seen in zip(views, whole, strict=True)
    }
    for view, seen in alike.values():
        hollow = named(run, view.hollow)
        for checkpoint, size in seen.items():
            into = bare if checkpoint in hollow else proven
            into[checkpoint] = min(size, into.get(checkpoint, size))
    complete = bare | proven
    parts: dict[CheckpointId, dict[int, set[int]]] = {}
    for view in {msgspec.msgpack.encode(one.parts): one for one in views}.values():
        for checkpoint, sizes in view.partial(run).items():
            for size, ranks in sizes.items():
                parts.setdefault(checkpoint, {}).setdefault(size, set()).update(ranks)
    found = {*complete, *parts}
    for checkpoint, sizes in parts.items():
        full = [size for size, ranks in sizes.items() if len(ranks) == size != bare.get(checkpoint)]
        if full and checkpoint not in proven:
            proven[checkpoint] = complete[checkpoint] = min(full)
    if isolated:
        for checkpoint in named(run, views[0].mixed):
            del complete[checkpoint]
    return found, complete, bare.keys() & complete.keys() - proven.keys()


def lacking_ranks(
    views: Sequence[RunView],
    whole: Sequence[dict[CheckpointId, int]],
    complete: dict[CheckpointId, int],
    world: int,
    *,
    everything: bool,
) -> dict[CheckpointId, tuple[int, ...]]:
    """By complete checkpoint, the ranks that do not observe the parts that they need."""
    found: dict[CheckpointId, list[int]] = {}
    absent: dict[int, list[CheckpointId]] = {}
    for rank, (view, seen) in enumerate(zip(views, whole, strict=True)):
        if id(seen) not in absent:
            needed = [one for one, size in complete.items() if everything or size == world]
            absent[id(seen)] = [one for one in needed if seen.get(one) != complete[one]]
        for checkpoint in absent[id(seen)]:
            own = view.parts.get(checkpoint.attempt, {}).get(checkpoint.step, {}).get(complete[checkpoint], [])
            if everything or rank not in ranks_of(own):
                found.setdefault(checkpoint, []).append(rank)
    return {checkpoint: tuple(ranks) for checkpoint, ranks in found.items()}


def complete_by_view(views: Sequence[RunView], run: str) -> list[dict[CheckpointId, int]]:
    """For each run view, its complete checkpoints with their world sizes. Equal views are decoded once."""
    same: dict[bytes, dict[CheckpointId, int]] = {}
    found = []
    for view in views:
        name = msgspec.msgpack.encode(view.whole)
        if name not in same:
            same[name] = view.complete(run)
        found.append(same[name])
    return found
