"""Announcements on a tier: which checkpoint a node takes or sends, their stamps, and the claim of one node to take.

    <run>/flushing/<checkpoint>/sending.<when>-<who>    an announcement, empty: a node sends parts of this checkpoint

A stamp ends the name of each such object, of intents and of marks: `.<when>-<who>`, in milliseconds since 1970 and by
the node's id. A node that is cut off leaves its objects, so each one expires. Invariant of a claim: two nodes that both
may take have not both announced in time. A unit that is read twice is waste, one that nobody takes is lost: so a node
takes without an agreement if the tier does not answer, or if another node does not renew its announcement.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tierd.core.errors import DeleteRefused, StoreRefused, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, flushing_prefix
from tierd.daemon.daemon_timings import USUAL, DaemonTimings
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

STALE_MS = 86_400_000  # until the objects of any node expire; long, because clocks differ. A node's own objects expire
# sooner for it: see `DaemonTimings.own_stale_ms`.
STAMP = re.compile(r"(.+)\.([0-9a-f]{12})-([0-9a-f]{8})")

_ahead: dict[str, float] = {}  # own stamps ahead of this clock -> monotonic seconds when first seen
_SENDING = "sending"
_standing: set[str] = set()  # announcements of flushes that run in this process
_ANSWER_S = 20.0  # seconds for which a unit waits for the tier's answer
_FAILURES = (StoreUnavailable, StoreRefused, TimeoutError)


def make_stamp(who: str, timings: DaemonTimings) -> str:
    """Return a new stamp; `who` is 8 hex digits, or empty for random ones."""
    return f"{timings.now_ms():012x}-{who or secrets.token_hex(4)}"


def age_ms(stamp: str, timings: DaemonTimings) -> int:
    """Return the age by a stamp's time, 12 hex digits."""
    return timings.now_ms() - int(stamp, 16)


def is_expired(stamp: str, by: str, who: str, timings: DaemonTimings) -> bool:
    """Whether an object that `by` stamped has expired for `who`.

    It has if it is too old, or stamped so far in the future that its clock cannot be trusted. If this node's own clock
    was set back since, its own stamps age from their first observation.
    """
    age = age_ms(stamp, timings)
    if by == who and age < 0:
        now_s = time.monotonic()
        age = int(1000 * (now_s - _ahead.setdefault(stamp, now_s)))
    return not -STALE_MS < age < (timings.own_stale_ms if by == who else STALE_MS)


async def delete_stamped(store: Store, keys: list[str]) -> None:
    """Delete stamped objects, if the store lets it."""
    try:
        await store.delete(keys)
    except TierdError:
        pass  # harmless: it expires within a day, and until then only keeps too much


@asynccontextmanager
async def announcing(
    store: Store, checkpoint: CheckpointId, who: str, timings: DaemonTimings = USUAL
) -> AsyncIterator[None]:
    """Announce to other nodes, within the context, that this node sends parts of `checkpoint`."""
    key = await announce(store, checkpoint, who, timings)
    try:
        yield
    finally:
        _standing.discard(key)
        await delete_stamped(store, [key])


async def announce(store: Store, checkpoint: CheckpointId, who: str, timings: DaemonTimings = USUAL) -> str:
    """Announce that this node takes or sends parts of `checkpoint`; return the announcement's key."""
    key = f"{flushing_prefix(checkpoint.run)}{checkpoint.name}/{_SENDING}.{make_stamp(who, timings)}"
    await store.put(key, b"")
    _standing.add(key)
    return key


async def withdraw(store: Store, key: str) -> None:
    """Delete an announcement."""
    _standing.discard(key)
    await store.delete([key])


async def announcement_keys(store: Store, run: str, who: str) -> frozenset[str]:
    """Return the keys of all announcements of nodes other than `who`, whatever their age."""
    keys = [info.key async for info in store.scan(flushing_prefix(run))]
    stamped = [(key, STAMP.fullmatch(key.rpartition("/")[2])) for key in keys]
    return frozenset(key for key, match in stamped if match and match[1] == _SENDING and match[3] != who)


async def find_senders(
    store: Store, run: str, who: str, timings: DaemonTimings = USUAL
) -> dict[CheckpointId, frozenset[str]]:
    """Return, by checkpoint, the other nodes that announce that they send its parts.

    Announcements of `who` itself and expired ones do not count.
    """
    senders: dict[CheckpointId, frozenset[str]] = {}
    prefix = flushing_prefix(run)
    async for info in store.scan(prefix):
        name, _, stamp = info.key[len(prefix) :].partition("/")
        match, checkpoint = STAMP.fullmatch(stamp), CheckpointId.parse(run, name)
        if not checkpoint or not match or match[1] != _SENDING or match[3] == who:
            continue
        if not is_expired(match[2], match[3], who, timings):
            senders[checkpoint] = senders.get(checkpoint, frozenset()) | {match[3]}
    return senders


