"""The run view: the checkpoints of a run that one node's daemon observes in its own spool and on the tiers; and what
the run views of all ranks say together.

Invariant: a run view holds names and origins, never a checkpoint's bytes. It is small however many ranks and
checkpoints there are, so that all ranks can exchange their run views. Equal views are decoded once, because ranks of
one node have equal ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from tierd.core.errors import ManifestError, SpoolUnusable
from tierd.core.ids import CheckpointId, checkpoint_order
from tierd.core.manifest import metrics_to_json
from tierd.core.planning.copies import ManifestFacts, complete_world_sizes, is_complete, union_ranks
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL, Place

CORRUPT = "corrupt"
_NAMES = 50  # the most names of metrics in a run view
AttemptSteps = dict[str, list[int]]  # attempt -> steps
Values = dict[str, dict[int, float | str | None]]  # attempt -> step -> a metric's value, as a manifest writes it


class RunView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The checkpoints of one run that one node observes."""

    whole: dict[int, AttemptSteps] = {}  # by world size, the checkpoints of which every rank's part is listed by name
    # the checkpoints of `whole` of which no manifest that was read is usable, so that only names show them complete at
    # that world size
    hollow: AttemptSteps = {}
    # the checkpoints of `whole` that neither this node's spool nor the tiers show complete alone
    mixed: AttemptSteps = {}
    # by attempt, step and world size, the ranks whose parts are listed. It has checkpoints that are hollow or not
    # whole, and only world sizes that lack a rank. Ranks are pairs: first, last.
    parts: dict[str, dict[int, dict[int, list[int]]]] = {}
    aside: AttemptSteps = {}  # checkpoints that were quarantined, in whole or in part, and are not whole
    # checkpoints that are lost. Either this node committed a part once, and no place shows any part now except names of
    # which nothing can be read. Or this node or a head remembers the checkpoint as complete, and it is not complete
    # now.
    gone: AttemptSteps = {}
    # by attempt, the attempt and step that it resumed from; null if it began from nothing
    origins: dict[str, tuple[str, int] | None] = {}
    # the tiers that did not answer; also a place with an unreadable manifest that may be the only record of an
    # attempt's origin
    unreached: tuple[str, ...] = ()
    # by name, details of places in `unreached`, if known: the node, the tier's URL and the reason
    silent: dict[str, str] = {}
    alone: str = ""  # why no tier at all could be asked; empty if some tier was asked
    # for each requested metric, its value in rank 0's manifests; null if the manifest has no such metric; `CORRUPT` if
    # the manifest failed verification. A checkpoint whose manifest was not read is absent.
    values: dict[str, Values] = {}
    metrics: tuple[str, ...] = ()  # up to 50 names of metrics in these manifests, if any metric was requested
    # the attempt and step of the oldest checkpoint that was observed, if older ones were left out. Every newer one was
    # observed. About older ones the view has origins and `aside` only.
    down_to: tuple[str, int] | None = None

    def complete(self, run: str) -> dict[CheckpointId, int]:
        """The complete checkpoints, with their world sizes."""
        return {checkpoint: size for size, steps in self.whole.items() for checkpoint in ids_of(run, steps)}

    def partial(self, run: str) -> dict[CheckpointId, dict[int, set[int]]]:
        """The other checkpoints, each with the ranks whose parts are listed, by world size."""
        return {
            CheckpointId(run, attempt, step): {size: ranks_of(pairs) for size, pairs in sizes.items()}
            for attempt, steps in self.parts.items()
            for step, sizes in steps.items()
        }

    @property
    def attempts(self) -> set[str]:
        """Every attempt of which the view has a checkpoint."""
        return {*self.parts, *self.aside, *(name for steps in self.whole.values() for name in steps)}


