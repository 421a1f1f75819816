"""What can be seen of a run from one place in the cluster: by a node's daemon, of its own spool and the tiers.

Law: a sight is names and origins, never bytes; it is small however many ranks and checkpoints there are, so that every
rank can be told every other rank's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from tierd.core.errors import ManifestError, SpoolUnusable
from tierd.core.ids import CheckpointId
from tierd.core.manifest import metrics_to_json
from tierd.core.wire import read_member
from tierd.core.world import SPOOL, Facts, Place, World, complete_worlds, is_complete, union

CORRUPT = "corrupt"
_NAMES = 50  # of metrics, that a sight tells
Steps = dict[str, list[int]]  # attempt -> steps
Values = dict[str, dict[int, float | str | None]]  # attempt -> step -> a metric's value, as a manifest writes it


class Sight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is seen of one run.

    Attributes:
        whole: world size -> the checkpoints of which every rank's part is seen, by name.
        hollow: those of `whole` of which no manifest that was read can be used: names alone tell of so many ranks.
        mixed: those of `whole` that neither this node's spool nor the tiers show alone.
        parts: attempt -> step -> world size -> ranks, for checkpoints that are not whole, or hollow, and the sizes of
            which not all are seen. Ranks are pairs: from, to.
        aside: set aside as corrupt, whole or in part, and not whole.
        gone: committed on this node once, and now seen in no place, whole or in part, but by names of which nothing
            can be read; or whole once, as this node or a head remembers, and not seen whole.
        origins: attempt -> the attempt and step that it resumed from, null where it began from nothing.
        unreached: tiers that did not answer; and a place where a manifest could not be read that alone may tell what an
            attempt resumed from.
        silent: by name, of those of `unreached` of which it is known: on which node, the tier's URL, and why.
        alone: why no tier at all could be asked, where that is so.
        values: of each metric that was asked for, what rank 0's manifests say: a number, null where one has no such
            metric, `CORRUPT` where it is that. A checkpoint of which it was not read is not there.
        metrics: the names of metrics in any of them, a few, where some were asked for.
    """

    whole: dict[int, Steps] = {}
    hollow: Steps = {}
    mixed: Steps = {}
    parts: dict[str, dict[int, dict[int, list[int]]]] = {}
    aside: Steps = {}
    gone: Steps = {}
    origins: dict[str, tuple[str, int] | None] = {}
    unreached: tuple[str, ...] = ()
    silent: dict[str, str] = {}
    alone: str = ""
    values: dict[str, Values] = {}
    metrics: tuple[str, ...] = ()

    def complete(self, run: str) -> dict[CheckpointId, int]:
        """The checkpoints that are seen whole, with their world sizes."""
        return {one: size for size, steps in self.whole.items() for one in named(run, steps)}

    def partial(self, run: str) -> dict[CheckpointId, dict[int, set[int]]]:
        """The ranks, by world size, whose parts are seen of the other checkpoints."""
        return {
            CheckpointId(run, attempt, step): {size: ranks_of(pairs) for size, pairs in sizes.items()}
            for attempt, steps in self.parts.items()
            for step, sizes in steps.items()
        }

    @property
    def attempts(self) -> set[str]:
        """Every attempt that is seen."""
        return {*self.parts, *self.aside, *(name for steps in self.whole.values() for name in steps)}


