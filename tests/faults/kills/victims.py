"""The processes that are killed: a daemon, and ranks of a training that save and restore. Forked from one that has
imported everything, so that one costs milliseconds; each is a real process with locks, sockets and threads of its own.

A victim shares one page with its killer. There it marks what it is doing, and there stands after how many system
calls of which kinds it is to kill itself: so a kill hits windows that a clock seldom hits, and it is known what it hit.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import json
import logging
import mmap
import os
import random
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults.hands import end_with_parent
from support.timed import give, give_client
from torch import distributed

import tierd
from tierd.client.restoring import slot_ring
from tierd.client.saving import save_pipeline, snapshot
from tierd.client.saving import snapshot_handoff as giving
from tierd.core.config import Config
from tierd.core.errors import CheckpointNotFound, DaemonUnavailable, StateMismatch
from tierd.core.planning import flush_order
from tierd.daemon import daemon_service
from tierd.daemon import handoff_socket as taking
from tierd.daemon.reconciling import flusher, pruner, repairs
from tierd.daemon.transfer import slot_fills

RUN = "run"
FROZEN = 1_100_000  # bytes: a chunk of its own, the same in every checkpoint, and large enough for direct I/O
STAGED = 7  # a step before a multiple of this is written through `stage`
AGAIN = 11  # and after one before a multiple of this the process restores

CALLS = ("fsync", "rename", "unlink", "mkdir", "write", "send", "tell", "copy", "fill")
VERBS = ("save", "stage", "restore", "persist", "flush", "prune", "mend", "fetch")

_Report = Callable[..., None]


# -- what lies in a checkpoint, by this one function ------------------------------------------------------------------


def content(seed: int, attempt: str, step: int, rank: int) -> dict[str, np.ndarray]:
    """What a rank's part holds: every byte of what moves hangs on who wrote it, and when."""

    def noise(*names: object) -> np.random.Generator:
        return np.random.default_rng(list(hashlib.blake2b(repr(names).encode(), digest_size=16).digest()))

    moving = noise(seed, attempt, step, rank)
    return {
        "frozen": noise(seed, rank).integers(0, 256, FROZEN, np.uint8),
        "weights": moving.standard_normal((37, 1 + seed % 5 * 911)).astype(np.float32),
        "seen": moving.integers(-(1 << 62), 1 << 62, 13),
    }


def reported(seed: int, attempt: str, step: int, rank: int) -> dict[str, Any]:
    """What of a state is no tensor."""
    return {"attempt": attempt, "step": step, "rank": rank, "seed": seed}


def is_right(state: dict[str, Any], seed: int, attempt: str, step: int, rank: int) -> bool:
    """Whether a state is, bit for bit, what this rank saved at this step of this attempt."""
    expected = content(seed, attempt, step, rank)
    return state["told"] == reported(seed, attempt, step, rank) and all(
        state[name].numpy().tobytes() == array.tobytes() for name, array in expected.items()
    )


def staged(seed: int, attempt: str, step: int, rank: int) -> bytes:
    """What the file holds that is written through `stage`."""
    return (
        json.dumps(reported(seed, attempt, step, rank)).encode() + content(seed, attempt, step, rank)["seen"].tobytes()
    )


def is_staged(step: int) -> bool:
    return step % STAGED == STAGED - 1


# -- the page between a victim and its killer -------------------------------------------------------------------


