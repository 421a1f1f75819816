"""The client's durations that no user sets.

A `Checkpointer` asks `current_timings` once and passes the result to its parts. So a test shortens a wait in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientTimings:
    """How long the client waits.

    Attributes:
        greeting_s: that a save gives a daemon to greet, counted from the connection.
        silence_s: without a packet after which a daemon counts as stopped. Together with the greeting it makes the one
            second that a stopped daemon may cost. A false alarm is harmless, because the client then writes the
            snapshot, too.
        settled_s: that a save waits for a silent daemon that has renamed its part into place, and may take that back.
        room_silence_s: without a sign of work after which a daemon that makes room counts as stopped.
        start_s: that a restore waits for a daemon that may be starting, as at a node's boot.
        flushed_s: in which the parts that other nodes need from this spool have to reach a tier.
        encoded_s: that one thread waits for another that encodes the same values.
        overlapped_s: after a copy; a write that overlapped the copy has ended by then, and shows.
        hello_s: that an attachment waits for a daemon's greeting, which a daemon sends at once even if it is busy.
        acceptance_s: between two questions for the backlog until a tier has accepted something.
        launches_s: between two questions to the daemon for other launches, which it observes on tiers.
        last_sign_s: that a rank waits until its last sign of life is given, so that no board call runs while the
            interpreter exits.
        notes_s: that the daemon, or its successor, may take for one request of the ranks' notes.
        stalled_s: without a byte after which a fetch is given up; well above the time that a tier gets for one chunk.
        close_shown_s: after which a `close` that waits shows its progress.
        close_logged_s: between two lines of the log about that.
        close_poll_s: between two questions of `close` to the daemon.
    """

    greeting_s: float = 0.1
    silence_s: float = 0.9
    settled_s: float = 5.0
    alone_s: float = 30.0
    names_s: float = 5.0
    room_silence_s: float = 1.0
    start_s: float = 5.0
    flushed_s: float = 600.0
    encoded_s: float = 5.0
    overlapped_s: float = 10.0
    hello_s: float = 5.0
    acceptance_s: float = 2.0
    launches_s: float = 15.0
    last_sign_s: float = 2.0
    notes_s: float = 20.0
    stalled_s: float = 600.0
    arrived_s: float = 0.05
    close_shown_s: float = 2.0
    close_logged_s: float = 60.0
    close_poll_s: float = 0.5


USUAL_TIMINGS = ClientTimings()


def current_timings() -> ClientTimings:
    return USUAL_TIMINGS
