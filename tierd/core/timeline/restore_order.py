"""Which checkpoints a restore tries, in which order, and what a message says when there is none.

Invariant: names alone decide completeness, and manifests alone decide ancestry. Neither decides validity, which only
the reader of a candidate's bytes finds out. From equal run views every rank decides the same.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory
from tierd.core.save_rules import MetricGoal, list_metrics
from tierd.core.timeline.launch_chain import order_by_timeline
from tierd.core.timeline.run_view import (
    RunView,
    combine_views,
    complete_by_view,
    corrupt_metrics,
    ids_of,
    lacking_ranks,
    metric_values,
    run_view_of,
    silent_places,
)
from tierd.core.units import list_few

_MOST_RUNS, _MOST_STEPS = 20, 8  # that a message names


def describe_runs(run: str, run_names: Collection[str]) -> str:
    """List the runs that exist, those with a similar name first; `run` is the one that was asked for."""
    if not run_names:
        return "there is no run at all"
    near = difflib.get_close_matches(run, run_names, n=_MOST_RUNS, cutoff=0.6)
    ordered = [*near, *sorted(set(run_names) - set(near))]
    return f"the runs there are: {list_few(ordered, _MOST_RUNS)}"


def describe_steps(step: int, existing: Collection[int]) -> str:
    """List the steps that exist, of many those nearest to `step`, which was asked for; empty if there are none."""
    if not existing:
        return ""
    steps = sorted(set(existing))
    near = sorted(sorted(steps, key=lambda candidate: abs(candidate - step))[:_MOST_STEPS])
    listing = ", ".join(map(str, near))
    if len(near) == len(steps):
        return f"the steps there are: {listing}"
    return f"the nearest of {len(steps)} steps there, {steps[0]} to {steps[-1]}, are: {listing}"


_LISTED_PLACES = 5  # items that a message lists
INCOMPLETE = "incomplete: not every rank's part is there"
QUARANTINED = "quarantined before: some of it was proven corrupt, and no place had it right"
UNPROVEN = (
    "unreadable: no manifest of its launch, or of so many ranks, can be read, so that its name alone says that it is "
    "newer (it is damaged, of a newer tierd, of another key, or not tierd's; if it is nobody's, "
    "`tierd disown RUN ATTEMPT URL`)"
)
DIFFERING = "its ranks hold different replicas"
UNKNOWN_METRIC = "rank 0's manifest is corrupt wherever it was seen: how good it is cannot be told"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint. `lacking` are the ranks that observe no copy of a part they need, although others do."""

    checkpoint: CheckpointId
    world: int
    lacking: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """The order in which a restore of one run tries checkpoints, and the facts that explain this order."""

    candidates: tuple[Candidate, ...]  # the checkpoints to try, in order
    branches: tuple[CheckpointId, ...]  # complete checkpoints that are not on the timeline
    incomplete: tuple[CheckpointId, ...]  # checkpoints newer than the first candidate that lack a rank's part
    # the attempt at which the timeline ends because its origin is unknown; None if there is none
    unknown_origin: str | None
    unreached: tuple[str, ...]  # the tiers that did not answer some rank
    attempts: tuple[str, ...]
    # checkpoints that belong among the candidates but were quarantined, in whole or in part, as proven corrupt
    # everywhere
    quarantined: tuple[CheckpointId, ...] = ()
    alone: tuple[str, ...] = ()  # which rank could ask no tier, and why
    origins: Mapping[str, CheckpointId | None] = field(default_factory=dict)
    goal: MetricGoal | None = None  # the metric and mode by which the best checkpoint was requested; None if it was not
    # by metric, the value in rank 0's manifest of each checkpoint; NaN if the manifest has none
    values: Mapping[str, Mapping[CheckpointId, float]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()  # some names of metrics that manifests have
    complete: frozenset[CheckpointId] = frozenset()
    # with `goal`: complete checkpoints of the timeline whose metric no place could give
    unread: tuple[CheckpointId, ...] = ()
    # with `goal`: complete checkpoints of the timeline whose metric no place will ever give, because rank 0's manifest
    # is corrupt wherever it was observed
    corrupt: tuple[CheckpointId, ...] = ()
    # checkpoints that were complete once, as some rank's node or a head remembers, and of which no rank observes
    # anything now
    missing: tuple[CheckpointId, ...] = ()
    # checkpoints about which nothing proves that they belong to the run. They are newer by name than all whose origin
    # is known, or only names show them complete, for another world size.
    unproven: tuple[CheckpointId, ...] = ()
    # details of the places in `unreached`, each with the indices of the run views that lack the place
    silent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # the oldest checkpoint that every rank observed, if some rank left older ones out. About older ones not everything
    # is known.
    down_to: CheckpointId | None = None
    # with a step: the checkpoints of other launches that have it, newest first, for a reader that finds the candidate
    # corrupt, and that continues no history
    same_step: tuple[Candidate, ...] = ()

    @property
    def goes_deep_enough(self) -> bool:
        """Whether the first candidate remains first whatever checkpoints were left out because of `down_to`.

        Every rank observed all checkpoints newer than the first candidate, so none that was left out can precede it:
        the newest attempt, the chain down to the candidate and the complete checkpoints on it are known. The result is
        False if no origin is known or a place is unreached, because an older manifest may then change the chain.
        """
        if self.down_to is None:
            return True
        chain_known = bool(self.origins) and not self.unreached
        return chain_known and bool(self.candidates) and self.candidates[0].checkpoint >= self.down_to

    def order(self, checkpoint: CheckpointId) -> tuple[float, CheckpointId]:
        """The sort key by which candidates are tried, largest first."""
        return (_score(self.goal, self.values, checkpoint) if self.goal else 0.0), checkpoint


def restore_candidates(
    inventory: Inventory, run: str, step: int | None = None, attempt: str | None = None, best: MetricGoal | None = None
) -> RestoreOrder:
    """Order the checkpoints of `run` by this node's inventory, to read all ranks' parts, as `restore_order`."""
    return restore_order([run_view_of(inventory, run, (best.metric,) if best else ())], run, step, attempt, best=best)


def restore_order(
    views: Sequence[RunView],
    run: str,
    step: int | None = None,
    attempt: str | None = None,
    *,
    world: int | None = None,
    everything: bool = False,
    best: MetricGoal | None = None,
    differing: Collection[CheckpointId] = (),
) -> RestoreOrder:
    """Order the checkpoints of `run` for a restore, by the run views of all ranks together.

    Args:
        views: the run views of ranks 0..world-1; or a single one if ranks cannot communicate or no rank is meant.
        step: only this step: the checkpoint on the timeline if there is one, else that of the newest attempt.
        attempt: only this attempt; it selects a branch off the timeline too.
        world: how many ranks restore; None if no ranks are meant.
        everything: whether every rank needs every rank's part, and not only its own.
        best: order by this goal, the best first, and of equals the newest. Only checkpoints with a number for the
            metric in rank 0's manifest are candidates.
        differing: checkpoints whose ranks hold different replicas: they come last, because the restore prefers others.
    """
    isolated = (
        world is not None and len(views) < world
    )  # other ranks do not know of checkpoints that only this node has
    by_view = complete_by_view(views, run)
    observed, complete, hollow = combine_views(views, by_view, run, isolated=isolated)
    if world is not None and not everything:  # names alone do not prove that another world size saved a checkpoint
        hollow = {checkpoint for checkpoint in hollow if complete[checkpoint] != world}
        complete = {checkpoint: size for checkpoint, size in complete.items() if checkpoint not in hollow}
    else:
        hollow = set()
    quarantined = {checkpoint for view in views for checkpoint in ids_of(run, view.aside)} - complete.keys()
    existing = {*observed, *quarantined}
    origins = {
        attempt: CheckpointId(run, *origin) if origin else None
        for view in reversed(views)
        for attempt, origin in view.origins.items()
    }
    line = order_by_timeline(existing, complete, origins)
    order, same_step = line.path, tuple[CheckpointId, ...]()
    if step is not None or attempt is not None:
        order = tuple(
            checkpoint
            for checkpoint in (*line.path, *line.branches)
            if step in (None, checkpoint.step) and attempt in (None, checkpoint.attempt)
        )
        # A requested attempt is ordered by itself, newest first, whether it was abandoned or not.
        order, same_step = (order[:1], order[1:]) if step is not None else (tuple(sorted(order, reverse=True)), ())
    values = metric_values(views, run)
    numbers, reach = values.get(best.metric, {}) if best else {}, order
    if best is not None:
        ranked = [checkpoint for checkpoint in reach if not math.isnan(numbers.get(checkpoint, math.nan))]
        order = tuple(
            sorted(ranked, key=lambda checkpoint: (_score(best, values, checkpoint), checkpoint), reverse=True)
        )
    unknown = tuple(checkpoint for checkpoint in reach if best and checkpoint not in numbers)
    corrupt = corrupt_metrics(views, run) & set(unknown)
    first = order[0] if order else None
    order = tuple(sorted(order, key=lambda checkpoint: checkpoint in differing))
    unusable = quarantined | hollow
    if step is None and attempt is None:
        unusable &= hollow | set(order_by_timeline(existing, existing, origins).path) - set(line.unproven)
    else:
        unusable = {c for c in unusable if step in (None, c.step) and attempt in (None, c.attempt)}
    # A checkpoint that one rank misses is not lost if another rank has a part of it. A rank's view counts for this only
    # if that view does not itself list the checkpoint as gone.
    missing = (
        {checkpoint for view in views for checkpoint in ids_of(run, view.gone)} - complete.keys() - quarantined - hollow
    )
    if missing:  # this is rare; otherwise it is skipped, because decoding every rank's parts takes long
        missing -= {checkpoint for view in views for checkpoint in view.partial(run).keys() - ids_of(run, view.gone)}
    unvouched = {
        *line.unproven,
        *(checkpoint for checkpoint in hollow & unusable if best or not first or checkpoint > first),
    }
    lacking = lacking_ranks(views, by_view, complete, world, everything=everything) if world and not isolated else {}
    return RestoreOrder(
        candidates=tuple(
            Candidate(checkpoint, complete[checkpoint], lacking.get(checkpoint, ())) for checkpoint in order
        ),
        branches=tuple(checkpoint for checkpoint in line.branches if checkpoint not in order),
        incomplete=tuple(
            sorted(
                (
                    checkpoint
                    for checkpoint in observed - complete.keys() - quarantined - hollow - missing - set(line.unproven)
                    if best or not first or checkpoint > first
                ),
                reverse=True,
            )
        ),
        unknown_origin=line.unknown_origin,
        unreached=tuple(dict.fromkeys(name for view in views for name in view.unreached)),
        attempts=tuple(sorted({checkpoint.attempt for checkpoint in existing - set(line.unproven)} | origins.keys())),
        quarantined=tuple(sorted(unusable & quarantined, reverse=True)),
        alone=tuple(
            f"rank {rank}: {view.alone}" if len(views) > 1 else view.alone
            for rank, view in enumerate(views)
            if view.alone
        ),
        origins=origins,
        goal=best,
        values=values,
        metrics=tuple(sorted({name for view in views for name in view.metrics})),
        complete=frozenset(complete),
        unread=tuple(checkpoint for checkpoint in unknown if checkpoint not in corrupt),
        corrupt=tuple(checkpoint for checkpoint in unknown if checkpoint in corrupt),
        missing=tuple(sorted(missing, reverse=True)),
        unproven=tuple(sorted((checkpoint for checkpoint in unvouched if checkpoint not in order), reverse=True)),
        silent=silent_places(views),
        down_to=max((CheckpointId(run, *view.down_to) for view in views if view.down_to), default=None),
        same_step=tuple(
            Candidate(checkpoint, complete[checkpoint], lacking.get(checkpoint, ())) for checkpoint in same_step
        ),
    )


def _score(goal: MetricGoal, values: Mapping[str, Mapping[CheckpointId, float]], checkpoint: CheckpointId) -> float:
    value = values.get(goal.metric, {}).get(checkpoint, math.nan)
    return -math.inf if math.isnan(value) else goal.score(value)


def not_found_error(
    resume: RestoreOrder, run: str, step: int | None, skipped: list[str], attempt: str | None = None
) -> CheckpointNotFound:
    """Make the error that names the request, the skipped checkpoints with reasons, and possible other requests."""
    request = f"run {run!r}" if step is None else f"run {run!r} step {step}"
    request += f" of attempt {attempt}" if attempt else ""
    if resume.goal and resume.complete and not resume.candidates:
        return CheckpointNotFound(
            f"{request}: no complete checkpoint of the timeline has a number for the metric {resume.goal.metric!r}; "
            f"{list_metrics(resume.metrics)}"
        )
    lines = [f"{request}: no checkpoint could be verified"] if skipped else [f"{request}: there is no such checkpoint"]
    lines += [f"  skipped {text}" for text in skipped]
    if (resume.quarantined or resume.missing or resume.unproven) and not resume.candidates and step is None:
        lines.append(f"  to begin from nothing all the same, give the run another name, or remove it (tierd rm {run})")
    steps = {checkpoint.step for checkpoint in resume.complete}
    if step is not None and step not in steps and (hint := describe_steps(step, steps)):
        lines.append(f"  {hint}")
    if resume.unknown_origin:
        lines.append(f"  what attempt {resume.unknown_origin} resumed from cannot be told any more")
    if resume.branches:
        off_timeline = ", ".join(f"step {c.step} of attempt {c.attempt}" for c in resume.branches[:5])
        lines.append(f"  not tried, off the timeline: {off_timeline}; restore(step=…, attempt=…) asks for one")
    return CheckpointNotFound("\n".join(lines))


def describe_silent(resume: RestoreOrder, world: int = 1, isolated: int | None = None) -> str:
    """Where and why places did not answer, in parentheses, for a message; empty if no details are known.

    `isolated` is the only rank whose run view was used, if ranks cannot communicate.
    """
    texts = []
    for why, numbers in list(resume.silent.items())[:_LISTED_PLACES]:
        ranks = numbers if isolated is None else (isolated,)
        rank_list = f"rank{'s' * (len(ranks) > 1)} {list_few(ranks, _LISTED_PLACES)}"
        texts.append(f"{rank_list} on {why}" if world > 1 else why)
    omitted = len(resume.silent) - len(texts)
    return f" ({'; '.join(texts)}{f'; and {omitted} more' if omitted else ''})" if texts else ""


def own_part(candidate: Candidate, rank: int) -> PartId:
    """The part from which `rank` restores."""
    return PartId(candidate.checkpoint, rank, candidate.world)
