"""One rank of one checked launch: the user's own loop, and a witness that records it and may kill it.

Invariant: the witness writes each observation to the record before anything else happens. A kill is a real SIGKILL of
this process, so that neither Python nor tierd cleans up.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec

from tierd import observing
from tierd.check.data_pipeline import global_generators
from tierd.check.launch_records import (
    BEFORE_FIRST_STEP,
    KillPoint,
    Observation,
    ProcessSettings,
    RecordLine,
    as_samples,
)
from tierd.check.state_capture import PassHooks, StateCapturer
from tierd.check.user_code import call_on_import
from tierd.client.saving.save_jobs import Save
from tierd.client.saving.snapshot_handoff import HandoffClient, PendingHandoff
from tierd.core.errors import ConfigError, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import Manifest
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.spool.stage import Stage

_PR_SET_PDEATHSIG = 1
_MAX_SAVES = 4  # the newest saves, some of which may not be durable yet, here or on another rank
_SETTLE_S = 30.0  # seconds that a kill after a step waits for saves that were begun before it


class WitnessOrders(msgspec.Struct, frozen=True):
    """The orders with which a rank's process starts."""

    target: str
    spool: str
    record: str
    parent: int  # the id of the checking process
    steps: int  # the last step that is compared
    kill: str | None = None  # the kill point of this rank in this launch
    captured: tuple[int, ...] = ()  # the steps after which the witness captures the state
    every_save: bool = False
    is_later: bool = False  # whether this is not the run's first launch


