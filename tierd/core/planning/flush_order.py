"""Which parts a tier wants and lacks, in which order this daemon sends them, and which chunks of an older checkpoint a
flush may name instead of sending its own.

The newest checkpoint is first, because a resume needs it. Checkpoints that the tier wants for good are second. Of these
the one with the fewest copies is first, because another tier may hold it only for this tier. The others follow, newest
first. A tier that is slower than the saves would never receive anything but the newest checkpoint. Therefore the daemon
sends some checkpoints that are wanted for good after each newest one: about the square root of the number that wait. So
both kinds make progress however slow the tier is. The queue shrinks as long as saves add less than the tier can
receive. Before the node ends, only the newest count.

Invariant: one damaged or lost object costs a bounded number of checkpoints. A chunk is shared only if sharing saves
enough to be worth the dependence. At most `MOST_SHARERS` checkpoints of a tier depend on the checkpoint that wrote it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tierd.core.ids import CheckpointId, PartId, chunk_owner
from tierd.core.manifest import Chunk, Manifest
from tierd.core.planning.copies import is_complete
from tierd.core.planning.demand import Demand, DemandedCheckpoints, pending_parts, unlisted_parts
from tierd.core.planning.eviction import oldest_completable
from tierd.core.planning.inventory import Inventory, LastSent, is_janitor
from tierd.core.planning.place import Flush, Place


@dataclass(frozen=True, slots=True)
class FlushCandidate:
    """A checkpoint of which a tier lacks parts."""

    checkpoint: CheckpointId
    progress: int
    is_permanent: bool  # whether a rule wants it however many newer checkpoints follow
    copies: int
    # whether one of those tiers wants it by its own policy, and does not only hold it for other tiers
    is_wanted_elsewhere: bool


def order_flushes(
    candidates: Collection[FlushCandidate],
    newest: Mapping[str, CheckpointId],
    sent: LastSent | None,
    awaited: Collection[CheckpointId] = (),
    *,
    newest_first: bool = False,
) -> list[CheckpointId]:
    """The candidates for one tier in the order in which to send them.

    `newest` is each run's newest checkpoint that is complete there. What was `sent` last is finished first, and then
    what restores on other nodes have `awaited`. With `newest_first` the newest are first in any case, because the node
    ends.
    """
    if newest_first:
        return sorted((candidate.checkpoint for candidate in candidates), key=_newest, reverse=True)
    by_age = sorted(candidates, key=_age, reverse=True)
    first_of: dict[str, FlushCandidate | None] = {}
    for candidate in by_age:
        run = candidate.checkpoint.run
        if first_of.setdefault(run, None) is None and _is_ahead(candidate, newest.get(run), sent):
            first_of[run] = candidate
    heads = [candidate for candidate in first_of.values() if candidate]
    permanent = sorted(
        (
            candidate
            for candidate in by_age
            if candidate.is_permanent and first_of[candidate.checkpoint.run] is not candidate
        ),
        key=_danger,
    )
    if sent is not None and sent.sent_since**2 < len(permanent):
        first: list[FlushCandidate] = [permanent[0], *heads, *permanent[1:]]
    else:
        first = [*heads, *permanent]
    urgent = [
        candidate
        for candidate in by_age
        if candidate.checkpoint in awaited or (sent and candidate.checkpoint == sent.last)
    ]
    return list(dict.fromkeys(candidate.checkpoint for candidate in [*urgent, *first, *by_age]))


def is_newest_of_run(checkpoint: CheckpointId, spool: Place, tier: Place) -> bool:
    """Whether a checkpoint that is about to be sent is its run's newest.

    Two conditions have to hold. The checkpoint is newer than every complete checkpoint on the tier. And the tier has a
    part of it, or the spool has no newer one. The second condition excludes a checkpoint that is wanted for good: when
    several of these are sent one after another, each is newer than all on the tier although newer ones wait.
    """
    complete, newest = tier.run(checkpoint.run).usable, spool.run(checkpoint.run).newest
    if complete and complete[-1] > checkpoint:
        return False
    return checkpoint in tier.checkpoints or newest is None or newest <= checkpoint


def _is_ahead(candidate: FlushCandidate, newest: CheckpointId | None, sent: LastSent | None) -> bool:
    """Whether a candidate is newer than its run's newest on the tier, and either begun or newer than the last sent."""
    if newest is not None and candidate.checkpoint <= newest:
        return False
    return (
        bool(candidate.progress)
        or sent is None
        or sent.last.run != candidate.checkpoint.run
        or candidate.checkpoint > sent.last
    )


def _age(candidate: FlushCandidate) -> tuple[str, int, int, str]:
    """Sort key, largest first: the newest launch, and in it the checkpoint of which other nodes have sent most."""
    return candidate.checkpoint.attempt, candidate.progress, candidate.checkpoint.step, candidate.checkpoint.run


def _newest(checkpoint: CheckpointId) -> tuple[str, int, str]:
    return checkpoint.attempt, checkpoint.step, checkpoint.run


