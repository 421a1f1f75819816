"""The identity of a tier: a record at its root, by which two names for one place are recognised.

Invariant: of two tiers that are one place, or of which one lies in the other, nothing is deleted, because each policy
would delete what only the other one keeps. URLs do not show this: one server has several names and addresses.

A record is put with the first object of a tier and does not change afterwards, except where two tiers have the same
one. Then a new record is put through one name. If the other name shows it, both are one place; otherwise one tier is a
copy of the other, and has a record of its own now.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from importlib import resources
from itertools import permutations

import msgspec

from tierd.core.errors import ConfigError, CorruptChunk, ObjectNotFound, StoreRefused, StoreUnavailable
from tierd.core.ids import IDENTITY_KEY, README_KEY
from tierd.core.urls import StoreUrl
from tierd.daemon.tiers.tier_objects import read_agreed
from tierd.stores.base import Store, delete_if_permitted, is_key

log = logging.getLogger("tierd.daemon")

_ANSWER_S = 5.0  # seconds for a tier to answer
_TRIES = 3  # comparisons, because other processes may put records at the same time


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a tier."""

    format: int = 1  # 1; members may be added, and a reader ignores those that it does not know
    id: str  # 32 random hex digits
    host: str = ""
    created: str = ""


class TiersOverlap(ConfigError):
    """Two tiers of a configuration are one place under two names, or one lies in the other."""

    def __init__(self, tier: str, how: str, other_tier: str, urls: Mapping[str, StoreUrl]) -> None:
        super().__init__(
            f"tier {tier!r} {how} the place of tier {other_tier!r} under another name ({urls[tier]}, "
            f"{urls[other_tier]}), and each would delete what is the other's: nothing is pruned there; leave one of "
            "them out, or give it a prefix or directory of its own"
        )
        self.tier = tier  # the name of the tier that is to be changed


async def read_identity(store: Store, key: str = IDENTITY_KEY) -> str:
    """Return the id in a tier's record, or in another one below it; empty if there is none that can be read."""
    try:
        return msgspec.json.decode(await read_agreed(store, key), type=Identity).id
    except (ObjectNotFound, CorruptChunk, msgspec.DecodeError, ValueError, RecursionError):
        return ""


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


async def introduce_tier(store: Store) -> None:
    """Put a tier's README.md and its record where they are missing.

    A person who finds the bucket in five years should be able to recover from it by hand.
    """
    present = {info.key async for info in store.scan(README_KEY)}
    if README_KEY not in present:
        await store.put(README_KEY, tier_readme())
    if IDENTITY_KEY not in present:
        await put_identity(store)


def tier_readme() -> bytes:
    """Return the content of a tier's README.md."""
    return resources.files("tierd").joinpath("TIER_README.md").read_bytes()


