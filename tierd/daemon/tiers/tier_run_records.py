"""The records of runs on a tier, heads and retention policies: read them, and write this node's own.

Invariants: only the run's janitor, or a node that fills the tier with the run, writes heads; only the janitor records
policies, only its own node's, and only new content. An unreadable head counts as absent, an unreadable policy is
reported. Nothing is put next to an object that is encrypted with another key.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec.structs import replace

from tierd.core.config import Config
from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, WrongKey
from tierd.core.ids import head_key, heads_prefix, parse_head, parse_retention, retention_key
from tierd.core.planning.inventory import DEFAULT_POLICY, Inventory, fills_tier, is_janitor, known_policy, own_policies
from tierd.core.planning.place import Place
from tierd.core.retention.policy import (
    MAX_POLICY_SIZE,
    StoredRetention,
    decode_policy,
    encode_policy,
    merge_policies,
    unreadable_policy,
)
from tierd.core.storage_faults import UnstableRead
from tierd.core.timeline.launch_chain import (
    MAX_HEAD_SIZE,
    Head,
    LastHead,
    decode_head,
    encode_head,
    last_head_of,
    launches_to_record,
    merge_heads,
    remember_heads,
    rollback_reason,
    successor_head,
)
from tierd.daemon.tiers.tier_objects import read_agreed, read_sealed, read_until_certain
from tierd.stores.base import ObjectInfo, Store, delete_if_permitted

log = logging.getLogger("tierd.daemon")


class HeadReader:
    """Read one tier's heads; each again only when its listing shows that it was replaced."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.unreadable = ""  # why a head could not be read, the last one of them; empty if all could be
        self._read: dict[str, tuple[str, Head | None]] = {}  # key -> its token and content

    async def read(self, run: str, info: ObjectInfo) -> Head | None:
        """Read the head that a listing of `run` shows; None if it is no head, unreadable, or deleted."""
        by = parse_head(run, info.key)
        if by is None:
            return None
        token, head = self._read.get(info.key, ("", None))
        if token != info.token or head is None:
            head = await self._fetch(run, by, info)
            self._read[info.key] = info.token, head
        return head

    async def _fetch(self, run: str, by: str, info: ObjectInfo) -> Head | None:
        try:
            if info.size > MAX_HEAD_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a head has at most {MAX_HEAD_SIZE}")
            return await read_sealed(self._store, info.key, lambda data: decode_head(data, run, by))
        except ObjectNotFound:
            return None
        except (CorruptChunk, ManifestError, FormatTooNew) as error:
            if self._read.get(info.key, ("", None))[0] != info.token:
                reason = "cannot be read here" if isinstance(error, FormatTooNew) else "not a head of this run"
                log.warning("%s: %s, and passed over: %s", info.key, reason, error)
            self.unreadable = str(error)
            return None


def due_head(inventory: Inventory, place: Place, run: str, *, fills: bool = False) -> Head | None:
    """Return the head that this node should write to a tier; None if there is none to write.

    There is one if this node is the run's janitor, or fills the tier with the run (`fills`), and a checkpoint is
    complete on the tier. In addition, its own head must lack something, or other nodes' heads must still be there.
    """
    complete = place.run(run).usable
    if not complete or not (fills or is_janitor(inventory, place, run)):
        return None
    tier_heads = place.heads.get(run, ())
    head = next_head(inventory, place, run, inventory.node_id, tier_heads)
    return None if [earlier.launches for earlier in tier_heads] == [head.launches] else head


def due_spool_head(inventory: Inventory, run: str, urls: Mapping[str, str]) -> Head | None:
    """Return the head that the spool should record from all places that answered; None if it holds that already.

    Args:
        urls: tier name -> URL of the tiers whose last heads are remembered now. Another tier may show an older head
            than before, which must not be taken over before `why_rolled_back` compared it.
    """
    before = inventory.spool.heads.get(run, ())
    answering = {urls[name]: place for name, place in inventory.tiers.items() if place and name in urls}
    last_by_url = {url: last_head_of(place.heads.get(run, ())) for url, place in answering.items()}
    tiers = remember_heads(before[0].tiers if before else {}, last_by_url)
    head = replace(next_head(inventory, inventory.spool, run, "", before), tiers=tiers)
    recorded = [(earlier.launches, earlier.tiers) for earlier in before]
    return None if not head.launches or recorded == [(head.launches, head.tiers)] else head


