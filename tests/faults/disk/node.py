"""A node for one trial: a spool, a tier on the disk that will fail, another that will not, a daemon and a trainer; and,
by code of its own, what lies on each of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults.rounds import Lost
from support import by_hand
from support.timed import HASTE, give, give_client
from support.waiting import holds
from support.world import Daemon, settle

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving.save_jobs import Save
from tierd.core.errors import (
    CheckpointNotFound,
    CorruptChunk,
    ManifestError,
    ObjectNotFound,
    SaveFailed,
    SpoolFull,
    SpoolUnusable,
    StoreRefused,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning import flush_order
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.daemon.reconciling import tier_worker, worker_loop
from tierd.daemon.transfer import tier_fetch
from tierd.stores.file_store import FileStore

DEADLINE = 120.0  # seconds in which the daemon has to converge, and in which any call ends; the machine may be busy
BACKOFF = 0.2  # seconds at most between two tries of a tier worker here; half of it at least
KEEP = 3  # on each place: then a tier that was down gets all that it wants


def hurry() -> None:
    """Waits of seconds become waits of milliseconds; their order stays."""
    give(**HASTE | {"backoff_s": BACKOFF, "tick_s": 0.05})
    give_client(start_s=0.5)
    flush_order.SMALLEST_SHARED_BYTES = 1
    tier_fetch._SPARE = 0  # a fetch begins, however full the disk is
    _watch_workers()


_hasty: list[str] = []  # what tier workers did before they had rested


def _watch_workers() -> None:
    """Note what a tier worker does within half of a backoff after it failed: a busy machine makes that later only."""
    failed: weakref.WeakKeyDictionary[tier_worker.TierWorker, float] = (
        weakref.WeakKeyDictionary()
    )  # when, monotonic seconds
    observe, fail = worker_loop.NextAction.next_action, worker_loop.WorkerLoop._failed

    async def observed(own: Any, one: Any) -> Any:
        rested = time.monotonic() - failed.pop(one, -math.inf)
        if rested < 0.9 * BACKOFF / 2:
            _hasty.append(f"{one.name} tried again after {rested:.3f} s")
        return await observe(own, one)

    def noted(loop: Any, one: Any, action: Any, error: Exception) -> None:
        failed[one] = time.monotonic()  # before: afterwards, a busy machine may have let some of the rest pass
        fail(loop, one, action, error)

    worker_loop.NextAction.next_action = observed  # type: ignore[method-assign]
    worker_loop.WorkerLoop._failed = noted  # type: ignore[method-assign]


# -- what is saved, and what is found ---------------------------------------------------------------------------------


LARGE = 300_000  # elements of float32 that take the way past the page cache


def state(step: int, big: int) -> dict[str, Any]:
    """What is saved at a step: every value tells which. `big`: elements of one more tensor of float32."""
    found: dict[str, Any] = {
        "a": torch.full((3000,), float(step)),
        "b": torch.arange(step, step + 500),
        "c": torch.full((7, 11), step % 2 == 0),
        "epoch": step,
    }
    if big:
        found["big"] = torch.arange(big, dtype=torch.float32) + step
    return found


def check_state(found: dict[str, Any], step: int, big: int, where: str) -> None:
    wanted = state(step, big)
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        if not same:
            raise Lost(f"{where}: {name} is not what was saved at step {step}")


def _check_part(manifest: dict[str, Any], files: by_hand.Files, big: int) -> int:
    """That what lies in a part is the state of its step; the step."""
    step = int(manifest["step"])
    wanted = state(step, big)
    for name, data in by_hand.tensors(files["tensors.safetensors"]).items():
        if data != np.ascontiguousarray(wanted[name].numpy()).tobytes():
            raise Lost(f"{name} is not what was saved at step {step}")
    if json.loads(files["state.json"])["epoch"] != step:
        raise Lost(f"state.json is not that of step {step}")
    return step


def on_tier(root: Path, big: int) -> set[int]:
    """The steps of the checkpoints on a tier, all of them read and compared."""
    return {_check_part(*by_hand.on_tier(path), big) for path in root.glob("run/manifests/*/*.json")}


def left_on(root: Path) -> list[str]:
    """What lies on a tier that no manifest names."""
    named = set().union(*(by_hand.keys(by_hand.on_tier(path)[0]) for path in root.glob("run/manifests/*/*.json")))
    found = {str(path.relative_to(root)) for path in by_hand.files_below(root)}
    known = ("README.md", "run/manifests/", "run/retention/", "run/timeline/", *(f"run/{key}" for key in named))
    return sorted(name for name in found if not name.startswith(known))


def in_spool(root: Path, big: int) -> set[int]:
    """The steps of the parts in a spool, all of them read and compared; nothing unfinished may be left."""
    steps = {_check_part(*by_hand.in_spool(path.parent), big) for path in root.glob("run/*/*/manifest.json")}
    if left := by_hand.unfinished(root, "run"):
        raise Lost(f"left over in {root}: {left}")
    return steps


# -- the node ---------------------------------------------------------------------------------------------------------


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Node:
    """A spool at `home/nvme/spool`, tiers at `home/nfs/tier`, or at `home/nfs` where that is not there, and at
    `home/disk/other`.

    Args:
        alone: the trainer writes by itself; a daemon comes only afterwards.

    Attributes:
        saved: steps whose `wait("local")` has returned.
        failed: steps whose `Save` said that it failed.
        recent: why, since `begin`.
        lines: what was logged since then.
    """

    def __init__(self, home: Path, *, large: bool, saved: int, alone: bool = False) -> None:
        self.spool, self.big, self.alone = home / "nvme" / "spool", LARGE if large else 0, alone
        tier = home / "nfs" / "tier"
        self.tiers = {"tier": tier if tier.exists() else home / "nfs", "other": home / "disk" / "other"}
        self.saved = set(range(1, saved + 1))
        self.failed: set[int] = set()
        self.taken: set[int] = set()  # steps whose copy in the spool was taken away, which a restore need not put back
        self.recent: dict[int, Exception] = {}
        self._counted = 0  # failures of this trainer before
        self.daemon: Daemon | None = None
        self._log = _Kept()
        for name in ("tierd", "tierd.daemon"):
            logging.getLogger(name).setLevel(logging.INFO)
            logging.getLogger(name).propagate = name != "tierd"
        logging.getLogger("tierd").addHandler(self._log)

    @property
    def lines(self) -> list[str]:
        return self._log.lines

    def begin(self) -> None:
        self.recent.clear()
        self.lines.clear()
        self._counted = self.trainer.stats.failed

    def start(self) -> None:
        if not self.alone:
            stores = lambda: {name: FileStore(root) for name, root in self.tiers.items()}  # noqa: E731
            options = {"keep": KEEP, "rescan": "1s"}
            self.daemon = Daemon(self.spool, stores, **options).__enter__()
        self.trainer = tierd.Checkpointer(self.spool, "run", to=[] if self.alone else None, slots=2)
        if self.saved:
            self.restore(max(self.saved), or_newer=self.failed)

    def stop(self) -> None:
        with limited("close"), contextlib.suppress(SaveFailed):  # `save` has recorded it
            self.trainer.close()
        if self.daemon:
            self.daemon.stop()
            self.daemon = None

    def restore_or_raise(self, step: int) -> None:
        """Resume under a fault: `step` comes, or an error that says that something could not be read or written."""
        try:
            self.restore(step)
        except (CorruptChunk, CheckpointNotFound, ManifestError) as error:
            raise Lost(f"an error is taken for corruption: {error!r}") from error
        except TierdError as error:
            self.lines.append(f"restore: {error}")
        except OSError as error:
            raise Lost(f"restore raises what is no error of tierd: {error!r}") from error

    def scrub(self, copies: Collection[ScrubbedCopy]) -> None:
        """Read these copies again."""
        assert self.daemon
        for copy in copies:
            try:
                self.daemon.call(self.daemon.reconciler.scrubber.scrub(copy), DEADLINE)
            except (CorruptChunk, ManifestError) as error:
                raise Lost(f"scrubbing takes an error for corruption: {error!r}") from error
            except (TierdError, OSError) as error:  # its tier worker puts that off
                self.lines.append(f"scrub: {error}")

    def copies(self) -> list[ScrubbedCopy]:
        """What lies in the spool, there and on the tier that will fail."""
        found = [PartId.parse(*path.parts[-3:]) for path in sorted(self.spool.glob("run/*.*/*"))]
        return [ScrubbedCopy(place, part) for part in found if part for place in ("local", "tier")]

    def restore(self, step: int, or_newer: Collection[int] = ()) -> None:
        """Resume; `step` and nothing older may come."""
        found = state(10**6, self.big)
        with limited("restore"):
            restored = self.trainer.restore(found)
        if restored is None or (restored.step != step and not (restored.step > step and restored.step in or_newer)):
            raise Lost(f"restored {restored and restored.step}, not {step}: {restored and restored.skipped}")
        check_state(found, restored.step, self.big, f"restored from {restored.tier}")

    def save(self) -> int:
        """Save and wait for it; its step. It must not keep the trainer, and must say what failed."""
        step = max(self.saved | self.failed, default=0) + 1
        with limited("save"):
            save = self.trainer.save(step, state(step, self.big))
        try:
            save.wait(timeout=DEADLINE)
        except SaveFailed as error:
            assert error.__cause__
            self.failed.add(step)
            self.recent[step] = error.__cause__
            if not any("save failed, training goes on" in line and f"step {step} " in line for line in self.lines):
                raise Lost(f"step {step} failed, and no line says so: {error}") from error
            return step
        except TimeoutError as error:
            raise Lost(f"a save hangs: {error}") from error
        self.saved.add(step)
        return step

    def check_failures(self, why: set[str]) -> None:
        """That saves which failed say where and why, are counted, and are what the disk says: no more, no less."""
        for step, error in self.recent.items():
            memory = isinstance(error, MemoryError)  # of a limit on files, which the snapshot's memory is, too
            if not isinstance(error, SpoolFull | SpoolUnusable | MemoryError):
                raise Lost(f"step {step} failed with {error!r}")
            if (not memory and str(self.spool) not in str(error)) or not any(text in str(error) for text in why):
                raise Lost(f"step {step} failed, and its error does not say where and why ({why}): {error}")
        counted = self.trainer.stats.failed - self._counted
        if counted != len(self.recent):
            raise Lost(f"{len(self.recent)} saves failed, and {counted} were counted")

    def wait_for(self, step: int, tier: str) -> None:
        """A tier's copy has to come, in bounded time."""
        part = PartId(CheckpointId("run", self.trainer.attempt, step), 0, 1)
        save = Save(part, internals(self.trainer).spool)
        save.finish(None)
        try:
            save.wait(tier, timeout=DEADLINE)
        except (TierdError, TimeoutError) as error:
            raise Lost(f"step {step} does not come to {tier}: {error!r}") from error

    def is_on(self, tier: str, step: int) -> bool:
        """Whether a tier holds a manifest of this step."""
        return any((self.tiers[tier] / "run" / "manifests").glob(f"{step:012}.*/*"))

    def ask_tier(self, newest: int) -> None:
        """What the tier answers while its disk fails is true, or an error."""
        assert self.daemon
        store = self.daemon.reconciler.stores["tier"]

        async def ask() -> None:
            keys = [info.key async for info in store.scan("run/manifests/")]
            found = [key for key in keys if f"/{newest:012}." in key]
            if not found:
                raise Lost(f"a listing of the tier lacks step {newest}, and is no error: {keys}")
            await store.get(found[0])

        try:
            self.daemon.call(ask(), DEADLINE)
        except ObjectNotFound as error:
            raise Lost(f"a tier that cannot be read says that step {newest} is not there: {error}") from error
        except (StoreUnavailable, StoreRefused) as error:
            self.lines.append(f"asked: {error}")

    def converge(self) -> None:
        assert self.daemon
        for one in self.daemon.reconciler.workers.values():
            self.daemon.loop.call_soon_threadsafe(one.wake.set)
        try:
            self.daemon.call(settle(self.daemon.reconciler, DEADLINE), DEADLINE + 10)
        except (AssertionError, TimeoutError) as error:
            raise Lost(f"not converged within {DEADLINE:.0f} s: {error}") from error

    def check(self) -> None:
        """That every checkpoint which was acknowledged, and that retention wants, lies where it should bit for bit, and
        nothing else does."""
        assert self.daemon
        counters = self.daemon.reconciler.journal.counters
        for name in ("quarantined", "corruptions", "scrub_findings"):
            if counters[name]:
                raise Lost(f"an error counted as corruption: {name}; {self.lines[-20:]}")
        known = self.saved
        holds(lambda: not any(any((root / ".tmp").iterdir()) for root in self.tiers.values()), 60.0)  # puts under way
        places = {name: on_tier(root, self.big) for name, root in self.tiers.items()}
        if left := [path for root in self.tiers.values() for path in left_on(root)]:
            raise Lost(f"left over on a tier: {left}")
        places["spool"] = in_spool(self.spool, self.big)
        on_tiers = set.intersection(*(places[name] for name in self.tiers))
        for name, steps in places.items():
            wanted = permitted = set(sorted(known | steps)[-KEEP:])
            if name == "spool":  # it may have kept older ones instead of those that were taken away
                others = set(sorted((known - self.taken) | steps)[-KEEP:])
                # A full disk takes from the spool what every tier has.
                wanted, permitted = (wanted & others) - on_tiers, wanted | others
            if steps - known - self.failed or steps - permitted or wanted - steps:
                raise Lost(f"{name} has {sorted(steps)}, of {sorted(known)} saved and {sorted(self.failed)} failed")

    def check_rests(self) -> None:
        """That no tier worker tried again without resting."""
        if _hasty:
            raise Lost(f"a lane that failed did not rest: {_hasty[:5]}")


@contextlib.contextmanager
def limited(doing: str) -> Iterator[None]:
    """What training calls must return, whatever the disk does."""
    begun = time.monotonic()
    yield
    if time.monotonic() - begun > DEADLINE / 2:
        raise Lost(f"{doing} took {time.monotonic() - begun:.0f} s")
