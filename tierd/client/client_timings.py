"""The client's durations that no user sets.

A `Checkpointer` asks `current_timings` once and passes the result to its parts. So a test shortens a wait in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientTimings:
    """How long the client waits, in seconds."""

    greeting_s: float = 0.1  # that a save gives a daemon to greet, counted from the connection
    # Without a packet after which a daemon counts as stopped. Together with the greeting it makes the one second that a
    # stopped daemon may cost. A false alarm is harmless, because the client then writes the snapshot, too.
    silence_s: float = 0.9
    settled_s: float = 5.0  # for a silent daemon that has renamed a part into place, and may take that back
    alone_s: float = 30.0  # for which an unusable daemon is not contacted
    names_s: float = 5.0  # that naming an attempt waits for the daemon's listing of the tiers
    room_silence_s: float = 1.0  # without a sign of work after which a daemon that makes room counts as stopped
    start_s: float = 5.0  # that a restore waits for a daemon that may be starting, as at a node's boot
    flushed_s: float = 600.0  # in which the parts that other nodes need from this spool have to reach a tier
    encoded_s: float = 5.0  # that one thread waits for another that encodes the same values
    overlapped_s: float = 10.0  # after a copy; a write that overlapped the copy has ended by then, and shows
    hello_s: float = 5.0  # that an attachment waits for a greeting, which a daemon sends at once even if it is busy
    acceptance_s: float = 2.0  # between two questions for the backlog until a tier has accepted something
    launches_s: float = 15.0  # between two questions for other launches, which the daemon observes on tiers
    last_sign_s: float = 2.0  # for a rank's last sign of life, so that no board call runs while the interpreter exits
    notes_s: float = 20.0  # that the daemon, or its successor, may take for one request of the ranks' notes
    stalled_s: float = 600.0  # without a byte that end a fetch; well above the time that a tier gets for one chunk
    close_shown_s: float = 2.0  # after which a `close` that waits shows its progress
    close_logged_s: float = 60.0  # between two lines of the log about that
    close_poll_s: float = 0.5  # between two questions of `close` to the daemon


USUAL_TIMINGS = ClientTimings()


def current_timings() -> ClientTimings:
    return USUAL_TIMINGS