def see(world: World, run: str, metrics: Collection[str] = ()) -> Sight:
    """What a node sees that has observed `world`; with the values of these metrics."""
    own = {seen.id: seen.ranks for seen in world.spool.copies(run)}
    others: dict[CheckpointId, Mapping[int, frozenset[int]]] = {}
    for place in world.tiers.values():
        for seen in place.copies(run) if place else ():
            others[seen.id] = union(others.get(seen.id, {}), seen.ranks)
    whole: dict[int, set[CheckpointId]] = defaultdict(set)
    mixed: set[CheckpointId] = set()
    hollow: set[CheckpointId] = set()
    parts: dict[str, dict[int, dict[int, list[int]]]] = {}
    for checkpoint in sorted({*own, *others}):
        here, there = own.get(checkpoint, {}), others.get(checkpoint, {})
        ranks = union(here, there)
        if sizes := complete_worlds(ranks):
            bare = [size for size in sizes if _is_hollow(world, checkpoint, size)]
            size = min([size for size in sizes if size not in bare] or sizes)
            whole[size].add(checkpoint)
            if size in bare:
                hollow.add(checkpoint)
            if size not in (*complete_worlds(here), *complete_worlds(there)):
                mixed.add(checkpoint)
        if not sizes or checkpoint in hollow:
            pairs = {size: _pairs(found) for size, found in sorted(ranks.items()) if size not in sizes}
            parts.setdefault(checkpoint.attempt, {})[checkpoint.step] = pairs
    places = world.places.values()
    aside = {
        part.checkpoint
        for place in places
        for part in place.quarantined
        if part.checkpoint.run == run and not any(other.lists(part) for other in places)
    }
    origins = world.origins(run)
    saved: dict[CheckpointId, dict[int, set[int]]] = {}
    for part in world.spool.committed:
        if part.checkpoint.run == run:
            saved.setdefault(part.checkpoint, {}).setdefault(part.world, set()).add(part.rank)
    some = world.sound(run)
    gone = {one for one, ranks in saved.items() if one not in some or (is_complete(ranks) and not world.has_whole(one))}
    if lost := world.gone(run):
        gone |= {lost}
    return Sight(
        whole={size: _steps(found) for size, found in sorted(whole.items())},
        hollow=_steps(hollow),
        mixed=_steps(mixed),
        parts=parts,
        aside=_steps(aside - {one for found in whole.values() for one in found}),
        gone=_steps(gone),
        origins={attempt: (origin.attempt, origin.step) if origin else None for attempt, origin in origins.items()},
        unreached=tuple(
            name
            for name, place in {SPOOL: world.spool, **world.tiers}.items()
            if place is None or _is_mute(place, run, origins)
        ),
        values={metric: _values(world, run, metric) for metric in metrics},
        metrics=tuple(sorted({name for facts in _speakers(world, run).values() for name in facts.metrics})[:_NAMES])
        if metrics
        else (),
    )


def _is_hollow(world: World, checkpoint: CheckpointId, size: int) -> bool:
    """Whether nothing but names, which anybody may have put there, tells that so many ranks saved a checkpoint."""
    copies = [seen for place in world.places.values() if (seen := place.checkpoints.get(checkpoint))]
    if any(part.world == size for seen in copies for part in seen.facts):
        return False
    defects = [why for seen in copies for part, why in seen.defects.items() if part.world == size]
    return bool(defects) and not any(isinstance(why, SpoolUnusable) for why in defects)


def _speakers(world: World, run: str) -> dict[CheckpointId, Facts]:
    """What rank 0's manifests say, set aside or not."""
    found: dict[CheckpointId, Facts] = {}
    for place in world.places.values():
        aside = ((part, facts) for part, facts in place.quarantined.items() if part.checkpoint.run == run)
        for part, facts in (*aside, *(item for seen in place.copies(run) for item in seen.facts.items())):
            if part.rank == 0 and facts:
                found[part.checkpoint] = facts
    return found


def _values(world: World, run: str, metric: str) -> Values:
    corrupt = {
        seen.id: CORRUPT
        for place in world.places.values()
        for seen in place.copies(run)
        for part, error in seen.defects.items()
        if part.rank == 0 and isinstance(error, ManifestError)
    }
    said = {one: metrics_to_json(facts.metrics).get(metric) for one, facts in _speakers(world, run).items()}
    values: Values = {}
    for one, value in sorted({**corrupt, **said}.items()):
        values.setdefault(one.attempt, {})[one.step] = value
    return values


def _is_mute(place: Place, run: str, origins: Mapping[str, CheckpointId | None]) -> bool:
    """Whether a disk's error, which says nothing about what is there, hides where an attempt came from."""
    return any(
        isinstance(error, SpoolUnusable)
        for seen in place.copies(run)
        if seen.id.attempt not in origins
        for error in seen.defects.values()
    )


def told(answer: dict[str, Any]) -> Sight:
    """The sight in a daemon's answer to `Candidates`.

    Raises:
        DaemonUnavailable: it answers otherwise.
    """
    return read_member(answer, "sight", Sight)


def named(run: str, steps: Steps) -> set[CheckpointId]:
    """The checkpoints that `steps` names."""
    return {CheckpointId(run, attempt, step) for attempt, found in steps.items() for step in found}


def ranks_of(pairs: list[int]) -> set[int]:
    """The ranks that `Sight.parts` writes as pairs."""
    return {rank for first, last in zip(pairs[::2], pairs[1::2], strict=True) for rank in range(first, last + 1)}


def _steps(checkpoints: Iterable[CheckpointId]) -> Steps:
    found: Steps = {}
    for checkpoint in sorted(checkpoints):
        found.setdefault(checkpoint.attempt, []).append(checkpoint.step)
    return found


def _pairs(ranks: Iterable[int]) -> list[int]:
    found: list[int] = []
    for rank in sorted(ranks):
        if found and found[-1] == rank - 1:
            found[-1] = rank
        else:
            found += [rank, rank]
    return found
