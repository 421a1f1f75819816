"""The retention policies of runs that lie on a tier: reading them, and recording this node's own.

Law: only the run's janitor records, only its own node's policies, and only what is new. A policy that cannot be read is
reported as such; nothing is put beside what is encrypted with another key, or not at all where a key is required,
because whoever reads that could not read this, and would delete nothing of the run any more.
"""

from __future__ import annotations

import logging
import socket
from datetime import UTC, datetime

from tierd.core.config import Config
from tierd.core.errors import CorruptChunk, FormatTooNew, ManifestError, ObjectNotFound, WrongKey
from tierd.core.ids import parse_retention, retention_key
from tierd.core.plan import is_janitor
from tierd.core.policies import DEFAULT, known_policy, own_policies
from tierd.core.retention import RetentionPolicy
from tierd.core.run_retention import MAX_SIZE, StoredRetention, decode, encode, unreadable
from tierd.core.world import Place, World
from tierd.stores.base import ObjectInfo, Store

log = logging.getLogger("tierd.daemon")


class RunPolicies:
    """Reads one tier's policies; each again only when its listing shows that it was replaced.

    Args:
        prunes: whether its owner deletes by them, and so logs a warning where one cannot be read.
    """

    def __init__(self, store: Store, *, prunes: bool) -> None:
        self._store, self._prunes = store, prunes
        self._read: dict[str, tuple[str, StoredRetention]] = {}  # key -> its token, and what it says

    async def read(self, run: str, info: ObjectInfo) -> StoredRetention | None:
        """The policy that a listing of `run` shows; None where it is no policy, or is gone.

        Raises:
            StoreUnavailable, StoreRefused: it could not be asked for.
        """
        name = parse_retention(run, info.key)
        if name is None:
            return None
        token, known = self._read.get(info.key, ("", None))
        if known is None or token != info.token or known.retention is None:
            try:
                known = await self._fetch(run, *name, info)
            except ObjectNotFound:
                return None
            if self._prunes and known.retention is None and token != info.token:
                log.warning("%s: the run's policy is not known, so nothing of it is deleted: %s", info.key, known.why)
            self._read[info.key] = info.token, known
        return known

    async def _fetch(self, run: str, by: str, given: str, info: ObjectInfo) -> StoredRetention:
        try:
            if info.size > MAX_SIZE:
                raise ManifestError(f"{info.key}: {info.size} bytes, and a policy has at most {MAX_SIZE}")
            return decode(bytes(await self._store.get(info.key)), run, by, given)
        except (CorruptChunk, ManifestError, FormatTooNew) as error:
            return unreadable(run, by, given, error)


def unrecorded(world: World, config: Config, tier: str, place: Place, run: str) -> list[StoredRetention]:
    """What this node is to record on a tier: the policies that it gives `run`, where another lies there or none; or the
    default, where nobody gives one. Nothing unless it is the run's janitor and reads what lies there with its key."""
    if not is_janitor(world, place, run):
        return []
    there = place.policies.get(run, ())
    if any(one.alien for one in there) or any(
        isinstance(why, WrongKey) for other, why in place.defects() if other.checkpoint.run == run
    ):
        return []
    wanted: dict[str, RetentionPolicy] = own_policies(world, config, run, tier)
    if not wanted and known_policy(world, config, run, tier) is None:
        wanted = {"default": DEFAULT}
    own = {one.given: (one.retention, one.tiers) for one in there if one.by == world.who}
    tiers, host, now = tuple(world.tiers), socket.gethostname(), datetime.now(UTC).isoformat()
    return [
        StoredRetention(run, world.who, given, host, now, policy, tiers=tiers)
        for given, policy in wanted.items()
        if own.get(given) != (policy, tiers)
    ]


async def record(store: Store, tier: str, one: StoredRetention) -> None:
    """Put a policy of this node on a tier. Raises `StoreUnavailable`, `StoreRefused`."""
    await store.put(retention_key(one.run, one.by, one.given), encode(one))
    if one.given == "default":
        log.warning(
            "%s: nobody configured what run %s keeps, so it keeps the last %d; recorded beside its manifests. To keep "
            "more: retention in a configuration, --keep-last, or Checkpointer(retention=tierd.Retention(…))",
            tier,
            one.run,
            DEFAULT.keep_last,
        )
    else:
        log.info("%s: recorded what run %s keeps there (%s)", tier, one.run, one.given)