def run_view_of(inventory: Inventory, run: str, metrics: Collection[str] = ()) -> RunView:
    """The run view of a node that has observed `inventory`, with the values of `metrics`."""
    spool_ranks = {copy.id: copy.matching_ranks for copy in inventory.spool.copies(run)}
    tier_ranks: dict[CheckpointId, Mapping[int, frozenset[int]]] = {}
    for place in inventory.tiers.values():
        for copy in place.copies(run) if place else ():
            tier_ranks[copy.id] = union_ranks(tier_ranks.get(copy.id, {}), copy.matching_ranks)
    complete: dict[int, set[CheckpointId]] = defaultdict(set)
    mixed: set[CheckpointId] = set()
    hollow: set[CheckpointId] = set()
    parts: dict[str, dict[int, dict[int, list[int]]]] = {}
    for checkpoint in sorted({*spool_ranks, *tier_ranks}, key=checkpoint_order):
        in_spool, on_tiers = spool_ranks.get(checkpoint, {}), tier_ranks.get(checkpoint, {})
        ranks = union_ranks(in_spool, on_tiers)
        if sizes := complete_world_sizes(ranks):
            bare = [size for size in sizes if _is_hollow(inventory, checkpoint, size)]
            size = min([size for size in sizes if size not in bare] or sizes)
            complete[size].add(checkpoint)
            if size in bare:
                hollow.add(checkpoint)
            if size not in (*complete_world_sizes(in_spool), *complete_world_sizes(on_tiers)):
                mixed.add(checkpoint)
        if not sizes or checkpoint in hollow:
            pairs = {size: _pairs(present) for size, present in sorted(ranks.items()) if size not in sizes}
            parts.setdefault(checkpoint.attempt, {})[checkpoint.step] = pairs
    places = inventory.places.values()
    quarantined = {
        part.checkpoint
        for place in places
        for part in place.quarantined
        if part.checkpoint.run == run and not any(other_place.lists(part) for other_place in places)
    }
    origins = inventory.origins(run)
    saved: dict[CheckpointId, dict[int, set[int]]] = {}
    for part in inventory.spool.committed:
        if part.checkpoint.run == run:
            saved.setdefault(part.checkpoint, {}).setdefault(part.world, set()).add(part.rank)
    sound = inventory.sound_checkpoints(run)
    missing = {
        checkpoint
        for checkpoint, ranks in saved.items()
        if checkpoint not in sound or (is_complete(ranks) and not inventory.has_complete(checkpoint))
    }
    if newest_gone := inventory.missing_newest(run):
        missing |= {newest_gone}
    return RunView(
        whole={size: _steps(checkpoints) for size, checkpoints in sorted(complete.items())},
        hollow=_steps(hollow),
        mixed=_steps(mixed),
        parts=parts,
        aside=_steps(quarantined - {checkpoint for checkpoints in complete.values() for checkpoint in checkpoints}),
        gone=_steps(missing),
        origins={attempt: (origin.attempt, origin.step) if origin else None for attempt, origin in origins.items()},
        unreached=tuple(
            name
            for name, place in {SPOOL: inventory.spool, **inventory.tiers}.items()
            if place is None or _hides_origin(place, run, origins)
        ),
        values={metric: _values(inventory, run, metric) for metric in metrics},
        metrics=tuple(sorted({name for facts in _speakers(inventory, run).values() for name in facts.metrics})[:_NAMES])
        if metrics
        else (),
    )


def without_older(view: RunView, run: str, oldest: CheckpointId) -> RunView:
    """The run view of an observation that left out all checkpoints older than `oldest`.

    Older checkpoints are removed from `gone`, because a checkpoint that was not observed is not proven lost.
    """
    missing = _steps(checkpoint for checkpoint in ids_of(run, view.gone) if checkpoint >= oldest)
    return msgspec.structs.replace(view, gone=missing, down_to=(oldest.attempt, oldest.step))


def with_missing(view: RunView, run: str, checkpoints: Collection[CheckpointId]) -> RunView:
    """The view with these checkpoints as gone too."""
    return msgspec.structs.replace(view, gone=_steps({*ids_of(run, view.gone), *checkpoints}))


def _is_hollow(inventory: Inventory, checkpoint: CheckpointId, size: int) -> bool:
    """Whether only names show that `size` ranks saved a checkpoint. Anybody may have put objects of such names."""
    copies = [copy for place in inventory.places.values() if (copy := place.checkpoints.get(checkpoint))]
    if any(part.world == size for copy in copies for part in copy.facts):
        return False
    defects = [why for copy in copies for part, why in copy.defects.items() if part.world == size]
    return bool(defects) and not any(isinstance(why, SpoolUnusable) for why in defects)


