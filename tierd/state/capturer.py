"""Capture a state save after save, without repeating work for the parts that did not change.

Invariant: a capture equals that of a new `Capturer` for the same state at the same moment: names, bytes and refusals.
The structure found by the last full walk (`state/capture_plan.py`) is only a guess, so a capture compares every part of
it with the state. On any doubt the full walk is repeated. One exception: a capture finds the tensors that an optimizer
moves again only after parameters were frozen or freed. That is safe because the answer decides only the tensors' order
in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch.optim import Optimizer

from tierd.state.capture import Capture
from tierd.state.capture_plan import CapturePlan
from tierd.state.encoder import Answers, Encoder
from tierd.state.kinds.live_parameters import names_changed_by_step, optimizers_in, trained_parameters
from tierd.state.replicas import ReplicaGroup
from tierd.state.state_tree import pause_collection
from tierd.state.tensor_file import UNSHARED, TensorFileLayout, TensorFilePlanner


class Capturer:
    """Capture the states of one job, one after the other: a capture that begins during another one would mix them.

    `kept_nodes` is the largest structure that is kept, because a larger one costs too much memory between saves.
    With a `group`, a capture has only this rank's share of the replicated tensors. What is replicated is asked with
    each full walk.
    """

    def __init__(self, kept_nodes: int = 200_000, group: ReplicaGroup | None = None) -> None:
        self._kept_nodes, self._group = kept_nodes, group
        self._share = UNSHARED
        self._forms: dict[str, tuple[torch.dtype, torch.Size]] = {}  # of all tensors, also those elsewhere
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
                if self._plan.added and self._share is not UNSHARED:
                    capture = None  # the shares change
        # Searched after the walk, because the walk leaves the parameters in the CPU cache.
        optimizers, trains = _optimizers_of(state)
        if capture is not None and trains == self._training_modes:
            return self._shared(self._recapture(capture, optimizers))
        self._plan = None
        walk = Encoder(answers)
        root = walk.begin(state)
        layout = self._laid_out(state, walk, optimizers)
        plan = CapturePlan(walk, root, layout, self._share.forms)
        self._plan, self._training_modes = plan if walk.nodes <= self._kept_nodes else None, trains
        return self._shared(plan.capture(walk.tensors, walk.dtensors, walk.holes))

    def _shared(self, capture: Capture) -> Capture:
        """Return the capture without the tensors that lie in other ranks' files."""
        if self._share is UNSHARED:
            return capture
        whole = capture.tensors
        if elsewhere := self._share.elsewhere:
            capture = dataclasses.replace(
                capture,
                tensors={name: tensor for name, tensor in whole.items() if name not in elsewhere},
                dtensors=[(name, tensor) for name, tensor in capture.dtensors if name not in elsewhere],
            )
        return dataclasses.replace(
            capture,
            division=self._share.digest,
            senders=self._share.senders,
            rounds=self._share.rounds,
            whole=whole,
        )

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

    def _laid_out(self, state: Mapping[str, object], walk: Encoder, optimizers: list[Optimizer]) -> TensorFileLayout:
        tensors = walk.tensors
        moved: frozenset[str] = frozenset()
        with suppress(Exception):  # for the reason given in `_optimizers_of`
            moved = names_changed_by_step(optimizers, tensors)
        share = self._group.share(state, tensors, walk.dtensors) if self._group is not None else UNSHARED
        forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if self._layout is None or forms != self._forms or moved != self._moving or share != self._share:
            own = {name: tensor for name, tensor in tensors.items() if name not in share.elsewhere}
            self._planner = TensorFilePlanner(own, moved, share)
            self._layout, self._moving = self._planner.layout(), moved
            self._forms, self._share = forms, share
        return self._layout


class CapturerPool:
    """Capturers for saves of several threads, and of signal handlers that interrupt them: each has one for itself.

    Invariant: a capturer is in the pool only between captures, and never after one that failed, because that one may
    have left its plan half changed.
    """

    def __init__(self, group: ReplicaGroup | None = None) -> None:
        self._group = group
        self._idle: list[Capturer] = []  # its methods are atomic; a lock could be held by an interrupted thread

    def capture(self, state: Mapping[str, object]) -> Capture:
        try:
            capturer = self._idle.pop()  # the one that was used last
        except IndexError:
            capturer = Capturer(group=self._group)
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
