"""Which checkpoints a restore tries, in which order, and what it says when there is none.

Law: names alone decide completeness, manifests alone decide ancestry, and neither decides validity: whether a
candidate's bytes are right is found out by whoever reads them. From the same sights every rank decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tierd.core.choose import Goal, listed
from tierd.core.errors import CheckpointNotFound
from tierd.core.ids import CheckpointId, PartId
from tierd.core.sight import CORRUPT, Sight, named, ranks_of, see
from tierd.core.timeline import timeline
from tierd.core.world import World

_MOST = 5  # of what a message lists
UNTOLD = "rank 0's manifest is corrupt wherever it was seen: how good it is cannot be told"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint. `lacking` are the ranks that see no copy of what they need of it, though others do."""

    checkpoint: CheckpointId
    world: int
    lacking: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Resume:
    """What a restore of one run has to go on.

    `candidates` are to be tried in order. `quarantined` belong between them, and were set aside, whole or in part, as
    proven corrupt everywhere. `branches` are complete checkpoints that the timeline does not reach.
    `incomplete` are newer than the first candidate and lack a rank's part. `lost` is an attempt whose origin nobody can
    tell; `origins` is what can be told. `unreached` are tiers that did not answer some rank; `alone` says which rank
    could ask no tier, and why.

    `gone` were complete once, as some rank's node or a head remembers, and no rank sees anything of them. `unvouched`
    are newer by name than all of which anything can be read, or whole by the names of another number of ranks alone, so
    that nothing tells whether they belong to the run.

    `silent` tells of the places in `unreached` where and why, each with the sights that lack it.

    `values` are what rank 0's manifests say of the metrics that were asked for, NaN where they say nothing, and
    `metrics` the names of some that there are. `whole` are all complete checkpoints. Where the best was asked for by
    `goal`: `unread` are complete ones of the timeline of which no place could say whether they are better, and
    `corrupt` those of which none will, since rank 0's manifest is corrupt wherever it was seen.
    """

    candidates: tuple[Candidate, ...]
    branches: tuple[CheckpointId, ...]
    incomplete: tuple[CheckpointId, ...]
    lost: str | None
    unreached: tuple[str, ...]
    attempts: tuple[str, ...]
    quarantined: tuple[CheckpointId, ...] = ()
    alone: tuple[str, ...] = ()
    origins: Mapping[str, CheckpointId | None] = field(default_factory=dict)
    goal: Goal | None = None
    values: Mapping[str, Mapping[CheckpointId, float]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    whole: frozenset[CheckpointId] = frozenset()
    unread: tuple[CheckpointId, ...] = ()
    corrupt: tuple[CheckpointId, ...] = ()
    gone: tuple[CheckpointId, ...] = ()
    unvouched: tuple[CheckpointId, ...] = ()
    silent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def order(self, checkpoint: CheckpointId) -> tuple[float, CheckpointId]:
        """What candidates are tried by, largest first."""
        return (_score(self.goal, self.values, checkpoint) if self.goal else 0.0), checkpoint


def restore_candidates(
    world: World, run: str, step: int | None = None, attempt: str | None = None, best: Goal | None = None
) -> Resume:
    """Order the checkpoints of `run` by what is observed here, for whoever wants all ranks' parts; see `agree`."""
    return agree([see(world, run, (best.metric,) if best else ())], run, step, attempt, best=best)


def agree(
    sights: Sequence[Sight],
    run: str,
    step: int | None = None,
    attempt: str | None = None,
    *,
    world: int | None = None,
    everything: bool = False,
    best: Goal | None = None,
) -> Resume:
    """Order the checkpoints of `run` for a restore, by what all ranks see together.

    Args:
        sights: of ranks 0..world-1; or one alone, where ranks cannot talk or none is meant in particular.
        step: only this step; on the timeline if it is there, else of the newest attempt that has it.
        attempt: only this attempt; with it a branch off the timeline can be asked for.
        world: how many ranks restore; None where none is meant.
        everything: every rank needs every rank's part, and not its own alone.
        best: the best first, and of equals the newest; only those of whose metric rank 0's manifest has a number.
    """
    mute = world is not None and len(sights) < world  # what only this node sees, other ranks do not know of
    whole = _whole(sights, run)
    found, complete, hollow = _together(sights, whole, run, mute=mute)
    if world is not None and not everything:  # names alone do not tell that another number of ranks is needed
        hollow = {one for one in hollow if complete[one] != world}
        complete = {one: size for one, size in complete.items() if one not in hollow}
    else:
        hollow = set()
    aside = {one for sight in sights for one in named(run, sight.aside)} - complete.keys()
    known = {*found, *aside}
    origins = {
        attempt: CheckpointId(run, *origin) if origin else None
        for sight in reversed(sights)
        for attempt, origin in sight.origins.items()
    }
    line = timeline(known, complete, origins)
    order = line.path
    if step is not None or attempt is not None:
        order = tuple(
            checkpoint
            for checkpoint in (*line.path, *line.branches)
            if step in (None, checkpoint.step) and attempt in (None, checkpoint.attempt)
        )
        # An attempt asked for by name is a line of its own: its newest first, abandoned or not.
        order = order[:1] if step is not None else tuple(sorted(order, reverse=True))
    values = _values(sights, run)
    told, reach = values.get(best.metric, {}) if best else {}, order
    if best is not None:
        ranked = [one for one in reach if not math.isnan(told.get(one, math.nan))]
        order = tuple(sorted(ranked, key=lambda one: (_score(best, values, one), one), reverse=True))
    untold = tuple(one for one in reach if best and one not in told)
    bad = _corrupt(sights, run) & set(untold)
    first = order[0] if order else None
    doubtful = aside | hollow
    if step is None and attempt is None:
        doubtful &= hollow | set(timeline(known, known, origins).path) - set(line.unvouched)
    else:
        doubtful = {c for c in doubtful if step in (None, c.step) and attempt in (None, c.attempt)}
    # What one rank misses, another may have; what it sees a part of, and knows to be no more, is not had by that.
    gone = {one for sight in sights for one in named(run, sight.gone)} - complete.keys() - aside - hollow
    if gone:  # seldom: to take every rank's parts apart takes long
        gone -= {one for sight in sights for one in sight.partial(run).keys() - named(run, sight.gone)}
    unvouched = {*line.unvouched, *(one for one in hollow & doubtful if best or not first or one > first)}
    lacking = _lacking(sights, whole, complete, world, everything=everything) if world and not mute else {}
    return Resume(
        candidates=tuple(Candidate(one, complete[one], lacking.get(one, ())) for one in order),
        branches=tuple(checkpoint for checkpoint in line.branches if checkpoint not in order),
        incomplete=tuple(
            sorted(
                (
                    one
                    for one in found - complete.keys() - aside - hollow - gone - set(line.unvouched)
                    if best or not first or one > first
                ),
                reverse=True,
            )
        ),
        lost=line.lost,
        unreached=tuple(dict.fromkeys(name for sight in sights for name in sight.unreached)),
        attempts=tuple(sorted({one.attempt for one in known - set(line.unvouched)} | origins.keys())),
        quarantined=tuple(sorted(doubtful & aside, reverse=True)),
        alone=tuple(
            f"rank {rank}: {sight.alone}" if len(sights) > 1 else sight.alone
            for rank, sight in enumerate(sights)
            if sight.alone
        ),
        origins=origins,
        goal=best,
        values=values,
        metrics=tuple(sorted({name for sight in sights for name in sight.metrics})),
        whole=frozenset(complete),
        unread=tuple(one for one in untold if one not in bad),
        corrupt=tuple(one for one in untold if one in bad),
        gone=tuple(sorted(gone, reverse=True)),
        unvouched=tuple(sorted((one for one in unvouched if one not in order), reverse=True)),
        silent=_silent(sights),
    )


def _silent(sights: Sequence[Sight]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for number, sight in enumerate(sights):
        for why in (sight.silent[name] for name in sight.unreached if name in sight.silent):
            found[why] = (*found.get(why, ()), number)
    return found


def _values(sights: Sequence[Sight], run: str) -> dict[str, dict[CheckpointId, float]]:
    """Of each metric, what any rank sees of it that is not corrupt."""
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


def _corrupt(sights: Sequence[Sight], run: str) -> set[CheckpointId]:
    return {
        CheckpointId(run, attempt, step)
        for sight in sights
        for attempts in sight.values.values()
        for attempt, steps in attempts.items()
        for step, value in steps.items()
        if value == CORRUPT
    }


def _score(goal: Goal, values: Mapping[str, Mapping[CheckpointId, float]], checkpoint: CheckpointId) -> float:
    value = values.get(goal.metric, {}).get(checkpoint, math.nan)
    return -math.inf if math.isnan(value) else goal.score(value)


def _together(
    sights: Sequence[Sight], whole: Sequence[dict[CheckpointId, int]], run: str, *, mute: bool
) -> tuple[set[CheckpointId], dict[CheckpointId, int], set[CheckpointId]]:
    """Every checkpoint that anybody sees a part of; the complete ones with their world sizes; and of these, those of
    which names alone tell so."""
    told: dict[CheckpointId, int] = {}
    bare: dict[CheckpointId, int] = {}
    # Ranks of one node see the same, which is taken apart once.
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


def _lacking(
    sights: Sequence[Sight],
    whole: Sequence[dict[CheckpointId, int]],
    complete: dict[CheckpointId, int],
    world: int,
    *,
    everything: bool,
) -> dict[CheckpointId, tuple[int, ...]]:
    """For each complete checkpoint the ranks that do not see what they need of it."""
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


def _whole(sights: Sequence[Sight], run: str) -> list[dict[CheckpointId, int]]:
    """What each sight shows complete, with its world size. Those of most ranks are the same, and taken apart once."""
    same: dict[bytes, dict[CheckpointId, int]] = {}
    found = []
    for sight in sights:
        name = msgspec.msgpack.encode(sight.whole)
        if name not in same:
            same[name] = sight.complete(run)
        found.append(same[name])
    return found


def not_found(
    resume: Resume, run: str, step: int | None, skipped: list[str], attempt: str | None = None
) -> CheckpointNotFound:
    """The error that names what was asked, what was skipped and why, and what else could be asked for."""
    asked = f"run {run!r}" if step is None else f"run {run!r} step {step}"
    asked += f" of attempt {attempt}" if attempt else ""
    if resume.goal and resume.whole and not resume.candidates:
        return CheckpointNotFound(
            f"{asked}: no complete checkpoint of the timeline has a number for the metric {resume.goal.metric!r}; "
            f"{listed(resume.metrics)}"
        )
    lines = [f"{asked}: no checkpoint could be verified"] if skipped else [f"{asked}: there is no such checkpoint"]
    lines += [f"  skipped {text}" for text in skipped]
    if (resume.quarantined or resume.gone or resume.unvouched) and not resume.candidates and step is None:
        lines.append(f"  to begin from nothing all the same, give the run another name, or remove it (tierd rm {run})")
    if resume.lost:
        lines.append(f"  what attempt {resume.lost} resumed from cannot be told any more")
    if resume.branches:
        others = ", ".join(f"step {c.step} of attempt {c.attempt}" for c in resume.branches[:5])
        lines.append(f"  not tried, off the timeline: {others}; restore(step=…, attempt=…) asks for one")
    return CheckpointNotFound("\n".join(lines))


def because(resume: Resume, world: int = 1, mute: int | None = None) -> str:
    """Where and why places did not answer, in parentheses, for a message; empty where nothing is known of it.

    Args:
        world: how many ranks there are.
        mute: the rank that saw it, where that one cannot hear the others.
    """
    texts = []
    for why, numbers in list(resume.silent.items())[:_MOST]:
        ranks = numbers if mute is None else (mute,)
        named = ", ".join(map(str, ranks[:_MOST])) + (f" and {len(ranks) - _MOST} more" if ranks[_MOST:] else "")
        texts.append(f"rank{'s' * (len(ranks) > 1)} {named} on {why}" if world > 1 else why)
    more = len(resume.silent) - len(texts)
    return f" ({'; '.join(texts)}{f'; and {more} more' if more else ''})" if texts else ""


def own_part(candidate: Candidate, rank: int) -> PartId:
    """The part that `rank` restores from."""
    return PartId(candidate.checkpoint, rank, candidate.world)
