"""Which checkpoints a tier wants and lacks, and which parts of them this daemon sends there.

A part comes from the spool, or is relayed from another tier. `order.in_turn` decides the order of the checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.actions import Flush
from tierd.core.planning.copies import is_complete
from tierd.core.planning.demand import Demand, WantedCheckpoints, lacked, pending_of
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.janitor import is_janitor
from tierd.core.planning.order import FlushCandidate
from tierd.core.planning.place import Place
from tierd.core.planning.tier_verdicts import oldest_completable


def candidates_of(demand: Demand, name: str, tier: Place) -> Iterator[tuple[FlushCandidate, list[Flush]]]:
    """The checkpoints that a tier wants and of which this daemon has parts to send, with those parts."""
    inventory, run = demand.inventory, demand.run
    waiting = {checkpoint: [Flush(part, name) for part in parts] for checkpoint, parts in demand.pending(name).items()}
    if not waiting and len(inventory.places) < 3:  # no other tier answers
        return
    demanded, progress = wanted_on(demand, name, tier), _flush_progress(tier, run)
    for part in _relays(demand, name, tier, demanded):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name, relayed=True))
    for checkpoint, parts in waiting.items():
        if checkpoint in demanded.ids:
            copies, at_home = demand.spread(checkpoint, name)
            yield (
                FlushCandidate(
                    checkpoint, progress.get(checkpoint, 0), demanded.is_for_good(checkpoint), copies, at_home
                ),
                parts,
            )


def wanted_on(demand: Demand, name: str, tier: Place) -> WantedCheckpoints:
    """The checkpoints that a tier should have, whether it lacks parts of them or not."""
    inventory, run = demand.inventory, demand.run
    # A pin or a restore that the janitor does not know of does not count, because the janitor would prune the copy that
    # this daemon sent.
    pins = tier.pins | inventory.spool.pins if is_janitor(inventory, tier, run) else tier.pins
    over = oldest_completable(tier, demand.policy(name), run, demand.live(name))
    # Incomplete checkpoints in this spool count as complete, because other spools may hold their other parts.
    in_spool = inventory.spool.run(run).seen
    hoped = [checkpoint for checkpoint in demand.halves if checkpoint in in_spool and checkpoint.attempt >= over]
    demanded = demand.wanted(name, pins, hoped)
    if hoped:  # complete ones are also ranked alone, so that one that is never completed displaces none of them
        demanded |= demand.wanted(name, pins) & demand.whole
    if progress := _flush_progress(tier, run):
        demanded = WantedCheckpoints(frozenset(progress), lambda _: False) | demanded
    # A restore on another node waits for these checkpoints, and needs no newer ones.
    awaited = demand.wanted(name, pins, inventory.needed) & inventory.needed if inventory.needed else None
    return awaited | demanded if awaited else demanded


def _relays(demand: Demand, name: str, tier: Place, demanded: WantedCheckpoints) -> Iterator[PartId]:
    """The parts that this daemon copies to a tier from another tier.

    These are the parts of the ranks that the newest launch saved in this spool. A janitor also relays the parts of
    ranks that the newest launch does not have, because no node saves those. Of a run with which this daemon fills the
    tier, these are all parts.
    """
    inventory, run = demand.inventory, demand.run
    if len(inventory.places) < 3:
        return  # no other tier answers
    on_tier = tier.run(run)
    lacking = (demand.whole & demanded.ids).difference(on_tier.whole)
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
        for part in lacked(tier, demand.merged[checkpoint], ranks, beyond):
            if not inventory.spool.lists(part):
                yield part


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The parts of `run` that the spool has with a readable manifest and the tier without a usable one."""
    on = tier.run(run).seen
    return [part for checkpoint, copy in spool.run(run).seen.items() for part in pending_of(copy, on.get(checkpoint))]


def _flush_progress(tier: Place, run: str) -> dict[CheckpointId, int]:
    """For each checkpoint newer than all complete ones on a tier: its number of parts there plus the number of nodes
    whose intents say that they send more.

    If saves outrun flushes, nodes that each sent their own newest checkpoint would never send parts of the same one.
    So all nodes finish the checkpoint that most of them began.
    """
    newest = newest_on(tier, run)
    sizes = {
        copy.id: sum(map(len, copy.ranks.values())) - len(copy.defects)
        for copy in tier.run(run).halves
        if newest is None or copy.id > newest
    }
    for checkpoint, nodes in tier.announced.items():
        if checkpoint.run == run and (newest is None or checkpoint > newest):
            sizes[checkpoint] = sizes.get(checkpoint, 0) + len(nodes)
    return {checkpoint: size for checkpoint, size in sizes.items() if size}


def newest_on(tier: Place, run: str) -> CheckpointId | None:
    """The newest complete checkpoint of a run on a tier; None if it has none."""
    return next(reversed(tier.run(run).whole), None)


def is_contended(inventory: Inventory, name: str, part: PartId) -> bool:
    """Whether nodes may disagree about which checkpoint to send next.

    They may if two conditions hold. Other nodes have parts of the checkpoint of `part`. And this spool has parts to
    send of several checkpoints that are newer than every complete one on the tier.
    """
    tier, copy = inventory.tiers[name], inventory.spool.checkpoints.get(part.checkpoint)
    if tier is None or copy is None or is_complete(copy.ranks):
        return False
    newest = newest_on(tier, part.checkpoint.run)
    waiting = {pending_part.checkpoint for pending_part in pending(inventory.spool, tier, part.checkpoint.run)}
    return sum(newest is None or checkpoint > newest for checkpoint in waiting) > 1
