"""When the daemon works in the background: when each copy is read again, and by which daemon on a shared tier; how long
an idle daemon waits between two listings of a tier; and over which time a flush is spread.

Invariant: every copy has its own moment in the scrub's period, which is a hash of its name. So copies that were written
or flushed together are not due together, even after a restart. A copy is due at its first moment after it was last
verified or, if that time is not remembered, after it was made. A shared chunk keeps the schedule of the checkpoint that
wrote it, even after that checkpoint was pruned. The reason is that bytes age from the day they were written. The
schedule deletes nothing.

An idle daemon makes at most `REQUESTS_AN_HOUR` requests over all tiers, however much the tiers hold. An event (a save,
a trainer that attaches, a request) begins a listing at once, so waiting delays only the observation of other nodes'
changes. Training loses least if the work in the background is even, so a flush ends about half-way to the next save,
which is predicted from past intervals, and no later than `LONGEST_SPREAD_S` after it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import xxhash

from tierd.core.ids import PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory, is_janitor, observed_runs
from tierd.core.planning.place import SPOOL, Place

_EARLY = 0.9  # of the period; the rest is a reserve for the reading itself and for a daemon that was down


@dataclass(frozen=True, slots=True, order=True)
class ScrubbedCopy:
    """One place's copy of a part; `place` is `SPOOL` or a tier's name."""

    place: str
    part: PartId


@dataclass(frozen=True, slots=True, order=True)
class DueScrub:
    """When a copy was verified last (`verified_at`) and when it is due again (`due_at`); seconds since 1970."""

    due_at: float
    copy: ScrubbedCopy
    verified_at: float


ScrubTimes = Mapping[ScrubbedCopy, float]  # when each copy was last verified, seconds since 1970


def scrub_agenda(
    inventory: Inventory, remembered: ScrubTimes, period: float, now: float, place: str | None = None
) -> list[DueScrub]:
    """Every copy that this daemon scrubs, of one place or of all, the most overdue first.

    Each copy is to be read again within `period` seconds. `now` is in seconds since 1970.
    """
    return sorted(
        (_due_scrub(inventory, copy, facts, remembered, period, now) for copy, facts in _duties(inventory, place)),
        key=lambda scrub: (scrub.due_at, scrub.copy),
    )


def reschedule(
    inventory: Inventory, copy: ScrubbedCopy, remembered: ScrubTimes, period: float, now: float
) -> DueScrub | None:
    """A copy's next turn by the times `remembered` now; None if its place does not show the copy any more."""
    place = inventory.places.get(copy.place)
    checkpoint_copy = place.checkpoints.get(copy.part.checkpoint) if place else None
    if checkpoint_copy is None or not checkpoint_copy.has(copy.part):
        return None
    return _due_scrub(
        inventory, copy, checkpoint_copy.facts.get(copy.part) or checkpoint_copy.metadata_facts, remembered, period, now
    )


def base_copies(inventory: Inventory, copy: ScrubbedCopy) -> list[ScrubbedCopy]:
    """The deleted copies whose chunks this copy still names."""
    place = inventory.tiers.get(copy.place)
    facts = place.facts(copy.part) if place else None
    owners = facts.bases if facts else ()
    bases = [ScrubbedCopy(copy.place, replace(copy.part, checkpoint=owner)) for owner in sorted(owners)]
    return [base for base in bases if place and not place.lists(base.part)]


def count_overdue(scrubs: list[DueScrub], period: float, now: float) -> int:
    """How many copies were not read again within the period."""
    return sum(scrub.verified_at + period < now for scrub in scrubs)


def _duties(inventory: Inventory, only: str | None) -> Iterator[tuple[ScrubbedCopy, ManifestFacts | None]]:
    """The copies that this daemon scrubs.

    In the spool these are all copies. On a tier these are the parts of each rank of which the spool has any part. A
    run's janitor also scrubs the ranks that the run's newest attempt does not have, because no spool will hold those
    again. If a part's manifest was not read, the facts of its checkpoint's lowest rank give the time of creation.
    """
    ranks_by_run = inventory.spool.ranks
    for name, place in {SPOOL: inventory.spool, **inventory.tiers}.items():
        if place is None or only not in (None, name):
            continue
        beyond = {
            run: _world_size(inventory, place, run)
            for run in observed_runs(inventory)
            if is_janitor(inventory, place, run)
        }
        for copy in place.checkpoints.values():
            own_ranks, end = ranks_by_run.get(copy.id.run, frozenset()), beyond.get(copy.id.run, math.inf)
            speaks = copy.metadata_facts
            for size, ranks in copy.ranks.items():
                scrubbed_ranks = (
                    ranks & own_ranks if size <= end else ranks & own_ranks | {rank for rank in ranks if rank >= end}
                )
                for part in (PartId(copy.id, rank, size) for rank in scrubbed_ranks):
                    if part not in copy.defects:
                        yield ScrubbedCopy(name, part), copy.facts.get(part) or speaks