def _danger(candidate: FlushCandidate) -> tuple[int, bool, CheckpointId]:
    return candidate.copies, candidate.is_wanted_elsewhere, candidate.checkpoint


def candidates_of(demand: Demand, name: str, tier: Place) -> Iterator[tuple[FlushCandidate, list[Flush]]]:
    """The checkpoints that a tier wants and of which this daemon has parts to send, with those parts."""
    inventory, run = demand.inventory, demand.run
    waiting = {checkpoint: [Flush(part, name) for part in parts] for checkpoint, parts in demand.pending(name).items()}
    if not waiting and len(inventory.places) < 3:  # no other tier answers
        return
    demanded, progress = demanded_on(demand, name, tier), _flush_progress(tier, run)
    for part in _relays(demand, name, tier, demanded):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name, relayed=True))
    for checkpoint, parts in waiting.items():
        if checkpoint in demanded.ids:
            copies, at_home = demand.complete_elsewhere(checkpoint, name)
            yield (
                FlushCandidate(
                    checkpoint, progress.get(checkpoint, 0), demanded.is_permanent(checkpoint), copies, at_home
                ),
                parts,
            )


def demanded_on(demand: Demand, name: str, tier: Place) -> DemandedCheckpoints:
    """The checkpoints that a tier should have, whether it lacks parts of them or not."""
    inventory, run = demand.inventory, demand.run
    # A pin or a restore that the janitor does not know of does not count, because the janitor would prune the copy that
    # this daemon sent.
    pins = tier.pins | inventory.spool.pins if is_janitor(inventory, tier, run) else tier.pins
    over = oldest_completable(tier, demand.policy(name), run, demand.live(name))
    # Incomplete checkpoints in this spool count as complete, because other spools may hold their other parts.
    in_spool = inventory.spool.run(run).copies
    hoped = [
        checkpoint for checkpoint in demand.incomplete_ids if checkpoint in in_spool and checkpoint.attempt >= over
    ]
    demanded = demand.demanded(name, pins, hoped)
    if hoped:  # complete ones are also ranked alone, so that one that is never completed displaces none of them
        demanded |= demand.demanded(name, pins) & demand.complete_ids
    if progress := _flush_progress(tier, run):
        demanded = DemandedCheckpoints(frozenset(progress), lambda _: False) | demanded
    # A restore on another node waits for these checkpoints, and needs no newer ones.
    awaited = demand.demanded(name, pins, inventory.awaited) & inventory.awaited if inventory.awaited else None
    return awaited | demanded if awaited else demanded


def _relays(demand: Demand, name: str, tier: Place, demanded: DemandedCheckpoints) -> Iterator[PartId]:
    """The parts that this daemon copies to a tier from another tier.

    These are the parts of the ranks that the newest launch saved in this spool. A janitor also relays the parts of
    ranks that the newest launch does not have, because no node saves those. Of a run with which this daemon fills the
    tier, these are all parts.
    """
    inventory, run = demand.inventory, demand.run
    if len(inventory.places) < 3:
        return  # no other tier answers
    on_tier = tier.run(run)
    lacking = (demand.complete_ids & demanded.ids).difference(on_tier.usable)
    if not lacking:
        return
    newest = max((checkpoint.attempt for checkpoint in demand.copies), default=None)
    own_ranks = [copy.ranks for copy in inventory.spool.copies(run) if copy.id.attempt == newest]
    own_ranks = [] if run in inventory.spool.restored else own_ranks
    launch = inventory.spool.launches.get(run)
    if launch and launch.attempt == newest:
        own_ranks.append(launch.ranks)
    filled = not own_ranks and demand.fills(name)
    if not (own_ranks or filled):
        return  # no trainer saved the newest launch here
    ranks = frozenset[int]().union(*(rank_set for by_world in own_ranks for rank_set in by_world.values()))
    beyond = 0.0 if filled else math.inf
    if is_janitor(inventory, tier, run):
        sizes = [copy.ranks for checkpoint, copy in demand.merged.items() if checkpoint.attempt == newest]
        beyond = max((size for by_world in sizes for size in by_world), default=math.inf)
    for checkpoint in lacking:
        for part in unlisted_parts(tier, demand.merged[checkpoint], ranks, beyond):
            if not inventory.spool.lists(part):
                yield part


