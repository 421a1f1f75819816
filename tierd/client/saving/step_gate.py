"""The gate that delays an optimizer's step until the copy behind forward and backward is done.

Invariant: only tensors that attached optimizers alone change (their parameters and their own state) may be copied late.
The gate precedes every attached optimizer's step, and waits only for a copy that is running. A tensor that something
else was seen to change is never copied late again.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from tierd.client.saving.device_copies import DeviceCopies
from tierd.client.saving.save_jobs import Stats, short_switches
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.write_sampling import NONE_DEFERRED, DeferredTensors
from tierd.core.errors import ConfigError
from tierd.core.ids import PartId
from tierd.state.capture import Capture
from tierd.state.kinds.live_parameters import address_and_size, optimizer_tensors

log = logging.getLogger("tierd")
_gates: weakref.WeakSet[OptimizerStepGate] = weakref.WeakSet()


@atexit.register  # before the threads end that wait for the confirmation
def _confirm_all() -> None:
    for gate in list(_gates):
        gate.confirm()


class OptimizerStepGate:
    """The attached optimizers, and the snapshots that their steps wait for and confirm."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._pid = os.getpid()
        self._optimizers: dict[Optimizer, list[Any]] = {}  # optimizer -> the handles of its hooks
        self._stepping: dict[Optimizer, int] = {}  # optimizer -> the thread that makes its step
        self._pending: list[Snapshot] = []
        self._on_devices: list[DeviceCopies] = []  # copies that may still run; each optimizer may have its own streams
        # The late tensors, and what they depend on: one pair, because threads that save at once replace it.
        self._cached_deferred: tuple[tuple[object, ...], DeferredTensors] = (), NONE_DEFERRED
        self._shared_names: frozenset[str] = frozenset()  # names of tensors that something else changes as well
        _gates.add(self)

    def attach(self, optimizers: Iterable[Optimizer]) -> list[Optimizer]:
        """Attach optimizers; return all that are attached."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(f"attach({type(optimizer).__name__}): a torch.optim.Optimizer is wanted")
            if optimizer not in self._optimizers:
                before = optimizer.register_step_pre_hook(self._before_step)
                self._optimizers[optimizer] = [before, optimizer.register_step_post_hook(self._after_step)]
        self._cached_deferred = (), NONE_DEFERRED
        return list(self._optimizers)

    def detach(self) -> None:
        self.confirm()
        for handle in itertools.chain.from_iterable(self._optimizers.values()):
            handle.remove()
        self._optimizers, self._cached_deferred = {}, ((), NONE_DEFERRED)

    def deferred_tensors(self, capture: Capture) -> DeferredTensors:
        if not self._optimizers or self._stepping:  # a signal handler saves in the middle of a step
            return NONE_DEFERRED
        sizes = [(len(o.state), *(len(group["params"]) for group in o.param_groups)) for o in self._optimizers]
        signature = (capture.steady, tuple(sizes), self._shared_names)
        before, deferred = self._cached_deferred
        if signature != before:
            governed = self._governed(capture)
            late_tensors = {name: tensor for name, tensor in capture.tensors.items() if name in governed}
            names = capture.tensors.keys() - governed - capture.copies
            deferred = DeferredTensors(late_tensors, {name: capture.tensors[name] for name in names})
            self._cached_deferred = signature, deferred
        return deferred

    def changed_by_steps(self, replicas: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of the tensors that attached optimizers alone change."""
        if not self._optimizers or self._stepping or not replicas:
            return frozenset()
        places = {address_and_size(tensor) for optimizer in self._optimizers for tensor in optimizer_tensors(optimizer)}
        return frozenset(
            name
            for name, tensor in replicas.items()
            if name not in self._shared_names and address_and_size(tensor) in places
        )

    def report_interrupted(self, part: PartId) -> None:
        """Warn, before `part` is saved, of steps of this thread that an exception has ended. Each is reported once."""
        for optimizer in self.forget_interrupted():
            log.warning(
                "%s: a step of %s was interrupted before this save, so this checkpoint and later ones may mix "
                "parameters from before that step with others from after it; to be sure, restore an earlier checkpoint",
                part,
                type(optimizer).__name__,
            )

    def forget_interrupted(self) -> list[Optimizer]:
        """Forget the steps of this thread that an exception has ended, and return their optimizers.

        A step that is still at work is not one of them, because its hooks and its closure may save.
        """
        stepping = list(self._stepping.items())  # a copy, because other threads make steps meanwhile
        own_optimizers = [optimizer for optimizer, thread in stepping if thread == threading.get_ident()]
        interrupted = [optimizer for optimizer in own_optimizers if not _is_at_work(optimizer)]
        for optimizer in interrupted:
            self._stepping.pop(optimizer, None)
        return interrupted

    def _governed(self, capture: Capture) -> frozenset[str]:
        owned_places = {
            address_and_size(tensor) for optimizer in self._optimizers for tensor in optimizer_tensors(optimizer)
        }
        candidates, shared = {}, set()
        for name, tensor in capture.tensors.items():
            memory = tensor.untyped_storage().data_ptr()
            if (
                name not in capture.restless
                and name not in self._shared_names
                and tensor.nbytes
                and address_and_size(tensor) in owned_places
            ):
                candidates[name] = memory
            else:
                shared.add(memory)
        # A tensor that shares its storage with another one would share its version counter, too.
        return frozenset(name for name, memory in candidates.items() if memory not in shared)

    def watch(self, snapshot: Snapshot) -> None:
        """Make the next step wait for this snapshot."""
        self._pending.append(snapshot)
        if snapshot.copies:
            self._on_devices.append(snapshot.copies)

    def distrust(self, names: Iterable[str]) -> None:
        """Record that something else changes these tensors as well. Any thread may call this."""
        self._shared_names |= frozenset(names)

    def confirm(self, wait: bool = True) -> None:
        """Confirm copies. Called by the training thread at a point where none of its calls is still at work.

        Without `wait`, only finished copies are confirmed.
        """
        if os.getpid() != self._pid:  # a forked child has this object, but no thread that copies
            return
        # A signal handler may run between any two lines, and save: it adds one, and confirms those before it.
        if not self._pending:
            return
        with short_switches:
            while (snapshot := next(iter(self._pending), None)) and (wait or snapshot.is_copied):
                snapshot.confirm()
                with suppress(ValueError):
                    self._pending.remove(snapshot)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid:
            self._stepping[optimizer] = threading.get_ident()
            try:
                if self._pending:
                    start_s = time.perf_counter()
                    self.confirm()
                    self._stats.step_waited_s += time.perf_counter() - start_s
                self._hold()
            except BaseException:
                self._stepping.pop(optimizer, None)  # it has changed nothing yet
                raise

    def _hold(self) -> None:
        """Make the current stream of the stepping optimizer wait for copies that devices still run. The host has waited
        once for all optimizers; but each may have its own stream, and only a stream that was given the event waits.
        """
        for copies in list(self._on_devices):  # a signal handler may save, and add one
            if copies.is_complete:
                with suppress(ValueError):
                    self._on_devices.remove(copies)
            else:
                copies.hold_current()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.pop(optimizer, None)


def _is_at_work(optimizer: Optimizer) -> bool:
    """Whether a method of this optimizer is among the calls of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
