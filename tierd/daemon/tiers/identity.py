"""The identity of a tier: a record at its root, by which two names for one place are recognised.

Invariant: of two tiers that are one place, or of which one lies in the other, nothing is deleted, because each policy
would delete what only the other one keeps. URLs do not show this: one server has several names and addresses.

A record is put with the first object of a tier and does not change afterwards, except where two tiers have the same
one. Then a new record is put through one name. If the other name shows it, both are one place; otherwise one tier is a
copy of the other, and has a record of its own now.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import permutations

import msgspec

from tierd.core.errors import ConfigError, CorruptChunk, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import IDENTITY_KEY
from tierd.core.urls import StoreUrl
from tierd.daemon.tiers.objects import agreed
from tierd.stores.base import Store, clear, is_key

_ANSWER_S = 5.0  # seconds for a tier to answer


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a tier.

    Attributes:
        format: 1; members may be added, and a reader ignores those that it does not know.
        id: 32 random hex digits.
        host: the name of the node that put the record, for people.
        created: when, in RFC 3339, for people.
    """

    format: int = 1
    id: str
    host: str = ""
    created: str = ""


class TiersOverlap(ConfigError):
    """Two tiers of a configuration are one place under two names, or one lies in the other.

    Attributes:
        tier: the name of the tier that is to be changed.
    """

    def __init__(self, tier: str, how: str, other: str) -> None:
        super().__init__(
            f"tier {tier!r} {how} the place of tier {other!r} under another name, and each would delete what is the "
            "other's: nothing is pruned there; leave one of them out, or give it a prefix or directory of its own"
        )
        self.tier = tier


async def read_identity(store: Store) -> str:
    """Return a tier's id; empty if it has no record that can be read.

    Raises:
        StoreUnavailable, StoreRefused: the tier failed to answer.
    """
    return await _id_at(store, IDENTITY_KEY)


async def put_identity(store: Store) -> str:
    """Give a tier a new record, and return its id. Raises as `Store.put`."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = Identity(id=secrets.token_hex(16), host=socket.gethostname(), created=now)
    await store.put(IDENTITY_KEY, msgspec.json.format(msgspec.json.encode(record), indent=2))
    return record.id


async def ensure_identity(store: Store) -> bool:
    """Give a tier a record if it has none; return whether it had one. Raises as `read_identity` and `put_identity`."""
    if await read_identity(store):
        return True
    await put_identity(store)
    return False


async def check_identities(urls: Mapping[str, StoreUrl], stores: Mapping[str, Store], tier: str = "") -> frozenset[str]:
    """Refuse tiers of which two are one place, or one lies in another one.

    Args:
        urls: tier name -> its URL.
        stores: tier name -> open store.
        tier: compare this tier with each other one; empty: compare all tiers.

    Returns:
        The tiers that did not answer within 5 s. They are left out, because an outage must not end a daemon.

    Raises:
        TiersOverlap: two tiers are one place, or one lies in another one.
    """
    if len(stores) < 2:
        return frozenset()
    answers = await asyncio.gather(*(_answer(store, IDENTITY_KEY) for store in stores.values()))
    ids = dict(zip(stores, answers, strict=True))
    pairs = [(inner, outer) for inner, outer in permutations(stores, 2) if not tier or tier in (inner, outer)]
    for inner, outer in pairs:
        below = _key_below(urls[inner], urls[outer])
        if ids[inner] and below and await _answer(stores[outer], below) == ids[inner]:
            raise TiersOverlap(inner, "lies in", outer)
    for mine, theirs in pairs:
        shared = ids[mine] if mine < theirs and ids[mine] == ids[theirs] else None
        if shared and await _is_one_place(stores[mine], stores[theirs], shared):
            raise TiersOverlap(theirs, "is", mine)
    return frozenset(name for name, identity in ids.items() if identity is None)


async def try_identities(urls: Mapping[str, StoreUrl], stores: Mapping[str, Store]) -> frozenset[str]:
    """As `check_identities`, also for tiers that have no record yet: each gets one for the time of the comparison.

    A tier that deletes nothing keeps it, and one that takes nothing is compared without. Raises as `check_identities`.
    """
    made: list[Store] = []
    try:
        for store in stores.values() if len(stores) > 1 else ():
            try:
                async with asyncio.timeout(_ANSWER_S):
                    if not await ensure_identity(store):
                        made.append(store)
            except (StoreUnavailable, StoreRefused, TimeoutError):
                continue
        return await check_identities(urls, stores)
    finally:
        for store in made:
            with suppress(StoreUnavailable, StoreRefused):
                await clear(store, [IDENTITY_KEY])


async def _is_one_place(mine: Store, theirs: Store, shared: str) -> bool:
    """Whether a new record that is put through one name replaces the shared one under the other name.

    Any other record than the shared one counts, because another process may do the same at the same time. So does a
    record that cannot be put or read, because a refusal deletes nothing.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            await put_identity(theirs)
            return await read_identity(mine) != shared
    except (StoreUnavailable, StoreRefused, TimeoutError):
        return True


async def _answer(store: Store, key: str) -> str | None:
    """Return the id in the record with this key; empty if there is none; None if the tier does not answer."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await _id_at(store, key)
    except (StoreUnavailable, StoreRefused, TimeoutError):
        return None


async def _id_at(store: Store, key: str) -> str:
    try:
        return msgspec.json.decode(await agreed(store, key), type=Identity).id
    except (ObjectNotFound, CorruptChunk, msgspec.DecodeError):
        return ""


def _key_below(inner: StoreUrl, outer: StoreUrl) -> str:
    """Return the key under which `outer` shows the record of `inner`; empty if no prefix says that it lies there."""
    top = f"{outer.prefix}/" if outer.prefix else ""
    if inner.is_directory or inner.bucket != outer.bucket:
        return ""
    if inner.prefix == outer.prefix or not inner.prefix.startswith(top):
        return ""
    key = f"{inner.prefix[len(top) :]}/{IDENTITY_KEY}"
    return key if is_key(key) else ""
