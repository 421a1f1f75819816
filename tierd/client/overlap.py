"""Overlap: copying behind forward and backward, and the gate that holds an optimizer's step until the copy is done.

Law: only tensors that attached optimizers alone change (their parameters and their own state) may be copied late; the
gate stands in front of every attached optimizer, and never holds for anything but a copy that is under way. A tensor
that something else was seen to change is not copied late again.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch.optim import Optimizer

from tierd.client.capture import Capture
from tierd.client.copies import Copies
from tierd.client.owned import owned, place
from tierd.client.sampling import NONE, Late
from tierd.client.save import Stats
from tierd.client.snapshot import Snapshot
from tierd.client.turns import short_turns
from tierd.core.errors import ConfigError

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


@atexit.register  # before the threads end that wait for it
def _confirm_all() -> None:
    for gate in list(_gates):
        gate.confirm()


class Gate:
    """The attached optimizers, and the snapshots that they wait for and confirm."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._pid = os.getpid()
        self._optimizers: dict[Optimizer, list[Any]] = {}  # -> its hooks' handles
        self._stepping: set[Optimizer] = set()
        self._pending: list[Snapshot] = []
        self._on_devices: list[Copies] = []  # that may still be under way; each optimizer has streams of its own
        self._late = NONE
        self._known: tuple[object, ...] = ()
        self._others: frozenset[str] = frozenset()  # names of what something else changes as well
        _gates.add(self)

    def attach(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(f"attach({type(optimizer).__name__}): a torch.optim.Optimizer is wanted")
            if optimizer not in self._optimizers:
                before = optimizer.register_step_pre_hook(self._before_step)
                self._optimizers[optimizer] = [before, optimizer.register_step_post_hook(self._after_step)]
        self._known = ()

    def detach(self) -> None:
        """Let every optimizer go; a copy under way is waited for."""
        self.confirm()
        for handle in itertools.chain.from_iterable(self._optimizers.values()):
            handle.remove()
        self._optimizers, self._late, self._known = {}, NONE, ()

    def late(self, capture: Capture) -> Late:
        """The tensors in `capture` that only attached optimizers change."""
        if not self._optimizers or self._stepping:  # a signal handler saves in the middle of a step
            return NONE
        sizes = [(len(o.state), *(len(group["params"]) for group in o.param_groups)) for o in self._optimizers]
        known = (capture.steady, tuple(sizes), self._others)
        if known != self._known:
            own = self._governed(capture)
            late = {name: tensor for name, tensor in capture.tensors.items() if name in own}
            names = capture.tensors.keys() - own - capture.copies
            self._late = Late(late, {name: capture.tensors[name] for name in names})
            self._known = known
        return self._late

    def _governed(self, capture: Capture) -> frozenset[str]:
        own = {place(tensor) for optimizer in self._optimizers for tensor in owned(optimizer)}
        late, shared = {}, set()
        for name, tensor in capture.tensors.items():
            memory = tensor.untyped_storage().data_ptr()
            if name not in capture.restless and name not in self._others and tensor.nbytes and place(tensor) in own:
                late[name] = memory
            else:
                shared.add(memory)
        # Beside something else in one memory they would share its version counter, too.
        return frozenset(name for name, memory in late.items() if memory not in shared)

    def watch(self, snapshot: Snapshot) -> None:
        """Hold the next step for this snapshot."""
        self._pending.append(snapshot)
        if snapshot.copies:
            self._on_devices.append(snapshot.copies)

    def distrust(self, names: Iterable[str]) -> None:
        """Something else changes these tensors as well. Any thread may say so."""
        self._others |= frozenset(names)

    def confirm(self, wait: bool = True) -> None:
        """Confirm copies: the thread that trains is here, and at nothing else.

        Args:
            wait: for those that are under way; else only what is copied is confirmed.
        """
        if os.getpid() != self._pid:  # a forked child has a copy of all this, and nobody who copies
            return
        # A signal's handler may come at any line, and save: it adds one, and confirms those before it.
        if not self._pending:
            return
        with short_turns:
            while (snapshot := next(iter(self._pending), None)) and (wait or snapshot.copied):
                snapshot.confirm()
                with suppress(ValueError):
                    self._pending.remove(snapshot)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid:
            self._stepping.add(optimizer)
            if self._pending:
                begun = time.perf_counter()
                self.confirm()
                self._stats.step_waited_s += time.perf_counter() - begun
            self._hold()

    def _hold(self) -> None:
        """Have the stream of the optimizer that steps now wait for what devices still copy. The host has waited, once
        for all optimizers; but they may have a stream each, and only those that were told wait."""
        for copies in list(self._on_devices):  # a signal's handler may save, and add one
            if copies.are_over:
                with suppress(ValueError):
                    self._on_devices.remove(copies)
            else:
                copies.hold_current()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.discard(optimizer)