class Page:
    """What a victim marks, and when it is to kill itself."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def arm(self, calls: int, kinds: set[int], verb: str | None, *, after: bool, stops: bool = False) -> None:
        """Have the victim kill itself at one of its next calls of some kinds, before it is done or after, or stop
        itself; only calls in the middle of `verb` count, if there is one."""
        self._memory[14] = 1 + VERBS.index(verb) if verb else 0
        self._memory[15] = stops
        struct.pack_into("<II", self._memory, 4, sum(1 << kind for kind in kinds), after)
        struct.pack_into("<i", self._memory, 0, calls)

    def disarm(self) -> None:
        struct.pack_into("<i", self._memory, 0, 0)

    def forget_hit(self) -> None:
        """Have a victim that stopped itself count as unhurt, now that it goes on."""
        self._memory[12] = 0

    @property
    def hit(self) -> str | None:
        """The call that it killed or stopped itself at."""
        kind = self._memory[12]
        return CALLS[kind - 1] if kind else None

    @property
    def at_work(self) -> bool:
        return bool(self._memory[13])

    @property
    def verbs(self) -> list[str]:
        """What the victim is in the middle of."""
        return [verb for number, verb in enumerate(VERBS) if self._memory[32 + number]]

    # In the victim.

    def begin(self) -> None:
        self._memory[13] = 1

    @contextmanager
    def within(self, verb: str) -> Iterator[None]:
        at = 32 + VERBS.index(verb)
        self._memory[at] = min(255, self._memory[at] + 1)
        try:
            yield
        finally:
            self._memory[at] = max(0, self._memory[at] - 1)

    def count(self, kind: int) -> None:
        """Have every call of one kind counted, as this module sees the system."""
        for module, name in _COUNTED[CALLS[kind]]:
            setattr(module, name, self.counted(kind, getattr(module, name)))

    def counted(self, kind: int, call: Callable[..., Any]) -> Callable[..., Any]:
        memory, bit, pid, kill = self._memory, 1 << kind, os.getpid(), os.kill

        def counted(*args: Any, **named: Any) -> Any:
            (left,) = struct.unpack_from("<i", memory, 0)
            if left <= 0:
                return call(*args, **named)
            kinds, after = struct.unpack_from("<II", memory, 4)
            if not kinds & bit or (memory[14] and not memory[31 + memory[14]]):
                return call(*args, **named)
            struct.pack_into("<i", memory, 0, left - 1)
            if left > 1:
                return call(*args, **named)
            memory[12] = kind + 1
            answer = call(*args, **named) if after else None
            if memory[15]:
                kill(pid, signal.SIGSTOP)
                return answer if after else call(*args, **named)
            kill(pid, signal.SIGKILL)
            raise AssertionError("SIGKILL was survived")

        return counted


_COUNTED: dict[str, list[tuple[Any, str]]] = {
    "fsync": [(os, "fsync")],
    "rename": [(os, "rename"), (os, "replace")],
    "unlink": [(os, "unlink"), (os, "rmdir")],
    "mkdir": [(os, "mkdir")],
    "write": [(os, "write"), (os, "pwrite")],
    "send": [(socket, "send_fds")],
    "tell": [],  # what a rank writes down of a snapshot that was taken
    "copy": [(snapshot.Snapshot, "copy")],  # over what the daemon may still show a successor
    "fill": [(slot_fills.SlotSession, "request"), (slot_ring, "copy_bytes")],  # a chunk of a restore past the spool
}


# -- a process --------------------------------------------------------------------------------------------------------


def fork(page: Page, log: Path, main: Callable[[], None]) -> int:
    """A child that runs `main`, dies with its parent, and leaves what it says in `log`; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        end_with_parent()
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.register(signal.SIGUSR2)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
        for kind in range(len(CALLS)):
            page.count(kind)
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def daemon(config: Config, page: Page, slow: float, *, last: bool) -> None:
    """The daemon: what `tierd run --config` runs, with waits of milliseconds where it has minutes.

    Args:
        slow: seconds at most that persisting a snapshot takes longer, as on a busy disk.
        last: nobody is killed any more; what a kill left of a fetch is then given up soon.
    """
    give(
        backoff_s=0.3,
        stuck_s=0.3,
        prune_again_s=0.1,
        abandoned_s=0.2,
        own_stale_ms=300,
        mark_pause_s=0.02,
        orphan_s=8.0,
    )
    flush_order.SMALLEST_SHARED_BYTES = 1
    if last:
        give(taken_up_s=1.0)
    _mark(taking, "write_part", page, "persist", slow)
    _mark_async(flusher.Flusher, "flush", page, "flush")
    _mark_async(pruner.Pruner, "prune", page, "prune")
    _mark_async(repairs.Repairs, "repair", page, "mend")
    _mark_async(repairs.Repairs, "fetch", page, "fetch")
    page.begin()
    asyncio.run(daemon_service.serve(config))


def _mark(where: Any, name: str, page: Page, verb: str, slow: float = 0.0) -> None:
    real = getattr(where, name)

    def marked(*args: Any, **named: Any) -> Any:
        with page.within(verb):
            if slow:
                time.sleep(random.random() * slow)
            return real(*args, **named)

    setattr(where, name, marked)


def _mark_async(where: Any, name: str, page: Page, verb: str) -> None:
    real = getattr(where, name)

    async def marked(*args: Any, **named: Any) -> Any:
        with page.within(verb):
            return await real(*args, **named)

    setattr(where, name, marked)


# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orders:
    """What a rank is started with.

    Attributes:
        daemon: whether it looks for one; without, it persists by itself and restores from the spool.
        pace: seconds at most between two steps.
        slow: seconds at most that persisting a snapshot takes longer.
        steps: after so many it closes and ends; None: it goes on until it is killed.
    """

    seed: int
    launch: int
    rank: int
    world: int
    spool: str
    tiers: tuple[str, ...]
    log: str
    meeting: str
    daemon: bool
    slots: int
    pace: float
    slow: float
    steps: int | None = None


