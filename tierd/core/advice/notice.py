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
        blocked_s, durable_s: the times of a save, as in `Costs`.
        tier_rate: to the tier, of this node, bytes per second; None: no tier counts.
        step_s: one training step.
        drain_s: how long the daemon sends after the same notice ends it, too; None: it runs until the node ends.
    """
    due_s = min(KNOWN_S, notice_s) + 2 * step_s
    spooled_s = due_s + max(blocked_s, durable_s)
    if tier_rate is None:
        on_tier_s, safe_s, end_s = None, spooled_s, notice_s
    else:
        on_tier_s = safe_s = spooled_s + state_bytes / tier_rate
        end_s = notice_s if drain_s is None else min(notice_s, drain_s)
    why = ""
    if spooled_s > notice_s:
        why = (
            f"the state is not even durable in the spool when the node ends, {spooled_s - notice_s:.3g} s too late: "
            "the checkpoint before it is the newest that is left"
        )
    elif safe_s > notice_s:
        sending_s = notice_s - spooled_s
        faster = f"{state_bytes / sending_s / 1e9:.3g} GB/s to the tier, or " if sending_s else ""
        why = (
            f"no tier has the state when the node ends, {safe_s - notice_s:.3g} s too late: {faster}a "
            f"notice of {safe_s:.0f} s would do; else the last one on a tier is the newest that is left"
        )
    elif safe_s > end_s:
        why = f"the daemon ends after drain = {drain_s:.3g} s: set drain to at least {safe_s:.0f} s"
    return Fit(notice_s, due_s, spooled_s, on_tier_s, end_s - safe_s, not why, why)