def is_standing(key: str) -> bool:
    """Whether this is an announcement of this process that was not withdrawn."""
    return key in _standing


class IngestClaim:
    """This node's part in the agreement.

    Args:
        find: returns the store of the first tier, another one after a reload; None if there is none, or if it is not to
            be asked now.
    """

    def __init__(self, run: str, who: str, find: Callable[[], Store | None], timings: DaemonTimings) -> None:
        self._run, self._who, self._find, self._timings = run, who, find, timings
        self._announcement: tuple[Store, CheckpointId, str] | None = None  # the announcement, by its key
        self._first_listed_at: dict[str, float] = {}  # others' announcements, and when each was first listed
        self._yielded: tuple[CheckpointId, float] | None = None  # what is left to others, and since when
        self._ask_at_s = 0.0
        self._refused = False  # the tier refuses deletions, so an announcement there would never end

    @property
    def is_claimed(self) -> bool:
        return self._announcement is not None

    async def may_take(self, checkpoint: CheckpointId, now_s: float) -> bool:
        """Return whether this node may take a unit now, with an agreement (`is_claimed`) or without one.

        Args:
            checkpoint: the checkpoint that the unit would become, as far as this node knows.
        """
        store = self._find()
        if self.is_claimed or store is None or self._refused:
            return True
        if self._yielded is None or self._yielded[0] != checkpoint:
            self._yielded = checkpoint, now_s
        if now_s - self._yielded[1] >= self._timings.yield_s:
            log.info("%s: it is taken, although another node announces it for long", checkpoint)
            return True
        if now_s < self._ask_at_s:
            return False
        self._ask_at_s = now_s + self._timings.renew_s / 3 * random.uniform(0.5, 1.0)  # noqa: S311
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._claim(store, checkpoint, now_s)
        except _FAILURES as error:
            log.info("%s: it is taken without asking other nodes: %s", checkpoint, error or type(error).__name__)
            return True

    async def _claim(self, store: Store, checkpoint: CheckpointId, now_s: float) -> bool:
        if await self._others(store, now_s):
            return False
        key = await announce(store, checkpoint, self._who, self._timings)
        if await self._others(store, now_s):  # it announced meanwhile: both withdraw, and ask again at other times
            await self._withdraw(store, key)
            return False
        self._announcement, self._yielded, self._ask_at_s = (store, checkpoint, key), None, 0.0
        return True

    async def _others(self, store: Store, now_s: float) -> bool:
        """Whether another node that is alive announces parts of the run."""
        announced_keys = await announcement_keys(store, self._run, self._who)
        self._first_listed_at = {key: self._first_listed_at.get(key, now_s) for key in announced_keys}
        return any(now_s - since_s < self._timings.silent_s for since_s in self._first_listed_at.values())

    async def keep_renewing(self) -> None:
        """Renew the announcement until cancelled. Each time it is another object, so that others see it change."""
        while True:
            await asyncio.sleep(self._timings.renew_s)
            try:
                await self.renew()
            except Exception:  # a loop that ended would end without a word, and others take this node for dead
                log.exception("%s: it could not be announced again", self._run)

    async def renew(self) -> None:
        """Renew the announcement, if there is one and the tier may be asked; a tier that fails raises nothing.

        If a reload made another tier the first one, the announcement on the former tier counts as over by itself.
        """
        if self._announcement is None or self._refused or (store := self._find()) is None:
            return  # never on the former store: a reload has closed it
        _, checkpoint, key = self._announcement
        try:
            fresh = await announce(store, checkpoint, self._who, self._timings)
        except _FAILURES as error:
            log.info("%s: it could not be announced again: %s", checkpoint, error)
            return
        self._announcement = store, checkpoint, fresh
        if fresh != key:  # the same, within a millisecond
            await self._withdraw(store, key)

    async def release(self) -> None:
        """End the agreement, because the tier has what was taken, or because the watch ends. Raises nothing."""
        if self._announcement is None:
            return
        (store, _, key), self._announcement = self._announcement, None
        await self._withdraw(self._find() or store, key)

    async def _withdraw(self, store: Store, key: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await withdraw(store, key)
        except DeleteRefused:
            self._refused = True
        except Exception as error:  # also of a store that a reload closed, while the new one is not observed yet
            log.info("%s: it is left, and counts as over when it is not renewed: %s", key, error)
