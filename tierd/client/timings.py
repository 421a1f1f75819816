"""The client's durations that no user sets.

A `Checkpointer` asks `given` once and passes the result to its parts. So a test shortens a wait in one place.
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
        alone_s: for which an unusable daemon is not contacted.
        names_s: that naming an attempt waits for the daemon's listing of the tiers.
        room_silence_s: without a sign of work after which a daemon that makes room counts as stopped.
        start_s: that a restore waits for a daemon that may be starting, as at a node's boot.
        flushed_s: in which the parts that other nodes need from this spool have to reach a tier.
        encoded_s: that one thread waits for another that encodes the same values.
        overlapped_s: after a copy; a write that overlapped the copy has ended by then, and shows.
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
    close_poll_s: float = 0.5


USUAL = ClientTimings()


def given() -> ClientTimings:
    """Return the timings of a `Checkpointer` that is made now."""
    return USUAL