async def check_identities(
    urls: Mapping[str, StoreUrl], stores: Mapping[str, Store], tier: str = "", *, keep: bool = True
) -> frozenset[str]:
    """Refuse tiers of which two are one place, or one lies in another one. A tier without a record gets one.

    Args:
        tier: compare this tier with each other one; empty: compare all tiers.
        keep: leave the records that this call put. They are deleted if tiers are refused. A tier that deletes nothing
            keeps them, and one that takes nothing is compared without.

    Returns:
        The tiers about which nothing is known: they did not answer within 5 s, or other processes compare them at the
        same time. An outage must not end a daemon.

    Raises:
        TiersOverlap: two tiers are one place, or one lies in another one.
    """
    if len(stores) < 2:
        return frozenset()
    created: list[Store] = []
    recorded: set[str] = set()
    silent: set[str] = set()

    async def ensure(name: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                if not await ensure_identity(stores[name]):
                    created.append(stores[name])
                recorded.add(name)
        except StoreRefused:
            pass
        except (StoreUnavailable, TimeoutError):
            silent.add(name)

    try:
        await asyncio.gather(*map(ensure, stores))
        answering = {name: store for name, store in stores.items() if name not in silent}
        pairs = [(inner, outer) for inner, outer in permutations(answering, 2) if not tier or tier in (inner, outer)]
        for _ in range(_TRIES):
            unknown = await _compare(urls, answering, pairs, recorded)
            if not unknown:
                break
        return frozenset(silent | unknown)
    except TiersOverlap:
        keep = False
        raise
    finally:
        for store in () if keep else created:
            with suppress(StoreUnavailable, StoreRefused):
                await delete_if_permitted(store, [IDENTITY_KEY])


async def is_one_place(source: Store, target: Store) -> bool:
    """Whether two tiers, of which nothing is put to `source`, are known to be one place."""
    shared = await read_identity(target)
    if not shared or await read_identity(source) != shared:
        return False
    new_id = await put_identity(target)
    return await read_identity(source) == new_id


async def _compare(
    urls: Mapping[str, StoreUrl], stores: Mapping[str, Store], pairs: Sequence[tuple[str, str]], recorded: Set[str]
) -> set[str]:
    """Compare the tiers of each pair once, and return those about which that shows nothing. Raises `TiersOverlap`.

    Each record is read twice. Ids are random and never put again, so a record that reads the same was there all the
    time in between. If two records differ, and neither changed, they are two objects. A single read would not show
    this, because another process may put a record between the reads of the two tiers.

    Args:
        recorded: the tiers that had a record before; one that has none now was deleted meanwhile.
    """
    ids = await _answers(stores)
    below = {pair: key for pair in pairs if (key := _key_below(urls[pair[0]], urls[pair[1]]))}
    identities_below = {pair: await _answer(stores[pair[1]], key) for pair, key in below.items()}
    ids_after = await _answers(stores)
    unknown = {name for name in stores if ids[name] is None or ids[name] != ids_after[name]}
    unknown |= {name for name in recorded & ids.keys() if not ids[name]}
    unknown |= {outer for (_, outer), identity in identities_below.items() if identity is None}
    for (inner, outer), identity in identities_below.items():
        if identity and identity == ids[inner]:
            raise TiersOverlap(inner, "lies in", outer, urls)
    for first, second in pairs:
        shared = ids[first] if first < second and ids[first] == ids[second] else None
        if not shared:
            continue
        is_same = await _is_one_place(stores[first], stores[second], shared)
        if is_same:
            raise TiersOverlap(second, "is", first, urls)
        if is_same is None:
            unknown |= {first, second}
        else:
            log.warning(
                "tiers %r (%s) and %r (%s) have one identity and are two places, so one is a copy of the other, as "
                "from a backup; each has an identity of its own now",
                *(first, urls[first], second, urls[second]),
            )
    return unknown


async def _is_one_place(first: Store, second: Store, shared: str) -> bool | None:
    """Whether a new record that is put through one name replaces the shared one under the other name.

    None if that cannot be told: a tier failed, or another process has put a record at the same time. A read-only tier,
    such as a mounted backup, is compared by a record that is put through the other name.
    """
    for writable, readable in ((second, first), (first, second)):
        try:
            async with asyncio.timeout(_ANSWER_S):
                new_id = await put_identity(writable)
                identity = await read_identity(readable)
        except StoreRefused:
            continue
        except (StoreUnavailable, TimeoutError):
            return None
        return True if identity == new_id else False if identity == shared else None
    return None


async def _answers(stores: Mapping[str, Store]) -> dict[str, str | None]:
    answers = await asyncio.gather(*(_answer(store, IDENTITY_KEY) for store in stores.values()))
    return dict(zip(stores, answers, strict=True))


async def _answer(store: Store, key: str) -> str | None:
    """Return the id in the record with this key; empty if there is none; None if the tier does not answer."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await read_identity(store, key)
    except (StoreUnavailable, StoreRefused, TimeoutError):
        return None


def _key_below(inner: StoreUrl, outer: StoreUrl) -> str:
    """Return the key under which `outer` shows the record of `inner`; empty if no prefix says that it lies there."""
    top = f"{outer.prefix}/" if outer.prefix else ""
    if inner.is_directory or inner.bucket != outer.bucket:
        return ""
    if inner.prefix == outer.prefix or not inner.prefix.startswith(top):
        return ""
    key = f"{inner.prefix[len(top) :]}/{IDENTITY_KEY}"
    return key if is_key(key) else ""