def _world_size(inventory: Inventory, tier: Place, run: str) -> int:
    """The world size of the newest attempt."""
    attempt_sizes = [
        (copy.id.attempt, max(copy.ranks)) for place in (inventory.spool, tier) for copy in place.copies(run)
    ]
    if run in inventory.spool.launches:
        launch = inventory.spool.launches[run]
        attempt_sizes.append((launch.attempt, max(launch.ranks)))
    return max(attempt_sizes)[1]


def _due_scrub(
    inventory: Inventory,
    copy: ScrubbedCopy,
    facts: ManifestFacts | None,
    remembered: ScrubTimes,
    period: float,
    now: float,
) -> DueScrub:
    verified = _verified(copy, facts, remembered, period, now)
    scrubs = [DueScrub(_moment(copy, verified, period), copy, verified)]
    for base in base_copies(inventory, copy):
        verified = min(max(0.0, remembered.get(base, now)), now)
        scrubs.append(DueScrub(_moment(base, verified, period), copy, verified))
    return min(scrubs, key=lambda scrub: scrub.due_at)


def _verified(
    copy: ScrubbedCopy, facts: ManifestFacts | None, remembered: ScrubTimes, period: float, now: float
) -> float:
    # A put verifies the copy. A time in the future is ignored, because a clock was wrong or `scrubbed.json` is damaged.
    created = facts.created.timestamp() if facts else -1.0
    times = [time for time in (remembered.get(copy, -1.0), created) if 0 <= time <= now]
    return times[0] if times else now - period


def _moment(copy: ScrubbedCopy, verified: float, period: float) -> float:
    beat = period * _EARLY
    offset: float = beat * xxhash.xxh3_64_intdigest(f"{copy.place}/{copy.part.path}".encode()) / 2**64
    return offset + beat * (math.floor((verified - offset) / beat) + 1)


REQUESTS_AN_HOUR = 60  # at S3's price for listings, $0.22 a month
ARRIVAL_TIMEOUT_S = 600.0  # the daemon stops waiting for a checkpoint of which no part arrived for this long


def listing_pause_s(rescan_s: float, requests: int, tiers: int) -> float:
    """Seconds until an idle daemon lists a tier again, at least `rescan_s`.

    Its last listing took `requests`. Each of `tiers` gets an equal share of `REQUESTS_AN_HOUR`.
    """
    return max(rescan_s, requests * tiers * 3600 / REQUESTS_AN_HOUR)


def is_arriving(spool: Place, tier: Place) -> bool:
    """Whether the tier has an incomplete checkpoint that is also in this spool: other nodes may be sending the rest."""
    tier_copies = (tier.checkpoints.get(checkpoint) for checkpoint in spool.checkpoints)
    return any(copy is not None and not copy.usable for copy in tier_copies)


COUNTED_SAVES = 8  # the latest saves, from which the interval is estimated
LONGEST_SPREAD_S = 30.0

_FEWEST = 4  # saves from which an interval can be estimated
_SHARE = 0.5  # of an interval; the other half is a reserve for a flush that takes longer than expected


def flush_spread_s(saved_at: Sequence[float], now: float) -> float:
    """Seconds over which a flush that begins at `now` is spread; 0 if it should run at full speed.

    `saved_at` has the times of the run's latest saves, oldest first; monotonic seconds, like `now`.
    """
    if len(saved_at) < _FEWEST:
        return 0.0
    interval = median(later - earlier for earlier, later in pairwise(saved_at))
    return min(max(saved_at[-1] + _SHARE * interval - now, 0.0), LONGEST_SPREAD_S)
