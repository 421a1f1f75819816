"""One capture of a state: its live tensors, and the values that cannot change any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierd.state.decodable import Skeleton
from tierd.state.tensor_file import TensorFileLayout
from tierd.state.values import encode

_MAX_QUICK_ITEMS = 1 << 13  # values in sequences, or characters, that are encoded within a few milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A state at one moment. Its tensors are live, so training may change them; its other values cannot change.

    Attributes:
        tensors: as `FlatState.tensors`.
        dtensors: the DTensors whose local shards are in `tensors`, each with its shard's name.
        layout: of the tensor file; the same object as in the previous capture while the tensors stay the same.
        places: a token; the same object as in the previous capture while every tensor keeps its name and address.
        steady: a token as `places`, but it ignores the tensors in `restless`.
        restless: names of the tensors whose addresses changed between captures of this structure, such as RNG states,
            which are made anew.
        copies: names of the tensors that the capture itself made, of arrays and generators; nothing else holds them.
        devices: CUDA devices that hold tensors. A copy from any other device blocks, so it needs no synchronization.
    """

    tensors: dict[str, torch.Tensor]
    dtensors: Sequence[tuple[str, torch.Tensor]]
    layout: TensorFileLayout
    places: object
    steady: object
    restless: frozenset[str]
    copies: frozenset[str]
    devices: tuple[torch.device, ...]
    _skeleton: Skeleton
    _holes: Sequence[object]

    def tree(self, pause: Callable[[], None] | None = None) -> bytes:
        """Return everything but the tensors as typed JSON, as it was at the capture.

        Any thread may call this at any time.

        Args:
            pause: called about every millisecond if encoding takes many.

        Raises:
            StateRefused: the tree is too large.
        """
        return encode(self._skeleton.pieces, self._holes, pause)

    def is_encoded_soon(self) -> bool:
        """Return whether `tree` and `check` take at most a few milliseconds together."""
        hole_items = sum(len(hole) for hole in self._holes if isinstance(hole, tuple | dict | str | bytes))
        return hole_items <= _MAX_QUICK_ITEMS and self._skeleton.is_decoded_soon()

    def is_checked_soon(self, tree: bytes) -> bool:
        """Return whether `check` takes at most a few milliseconds."""
        return self._skeleton.is_checked_soon(tree)

    def check(self, tree: bytes, pause: Callable[[], None] | None = None) -> None:
        """Decode the result of `tree()` as a restore does; fast if the structure has been decoded before.

        Any thread may call this.

        Args:
            pause: as for `tree`.

        Raises:
            StateRefused: a restore could not decode the tree; the message names the path.
        """
        self._skeleton.check(tree, pause)
