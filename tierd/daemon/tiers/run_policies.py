"""The retention policies of runs on a tier: read them, and record this node's own.

Invariant: only the run's janitor records, only its own node's policies, and only new content; but every node that saved
the run repairs its own damaged record. A policy counts only after two equal reads. An unreadable policy is reported as
such.

Nothing is put next to an object that is encrypted with another key, or not encrypted where a key is required. The nodes
that read such objects could not read this node's policy, and would then delete nothing of the run any more.
"""

from __future__ import annotations

import logging
import socket
from datetime import UTC, datetime

from tierd.core.config import Config
from tierd.core.corruption import UnstableRead
from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, WrongKey
from tierd.core.ids import parse_retention, retention_key
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.janitor import fills, is_janitor
from tierd.core.planning.place import Place
from tierd.core.retention.policies import DEFAULT, known_policy, own_policies
from tierd.core.retention.policy import merged
from tierd.core.retention.stored import MAX_SIZE, StoredRetention, decode, encode, unreadable
from tierd.daemon.tiers.objects import agreed, surely
from tierd.stores.base import ObjectInfo, Store

log = logging.getLogger("tierd.daemon")


class RunPolicies:
    """Read one tier's policies; each again only when its listing shows that it was replaced.

    Args:
        store: the tier's store.
        prunes: whether the caller deletes by them, and so logs a warning for each unreadable one.
    """

    def __init__(self, store: Store, *, prunes: bool) -> None:
        self._store, self._prunes = store, prunes
        self._read: dict[str, tuple[str, StoredRetention]] = {}  # key -> its token and content

    async def read(self, run: str, info: ObjectInfo) -> StoredRetention | None:
        """Read the policy that a listing of `run` shows; None if it is no policy, or deleted.

        Raises:
            StoreUnavailable, StoreRefused: the tier failed.
        """
        name = parse_retention(run, info.key)
        if name is None:
            return None
        token, policy = self._read.get(info.key, ("", None))
        if policy is None or token != info.token or policy.retention is None:
            try:
                policy = await self._fetch(run, *name, info)
            except ObjectNotFound:
                return None
            if self._prunes and policy.retention is None and token != info.token:
                log.warning("%s: the run's policy is not known, so nothing of it is deleted: %s", info.key, policy.why)
            self._read[info.key] = info.token, policy
        return policy

    async def _fetch(self, run: str, by: str, provenance: str, info: ObjectInfo) -> StoredRetention:
        try:
            if info.size > MAX_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a policy has at most {MAX_SIZE}")
            return decode(await self._agreed(info.key), run, by, provenance)
        except (CorruptChunk, ManifestError, FormatTooNew, UnstableRead) as error:
            return unreadable(run, by, provenance, error)

    async def _agreed(self, key: str) -> bytes:
        """Read a policy until two reads agree, because it has no digest: a flipped bit in a rule may keep less."""

        async def read() -> bytes:
            return await surely(lambda: agreed(self._store, key))  # an encrypted tier refuses a wrong read by its tag

        try:
            return await read()
        except ObjectNotFound:  # a single answer proves no deletion
            return await read()


def unrecorded(inventory: Inventory, config: Config, tier: str, place: Place, run: str) -> list[StoredRetention]:
    """Return the policies that this node should record on a tier.

    These are the policies that this node gives `run`, where the tier has another one or none; or the default, where no
    node gives one. A node that neither is the run's janitor nor fills the tier with the run only replaces its own
    record that cannot be read, because the tier would delete nothing of the run any more. The result is empty unless
    this node can read the objects there with its key.
    """
    recorded = place.policies.get(run, ())
    if any(stored.alien for stored in recorded) or any(
        isinstance(why, WrongKey) for part, why in place.defects() if part.checkpoint.run == run
    ):
        return []
    own_records = {stored.given: stored for stored in recorded if stored.by == inventory.who}
    damaged = {provenance for provenance, stored in own_records.items() if stored.retention is None}
    janitor = is_janitor(inventory, place, run) or fills(inventory, config, run, tier)
    policies = own_policies(inventory, config, run, tier)
    if "default" in damaged or (not policies and known_policy(inventory, config, run, tier) is None):
        policies["default"] = DEFAULT
    tiers, host, now = tuple(inventory.tiers), socket.gethostname(), datetime.now(UTC).isoformat()
    fresh = []
    for provenance, policy in policies.items():
        before, expected = own_records.get(provenance), (policy, tiers)
        if before and before.contested:  # another node's, perhaps, which has not recorded it under an id of its own yet
            expected = (
                merged([before.retention or policy, policy]) or policy,
                (*before.tiers, *_without_tiers(tiers, before.tiers)),
            )
        if (janitor or provenance in damaged) and (before is None or (before.retention, before.tiers) != expected):
            fresh.append(StoredRetention(run, inventory.who, provenance, host, now, expected[0], tiers=expected[1]))
    return fresh


def _without_tiers(tiers: tuple[str, ...], earlier: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tier for tier in tiers if tier not in earlier)


async def record(store: Store, tier: str, policy: StoredRetention) -> None:
    """Put a policy of this node on a tier.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed.
    """
    await store.put(retention_key(policy.run, policy.by, policy.given), encode(policy))
    if policy.given == "default":
        log.warning(
            "%s: no policy for run %s is known here, so the default is recorded beside its manifests: keep_last = %d. "
            "To keep more: retention in a configuration, --keep-last, or Checkpointer(retention=tierd.Retention(…))",
            tier,
            policy.run,
            DEFAULT.keep_last,
        )
    else:
        log.info("%s: recorded what run %s keeps there (%s)", tier, policy.run, policy.given)
