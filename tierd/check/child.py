"""One rank of one launch under check: the user's own loop, and a witness that may kill it.

Law: what was observed is in the record before anything else happens, and a kill is a real SIGKILL of this process, with
nothing of Python's or tierd's cleaning up behind it.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec
import xxhash

from tierd import observing
from tierd.check.history import KillPoint, Line, Observation, Setting, as_samples
from tierd.client.handoff import Given, HandOff
from tierd.client.save import Save
from tierd.commit import Written
from tierd.core.errors import ConfigError, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.spool import Spool
from tierd.stage import Stage

_PR_SET_PDEATHSIG = 1
_SAVES = 4  # the newest, of which some may not be durable yet, here or on another rank
_SETTLE = 30.0  # seconds that a kill after a step waits for saves that were begun before it


class Orders(msgspec.Struct, frozen=True):
    """What a process is started with. `kill` is for this rank, in this launch; `parent` the process that checks;
    `steps` the last one that it compares."""

    target: str
    spool: str
    record: str
    parent: int
    steps: int
    kill: str | None = None


class Witness:
    """Writes down what this process does, and kills it where the orders say."""

    def __init__(self, orders: Orders) -> None:
        self._fd = os.open(orders.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._kill = KillPoint.parse(orders.kill) if orders.kill else None
        self._steps = orders.steps
        self._dying: threading.Thread | None = None
        self._last: int | None = None
        self._saves: list[tuple[Save, Path]] = []
        self._pid = os.getpid()

    def observe(self, step: int, samples: Iterable[Hashable], loss: SupportsFloat | None) -> None:
        """One call of `tierd.observe`."""
        number = int(step)
        if self._last is not None and number <= self._last:
            raise ConfigError(f"tierd.observe: step {number} after step {self._last}: once a step, in rising order")
        if self._last is None:
            self._write(Line(setting=_setting()))
        self._last = number
        if self._kill is not None and self._kill.in_save and any(one.step >= self._kill.step for one, _ in self._saves):
            self._settle()  # the save that it dies in is under way: a fast loop must not be through before
        seen = Observation(number, as_samples(samples), _hexadecimal(loss), _generators())
        self._write(Line(observed=seen))
        if self._kill is not None and number >= self._kill.step:
            self._near(self._kill, number)

    def _near(self, kill: KillPoint, step: int) -> None:
        """`step` is the kill's or a later one."""
        if kill.in_save:
            return
        if not kill.delay_ms:
            self._settle()
            self._die()
        if self._dying is None:
            self._write(Line(killing=str(kill)))
            self._dying = threading.Thread(target=self._die_after, args=(kill.delay_ms / 1000,), daemon=True)
            self._dying.start()
        if step >= self._steps:  # a fast loop waits for its death here
            self._dying.join()

    def saving(self, step: int) -> None:
        """A save is about to become visible. Not in the thread that trains."""
        self._write(Line(saving=step))
        if self._kill is not None and self._kill.in_save and step >= self._kill.step:
            self._settle(step)
            self._die()

    def install(self) -> None:
        """Hear of saves wherever they are committed: here, or by the daemon for this process."""
        commit, answer, made = Stage.commit, HandOff.answer, Save.__init__

        @wraps(commit)
        def committing(stage: Stage, manifest: Manifest) -> None:
            if os.getpid() == self._pid:
                self.saving(manifest.step)
            commit(stage, manifest)

        @wraps(answer)
        def answering(line: HandOff, given: Given) -> Written:
            # It is the daemon's now, and its word is still to come. One thread asks, in the order of the saves.
            self.saving(next((save.step for save, _ in self._saves if not save.done()), 0))
            return answer(line, given)

        @wraps(made)
        def making(save: Save, part: PartId, spool: Spool) -> None:
            made(save, part, spool)
            self._saves = [*self._saves, (save, spool.path(part).parent)][-_SAVES:]

        Stage.commit, HandOff.answer, Save.__init__ = committing, answering, making  # type: ignore[assignment, method-assign]

    def _settle(self, before: float = math.inf) -> None:
        """Let saves that were begun, of steps below `before`, become durable, on every rank: so the step that is
        resumed from is the same each time. What becomes of one that is cut short is what `+save` asks."""
        end = time.monotonic() + _SETTLE
        for save, home in [one for one in self._saves if one[0].step < before]:
            try:
                save.wait(timeout=max(0.0, end - time.monotonic()))
                while sum(1 for _ in home.iterdir()) < save.part.world and time.monotonic() < end:
                    time.sleep(0.01)
            except (TierdError, TimeoutError, OSError):  # failed; or retention was faster
                continue

    def _die_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self._die()

    def _die(self) -> None:
        self._write(Line(killing=str(self._kill or "")))
        os.kill(self._pid, signal.SIGKILL)
        signal.pause()

    def _write(self, line: Line) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


def _setting() -> Setting:
    torch = sys.modules.get("torch")
    return Setting(
        torch_threads=torch.get_num_threads() if torch else None,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cpus=len(os.sched_getaffinity(0)),
        hash_seed=os.environ.get("PYTHONHASHSEED"),
    )


def _generators() -> dict[str, str]:
    """Digests of the global generators' states, of libraries that are loaded. Changes none of them."""
    states = {"python": repr(random.getstate()).encode()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = repr([repr(part) for part in numpy.random.get_state(legacy=True)]).encode()
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            states["cuda"] = b"".join(one.numpy().tobytes() for one in torch.cuda.get_rng_state_all())
    return {name: xxhash.xxh3_64_hexdigest(state) for name, state in states.items()}


def _hexadecimal(loss: SupportsFloat | None) -> str | None:
    if loss is None:
        return None
    try:
        return float(loss).hex()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"tierd.observe: the loss is a {type(loss).__name__}, and no number") from error


def _end_with_parent(parent: int) -> None:
    """No process of a check outlives it, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def load(target: str) -> Callable[[Path], object]:
    """The function that `module:function` names; raises `ConfigError`."""
    module, colon, name = target.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"{target!r}: MODULE:FUNCTION, as train:main")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise ConfigError(f"{target}: there is no module {error.name} in {Path.cwd()} or on sys.path") from error
        raise
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"{target}: {module} has no function {name}")
    return found  # type: ignore[no-any-return]


def main(text: str) -> None:
    """Run the loop; returns when it returns."""
    orders = msgspec.json.decode(text, type=Orders)
    _end_with_parent(orders.parent)
    witness = Witness(orders)
    witness.install()
    observing.begin(witness.observe)
    try:
        load(orders.target)(Path(orders.spool))
    except ConfigError as error:
        sys.exit(f"{error}")