def _speakers(inventory: Inventory, run: str) -> dict[CheckpointId, ManifestFacts]:
    """The facts of rank 0's manifests, quarantined or not, by checkpoint."""
    speakers: dict[CheckpointId, ManifestFacts] = {}
    for place in inventory.places.values():
        quarantined = ((part, facts) for part, facts in place.quarantined.items() if part.checkpoint.run == run)
        for part, facts in (*quarantined, *(item for copy in place.copies(run) for item in copy.facts.items())):
            if part.rank == 0 and facts:
                speakers[part.checkpoint] = facts
    return speakers


def _values(inventory: Inventory, run: str, metric: str) -> Values:
    corrupt = {
        copy.id: CORRUPT
        for place in inventory.places.values()
        for copy in place.copies(run)
        for part, error in copy.defects.items()
        if part.rank == 0 and isinstance(error, ManifestError)
    }
    recorded = {
        checkpoint: metrics_to_json(facts.metrics).get(metric)
        for checkpoint, facts in _speakers(inventory, run).items()
    }
    values: Values = {}
    for checkpoint, value in sorted({**corrupt, **recorded}.items()):
        values.setdefault(checkpoint.attempt, {})[checkpoint.step] = value
    return values


def _hides_origin(place: Place, run: str, origins: Mapping[str, CheckpointId | None]) -> bool:
    """Whether a disk error hides an attempt's origin. A disk error does not prove that the manifest is absent."""
    return any(
        isinstance(error, SpoolUnusable)
        for copy in place.copies(run)
        if copy.id.attempt not in origins
        for error in copy.defects.values()
    )


def ids_of(run: str, steps: AttemptSteps) -> set[CheckpointId]:
    """The checkpoints that `steps` names."""
    return {CheckpointId(run, attempt, step) for attempt, attempt_steps in steps.items() for step in attempt_steps}


def ranks_of(pairs: list[int]) -> set[int]:
    """The ranks that `RunView.parts` writes as pairs."""
    return {rank for first, last in zip(pairs[::2], pairs[1::2], strict=True) for rank in range(first, last + 1)}


def _steps(checkpoints: Iterable[CheckpointId]) -> AttemptSteps:
    by_attempt: AttemptSteps = {}
    for checkpoint in sorted(checkpoints):
        by_attempt.setdefault(checkpoint.attempt, []).append(checkpoint.step)
    return by_attempt


def _pairs(ranks: Iterable[int]) -> list[int]:
    pairs: list[int] = []
    for rank in sorted(ranks):
        if pairs and pairs[-1] == rank - 1:
            pairs[-1] = rank
        else:
            pairs += [rank, rank]
    return pairs


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


def combine_views(
    views: Sequence[RunView], by_view: Sequence[dict[CheckpointId, int]], run: str, *, isolated: bool
) -> tuple[set[CheckpointId], dict[CheckpointId, int], set[CheckpointId]]:
    """Combine the run views of all ranks.

    The result is every checkpoint of which any rank observes a part; the complete ones with their world sizes; and
    those of the complete ones that only names show to be so.
    """
    proven: dict[CheckpointId, int] = {}
    bare: dict[CheckpointId, int] = {}
    # Ranks of one node have equal views, each of which is decoded once.
    alike = {
        (id(listed), msgspec.msgpack.encode(view.hollow)): (view, listed)
        for view, listed in zip(views, by_view, strict=True)
    }
    for view, listed in alike.values():
        hollow = ids_of(run, view.hollow)
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
        for checkpoint in ids_of(run, views[0].mixed):
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
    """By complete checkpoint, the ranks that do not observe the parts that they need.

    Each rank needs its own part of a checkpoint that as many ranks saved. Of any other it may need every part.
    """
    lacking: dict[CheckpointId, list[int]] = {}
    absent: dict[int, list[CheckpointId]] = {}
    for rank, (view, listed) in enumerate(zip(views, by_view, strict=True)):
        if id(listed) not in absent:
            absent[id(listed)] = [checkpoint for checkpoint, size in complete.items() if listed.get(checkpoint) != size]
        for checkpoint in absent[id(listed)]:
            present = view.parts.get(checkpoint.attempt, {}).get(checkpoint.step, {}).get(complete[checkpoint], [])
            if everything or complete[checkpoint] != world or rank not in ranks_of(present):
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