def pending_run_parts(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The parts of `run` that the spool has with a readable manifest and the tier without a usable one."""
    on = tier.run(run).copies
    return [
        part for checkpoint, copy in spool.run(run).copies.items() for part in pending_parts(copy, on.get(checkpoint))
    ]


def _flush_progress(tier: Place, run: str) -> dict[CheckpointId, int]:
    """For each checkpoint newer than all complete ones on a tier: its number of parts there plus the number of nodes
    whose intents say that they send more.

    If saves outrun flushes, nodes that each sent their own newest checkpoint would never send parts of the same one.
    So all nodes finish the checkpoint that most of them began.
    """
    newest = newest_complete_on(tier, run)
    sizes = {
        copy.id: sum(map(len, copy.ranks.values())) - len(copy.defects)
        for copy in tier.run(run).unusable
        if newest is None or copy.id > newest
    }
    for checkpoint, nodes in tier.announced.items():
        if checkpoint.run == run and (newest is None or checkpoint > newest):
            sizes[checkpoint] = sizes.get(checkpoint, 0) + len(nodes)
    return {checkpoint: size for checkpoint, size in sizes.items() if size}


def newest_complete_on(tier: Place, run: str) -> CheckpointId | None:
    """The newest complete checkpoint of a run on a tier; None if it has none."""
    return next(reversed(tier.run(run).usable), None)


def is_contended(inventory: Inventory, name: str, part: PartId) -> bool:
    """Whether nodes may disagree about which checkpoint to send next.

    They may if two conditions hold. Other nodes have parts of the checkpoint of `part`. And this spool has parts to
    send of several checkpoints that are newer than every complete one on the tier.
    """
    tier, copy = inventory.tiers[name], inventory.spool.checkpoints.get(part.checkpoint)
    if tier is None or copy is None or is_complete(copy.ranks):
        return False
    newest = newest_complete_on(tier, part.checkpoint.run)
    waiting = {
        pending_part.checkpoint for pending_part in pending_run_parts(inventory.spool, tier, part.checkpoint.run)
    }
    return sum(newest is None or checkpoint > newest for checkpoint in waiting) > 1


# Sharing a smaller chunk would risk checkpoints and save next to nothing. Such chunks hold less than 1 % of a
# transformer's bytes, and sending one again costs a single request, as does asking whether it still exists.
SMALLEST_SHARED_BYTES = 1 << 20

# If only an adapter changes, 100 checkpoints send the frozen bytes 7 times with 16 sharers, and once without a bound
# (docs/explanation/scale.md). Doubling the bound halves these uploads, and doubles the number of checkpoints that one
# bad chunk costs.
MOST_SHARERS = 16

# A reader fetches a patch and every base below it, each a request. An embedding of which 5 % of the rows change at each
# save sends 16 % of its bytes with 8 patches in a row, and 29 % where each patch starts from the whole chunk.
MOST_PATCHES = 8


def overshared(tier: Place, part: PartId) -> frozenset[CheckpointId]:
    """The checkpoints whose chunks a new flush of `part` must not name, because enough others depend on them.

    The dependents of a checkpoint are those on the tier whose manifest of the same rank names its chunks. The
    checkpoint itself counts too while it exists. The part's own checkpoint does not count, because it would only be
    flushed again.
    """
    run, checkpoint = part.checkpoint.run, part.checkpoint
    if not tier.run(run).bases:
        return frozenset()
    sharers: Counter[CheckpointId] = Counter()
    for copy in tier.copies(run):
        facts = [part_facts for other_part, part_facts in copy.facts.items() if other_part.rank == part.rank]
        if facts and copy.id != checkpoint:
            sharers.update({copy.id}.union(*(part_facts.bases for part_facts in facts)))
    return frozenset(owner for owner, count in sharers.items() if count >= MOST_SHARERS)


def shareable_chunks(base: Manifest, worn_out: Collection[CheckpointId]) -> list[Chunk]:
    """The chunks of `base`, another checkpoint's manifest on the tier, that a flush may name. `worn_out` is
    `overshared`.
    """
    chunks = []
    for chunk in base.chunks():
        if chunk.stored and chunk.size >= SMALLEST_SHARED_BYTES:
            owners = {chunk_owner(base.run, stored.key) for stored in chunk.objects()}
            if None not in owners and owners.isdisjoint(worn_out):
                chunks.append(chunk)
    return chunks


def is_patchable(base: Chunk) -> bool:
    """Whether a flush may store a chunk as a patch of `base`, one of `shareable_chunks` at its place in the file."""
    return sum(1 for _ in base.objects()) <= MOST_PATCHES


def base_part(tier: Place, part: PartId) -> PartId | None:
    """The base of a flush of `part`: the part whose equal chunks the flush may name instead of sending its own.

    It is the same rank's part of the newest checkpoint that is complete on the tier. It is None while the tier has a
    quarantined part of that rank, because the base may share a chunk that is proven corrupt. It is None as well while
    another rank's quarantined part names chunks that several ranks hold, or cannot be read.
    """
    checkpoint = part.checkpoint
    if any(
        quarantined.rank == part.rank or facts is None or facts.homed_sizes
        for quarantined, facts in tier.quarantined.items()
        if quarantined.checkpoint.run == checkpoint.run
    ):
        return None
    newest = next(
        (candidate for candidate in reversed(tier.run(checkpoint.run).usable) if candidate != checkpoint), None
    )
    if newest is None:
        return None
    candidates = (PartId(newest, part.rank, world) for world in sorted(tier.checkpoints[newest].ranks))
    return next((candidate for candidate in candidates if tier.has(candidate)), None)
