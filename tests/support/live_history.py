"""One seeded history of a trainer that publishes weights and of followers that follow it, in one process.

The trainer's side is tierd's own flush, head and prune over stores in memory; its kills end a flush at any put. Faults
of a follower strike at any of its requests: the tier fails, prunes what is being read, or lets an object rot.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from support.doubles import Double, is_chunk
from support.state_files import files_of
from support.world import RUN, commit, part

from tierd.core.errors import StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.daemon.tiers.tier_observer import TierObserver, find_base
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.tiers.tier_run_records import next_head, put_head
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.reading import Reader
from tierd.reading.live_weights import LiveWeights
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

NODE = "0badcafe"
KEY = EncryptionKey(bytes(range(32)))
Weights = dict[str, torch.Tensor]


class Killed(Exception):
    """The trainer's node died here."""


def in_thread(make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Run a coroutine to its end, also from inside of an event loop."""
    thread = threading.Thread(target=lambda: asyncio.run(make()))
    thread.start()
    thread.join()


def new_weights() -> Weights:
    return {
        "rows.weight": torch.randn(120, 40).bfloat16(),
        "frozen": torch.randn(30, 40).bfloat16(),
        "bias": torch.randn(7),
        "count": torch.tensor(0),
    }


def bits(weights: Weights) -> dict[str, bytes]:
    return {name: bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in weights.items()}


class Publisher:
    """The trainer with its node's daemon, reduced to what reaches the tiers."""

    def __init__(self, home: Path, draw: random.Random, happened: Counter[str]) -> None:
        self.spool, self.draw, self.happened = Spool(home / "spool"), draw, happened
        self.encrypted = draw.random() < 0.3
        self.tiers = [MemoryStore() for _ in range(draw.choice((1, 1, 2)))]
        self.weights, self.step, self.launch = new_weights(), 0, 1
        self.origin: CheckpointId | None = None
        self.saved: dict[CheckpointId, Weights] = {}
        self.origins: dict[str, CheckpointId | None] = {}
        self.announced: CheckpointId | None = None

    def open(self, tier: MemoryStore) -> tuple[Double, Store]:
        """A store of one process over a tier, whose faults the caller sets."""
        double = Double(tier)
        return double, EncryptedStore(double, KEY) if self.encrypted else double

    def train(self, *, everything: bool = False) -> None:
        """Change a few rows, so that chunks become patches, or everything."""
        rows = self.weights["rows.weight"].clone()
        for _ in range(self.draw.randint(0, 4)):
            rows[self.draw.randrange(120)] += 1
        self.weights = {**self.weights, "rows.weight": rows, "count": self.weights["count"] + 1}
        if everything or self.draw.random() < 0.1:
            self.weights = new_weights() | {"count": self.weights["count"]}
        if self.draw.random() < 0.3:
            self.weights["bias"] = torch.randn(7)

    def publish(self, *, kills: bool = True) -> None:
        """Save the next step; perhaps the node is killed before a put, and launched again from what is complete."""
        self.train()
        self.step += 1
        deadline = self.draw.randint(1, 14) if kills and self.draw.random() < 0.2 else -1
        try:
            in_thread(lambda: self._publish(deadline))
        except Killed:
            raise AssertionError("a thread's error is not raised here") from None
        if deadline >= 0 and self.announced != self._checkpoint:
            self.happened["trainer killed"] += 1
            self.relaunch(self.draw.choice(self._complete() or [None]))

    @property
    def _checkpoint(self) -> CheckpointId:
        return part(self.step, self.launch).checkpoint

    async def _publish(self, deadline: int) -> None:
        which, puts = part(self.step, self.launch), 0
        self.saved[which.checkpoint] = self.weights
        self.origins[which.checkpoint.attempt] = self.origin
        commit(self.spool, which, files_of({"model": self.weights, "lr": 0.1}), origin=self.origin)

        def die(operation: str, key: str) -> None:
            nonlocal puts
            puts += operation == "put"
            if puts == deadline:
                raise StoreUnavailable("killed")

        for tier in self.tiers:
            double, store = self.open(tier)
            double.before = die
            try:
                place = await TierObserver(store).observe({RUN}, {RUN: {0}})
                base, worn_out = await find_base(store, place, which)
                await flush(self.spool, which, TierUploadContext(store), base=base, worn_out=worn_out)
                place = await TierObserver(store).observe({RUN}, {RUN: {0}})
                heads = place.heads.get(RUN, ())
                head = next_head(Inventory(Place(), {"tier": place}, node_id=NODE), place, RUN, NODE, heads)
                await put_head(store, head, heads)
            except StoreUnavailable:
                return
            except TierdError as error:  # an object that rotted stands in the way
                assert self.happened["rotten"], error
                return
            self.announced = which.checkpoint

    def relaunch(self, origin: CheckpointId | None) -> None:
        self.launch += 1
        self.origin = origin
        self.step = origin.step if origin else 0
        self.weights = self.saved[origin] if origin else new_weights()

    def roll_back(self) -> None:
        """Another launch continues an older checkpoint."""
        if complete := self._complete():
            self.happened["rollback"] += 1
            self.relaunch(self.draw.choice(complete))

    def _complete(self) -> list[CheckpointId]:
        names = (key.split("/")[2] for key in self.tiers[0].keys if key.startswith(f"{RUN}/manifests/"))
        return sorted(checkpoint for name in names if (checkpoint := CheckpointId.parse(RUN, name)) in self.saved)

    def prune(self, keep: int = 2) -> None:
        """Delete all but the newest checkpoints from each tier."""

        async def work() -> None:
            for tier in self.tiers:
                old = self._complete()[:-keep]
                try:
                    await prune(self.open(tier)[1], old)
                except TierdError as error:
                    assert self.happened["rotten"], error

        in_thread(work)

    def lose_newest(self) -> None:
        """Somebody deletes the newest checkpoint and the head, and the trainer goes on as if nothing had happened."""
        if complete := self._complete():
            self.happened["newest deleted"] += 1
            names = f"/manifests/{complete[-1].name}/", "/timeline/"
            lost = [key for tier in self.tiers for key in tier.keys if any(name in key for name in names)]
            in_thread(lambda: self._delete(lost))
            self.announced = max(self._complete(), default=None)

    async def _delete(self, keys: list[str]) -> None:
        for tier in self.tiers:
            await tier.delete(keys)

    def rot(self) -> None:
        """Flip a bit of an object of the first tier."""
        tier = self.tiers[0]
        if keys := [key for key in tier.keys if is_chunk(key)]:
            self.happened["rotten"] += 1
            key = self.draw.choice(keys)
            content, number = tier.objects[key]
            at = self.draw.randrange(len(content))
            tier.objects[key] = content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :], number


