"""The daemon's durations that no user configures, and its clock.

The composition roots ask `given` and pass the result down. So a test shortens a wait, or sets a clock, in one place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def _wall_ns() -> int:
    return time.time_ns()


@dataclass(frozen=True)
class DaemonTimings:
    """How long the daemon waits, and the clock by which it stamps and judges ages."""

    backoff_s: float = 300.0  # the longest backoff of a tier worker
    stuck_s: float = 60.0  # until an object that could not be sent, repaired or deleted is tried again
    in_hand_s: float = 10.0  # how long workers have to end their current actions when the configuration changes
    grace_s: float = 2.0  # without a trainer before an idle daemon ends, so that a restarting trainer still finds it
    abandoned_s: float = 5.0  # how long a stage must be unlocked before it counts as left over
    taken_up_s: float = 3600.0  # how long an interrupted fetch of a whole part may be continued
    full_observation_s: float = 60.0  # between full observations of the spool
    # Until a local copy that no tier was found to hold is checked again; tiers are observed meanwhile.
    prune_again_s: float = 1.0
    # How old the observation may be by which the only copy of a checkpoint is deleted. An older one is made anew,
    # because a daemon that was stopped for hours decides before it has observed anything.
    aged_s: float = 300.0
    room_s: float = 5.0  # how long freeing disk space may take; flushes under way may verify more copies meanwhile
    twin_s: float = 5.0  # how long a flush waits for another tier's manifest, which only saves work
    # How long a tier may be silent when it is asked whether it holds a part, before another tier deletes its copy; the
    # prune is put off after that, because flushes wait for it.
    holds_s: float = 5.0
    # How long further parts of a checkpoint may arrive in the spool until a difference between its ranks is reported.
    parts_arrive_s: float = 10.0
    restore_s: float = 60.0  # how long a restore waits for a tier's answer if the spool suffices
    listen_s: float = 1.0  # between two checks whether a tier has given a sign of life
    # How long a tier may give none, with requests under way, until `status` says that it waits.
    unanswered_shown_s: float = 5.0
    unanswered_problem_s: float = 20.0  # until that is a problem
    unanswered_alert_s: float = 75.0  # until that is an alert
    refused_s: float = 600.0  # how long a refused deletion counts before the store is asked again
    # How old a checkpoint is when another node should have sent it to a tier with `backfill`.
    left_undone_s: float = 3600.0
    # How old a listing of chunks may be by which a flush sends a chunk that other nodes have, too, and may have sent.
    chunks_listed_s: float = 1.0
    # How long nothing has to come from the other nodes until a flush sends chunks that are theirs to send.
    chunks_awaited_s: float = 5.0
    list_again_s: float = 60.0  # until a tier whose runs could not be listed is tried again
    # Until this node's own intents and marks expire; short, because it trusts its own clock.
    own_stale_ms: int = 900_000
    shared_id_s: float = 300.0  # how long a daemon whose spool may be a copied volume waits for another one with its id
    # Summaries are made of checkpoints of so many ranks, if the manifests of their run on the tier are so many.
    summarised_ranks: int = 32
    summarised_manifests: int = 2000
    mark_reads: int = 30  # how often a flush lists the marks that it waits for
    mark_pause_s: float = 0.5  # between two of these listings
    scrub_rest_s: float = 60.0  # between two checks for a copy that is due to be verified
    # How long a copy that could not be read or repaired is skipped at first; it doubles each time.
    scrub_later_s: float = 3600.0
    orphan_s: float = 30.0  # how long a dead trainer's memory is kept for its successor
    tick_s: float = 0.5  # between two polls of the hand-off socket
    watch_s: float = 3.0  # between two listings of a watched directory
    # How long `--until-idle` waits for a watched directory that does not exist, then for its first unit.
    appear_s: float = 600.0
    # How long a watched directory has files, and nothing of it is taken, until that is reported.
    untaken_s: float = 900.0
    settle_s: float = 10.0  # how long a unit of a watched directory has to be unchanged before it is taken
    renew_s: float = 30.0  # between two announcements of the node that takes the units of a watched run
    idle_renew_s: float = 600.0  # the longest time between two records of a watch that has nothing to take
    silent_s: float = 180.0  # until a node whose announcement is not renewed counts as dead for the other watchers
    yield_s: float = 3600.0  # how long a watcher leaves a unit to another node that still renews its announcement
    answers_s: float = 120.0  # that an observation waits for a tier's next answer, all retries included
    marked_s: float = 21_600.0  # after which a launch that still writes notes is marked again
    notify_again_s: float = 1.0  # before the second try to deliver an event; then twice as long
    notify_end_s: float = 5.0  # to send queued events when the daemon ends
    http_lifetime_s: float = 15.0  # how long an HTTP client may have its connection
    http_grace_s: float = 0.5  # how long it may wait with its request if another client waits for the connection
    wall_ns: Callable[[], int] = _wall_ns  # the wall clock, nanoseconds since 1970

    def now_s(self) -> float:
        """Return the wall clock in seconds since 1970."""
        return self.wall_ns() / 1e9

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970."""
        return self.wall_ns() // 1_000_000


USUAL = DaemonTimings()


def given() -> DaemonTimings:
    """Return the timings of a daemon that is composed now."""
    return USUAL
