"""A trainer whose optimizer is attached, and what tests of it compare."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.training import fresh, train

import tierd
from tierd.client.saving.snapshot import Snapshot


class Pace:
    """Holds every late copy until it is told to go on, and lets it crawl then: what can tear, tears."""

    def __init__(self, monkeypatch) -> None:
        self.crawl = 0.0003
        self._changed = threading.Condition()
        self._free = -1  # up to which step they may go on
        self.begun: set[int] = set()  # steps of which something was copied late
        real = Snapshot._copy_tensors

        def begin(snapshot, into, names):
            names = list(names)
            if not snapshot.deferred_names.issuperset(names) or not names:
                real(snapshot, into, names)
                return
            step = snapshot.save.step
            with self._changed:
                self.begun.add(step)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: step <= self._free, 60), f"nobody let the copy of {step} go on"
            for name in names:
                time.sleep(self.crawl)
                real(snapshot, into, [name])

        monkeypatch.setattr(Snapshot, "_copy_tensors", begin)

    def free(self, step: int) -> None:
        with self._changed:
            self._free = max(self._free, step)
            self._changed.notify_all()

    def reached(self, step: int) -> None:
        """Return when the late copy of `step` is at its begin: all else of it is copied."""
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.begun, 60), f"the copy of {step} did not begin"


@pytest.fixture
def pace(monkeypatch):
    pace = Pace(monkeypatch)
    yield pace
    pace.free(10**9)


def frozen(value: Any) -> Any:
    """A synchronous copy of a state: every entry asked for its own, every tensor and array cloned."""
    if hasattr(value, "load_state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(frozen(inner) for inner in value)
    return copy.deepcopy(value)


def differences(expected: Any, found: Any, path: str = "state") -> list[str]:
    """Where two states are not the same to the last bit."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return [f"{path}: another form"]
        mine, other = (tensor.detach().cpu().resolve_conj().contiguous().flatten() for tensor in (expected, found))
        wrong = (mine.view(torch.uint8) != other.view(torch.uint8)).sum().item() if mine.numel() else 0
        return [f"{path}: {wrong} bytes of {mine.nbytes}"] if wrong else []
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and expected.shape == found.shape and expected.tobytes() == found.tobytes()
        return [] if same else [f"{path}: another array"]
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return [f"{path}: keys {list(expected)} and {list(found)}"]
        return [line for key in expected for line in differences(expected[key], found[key], f"{path}[{key!r}]")]
    if type(expected) in (list, tuple):
        if type(expected) is not type(found) or len(expected) != len(found):
            return [f"{path}: {expected!r:.60} and {found!r:.60}"]
        pairs = zip(expected, found, strict=True)
        return [line for at, pair in enumerate(pairs) for line in differences(*pair, f"{path}[{at}]")]
    return [] if repr(expected) == repr(found) else [f"{path}: {expected!r:.60} and {found!r:.60}"]


def loaded(spool, steps, keys) -> Iterator[tuple[int, dict[str, Any]]]:
    """The checkpoints of these steps, verified, as plain values."""
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for step in steps:
            found = dict.fromkeys(keys)
            assert checkpointer.restore(found, step=step).step == step
            yield step, found


def committed(spool) -> list[int]:
    return [part.checkpoint.step for part in spool.parts()]


@pytest.fixture
def job(local):
    """A training under way, its optimizer attached."""
    state = fresh()
    train(state, 2)
    local.attach(state["optimizer"])
    return state


def check(spool, step: int, reference) -> None:
    ((_, found),) = loaded(spool, [step], reference)
    assert not differences(reference, found)
