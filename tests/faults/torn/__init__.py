"""Late writes: something that is no attached optimizer writes to parameters while a save copies them behind training.

A trial saves parameters that hold one value each, and lets one writer change all of them a moment later: an in-place
operation, a collective, a fused optimizer, a view of NumPy's, a kernel of its own. Then the attached optimizer steps.
Required: the checkpoint is refused, or it holds either what was there before the write or what was there after it. What
holds some of both is a mixture. Bytes are read back without tierd. Of races: a seed says who writes what and when, not
who is first.
"""

from __future__ import annotations

import ctypes
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from faults import hands
from faults.rounds import Lost, Round
from torch import nn

import tierd
from tierd.client.checkpointer import internals
from tierd.core.errors import TornSnapshot

UNIT = "late writes"
SHORT = 150
GATE = 10_000

_BEFORE, _AFTER = 1.0, 3.0
_COPY_S = 0.004  # about what a copy of the largest state takes; writes begin at any moment of it

Parameters = list[nn.Parameter]


class Ranks:
    """Two ranks of a gloo group, which are two threads; the second one has what the first is to get."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self._threads = ThreadPoolExecutor(2)
        made = self._threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2))
        self._mine, self._other = list(made)

    def broadcast(self, parameters: Parameters) -> None:
        for one in parameters:
            self._both(lambda group, tensor: group.broadcast([tensor], self._options()), one, _AFTER)

    def all_reduce(self, parameters: Parameters) -> None:
        for one in parameters:
            self._both(lambda group, tensor: group.allreduce([tensor]), one, _AFTER - _BEFORE)

    def _both(
        self, call: Callable[[dist.ProcessGroupGloo, torch.Tensor], dist.Work], one: nn.Parameter, theirs: float
    ) -> None:
        other = torch.full_like(one, theirs, requires_grad=False)
        work = [call(self._mine, one.detach()), call(self._other, other)]
        for each in work:
            each.wait()

    @staticmethod
    def _options() -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = 1
        return options


def in_place(parameters: Parameters) -> None:
    with torch.no_grad():
        for one in parameters:
            one.clamp_(min=_AFTER)


def foreach(parameters: Parameters) -> None:
    with torch.no_grad():
        torch._foreach_mul_(parameters, _AFTER / _BEFORE)


def load_state_dict(parameters: Parameters) -> None:
    nn.ParameterList(parameters).load_state_dict(
        {str(number): torch.full_like(one, _AFTER) for number, one in enumerate(parameters)}
    )


def data(parameters: Parameters) -> None:
    for one in parameters:
        one.data.fill_(_AFTER)


def numpy_view(parameters: Parameters) -> None:
    for one in parameters:
        one.detach().numpy()[...] = _AFTER


def own_kernel(parameters: Parameters) -> None:
    for one in parameters:
        value = np.full(one.shape, _AFTER, np.float32)
        ctypes.memmove(one.data_ptr(), value.ctypes.data, value.nbytes)


def fused_optimizer(parameters: Parameters) -> None:
    for one in parameters:
        one.grad = torch.full_like(one, _BEFORE - _AFTER)
    torch.optim.SGD(parameters, 1.0, fused=True).step()
    for one in parameters:
        one.grad = None


def another_thread(parameters: Parameters) -> None:
    thread = threading.Thread(target=in_place, args=(parameters,))
    thread.start()
    thread.join()


_ranks: list[Ranks] = []


def _group() -> Ranks:
    if not _ranks:
        _ranks.append(Ranks())
    return _ranks[0]


WRITERS: dict[str, Callable[[Parameters], None]] = {
    "in place": in_place,
    "foreach": foreach,
    "load_state_dict": load_state_dict,
    ".data": data,
    "NumPy view": numpy_view,
    "own kernel": own_kernel,
    "fused optimizer": fused_optimizer,
    "another thread": another_thread,
    "broadcast": lambda parameters: _group().broadcast(parameters),
    "all_reduce": lambda parameters: _group().all_reduce(parameters),
}
MET = tuple(f"{name}: refused" for name in WRITERS)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a seed says."""

    writer: str
    threads: int
    sizes: tuple[int, ...]  # elements of each parameter
    delay_s: float  # between the return of `save` and the write

    @classmethod
    def of(cls, seed: int) -> Trial:
        noise = random.Random(seed)
        few = noise.choice([1, 1, 1, 2, 5])
        return cls(
            writer=list(WRITERS)[seed % len(WRITERS)],
            threads=(1, 8)[seed // 100 % 2],  # changing it takes longer than a trial
            sizes=tuple(noise.randrange(1 << 20, (4 << 20) // few + (1 << 20)) for _ in range(few)),
            delay_s=noise.choice([0.0, noise.random() * _COPY_S]),
        )


def run(work: Round) -> None:
    with hands.room(work) as home:
        hands.spread(work, lambda: _prepare(home), hands=1, batch=1)


def _prepare(home: Path) -> hands.Trial:
    logging.getLogger("tierd").setLevel(logging.CRITICAL)  # most saves fail, as they should
    checkpointer = tierd.Checkpointer(home / "spool", "run", to=[])
    return lambda seed: (1, [_play(Trial.of(seed), seed, checkpointer, home / "spool")])


def _play(trial: Trial, seed: int, checkpointer: tierd.Checkpointer, spool: Path) -> str:
    if torch.get_num_threads() != trial.threads:
        torch.set_num_threads(trial.threads)
    parameters = [nn.Parameter(torch.full((size,), _BEFORE)) for size in trial.sizes]
    optimizer = torch.optim.SGD(parameters, 0.1)
    checkpointer.attach(optimizer)
    # A name of its own: what was torn once is not copied late again under its name.
    save = checkpointer.save(seed, {f"of seed {seed}": dict(enumerate(parameters))})
    end = time.perf_counter() + trial.delay_s
    while time.perf_counter() < end:
        pass
    WRITERS[trial.writer](parameters)
    optimizer.step()
    _detach(checkpointer, optimizer)
    if any(not bool((one == _AFTER).all()) for one in parameters):
        raise Lost(f"{trial}: the writer did not write what it was to write")
    try:
        save.wait(timeout=60)
    except Exception as error:
        if not isinstance(error.__cause__, TornSnapshot):
            raise
        return f"{trial.writer}: refused"
    (part,) = spool.glob("run/*/*")
    try:
        return f"{trial.writer}: kept as {_what_is_in(part / 'tensors.safetensors', trial)}"
    finally:
        shutil.rmtree(part.parent)


def _detach(checkpointer: tierd.Checkpointer, optimizer: torch.optim.Optimizer) -> None:
    """An attached optimizer would be kept, and with it its parameters, until the checkpointer is closed."""
    handles = internals(checkpointer).gate._optimizers.pop(optimizer)
    for handle in handles:
        handle.remove()


def _what_is_in(path: Path, trial: Trial) -> str:
    """Whether a tensor file holds what was before the write, or what was after it."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:begin])
    entries.pop("__metadata__", None)
    if sorted(entry["shape"][0] for entry in entries.values()) != sorted(trial.sizes):
        raise Lost(f"{trial}: the file holds {entries}")
    values = np.frombuffer(raw, np.float32, offset=begin)
    old, new = int((values == _BEFORE).sum()), int((values == _AFTER).sum())
    if old + new != len(values):
        raise Lost(f"{trial}: {len(values) - old - new} elements are neither from before the write nor from after it")
    if old and new:
        raise Lost(
            f"{trial}: the checkpoint is a mixture: {old} elements from before the write and {new} from after it"
        )
    return "before" if old else "after"
