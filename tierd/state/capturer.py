"""Capture a state save after save, without repeating work for the parts that did not change.

Invariant: a capture equals that of a new `Capturer` for the same state at the same moment: names, bytes and refusals.
The structure found by the last full walk (`state/capture_plan.py`) is only a guess, so a capture compares every part of
it with the state. On any doubt the full walk is repeated. One exception: a capture finds the tensors that an optimizer
moves again only after parameters were frozen or freed. That is safe because the answer decides only the tensors' order
in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch.optim import Optimizer

from tierd.state.capture import Capture
from tierd.state.capture_plan import CapturePlan
from tierd.state.encoder import Answers, Encoder
from tierd.state.kinds.live_parameters import names_changed_by_step, optimizers_in, trained_parameters
from tierd.state.state_tree import pause_collection
from tierd.state.tensor_file import TensorFileLayout, TensorFilePlanner


class Capturer:
    """Capture the states of one job, one after the other: a capture that begins during another one would mix them.

    `kept_nodes` is the largest structure that is kept, because a larger one costs too much memory between saves.
    """

    def __init__(self, kept_nodes: int = 200_000) -> None:
        self._kept_nodes = kept_nodes
        self._plan: CapturePlan | None = None
        self._planner: TensorFilePlanner | None = None
        self._layout: TensorFileLayout | None = None
        self._moving: frozenset[str] = frozenset()
        self._training_modes: list[bool] = []

    def capture(self, state: Mapping[str, object]) -> Capture:
        """Take a state apart, and plan the layout of its tensors. Calls every `state_dict()` once.

        Raises:
            StateRefused: a value has no encoding (the message names its path), a `state_dict()` raised (chained), or
                the header is too large. Only `tree()` checks the size of the tree.
        """
        with pause_collection():
            return self._capture(state)

    def _capture(self, state: Mapping[str, object]) -> Capture:
        answers: Answers = {}
        capture = None
        if self._plan is not None:
            # Any error is suppressed, because the full walk then continues from the answers and reports it.
            with suppress(Exception):
                capture = self._plan.follow(state, answers)
        # Searched after the walk, because the walk leaves the parameters in the CPU cache.
        optimizers, trains = _optimizers_of(state)
        if capture is not None and trains == self._training_modes:
            return self._recapture(capture, optimizers)
        self._plan = None
        walk = Encoder(answers)
        root = walk.begin(state)
        layout = self._laid_out(walk.tensors, optimizers)
        plan = CapturePlan(walk, root, layout)
        self._plan, self._training_modes = plan if walk.nodes <= self._kept_nodes else None, trains
        return plan.capture(walk.tensors, walk.dtensors, walk.holes)

    def _recapture(self, capture: Capture, optimizers: list[Optimizer]) -> Capture:
        """Return the capture with a layout that includes the tensors added since the previous capture."""
        assert self._plan is not None
        added, self._plan.added = self._plan.added, {}
        if not added:
            return capture
        assert self._planner is not None
        moved = frozenset[str]()
        with suppress(Exception):  # for the reason given in `_optimizers_of`
            moved = names_changed_by_step(optimizers, added)
        self._moving |= moved
        for name, tensor in added.items():
            self._planner.add(name, tensor, moved)
        self._layout = self._planner.layout()
        self._plan.lay_out(self._layout)
        return self._plan.capture(capture.tensors, capture.dtensors, capture._holes)

    def _laid_out(self, tensors: Mapping[str, torch.Tensor], optimizers: list[Optimizer]) -> TensorFileLayout:
        moved: frozenset[str] = frozenset()
        with suppress(Exception):  # for the reason given in `_optimizers_of`
            moved = names_changed_by_step(optimizers, tensors)
        entries = self._layout.entries if self._layout else {}
        same = tensors.keys() == entries.keys() and all(
            (tensor.dtype, tensor.shape) == (entries[name].dtype, entries[name].shape)
            for name, tensor in tensors.items()
        )
        if self._layout is None or not same or moved != self._moving:
            self._planner = TensorFilePlanner(tensors, moved)
            self._layout, self._moving = self._planner.layout(), moved
        return self._layout


class CapturerPool:
    """Capturers for saves of several threads, and of signal handlers that interrupt them: each has one for itself.

    Invariant: a capturer is in the pool only between captures, and never after one that failed, because that one may
    have left its plan half changed.
    """

    def __init__(self) -> None:
        self._idle: list[Capturer] = []  # its methods are atomic; a lock could be held by an interrupted thread

    def capture(self, state: Mapping[str, object]) -> Capture:
        try:
            capturer = self._idle.pop()  # the one that was used last
        except IndexError:
            capturer = Capturer()
        capture = capturer.capture(state)
        self._idle.append(capturer)
        return capture


def _optimizers_of(state: Mapping[str, object]) -> tuple[list[Optimizer], list[bool]]:
    """Return the optimizers in a state, and for their parameters whether each is trained."""
    try:
        optimizers = optimizers_in(state)
        return optimizers, trained_parameters(optimizers)
    # Some objects raise when their attributes are read; only the tensors' order depends on this, so the save continues.
    except Exception:
        return [], []