def next_head(inventory: Inventory, place: Place, run: str, by: str, heads: tuple[Head, ...]) -> Head:
    """Return the head that follows `heads`, the earlier ones of a place.

    Args:
        by: the id of the node that writes it, 8 hex digits; empty for a spool's, which describes all places.
    """
    where = [place] if by else list(inventory.places.values())
    complete = [newest for observed in where for newest in observed.run(run).newest_usable]
    remembered = merge_heads(heads) if by else inventory.remembered(run)
    checkpoints = [newest for observed in inventory.places.values() for newest in observed.run(run).newest_of_each]
    launches = launches_to_record(complete, checkpoints, inventory.origins(run), remembered)
    return successor_head(heads, run, by, launches, datetime.now(UTC).isoformat())


async def why_rolled_back(store: Store, run: str, remembered: LastHead | None, heads: tuple[Head, ...]) -> str | None:
    """Explain why a run's history on a tier is, or can be, older than this node saw there; None if it is not.

    Args:
        remembered: the last head that this node saw there.
    """
    if rollback_reason(last_head_of(heads), remembered) is None:
        return None
    # List again, because a head that another node replaced during the observation is missing from it.
    reader = HeadReader(store)
    now = [head async for info in store.scan(heads_prefix(run)) if (head := await reader.read(run, info))]
    return rollback_reason(last_head_of(now), remembered, reader.unreadable)


async def put_head(store: Store, head: Head, heads: tuple[Head, ...]) -> None:
    """Put a head on a tier, and delete those of other nodes, because the new one contains their content."""
    await store.put(head_key(head.run, head.by), encode_head(head))
    if stale := [head_key(other_head.run, other_head.by) for other_head in heads if other_head.by != head.by]:
        await delete_if_permitted(store, stale)


class RunPolicyReader:
    """Read one tier's policies; each again only when its listing shows that it was replaced.

    Args:
        prunes: whether the caller deletes by them, and so logs a warning for each unreadable one.
    """

    def __init__(self, store: Store, *, prunes: bool) -> None:
        self._store, self._prunes = store, prunes
        self._read: dict[str, tuple[str, StoredRetention]] = {}  # key -> its token and content

    async def read(self, run: str, info: ObjectInfo) -> StoredRetention | None:
        """Read the policy that a listing of `run` shows; None if it is no policy, or deleted."""
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
            if info.size > MAX_POLICY_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a policy has at most {MAX_POLICY_SIZE}")
            return decode_policy(await self._agreed(info.key), run, by, provenance)
        except (CorruptChunk, ManifestError, FormatTooNew, UnstableRead) as error:
            return unreadable_policy(run, by, provenance, error)

    async def _agreed(self, key: str) -> bytes:
        """Read a policy until two reads agree, because it has no digest: a flipped bit in a rule may keep less."""

        async def read() -> bytes:
            # An encrypted tier refuses a wrong read by its tag.
            return await read_until_certain(lambda: read_agreed(self._store, key))

        try:
            return await read()
        except ObjectNotFound:  # a single answer proves no deletion
            return await read()


def due_policies(inventory: Inventory, config: Config, tier: str, place: Place, run: str) -> list[StoredRetention]:
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
    own_records = {stored.given: stored for stored in recorded if stored.by == inventory.node_id}
    damaged = {provenance for provenance, stored in own_records.items() if stored.retention is None}
    janitor = is_janitor(inventory, place, run) or fills_tier(inventory, config, run, tier)
    policies = own_policies(inventory, config, run, tier)
    if "default" in damaged or (not policies and known_policy(inventory, config, run, tier) is None):
        policies["default"] = DEFAULT_POLICY
    tiers, host, now = tuple(inventory.tiers), socket.gethostname(), datetime.now(UTC).isoformat()
    fresh = []
    for provenance, policy in policies.items():
        before, expected = own_records.get(provenance), (policy, tiers)
        if before and before.contested:  # another node's, perhaps, which has not recorded it under an id of its own yet
            expected = (
                merge_policies([before.retention or policy, policy]) or policy,
                (*before.tiers, *_without_tiers(tiers, before.tiers)),
            )
        if (janitor or provenance in damaged) and (before is None or (before.retention, before.tiers) != expected):
            fresh.append(StoredRetention(run, inventory.node_id, provenance, host, now, expected[0], tiers=expected[1]))
    return fresh


def _without_tiers(tiers: tuple[str, ...], earlier: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(tier for tier in tiers if tier not in earlier)


async def put_policy(store: Store, tier: str, policy: StoredRetention) -> None:
    await store.put(retention_key(policy.run, policy.by, policy.given), encode_policy(policy))
    if policy.given == "default":
        log.warning(
            "%s: no policy for run %s is known here, so the default is recorded beside its manifests: keep_last = %d. "
            "To keep more: retention in a configuration, --keep-last, or Checkpointer(retention=tierd.Retention(…))",
            tier,
            policy.run,
            DEFAULT_POLICY.keep_last,
        )
    else:
        log.info("%s: recorded what run %s keeps there (%s)", tier, policy.run, policy.given)
