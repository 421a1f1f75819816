"""Stage the state for `dcp.async_save`, which writes while training continues.

Tensors are copied into an arena; torch's own stager handles the rest.

Invariant: the copies are not read before they are complete. The writing thread waits for that. Pickling the copies, for
a save in another process, waits for it as well.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tierd.client.checkpointer import Checkpointer, made_of
from tierd.client.saving.arena_staging import ArenaCopy
from tierd.client.saving.save import Save
from tierd.core.errors import StateRefused
from tierd.state.classify import IMMUTABLE
from tierd.state.kinds.dtensors import is_dtensor, local_of
from tierd.state.values import is_storable

if TYPE_CHECKING:
    from tierd.core.manifest import Manifest

_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
Other = Callable[[dict[str, Any]], dict[str, Any]]


class StagedState(dict[str, Any]):
    """A state whose tensors may still be being copied."""

    staged: ArenaCopy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.staged is not None:
            self.staged.wait()
            self.staged.room = None  # not reused, because pickling moves its tensors into shared memory
        return dict, (dict(self),)


def stage(checkpointer: Checkpointer, draft: Manifest, state: dict[str, Any], fallback: Other) -> StagedState | None:
    """Copy a state. Returns when training may change it, except for tensors that only an attached optimizer changes.

    Args:
        draft: manifest of the part that will hold the state.
        fallback: stages the values that are neither plain nor tensors that an arena accepts.

    Returns:
        The staged state, or None if an arena does not accept these tensors.
    """
    start_s = time.perf_counter()
    tensors: list[torch.Tensor] = []
    unstaged: dict[str, Any] = {}
    for value in _leaves(state):
        if _fits_arena(value):
            tensors.append(value)
        elif type(value) not in IMMUTABLE:
            unstaged[str(len(unstaged))] = value
    try:
        staged = made_of(checkpointer).staging.stage(Save(draft.part, made_of(checkpointer).spool), draft, tensors)
    except (StateRefused, MemoryError):
        return None
    copies, fallback_copies = iter(staged.tensors), iter(fallback(unstaged).values() if unstaged else ())

    def copied(value: Any) -> Any:
        if type(value) in _CONTAINERS:
            if isinstance(value, dict):
                return type(value)((key, copied(inner)) for key, inner in value.items())
            return type(value)(copied(inner) for inner in value)
        if _fits_arena(value):
            return next(copies)
        return value if type(value) in IMMUTABLE else next(fallback_copies)

    staged_state = StagedState(copied(state))
    staged_state.staged = staged
    checkpointer.stats.blocked_s += time.perf_counter() - start_s
    return staged_state


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in _CONTAINERS:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _fits_arena(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and is_storable(local_of(value)) and (is_dtensor(value) or is_storable(value))
    )