class Follower:
    """One follower and the weights of its model, which are compared with the trainer's after each update."""

    def __init__(self, publisher: Publisher, cache: Path | None) -> None:
        self.publisher, self._cache = publisher, cache
        self.model = {name: torch.zeros_like(tensor) for name, tensor in new_weights().items()}
        self._open()

    def _open(self) -> None:
        opened = [self.publisher.open(tier) for tier in self.publisher.tiers]
        self._doubles = [double for double, _ in opened]
        stores = {f"tier{number}": store for number, (_, store) in enumerate(opened)}
        self._reader = Reader(stores, RUN)
        self.live: LiveWeights = self._reader.live(self.model, only="model", period_s=None, cache=self._cache)

    def restart(self) -> None:
        """The follower is killed; another one begins with nothing."""
        self.close()
        self.publisher.happened["follower killed"] += 1
        self._open()

    def close(self) -> None:
        self.live.close()
        self._reader.close()

    def poll(self, fault: Callable[[], None] | None = None, at: int = 0) -> None:
        """Update, with a fault before the request number `at`, and judge the result."""
        asked = 0

        def strike(operation: str, key: str) -> None:
            nonlocal asked
            asked += 1
            if asked == at and fault:
                fault()

        for double in self._doubles:
            double.before = strike
        happened, saved = self.publisher.happened, self.publisher.saved
        before, weights = self.live.checkpoint, bits(self.model)
        update = self.live.update()
        now = self.live.checkpoint
        if update is None:
            assert now == before and bits(self.model) == weights, "weights changed without an update"
            announced = self.publisher.announced
            if announced is not None and (now is None or announced > now):
                # Without a head, a follower lists every few seconds, and knows nothing in between.
                knows = self.live.problem or happened["newest deleted"]
                assert knows, f"{now} is kept without a reason, beside {announced}"
                happened["older kept"] += 1
            return
        assert now is not None and bits(self.model) == bits(saved[now]), f"other weights than those of {now}"
        assert (update.step, update.attempt) == (now.step, now.attempt)
        happened["update"] += 1
        if before is not None:
            changed = {name for name, content in bits(saved[before]).items() if content != bits(saved[now])[name]}
            assert update.tensors.keys() == changed, "another set of tensors than those that changed"
            goes_on = self._descends(now, before)
            assert goes_on == (update.abandoned is None), f"{before} -> {now}: abandoned {update.abandoned}"
            assert not goes_on or now > before, f"older weights: {before} -> {now}"
            happened["rollback followed"] += not goes_on
            size = sum(map(len, bits(saved[now]).values()))
            happened["less than everything fetched"] += 0 < update.fetched_bytes < size / 2

    def _descends(self, checkpoint: CheckpointId, earlier: CheckpointId) -> bool:
        """Whether a checkpoint continues an earlier one, as the trainer knows."""
        at: CheckpointId | None = checkpoint
        while at is not None:
            if at.attempt == earlier.attempt:
                return earlier.step <= at.step
            at = self.publisher.origins[at.attempt]
        return False


def fail() -> None:
    raise StoreUnavailable("the tier does not answer")


def play(seed: int, home: Path, happened: Counter[str], patch: Any) -> None:
    """Play one history, and check each swap."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    publisher = Publisher(home, draw, happened)
    cache = home / "cache" if draw.random() < 0.6 else None
    pwrite = os.pwrite

    def full_disk(file: int, data: Any, offset: int) -> int:
        if disk_is_full and os.readlink(f"/proc/self/fd/{file}").startswith(str(home / "cache")):
            happened["disk full"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    disk_is_full = draw.random() < 0.2
    patch.setattr(os, "pwrite", full_disk)
    publisher.publish(kills=False)
    followers = [Follower(publisher, cache) for _ in range(2)]
    try:
        for _ in range(draw.randint(6, 14)):
            act = draw.random()
            if act < 0.55:
                publisher.publish()
            elif act < 0.65:
                publisher.roll_back()
                publisher.publish()
            elif act < 0.75:
                publisher.prune()
            elif act < 0.8:
                publisher.rot()
            elif act < 0.85:
                draw.choice(followers).restart()
            elif act < 0.9:
                publisher.lose_newest()
            for follower in followers:
                if draw.random() < 0.7:
                    fault = draw.choice((None, None, fail, publisher.prune, publisher.rot))
                    follower.poll(fault, draw.randint(1, 12))
        publisher.relaunch(publisher.announced)
        publisher.train(everything=True)
        publisher.publish(kills=False)
        for follower in followers:
            follower.poll()
            if follower.live.checkpoint != publisher.announced:
                follower.poll()
            excused = happened["rotten"] or happened["newest deleted"]
            assert excused or follower.live.checkpoint == publisher.announced, follower.live.problem
    finally:
        for follower in followers:
            follower.close()
