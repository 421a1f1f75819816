"""Which checkpoints a tier wants and lacks, and which parts of them this daemon sends there.

A part comes from the spool, or is relayed from another tier. `order.in_turn` decides the order of the checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.actions import Flush
from tierd.core.planning.copies import is_complete
from tierd.core.planning.demand import Demand, Wanted, lacked, pending_of
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.janitor import is_janitor
from tierd.core.planning.order import FlushCandidate
from tierd.core.planning.place import Place
from tierd.core.planning.tier_verdicts import oldest_completable


def candidates_of(demand: Demand, name: str, tier: Place) -> Iterator[tuple[FlushCandidate, list[Flush]]]:
    """The checkpoints that a tier wants and of which this daemon has parts to send, with those parts."""
    inventory, run = demand.inventory, demand.run
    waiting = {one: [Flush(part, name) for part in parts] for one, parts in demand.pending(name).items()}
    if not waiting and len(inventory.places) < 3:  # no other tier answers
        return
    wanted, begun = wanted_on(demand, name, tier), _begun(tier, run)
    for part in _relays(demand, name, tier, wanted):
        waiting.setdefault(part.checkpoint, []).append(Flush(part, name, relayed=True))
    for one, parts in waiting.items():
        if one in wanted.ids:
            copies, at_home = demand.spread(one, name)
            yield FlushCandidate(one, begun.get(one, 0), wanted.is_for_good(one), copies, at_home), parts


def wanted_on(demand: Demand, name: str, tier: Place) -> Wanted:
    """The checkpoints that a tier should have, whether it lacks parts of them or not."""
    inventory, run = demand.inventory, demand.run
    # A pin or a restore that the janitor does not know of does not count, because the janitor would prune the copy that
    # this daemon sent.
    pins = tier.pins | inventory.spool.pins if is_janitor(inventory, tier, run) else tier.pins
    over = oldest_completable(tier, demand.policy(name), run, demand.live(name))
    # Incomplete checkpoints in this spool count as complete, because other spools may hold their other parts.
    here = inventory.spool.run(run).seen
    hoped = [one for one in demand.halves if one in here and one.attempt >= over]
    wanted = demand.wanted(name, pins, hoped)
    if hoped:  # complete ones are also ranked alone, so that one that is never completed displaces none of them
        wanted |= demand.wanted(name, pins) & demand.whole
    if begun := _begun(tier, run):
        wanted = Wanted(frozenset(begun), lambda _: False) | wanted
    # A restore on another node waits for these checkpoints, and needs no newer ones.
    needed = demand.wanted(name, pins, inventory.needed) & inventory.needed if inventory.needed else None
    return needed | wanted if needed else wanted


def _relays(demand: Demand, name: str, tier: Place, wanted: Wanted) -> Iterator[PartId]:
    """The parts that this daemon copies to a tier from another tier.

    These are the parts of the ranks that the newest launch saved in this spool. A janitor also relays the parts of
    ranks that the newest launch does not have, because no node saves those. Of a run with which this daemon fills the
    tier, these are all parts.
    """
    inventory, run = demand.inventory, demand.run
    if len(inventory.places) < 3:
        return  # no other tier answers
    there = tier.run(run)
    lacking = (demand.whole & wanted.ids).difference(there.whole)
    if not lacking:
        return
    newest = max((one.attempt for one in demand.copies), default=None)
    own = [seen.ranks for seen in inventory.spool.copies(run) if seen.id.attempt == newest]
    own = [] if run in inventory.spool.restored else own
    launch = inventory.spool.launches.get(run)
    if launch and launch.attempt == newest:
        own.append(launch.ranks)
    filled = not own and demand.fills(name)
    if not (own or filled):
        return  # no trainer saved the newest launch here
    ranks = frozenset[int]().union(*(some for one in own for some in one.values()))
    beyond = 0.0 if filled else math.inf
    if is_janitor(inventory, tier, run):
        sizes = [seen.ranks for one, seen in demand.merged.items() if one.attempt == newest]
        beyond = max((size for one in sizes for size in one), default=math.inf)
    for one in lacking:
        for part in lacked(tier, demand.merged[one], ranks, beyond):
            if not inventory.spool.lists(part):
                yield part


def pending(spool: Place, tier: Place, run: str) -> list[PartId]:
    """The parts of `run` that the spool has with a readable manifest and the tier without a usable one."""
    on = tier.run(run).seen
    return [part for one, seen in spool.run(run).seen.items() for part in pending_of(seen, on.get(one))]


def _begun(tier: Place, run: str) -> dict[CheckpointId, int]:
    """For each checkpoint newer than all complete ones on a tier: its number of parts there plus the number of nodes
    whose intents say that they send more.

    If saves outrun flushes, nodes that each sent their own newest checkpoint would never send parts of the same one.
    So all nodes finish the checkpoint that most of them began.
    """
    newest = newest_on(tier, run)
    sizes = {
        seen.id: sum(map(len, seen.ranks.values())) - len(seen.defects)
        for seen in tier.run(run).halves
        if newest is None or seen.id > newest
    }
    for one, nodes in tier.announced.items():
        if one.run == run and (newest is None or one > newest):
            sizes[one] = sizes.get(one, 0) + len(nodes)
    return {one: size for one, size in sizes.items() if size}


def newest_on(tier: Place, run: str) -> CheckpointId | None:
    """The newest complete checkpoint of a run on a tier; None if it has none."""
    return next(reversed(tier.run(run).whole), None)


def is_contended(inventory: Inventory, name: str, part: PartId) -> bool:
    """Whether nodes may disagree about which checkpoint to send next.

    They may if two conditions hold. Other nodes have parts of the checkpoint of `part`. And this spool has parts to
    send of several checkpoints that are newer than every complete one on the tier.
    """
    tier, seen = inventory.tiers[name], inventory.spool.checkpoints.get(part.checkpoint)
    if tier is None or seen is None or is_complete(seen.ranks):
        return False
    newest = newest_on(tier, part.checkpoint.run)
    waiting = {one.checkpoint for one in pending(inventory.spool, tier, part.checkpoint.run)}
    return sum(newest is None or one > newest for one in waiting) > 1
