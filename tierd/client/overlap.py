"""Overlap: copying behind forward and backward, and the gate that holds an optimizer's step until the copy is done.

Law: only tensors that attached optimizers alone change (their parameters and their own state) may be copied late; the
gate stands in front of every attached optimizer, and never holds for anything but a copy that is under way.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from tierd.client.capture import Capture
from tierd.client.owned import owned, place
from tierd.client.save import Stats
from tierd.client.snapshot import Snapshot
from tierd.core.errors import ConfigError


class Gate:
    """The attached optimizers, and the snapshot that they wait for."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._pid = os.getpid()
        self._optimizers: dict[Optimizer, list[Any]] = {}  # -> its hooks' handles
        self._stepping: set[Optimizer] = set()
        self._pending: list[Snapshot] = []
        self._late: frozenset[str] = frozenset()
        self._known: tuple[object, ...] = ()

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
        self._wait()
        for handle in itertools.chain.from_iterable(self._optimizers.values()):
            handle.remove()
        self._optimizers, self._late, self._known = {}, frozenset(), ()

    def late(self, capture: Capture) -> frozenset[str]:
        """Names of the tensors in `capture` that only attached optimizers change."""
        if not self._optimizers or self._stepping:  # a signal handler saves in the middle of a step
            return frozenset()
        sizes = [(len(o.state), *(len(group["params"]) for group in o.param_groups)) for o in self._optimizers]
        known = (capture.steady, tuple(sizes))
        if known != self._known:
            self._late = self._governed(capture)
            self._known = known
        return self._late

    def _governed(self, capture: Capture) -> frozenset[str]:
        own = {place(tensor) for optimizer in self._optimizers for tensor in owned(optimizer)}
        late, shared = {}, set()
        for name, tensor in capture.tensors.items():
            memory = tensor.untyped_storage().data_ptr()
            if name not in capture.restless and tensor.nbytes and place(tensor) in own:
                late[name] = memory
            else:
                shared.add(memory)
        # Beside something else in one memory they would share its version counter, too.
        return frozenset(name for name, memory in late.items() if memory not in shared)

    def watch(self, snapshot: Snapshot) -> None:
        """Hold the next step for this snapshot."""
        for former in tuple(self._pending):  # of optimizers that step no more
            if former.over and former in self._pending:
                self._pending.remove(former)
        self._pending.append(snapshot)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() == self._pid:  # a forked child has a copy of all this, and nobody who copies
            self._stepping.add(optimizer)
            self._wait()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping.discard(optimizer)

    def _wait(self) -> None:
        while self._pending:  # a signal's handler may add to them meanwhile
            begun = time.perf_counter()
            snapshot = self._pending[0]
            snapshot.wait_for_copy()
            if snapshot in self._pending:
                self._pending.remove(snapshot)
            self._stats.step_waited_s += time.perf_counter() - begun
