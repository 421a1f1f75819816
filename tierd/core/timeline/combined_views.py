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
    silent: dict[str, tuple[int, ...]] = {}
    for number, view in enumerate(views):
        for why in (view.silent[name] for name in view.unreached if name in view.silent):
            silent[why] = (*silent.get(why, ()), number)
    return silent


def metric_values(views: Sequence[RunView], run: str) -> dict[str, dict[CheckpointId, float]]:
    """By metric, the values that any rank's view has, without corrupt ones."""
    values: dict[str, dict[CheckpointId, float]] = {}
    for view in {msgspec.msgpack.encode(view.values): view for view in views}.values():
        for metric, attempts in view.values.items():
            values.setdefault(metric, {}).update(
                (CheckpointId(run, attempt, step), math.nan if value is None else float(value))
                for attempt, steps in attempts.items()
                for step, value in steps.items()
                if value != CORRUPT
            )
    return values


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
    views: Sequence[RunView], by_view: Sequence[dict[CheckpointId, int]], run: str, *, isolated: bool
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
        (id(listed), msgspec.msgpack.encode(view.hollow)): (view, listed)
        for view, listed in zip(views, by_view, strict=True)
    }
    for view, listed in alike.values():
        hollow = named(run, view.hollow)
        for checkpoint, size in listed.items():
            into = bare if checkpoint in hollow else proven
            into[checkpoint] = min(size, into.get(checkpoint, size))
    complete = bare | proven
    parts: dict[CheckpointId, dict[int, set[int]]] = {}
    for view in {msgspec.msgpack.encode(view.parts): view for view in views}.values():
        for checkpoint, sizes in view.partial(run).items():
            for size, ranks in sizes.items():
                parts.setdefault(checkpoint, {}).setdefault(size, set()).update(ranks)
    observed = {*complete, *parts}
    for checkpoint, sizes in parts.items():
        full = [size for size, ranks in sizes.items() if len(ranks) == size != bare.get(checkpoint)]
        if full and checkpoint not in proven:
            proven[checkpoint] = complete[checkpoint] = min(full)
    if isolated:
        for checkpoint in named(run, views[0].mixed):
            del complete[checkpoint]
    return observed, complete, bare.keys() & complete.keys() - proven.keys()


def lacking_ranks(
    views: Sequence[RunView],
    by_view: Sequence[dict[CheckpointId, int]],
    complete: dict[CheckpointId, int],
    world: int,
    *,
    everything: bool,
) -> dict[CheckpointId, tuple[int, ...]]:
    """By complete checkpoint, the ranks that do not observe the parts that they need."""
    lacking: dict[CheckpointId, list[int]] = {}
    absent: dict[int, list[CheckpointId]] = {}
    for rank, (view, listed) in enumerate(zip(views, by_view, strict=True)):
        if id(listed) not in absent:
            required = [checkpoint for checkpoint, size in complete.items() if everything or size == world]
            absent[id(listed)] = [
                checkpoint for checkpoint in required if listed.get(checkpoint) != complete[checkpoint]
            ]
        for checkpoint in absent[id(listed)]:
            present = view.parts.get(checkpoint.attempt, {}).get(checkpoint.step, {}).get(complete[checkpoint], [])
            if everything or rank not in ranks_of(present):
                lacking.setdefault(checkpoint, []).append(rank)
    return {checkpoint: tuple(ranks) for checkpoint, ranks in lacking.items()}


def complete_by_view(views: Sequence[RunView], run: str) -> list[dict[CheckpointId, int]]:
    """For each run view, its complete checkpoints with their world sizes. Equal views are decoded once."""
    same: dict[bytes, dict[CheckpointId, int]] = {}
    by_view = []
    for view in views:
        name = msgspec.msgpack.encode(view.whole)
        if name not in same:
            same[name] = view.complete(run)
        by_view.append(same[name])
    return by_view