class Witness:
    """Records the actions of this process, and kills it at the ordered point."""

    def __init__(self, orders: WitnessOrders) -> None:
        self._fd = os.open(orders.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._kill_point = KillPoint.parse(orders.kill) if orders.kill else None
        self._last_compared_step = orders.steps
        self._killer: threading.Thread | None = None
        self._last_step: int | None = None
        self._saves: list[tuple[Save, Path]] = []
        self._pid = os.getpid()
        self._orders = orders
        self._states = StateCapturer()
        self._is_end_captured = self._is_after_restore = False
        self._passes = PassHooks(self._before_forward, self._before_backward, self._after_load)
        self._passes.forward_after_step = self._passes.backward_after_step = BEFORE_FIRST_STEP

    def observe(
        self,
        step: int,
        samples: Iterable[Hashable],
        loss: SupportsFloat | None,
        epoch: int | None,
        validation: Iterable[Hashable],
    ) -> None:
        """Record one call of `tierd.observe`."""
        number = int(step)
        if self._last_step is not None and number <= self._last_step:
            raise ConfigError(
                f"tierd.observe: step {number} after step {self._last_step}: once a step, in rising order"
            )
        is_first = self._last_step is None
        if is_first:
            self._write(RecordLine(setting=_process_setting()))
            if self._passes.forward_after_step == BEFORE_FIRST_STEP:
                self._passes.forward_after_step = None
            if self._passes.backward_after_step == BEFORE_FIRST_STEP:
                self._passes.backward_after_step = None
        self._last_step = number
        if (
            self._kill_point is not None
            and self._kill_point.in_save
            and any(save.step >= self._kill_point.step for save, _ in self._saves)
        ):
            # The save in which the process dies is in flight, and a fast loop must not end before it.
            self._wait_for_saves()
        number_of_epoch = None if epoch is None else int(epoch)
        validation_samples = as_samples(validation)
        observation = Observation(
            number, as_samples(samples), _hexadecimal(loss), _generator_digests(), number_of_epoch, validation_samples
        )
        self._write(RecordLine(observation=observation))
        if number >= self._last_compared_step and not self._is_end_captured:
            self._is_end_captured = True
            # The state of a later step is not the state of the last one.
            self._capture(number, "end")
        elif self._is_after_restore or (is_first and self._orders.is_later) or number in self._orders.captured:
            self._is_after_restore = False  # the first step after a restore: its state is evidence for causes
            self._capture(number, "step")
            if number in self._orders.captured:
                self._passes.forward_after_step = self._passes.backward_after_step = number
        if self._kill_point is not None and number >= self._kill_point.step:
            self._schedule_kill(self._kill_point, number)

    def _capture(self, step: int, at: str) -> None:
        capture = msgspec.structs.replace(self._states.capture(step, at), after=self._last_step)
        self._write(RecordLine(start_capture=capture) if step == BEFORE_FIRST_STEP else RecordLine(capture=capture))

    def _before_forward(self, after: int) -> None:
        self._capture(after, "forward")

    def _before_backward(self, after: int) -> None:
        self._write(RecordLine(capture=self._states.capture_gradients(after)))

    def _after_load(self) -> None:
        """Capture the state before the launch's first step again, because a loop may train something before a load."""
        if self._last_step is None and not self._is_after_restore:
            self._passes.forward_after_step = self._passes.backward_after_step = BEFORE_FIRST_STEP

    def _schedule_kill(self, kill: KillPoint, step: int) -> None:
        """Kill the process, now or soon: `step` is the kill point's or a later one."""
        if kill.in_save:
            return
        if not kill.delay_ms:
            self._wait_for_saves()
            self._die()
        if self._killer is None:
            self._write(RecordLine(kill_point=str(kill)))
            self._killer = threading.Thread(target=self._die_after, args=(kill.delay_ms / 1000,), daemon=True)
            self._killer.start()
        if step >= self._last_compared_step:  # a fast loop waits here for the kill
            self._killer.join()

    def record_save(self, step: int) -> None:
        """Record that a save is about to become visible. Called in another thread than the training thread."""
        self._write(RecordLine(saving_step=step))
        if self._kill_point is not None and self._kill_point.in_save and step >= self._kill_point.step:
            self._wait_for_saves(step)
            self._die()

    def install(self) -> None:
        """Intercept commits in this process, hand-offs to the daemon, and new saves."""
        commit, answer, init = Stage.commit, HandoffClient.answer, Save.__init__

        @wraps(commit)
        def committing(stage: Stage, manifest: Manifest) -> None:
            if os.getpid() == self._pid:
                self.record_save(manifest.step)
            commit(stage, manifest)

        @wraps(answer)
        def answering(line: HandoffClient, handoff: PendingHandoff) -> CommittedPart:
            # Called when the daemon has the snapshot and has not answered yet. One thread waits for all answers, in the
            # order of the saves, so this answer belongs to the oldest save that is not done.
            self.record_save(next((save.step for save, _ in self._saves if not save.done()), 0))
            return answer(line, handoff)

        @wraps(init)
        def making(save: Save, part: PartId, spool: Spool) -> None:
            init(save, part, spool)
            self._saves = [*self._saves, (save, spool.path(part).parent)][-_MAX_SAVES:]

        self._passes.install()
        call_on_import({"tierd.client.checkpointer": self._intercept_checkpointer})
        Stage.commit, HandoffClient.answer, Save.__init__ = committing, answering, making  # type: ignore[assignment, method-assign]

    def _intercept_checkpointer(self, module: Any) -> None:
        """Intercept the states that a loop saves or restores into."""
        kind = module.Checkpointer
        save, restore = kind.save, kind.restore

        @wraps(save)
        def beginning(checkpointer: Any, step: int, state: Any, *args: Any, **kwargs: Any) -> Any:
            self._states.note_state(state, "save", int(step))
            if self._orders.every_save and step <= self._last_compared_step:
                self._capture(step, "save")
            return save(checkpointer, step, state, *args, **kwargs)

        @wraps(restore)
        def restoring(checkpointer: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
            restored = restore(checkpointer, state, *args, **kwargs)
            self._states.note_state(state, "restore", -1 if restored is None else restored.step)
            if restored is not None:
                self._is_after_restore = True
                self._capture(restored.step, "loaded")
                self._passes.forward_after_step = self._passes.backward_after_step = restored.step
            return restored

        kind.save, kind.restore = beginning, restoring

    def _wait_for_saves(self, before: float = math.inf) -> None:
        """Wait until the saves of steps below `before` are durable on every rank.

        The step of the resume is thus the same each time. The kill point `+save` tests the opposite, a save that is
        interrupted.
        """
        end = time.monotonic() + _SETTLE_S
        for save, home in [pair for pair in self._saves if pair[0].step < before]:
            try:
                save.wait(timeout=max(0.0, end - time.monotonic()))
                while sum(1 for _ in home.iterdir()) < save.part.world and time.monotonic() < end:
                    time.sleep(0.01)
            except (TierdError, TimeoutError, OSError):  # the save failed, or retention deleted it already
                continue

    def _die_after(self, seconds: float) -> None:
        time.sleep(seconds)
        self._die()

    def _die(self) -> None:
        self._write(RecordLine(kill_point=str(self._kill_point or "")))
        os.kill(self._pid, signal.SIGKILL)
        signal.pause()

    def _write(self, line: RecordLine) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


def _process_setting() -> ProcessSettings:
    torch = sys.modules.get("torch")
    return ProcessSettings(
        torch_threads=torch.get_num_threads() if torch else None,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cpus=len(os.sched_getaffinity(0)),
        hash_seed=os.environ.get("PYTHONHASHSEED"),
    )


def _generator_digests() -> dict[str, str]:
    return {name: leaf.digest for name, leaf in global_generators().items()}


def _hexadecimal(loss: SupportsFloat | None) -> str | None:
    if loss is None:
        return None
    try:
        return float(loss).hex()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"tierd.observe: the loss is a {type(loss).__name__}, and no number") from error


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the checking process ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def import_loop(target: str) -> Callable[[Path], object]:
    """Import the function that `module:function` names. Raises `ConfigError`."""
    module, colon, name = target.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"{target!r}: MODULE:FUNCTION, as train:main")
    try:
        function: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise ConfigError(f"{target}: there is no module {error.name} in {Path.cwd()} or on sys.path") from error
        raise
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ConfigError(f"{target}: {module} has no function {name}")
    return function  # type: ignore[no-any-return]


def main(text: str) -> None:
    """Run the loop under the orders in `text`; return when the loop returns."""
    orders = msgspec.json.decode(text, type=WitnessOrders)
    _end_with_parent(orders.parent)
    witness = Witness(orders)
    witness.install()
    observing.set_recorder(witness.observe)
    try:
        import_loop(orders.target)(Path(orders.spool))
    except ConfigError as error:
        sys.exit(f"{error}")
