"""The table of all metrics: names, types, labels and meanings. The reference and the exposition are made of it.

Names follow Prometheus' conventions: the prefix `tierd_`, base units (`_seconds`, `_bytes`, `_ratio`) at the end, and
`_total` after the unit of a counter. A summary has the samples `_sum` and `_count`, and no quantiles.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """One metric.

    Attributes:
        kind: the type of OpenMetrics.
        labels: the names of its labels, in order. `tier` is `local` for the spool.
        means: for people.
    """

    kind: Literal["gauge", "counter", "summary"]
    labels: tuple[str, ...]
    means: str


_RUN, _TIER, _RUN_AND_TIER = ("run",), ("tier",), ("run", "tier")

FAMILIES: dict[str, Family] = {
    "tierd_build_info": Family("gauge", ("version", "protocol"), "always 1"),
    "tierd_runs": Family("gauge", (), "runs in the spool; those with the newest launches have series, 100 at most"),
    "tierd_last_durable_step": Family(
        "gauge",
        _RUN_AND_TIER,
        "step of the newest checkpoint that a tier holds whole and verified; of `local`, of the newest one with a "
        "committed part",
    ),
    "tierd_last_durable_age_seconds": Family("gauge", _RUN_AND_TIER, "time since that checkpoint was made"),
    "tierd_pending_parts": Family("gauge", _RUN_AND_TIER, "parts in the spool that the tier lacks and wants"),
    "tierd_pending_bytes": Family("gauge", _RUN_AND_TIER, "the size of these parts in the spool"),
    "tierd_pending_prunes": Family(
        "gauge", _RUN_AND_TIER, "copies on the tier that retention gave up and that are still there"
    ),
    "tierd_flush_seconds": Family("summary", _RUN_AND_TIER, "time to send and verify a part"),
    "tierd_flush_raw_bytes_total": Family("counter", _RUN_AND_TIER, "the size in the spool of parts that were sent"),
    "tierd_flush_sent_bytes_total": Family("counter", _RUN_AND_TIER, "bytes sent for them"),
    "tierd_save_blocked_seconds": Family(
        "summary", _RUN, "time in which `save` blocked training, of saves handed over"
    ),
    "tierd_save_durable_seconds": Family(
        "summary",
        _RUN_AND_TIER,
        "time until a checkpoint was durable; `local`: since the call of `save`, of handed-over saves; a tier: since "
        "the daemon saw the checkpoint in the spool",
    ),
    "tierd_saves_total": Family("counter", _RUN, "parts committed to the spool"),
    "tierd_save_failures_total": Family("counter", _RUN, "saves that were given up"),
    "tierd_restores_total": Family("counter", _RUN, "parts that ranks read and verified, to load them"),
    "tierd_restore_fallbacks_total": Family("counter", _RUN, "restores that passed over newer checkpoints"),
    "tierd_corrupt_copies_total": Family("counter", _RUN_AND_TIER, "copies proven corrupt"),
    "tierd_repaired_chunks_total": Family("counter", _RUN_AND_TIER, "corrupt or missing chunks that were repaired"),
    "tierd_quarantined_copies_total": Family(
        "counter", _RUN_AND_TIER, "copies quarantined, because no place had the right bytes"
    ),
    "tierd_pruned_copies_total": Family("counter", _RUN_AND_TIER, "copies that retention deleted"),
    "tierd_tier_reachable": Family(
        "gauge", _TIER, "1 if the tier answered the last listing and no request has waited for 20 s, else 0"
    ),
    "tierd_tier_failed_tries": Family("gauge", _TIER, "failed tries in a row"),
    "tierd_store_requests_total": Family(
        "counter",
        ("tier", "kind"),
        "requests of listings, flushes and prunes since the start or the last reload; `kind` is put, get, list, delete",
    ),
    "tierd_active_alerts": Family("gauge", _TIER, "failures that last now, by the place that fails"),
    "tierd_alerts_total": Family("counter", (), "failures that became alerts"),
    "tierd_errors_total": Family("counter", (), "listings and actions that failed and were tried again"),
    "tierd_problems": Family("gauge", ("severity",), "problems that `tierd status --check` prints: warning, alert"),
    "tierd_spool_free_bytes": Family("gauge", (), "free bytes of the spool's file system"),
    "tierd_spool_size_bytes": Family("gauge", (), "the size of the spool's file system"),
    "tierd_spool_parts": Family("gauge", (), "parts in the spool"),
    "tierd_trainers": Family("gauge", (), "attached training processes"),
    "tierd_paused": Family("gauge", (), "1 during a pause, else 0"),
    "tierd_handed_over_bytes": Family("gauge", (), "memory of trainers that holds handed-over snapshots"),
    "tierd_scrub_overdue_copies": Family("gauge", (), "copies that were not verified again within `scrub`"),
    "tierd_scrubbed_bytes_total": Family("counter", (), "bytes that the scrub read"),
    "tierd_notifications_total": Family(
        "counter", ("receiver", "outcome"), "events for receivers; `outcome` is delivered or dropped"
    ),
}


def samples(name: str) -> tuple[str, ...]:
    """The names of a metric's samples."""
    return (f"{name}_count", f"{name}_sum") if FAMILIES[name].kind == "summary" else (name,)
