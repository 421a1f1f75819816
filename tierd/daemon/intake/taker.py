"""Agree on the tier which of several nodes takes the units of a run that they all watch.

The taker announces a checkpoint on the run's first tier, as a flush does, before it reads a unit, and renews the
announcement until the tier has what it took. Another node that wants a unit and finds an announcement waits. Nodes give
a unit the same name only if they know the same checkpoints, so one node takes at a time from a run, not from a unit.

Invariant: two nodes that both may take have not both announced in time: each lists the announcements after it put its
own, and a node that then finds another one withdraws its own. An exception is made for safety alone. A unit that is
read twice is waste, one that nobody takes is lost. So a node takes without an agreement if the tier does not answer, if
an announcement was not renewed for `silent_s` by this node's own clock, or if a unit was left to others for `yield_s`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from tierd.core.errors import DeleteRefused, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.daemon.tiers.announcements import announce, announcements, withdraw
from tierd.daemon.timings import DaemonTimings
from tierd.stores.base import Store

log = logging.getLogger("tierd.daemon")

_ANSWER_S = 20.0  # seconds for which a unit waits for the tier's answer
_FAILURES = (StoreUnavailable, StoreRefused, TimeoutError)


class IngestClaim:
    """This node's part in the agreement.

    Args:
        run: the watched run.
        who: this node's id among the nodes that share the tier.
        find: returns the store of the first tier, another one after a reload; None if there is none, or if it is not to
            be asked now.
        timings: the daemon's.

    Attributes:
        held: whether this node has the agreement that it takes.
    """

    def __init__(self, run: str, who: str, find: Callable[[], Store | None], timings: DaemonTimings) -> None:
        self._run, self._who, self._find, self._timings = run, who, find, timings
        self._announcement: tuple[Store, CheckpointId, str] | None = None  # the announcement, by its key
        self._first_listed_at: dict[str, float] = {}  # others' announcements, and when each was first listed
        self._yielded: tuple[CheckpointId, float] | None = None  # what is left to others, and since when
        self._ask_at_s = 0.0
        self._refused = False  # the tier refuses deletions, so an announcement there would never end

    @property
    def held(self) -> bool:
        return self._announcement is not None

    async def may_take(self, checkpoint: CheckpointId, now_s: float) -> bool:
        """Return whether this node may take a unit now, with an agreement (`held`) or without one.

        Args:
            checkpoint: the checkpoint that the unit would become, as far as this node knows.
            now_s: a monotonic clock, in seconds.
        """
        store = self._find()
        if self.held or store is None or self._refused:
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
        announced_keys = await announcements(store, self._run, self._who)
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