def rank(orders: Orders, page: Page) -> None:
    """A rank's whole life. What it was told, it writes down outside, before and after each call."""
    out = Path(orders.log).open("ab", buffering=0)  # noqa: SIM115  # to the end; and not by os.write, which is counted

    def report(what: str, **more: object) -> None:
        line = {"at": time.monotonic(), "launch": orders.launch, "rank": orders.rank, "what": what, **more}
        out.write(json.dumps(line).encode() + b"\n")

    try:
        give_client(start_s=3.0 if orders.steps is None else 60.0, greeting_s=5.0)
        for name in ("save", "restore"):
            _mark(tierd.Checkpointer, name, page, name)
        _mark(save_pipeline, "write_part", page, "persist", orders.slow)
        page.begin()
        _train(orders, report, page)
        report("ended")
    except BaseException as error:
        report("died", why=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
        raise


class _Acks:
    """Tells what became durable, of saves that nobody waits for, too."""

    def __init__(self, report: _Report) -> None:
        self._report = report
        self._open: list[tierd.Save] = []

    def add(self, save: tierd.Save) -> None:
        self._open.append(save)

    def observe(self) -> None:
        for save in self._open:
            if save.done():
                error = save.error()
                attempt = save.part.checkpoint.attempt
                self._report("failed" if error else "local", step=save.step, attempt=attempt, why=str(error))
        self._open = [save for save in self._open if not save.done()]


def _train(orders: Orders, report: _Report, page: Page) -> None:
    seed, number = orders.seed, orders.rank
    noise = np.random.default_rng([seed, orders.launch])  # the same on every rank
    if orders.world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{orders.meeting}",
            rank=number,
            world_size=orders.world,
            timeout=timedelta(seconds=50),
        )
    report("restoring")
    given: set[tuple[str, int]] = set()
    tell_taken = page.counted(CALLS.index("tell"), report)
    _watch_giving(given)
    to = None if orders.daemon else []
    checkpointer = tierd.Checkpointer(orders.spool, RUN, to=to, slots=orders.slots)
    step = _restore(checkpointer, orders, report)
    attempt, acks = checkpointer.attempt, _Acks(report)
    last = None if orders.steps is None else step + orders.steps
    while last is None or step < last:
        step += 1
        report("begun", step=step, attempt=attempt)
        if is_staged(step):
            with page.within("stage"), checkpointer.stage(step) as directory:
                (directory / "sub").mkdir()
                (directory / "sub" / "data").write_bytes(staged(seed, attempt, step, number))
                time.sleep(0.7 * (noise.random() < 0.2))  # a slow writer's is not taken for a dead one's
            report("local", step=step, attempt=attempt)
        else:
            arrays = content(seed, attempt, step, number)
            state = {name: torch.from_numpy(array) for name, array in arrays.items()}
            save = checkpointer.save(
                step, {**state, "told": reported(seed, attempt, step, number)}, metrics={"loss": step}
            )
            tell_taken("returned", step=step, attempt=attempt, given=(attempt, step) in given)
            acks.add(save)
            for array in arrays.values():
                array.fill(0)  # training goes on: nothing of this may get in
            if (dice := noise.random()) < 0.3 or last:
                save.wait()
            if dice < 0.15 or last:
                _wait_for_tiers(save, orders, report)
        acks.observe()
        time.sleep(noise.random() * orders.pace)
        if step % AGAIN == AGAIN - 1 and not last:
            report("restoring")
            step = _restore(checkpointer, orders, report)
            attempt = checkpointer.attempt
    checkpointer.close()
    acks.observe()
    if orders.world > 1:
        distributed.destroy_process_group()


def _wait_for_tiers(save: tierd.Save, orders: Orders, report: _Report) -> None:
    for name in orders.tiers if orders.daemon else ():
        try:
            save.wait(name)
            report("tier", step=save.step, attempt=save.part.checkpoint.attempt, tier=name)
        except (CheckpointNotFound, DaemonUnavailable) as error:  # newer ones have retired it; the daemon was killed
            report("untold", step=save.step, why=str(error))


def _restore(checkpointer: tierd.Checkpointer, orders: Orders, report: _Report) -> int:
    """Restore, and hold every byte against what was saved; the step to go on from."""
    seed, number = orders.seed, orders.rank
    arrays = content(seed, "", 0, number)
    state: dict[str, Any] = {
        name: torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype) for name, array in arrays.items()
    }
    state["told"] = reported(seed, "", -1, number)
    try:
        found = checkpointer.restore(state)
        right = found is None or is_right(state, seed, found.attempt, found.step, number)
    except StateMismatch as error:
        if "stage()" not in str(error):
            raise
        found = checkpointer.restore()
        assert found is not None, "what was there for one restore was not there for the next"
        if (found.directory / "state.json").exists():  # a launch beside this one has saved meanwhile
            return _restore(checkpointer, orders, report)
        files = sorted(
            path.relative_to(found.directory).as_posix() for path in found.directory.rglob("*") if path.is_file()
        )
        right = files == ["manifest.json", "sub/data"] and (
            (found.directory / "sub" / "data").read_bytes() == staged(seed, found.attempt, found.step, number)
        )
    if found is None:
        report("restored", found=None)
        return -1
    skipped = [str(one) for one in found.skipped]
    report("restored", found=[found.attempt, found.step], tier=found.tier, right=right, skipped=skipped)
    return found.step


def _watch_giving(given: set[tuple[str, int]]) -> None:
    """Note which snapshots the daemon was told of: there is no other sign that it holds one (P11)."""
    real = giving.HandoffClient.hand_over

    def watched(self: Any, slot: int, arena: Any, manifest: Any, *more: Any) -> Any:
        answer = real(self, slot, arena, manifest, *more)
        if answer is not None:
            given.add((manifest.attempt, manifest.step))
        return answer

    giving.HandoffClient.hand_over = watched  # type: ignore[method-assign]
