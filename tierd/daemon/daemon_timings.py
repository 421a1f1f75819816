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
    """How long the daemon waits, and the clock by which it stamps and judges ages.

    Attributes:
        backoff_s: the longest backoff of a tier worker.
        stuck_s: until an object that could not be sent, repaired or deleted is tried again.
        in_hand_s: how long workers have to end their current actions when the configuration changes.
        grace_s: without a trainer before an idle daemon ends, so that a restarting trainer still finds it.
        abandoned_s: how long a stage must be unlocked before it counts as left over.
        taken_up_s: how long an interrupted fetch of a whole part may be continued.
        full_observation_s: between full observations of the spool.
        prune_again_s: until a local copy that no tier was found to hold is checked again; tiers are observed meanwhile.
        aged_s: how old the observation may be by which the only copy of a checkpoint is deleted. An older one is made
            anew, because a daemon that was stopped for hours decides before it has observed anything.
        room_s: how long freeing disk space may take; flushes under way may verify more copies meanwhile.
        twin_s: how long a flush waits for another tier's manifest, which only saves work.
        holds_s: how long a tier may be silent when it is asked whether it holds a part, before another tier deletes its
            copy; the prune is put off after that, because flushes wait for it.
        restore_s: how long a restore waits for a tier's answer if the spool suffices.
        listen_s: between two checks whether a tier has given a sign of life.
        unanswered_shown_s: how long a tier may give none, with requests under way, until `status` says that it waits.
        unanswered_problem_s: until that is a problem.
        unanswered_alert_s: until that is an alert.
        refused_s: how long a refused deletion counts before the store is asked again.
        left_undone_s: how old a checkpoint is when another node should have sent it to a tier with `backfill`.
        list_again_s: until a tier whose runs could not be listed is tried again.
        own_stale_ms: until this node's own intents and marks expire; short, because it trusts its own clock.
        shared_id_s: how long a daemon whose spool may be a copied volume waits for another one with its id.
        mark_reads: how often a flush lists the marks that it waits for.
        mark_pause_s: between two of these listings.
        scrub_rest_s: between two checks for a copy that is due to be verified.
        scrub_later_s: how long a copy that could not be read or repaired is skipped at first; it doubles each time.
        orphan_s: how long a dead trainer's memory is kept for its successor.
        tick_s: between two polls of the hand-off socket.
        watch_s: between two listings of a watched directory.
        appear_s: how long `--until-idle` waits for a watched directory that does not exist, then for its first unit.
        untaken_s: how long a watched directory has files, and nothing of it is taken, until that is reported.
        settle_s: how long a unit of a watched directory has to be unchanged before it is taken.
        renew_s: between two announcements of the node that takes the units of a watched run.
        idle_renew_s: the longest time between two records of a watch that has nothing to take.
        silent_s: until a node whose announcement is not renewed counts as dead for the other watchers.
        yield_s: how long a watcher leaves a unit to another node that still renews its announcement.
        answers_s: that an observation waits for a tier's next answer, all retries included.
        marked_s: after which a launch that still writes notes is marked again.
        notify_again_s: before the second try to deliver an event; then twice as long.
        notify_end_s: to send queued events when the daemon ends.
        http_lifetime_s: how long an HTTP client may have its connection.
        http_grace_s: how long it may wait with its request if another client waits for the connection.
        wall_ns: the wall clock, nanoseconds since 1970.
    """

    backoff_s: float = 300.0
    stuck_s: float = 60.0
    in_hand_s: float = 10.0
    grace_s: float = 2.0
    abandoned_s: float = 5.0
    taken_up_s: float = 3600.0
    full_observation_s: float = 60.0
    prune_again_s: float = 1.0
    aged_s: float = 300.0
    room_s: float = 5.0
    twin_s: float = 5.0
    holds_s: float = 5.0
    restore_s: float = 60.0
    listen_s: float = 1.0
    unanswered_shown_s: float = 5.0
    unanswered_problem_s: float = 20.0
    unanswered_alert_s: float = 75.0
    refused_s: float = 600.0
    left_undone_s: float = 3600.0
    list_again_s: float = 60.0
    own_stale_ms: int = 900_000
    shared_id_s: float = 300.0
    mark_reads: int = 30
    mark_pause_s: float = 0.5
    scrub_rest_s: float = 60.0
    scrub_later_s: float = 3600.0
    orphan_s: float = 30.0
    tick_s: float = 0.5
    watch_s: float = 3.0
    appear_s: float = 600.0
    untaken_s: float = 900.0
    settle_s: float = 10.0
    renew_s: float = 30.0
    idle_renew_s: float = 600.0
    silent_s: float = 180.0
    yield_s: float = 3600.0
    answers_s: float = 120.0
    marked_s: float = 21_600.0
    notify_again_s: float = 1.0
    notify_end_s: float = 5.0
    http_lifetime_s: float = 15.0
    http_grace_s: float = 0.5
    wall_ns: Callable[[], int] = _wall_ns

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
