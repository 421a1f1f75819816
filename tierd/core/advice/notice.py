"""Whether a node's state is saved in time after a notice that the node ends.

Invariant: a state fits only if it does in the worst case of each part. All times are seconds.

A notice is known after at most `KNOWN_S`: metadata servers are read every 5 s, and other ranks read their notes every
2.5 s at most. Then the step in hand ends, and one more, because a rank may have begun it before it knew. The save
blocks training, becomes durable in the spool, and is sent to the tier. If the daemon gets the end's signal together
with the trainer, it sends for `drain` and ends.
"""

from __future__ import annotations

from dataclasses import dataclass

KNOWN_S = 8.0  # a read of the metadata server, a read of the notes, and their exchange


@dataclass(frozen=True, slots=True)
class Fit:
    """The times of a last save, in seconds after the notice.

    Attributes:
        notice_s: how long before its end the node says so.
        due_s: when the checkpoint is due at the latest.
        durable_s: when it is durable in the spool.
        on_tier_s: when a tier has verified it; None if no tier's bandwidth is known.
        left_s: what is left of the notice when the state is as safe as it gets; negative if it does not fit.
        fits: whether the state is on a tier before the end, or in the spool if no tier is known.
        why: what does not fit, and what would; empty if it fits.
    """

    notice_s: float
    due_s: float
    durable_s: float
    on_tier_s: float | None
    left_s: float
    fits: bool
    why: str = ""


def fit(
    notice_s: float,
    state_bytes: float,
    blocked_s: float,
    durable_s: float,
    tier_rate: float | None = None,
    step_s: float = 0.0,
    drain_s: float | None = None,
) -> Fit:
    """Compute whether the state of one node fits into the time of a notice.

    Args:
        notice_s: how long before its end the node says so.
        state_bytes: what one node saves.
        blocked_s: what a save takes from training.
        durable_s: from the call of `save` until it is durable in the spool.
        tier_rate: to the tier, of this node, bytes per second; None: no tier counts.
        step_s: one training step.
        drain_s: how long the daemon sends after the same notice ends it, too; None: it runs until the node ends.
    """
    due_s = min(KNOWN_S, notice_s) + 2 * step_s
    spooled_s = due_s + max(blocked_s, durable_s)
    sending_s = None if tier_rate is None else state_bytes / tier_rate
    on_tier_s = None if sending_s is None else spooled_s + sending_s
    end_s = notice_s if drain_s is None or on_tier_s is None else min(notice_s, drain_s)
    left_s = end_s - (spooled_s if on_tier_s is None else on_tier_s)
    why = ""
    if left_s < 0:
        why = _why(notice_s, state_bytes, spooled_s, sending_s, drain_s)
    return Fit(notice_s, due_s, spooled_s, on_tier_s, left_s, left_s >= 0, why)


def _why(notice_s: float, state_bytes: float, spooled_s: float, sending_s: float | None, drain_s: float | None) -> str:
    """Say what does not fit, and what would."""
    if spooled_s > notice_s:
        return (
            f"the state is not even durable in the spool when the node ends, {spooled_s - notice_s:.3g} s too late: "
            "the checkpoint before it is the newest that is left"
        )
    assert sending_s is not None
    if drain_s is not None and drain_s < notice_s and spooled_s + sending_s <= notice_s:
        return f"the daemon ends after drain = {drain_s:.3g} s: set drain to at least {spooled_s + sending_s:.0f} s"
    rate = "" if spooled_s == notice_s else f"{state_bytes / (notice_s - spooled_s) / 1e9:.3g} GB/s to the tier, or "
    return (
        f"no tier has the state when the node ends, {spooled_s + sending_s - notice_s:.3g} s too late: {rate}a "
        f"notice of {spooled_s + sending_s:.0f} s would do; else the last one on a tier is the newest that is left"
    )
