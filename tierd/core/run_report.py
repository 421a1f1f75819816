"""The output of `ls` and `show` as plain data, and which steps each launch of a run saved, from where it began, and how
far that rolled the run back. The JSON form of `ls` and `show` is a stable contract, shown in the reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tierd.core.config import Config
from tierd.core.errors import DivisionMismatch, FormatTooNew
from tierd.core.ids import CheckpointId, PartId, checkpoint_order
from tierd.core.planning.copies import CheckpointCopy, ManifestFacts, is_complete, total_stored_size, union_ranks
from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory, known_policy, observed_runs
from tierd.core.planning.place import SPOOL, Place
from tierd.core.planning.pruning import judge_place
from tierd.core.retention.retention_verdicts import AWAITS_PARTS, Verdict
from tierd.core.timeline.launch_chain import LaunchRecord
from tierd.core.timeline.restore_order import restore_candidates

_LOCAL_ONLY = "the last launch names no tier"
_MISMATCHED = "incomplete: its ranks divided different states"


@dataclass(frozen=True, slots=True)
class Copy:
    """One place's copy of a checkpoint.

    Attributes:
        state: `verified` (a tier: every byte was verified there before its manifest was put), `committed` (the
            spool: durable, with digests taken from memory), `incomplete` (parts are missing, or do not belong
            together), `corrupt` (a manifest
            cannot be used), `unreadable` (by this version, or without the key), `quarantined` (proven corrupt, and no
            other copy could repair it).
        ranks: the ranks whose parts are there.
        read: the number of ranks whose manifests were read; `size` and `stored_size` are sums over these.
        size: bytes of the files of all ranks, before compression; what ranks hold alike counts for each that stored it.
        stored_size: bytes as stored, each object once: what several ranks name, and what other checkpoints share.
        keep: whether retention keeps the copy.
        reasons: the rules that keep it, or why no rule does.
        defects: the errors of its manifests.
    """

    place: str
    state: str
    ranks: tuple[int, ...]
    read: int
    size: int
    stored_size: int
    keep: bool
    reasons: tuple[str, ...]
    defects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint and its copies.

    Attributes:
        created: RFC 3339 in UTC; None: no manifest could be read.
        metrics: of the lowest rank whose manifest could be read; None for a value that is not finite.
        resumed_from: the checkpoint from which its launch resumed; None: none, or not known.
        complete: whether every rank has a part in some place.
        pinned: whether it is pinned anywhere.
        resumes: whether a restore tries this checkpoint first.
        copies: its copies, by place.
        note: the text of its pin; empty: none.
    """

    run: str
    step: int
    attempt: str
    world_size: int
    created: str | None
    metrics: dict[str, float | None]
    resumed_from: str | None
    complete: bool
    pinned: bool
    resumes: bool
    copies: tuple[Copy, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything known of the requested runs.

    Attributes:
        checkpoints: run by run, in the order of their names; of each run the newest first.
        unreached: tiers that did not answer.
    """

    checkpoints: tuple[Checkpoint, ...]
    unreached: tuple[str, ...]


def make_report(
    inventory: Inventory, config: Config | None, run: str | None = None, *, defaults: bool = True
) -> Report:
    """Describe `run`, or every run. Without a configuration there are no verdicts, and every copy has `keep` set.

    `defaults` says whether the default policy judges in a place for which no policy was given; else it has no verdicts.
    """
    run_names = [name for name in observed_runs(inventory) if run in (None, name)]
    checkpoints = [checkpoint for name in run_names for checkpoint in _run(inventory, config, name, defaults)]
    unreached = tuple(name for name, place in inventory.tiers.items() if place is None)
    return Report(tuple(checkpoints), unreached)


def _run(inventory: Inventory, config: Config | None, run: str, defaults: bool) -> list[Checkpoint]:
    places = inventory.places
    demand = Demand(replace(inventory, spool=inventory.spool.managed), config, run) if config else None
    verdicts = {
        name: {verdict.id: verdict for verdict in judge_place(demand, name)}
        for name in places
        if demand and config and (defaults or known_policy(inventory, config, run, name))
    }
    if SPOOL in verdicts and run in inventory.spool.local_only:  # nothing of the run is deleted there
        verdicts[SPOOL] = {copy.id: Verdict(copy.id, True, (_LOCAL_ONLY,)) for copy in inventory.spool.copies(run)}
    resume = restore_candidates(inventory, run)
    first = resume.candidates[0].checkpoint if resume.candidates else None
    copies = inventory.copies(run)
    quarantined: dict[CheckpointId, dict[str, list[PartId]]] = defaultdict(lambda: defaultdict(list))
    for name, place in places.items():
        for part in sorted(place.quarantined):
            if part.checkpoint.run == run:
                quarantined[part.checkpoint][name].append(part)
    return [
        _checkpoint(
            checkpoint,
            places,
            copies.get(checkpoint, {}),
            quarantined.get(checkpoint, {}),
            {
                name: by_checkpoint[checkpoint]
                for name, by_checkpoint in verdicts.items()
                if checkpoint in by_checkpoint
            },
            resumes=checkpoint == first,
        )
        for checkpoint in sorted({*copies, *quarantined}, key=checkpoint_order, reverse=True)
    ]


def _checkpoint(
    checkpoint: CheckpointId,
    places: Mapping[str, Place],
    copies: Mapping[str, CheckpointCopy],
    quarantined: Mapping[str, list[PartId]],
    verdicts: Mapping[str, Verdict],
    *,
    resumes: bool,
) -> Checkpoint:
    ranks = union_ranks(*(copy.matching_ranks for copy in copies.values()))
    facts = next(
        (
            part_facts
            for name in places
            if (part_facts := _facts(places[name], copies.get(name), quarantined.get(name)))
        ),
        None,
    )
    return Checkpoint(
        run=checkpoint.run,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        world_size=max([*ranks, *(part.world for parts in quarantined.values() for part in parts)]),
        created=facts.created.isoformat() if facts else None,
        metrics={name: value if value == value else None for name, value in facts.metrics.items()} if facts else {},
        resumed_from=facts.origin.name if facts and facts.origin else None,
        complete=is_complete(ranks),
        pinned=any(checkpoint in place.pins for place in places.values()),
        resumes=resumes,
        copies=tuple(
            _copy(name, copies.get(name), quarantined.get(name, []), verdicts.get(name))
            for name in places
            if name in copies or name in quarantined
        ),
    )


def _facts(place: Place, copy: CheckpointCopy | None, quarantined: list[PartId] | None) -> ManifestFacts | None:
    """The facts of the lowest rank whose manifest was read, quarantined or not."""
    facts_by_part = {**{part: place.quarantined[part] for part in quarantined or ()}, **(copy.facts if copy else {})}
    read_parts = [(part.rank, part.world, part) for part, facts in facts_by_part.items() if facts]
    return facts_by_part[min(read_parts)[-1]] if read_parts else None


def _copy(name: str, copy: CheckpointCopy | None, quarantined: list[PartId], verdict: Verdict | None) -> Copy:
    ranks = (
        sorted(rank for rank_set in copy.ranks.values() for rank in rank_set)
        if copy
        else [part.rank for part in quarantined]
    )
    facts = copy.facts.values() if copy else ()
    return Copy(
        place=name,
        state=_state(name, copy) if copy else "quarantined",
        ranks=tuple(ranks),
        read=len(facts),
        size=sum(part_facts.size for part_facts in facts),
        stored_size=total_stored_size(copy.facts) if copy else 0,
        keep=verdict.keep if verdict else True,
        reasons=reasons_of(copy, verdict),
        defects=tuple(str(copy.defects[part]) for part in sorted(copy.defects)) if copy else (),
    )


def reasons_of(copy: CheckpointCopy | None, verdict: Verdict | None) -> tuple[str, ...]:
    """The verdict's reasons, one of which says so if unusable manifests, and no missing part, make it incomplete."""
    reasons = verdict.reasons if verdict else ()
    if copy is not None and copy.is_mismatched:
        return (_MISMATCHED, *(reason for reason in reasons if reason != AWAITS_PARTS))
    if copy is None or not copy.defects or not is_complete(copy.ranks):
        return reasons
    count = sum(map(len, copy.ranks.values()))
    unusable = f"incomplete: {len(copy.defects)} of its {count} manifests cannot be used"
    return tuple(unusable if reason == AWAITS_PARTS else reason for reason in reasons)


def _state(name: str, copy: CheckpointCopy) -> str:
    if all(isinstance(defect, DivisionMismatch) for defect in copy.defects.values()) and copy.is_mismatched:
        return "incomplete"
    if copy.defects:
        strange = all(isinstance(defect, FormatTooNew) for defect in copy.defects.values())
        return "unreadable" if strange else "corrupt"
    if name == SPOOL:
        return "committed"
    return "verified" if is_complete(copy.ranks) else "incomplete"


@dataclass(frozen=True, slots=True)
class LaunchSteps:
    """The checkpoints of one launch, as far as they are known.

    Attributes:
        attempt: the launch.
        first_step, last_step: its oldest and its newest checkpoint.
        from_step, from_attempt: the checkpoint from which it resumed; None: from the beginning, or not known.
        lost_steps: by how many steps the launch that saved that checkpoint had come further, also if retention has
            deleted its newest checkpoints since.
    """

    run: str
    attempt: str
    first_step: int
    last_step: int
    from_step: int | None
    from_attempt: str | None
    lost_steps: int


def launch_steps(
    checkpoints: Iterable[Checkpoint], remembered: Callable[[str], Mapping[str, LaunchRecord]]
) -> tuple[LaunchSteps, ...]:
    """Return the launches of every run, by run and in their order. `remembered` gives a run's launches by its heads."""
    by_launch: dict[tuple[str, str], list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        by_launch.setdefault((checkpoint.run, checkpoint.attempt), []).append(checkpoint)
    launches = []
    heads = {run: remembered(run) for run in {run for run, _ in by_launch}}
    for (run, attempt), saved in sorted(by_launch.items()):
        steps = [checkpoint.step for checkpoint in saved]
        origin = next((checkpoint.resumed_from for checkpoint in saved if checkpoint.resumed_from), None)
        step, _, by = origin.partition(".") if origin else ("", "", "")
        before = [checkpoint.step for checkpoint in by_launch.get((run, by), ())]
        if (launch := heads[run].get(by)) and launch.newest is not None:
            before.append(launch.newest)
        lost_steps = max(0, max(before) - int(step)) if before else 0
        launches.append(
            LaunchSteps(run, attempt, min(steps), max(steps), int(step) if step else None, by or None, lost_steps)
        )
    return tuple(launches)
