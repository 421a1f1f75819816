"""Find targets of a load that are one object or share memory, and check that each can receive its saved values.

Invariant: only addresses and saved bytes are read, never a target's values, and nothing is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from tierd.state.kinds import stored_arrays
from tierd.state.single_values import form_of, path_part_text, path_text
from tierd.state.state_tree import Path

_CPU = torch.device("cpu")
StatePlace = tuple[Path, str | None]  # a path, and the name of a tensor within the module at that path

_WAY_OUT = "give each its own memory, for example by .clone(), or untie them"


class TargetWrite:
    """A tensor or array that a load fills in place: its memory range and the values that it will receive.

    Attributes:
        start, end: the lowest address, and the address after the last byte.
        dims: length and stride in bytes of each dimension longer than 1; None if the target is contiguous.
    """

    __slots__ = ("dims", "end", "place", "saved", "start", "target")

    def __init__(self, place: StatePlace, target: Any, saved: Any) -> None:
        # The target is kept because its memory, once freed, could be reused by the next `state_dict()`.
        self.place, self.target, self.saved = place, target, saved
        if isinstance(target, torch.Tensor):
            self.start = target.data_ptr()
        else:
            self.start = target.__array_interface__["data"][0]
        self.dims: list[tuple[int, int]] | None = None  # None if contiguous
        if target.is_contiguous() if isinstance(target, torch.Tensor) else target.flags.c_contiguous:
            self.end = self.start + target.nbytes
            return
        strides = target.strides if stored_arrays.is_array(target) else [n * target.itemsize for n in target.stride()]
        self.dims = [(n, step) for n, step in zip(target.shape, strides, strict=True) if n != 1]
        self.end = self.start + sum((n - 1) * step for n, step in self.dims if step > 0) + target.itemsize
        self.start += sum((n - 1) * step for n, step in self.dims if step < 0)

    @property
    def form(self) -> object:
        if isinstance(self.target, torch.Tensor):
            return self.start, form_of(self.target)
        return self.start, self.target.dtype, self.target.shape, self.target.strides

    @property
    def is_self_overlapping(self) -> bool:
        extent = self.target.itemsize
        for step, n in sorted((abs(step), n) for n, step in self.dims or ()):
            if step < extent:
                return True
            extent += (n - 1) * step
        return False

    def image(self) -> torch.Tensor:
        """Return the bytes that the elements will have, in their order."""
        saved = self.saved
        if isinstance(saved, torch.Tensor):
            saved = torch.conj_physical(saved) if self.target.is_conj() else saved
            return _as_bytes(saved.neg() if self.target.is_neg() else saved)
        return _as_bytes(saved)

    def paint(self, canvas: torch.Tensor, low: int) -> bool:
        """Write the image into `canvas`, which represents memory from `low`; return whether it can be read back."""
        view, image = self._views_on(canvas, low)
        view.copy_(image)
        return torch.equal(view, image)

    def holds_image(self, canvas: torch.Tensor, low: int) -> bool:
        return torch.equal(*self._views_on(canvas, low))

    def _views_on(self, canvas: torch.Tensor, low: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.image()
        if self.dims is None:
            return canvas[self.start - low : self.end - low], image
        size = self.target.itemsize
        image = image.view([*(n for n, _ in self.dims), size])
        image = image.flip([index for index, (_, step) in enumerate(self.dims) if step < 0])
        steps = [*(abs(step) for _, step in self.dims), 1]
        return canvas.as_strided(image.shape, steps, self.start - low), image


class AliasedTargets:
    """Collects the targets that a load would fill, and reports those that cannot all receive their saved values."""

    def __init__(self) -> None:
        self._writes: dict[torch.device, list[TargetWrite]] = {}
        self._containers: dict[int, tuple[Path, Any]] = {}

    def add(self, place: StatePlace, target: Any, saved: Any) -> None:
        """Add a plain tensor or array, and its saved values of the same dtype and shape."""
        if target.nbytes:
            write = TargetWrite(place, target, saved)
            if write.start:  # 0 on a device that has no addresses
                device = target.device if isinstance(target, torch.Tensor) else _CPU
                self._writes.setdefault(device, []).append(write)

    def add_container(self, path: Path, target: object, saved: Any) -> Iterator[str]:
        """Add a list or dict that is filled in place.

        Yields a message if the same object was added under an earlier path with other saved content.
        """
        before, first = self._containers.setdefault(id(target), (path, saved))
        if first is not saved and not is_same_content(first, saved):
            pair = f"{path_text(before)} and {path_text(path)}"
            yield f"{pair} are one {type(target).__name__} here, and differ in the checkpoint"

    def conflicts(self) -> Iterator[str]:
        """Yield a message for each conflict between targets that share memory. One sweep by address finds them all."""
        for writes in self._writes.values():
            near: list[TargetWrite] = []
            end = 0
            for write in sorted(writes, key=attrgetter("start")):
                if near and write.start >= end:
                    yield from _conflicts(near)
                    near, end = [], 0
                near.append(write)
                end = max(end, write.end)
            yield from _conflicts(near)


def _conflicts(near: list[TargetWrite]) -> Iterator[str]:
    """Yield the conflicts of writes whose ranges overlap; `near` is in the order of their addresses."""
    if len(near) == 1 and near[0].dims is None:
        return
    distinct: dict[object, TargetWrite] = {}
    for write in near:
        first = distinct.setdefault(write.form, write)
        if not _same(first.saved, write.saved):
            yield _conflict_text(first, write)
    remaining = list(distinct.values())
    if all(write.dims is None for write in remaining):
        # The write that ends last agrees with all before it, so each further write needs to agree with that one alone.
        farthest = remaining[0]
        for write in remaining[1:]:
            span = min(write.end, farthest.end) - write.start
            offset = write.start - farthest.start
            if not torch.equal(farthest.image()[offset : offset + span], write.image()[:span]):
                yield _conflict_text(farthest, write)
            if write.end > farthest.end:
                farthest = write
    elif len(remaining) > 1 or remaining[0].is_self_overlapping:
        yield from _paint_conflicts(remaining)


def _paint_conflicts(writes: list[TargetWrite]) -> Iterator[str]:
    """Yield conflicts as `_conflicts` does, for any strides: make all writes on a canvas, then compare."""
    low = writes[0].start
    canvas = torch.zeros(max(write.end for write in writes) - low, dtype=torch.uint8)
    for write in writes:
        if not write.paint(canvas, low):
            place = _show_write(write)
            yield f"{place}: its own elements share memory, and differ in the checkpoint; pass a contiguous one"
            return
    for write in writes:
        if not write.holds_image(canvas, low):
            for second in writes:
                write.paint(canvas, low)
                second.paint(canvas, low)
                if not write.holds_image(canvas, low):
                    yield _conflict_text(write, second)
                    return


def _conflict_text(first: TargetWrite, second: TargetWrite) -> str:
    return f"{_show_write(first)} and {_show_write(second)} share memory here, and differ in the checkpoint; {_WAY_OUT}"


def _show_write(write: TargetWrite) -> str:
    path, name = write.place
    return path_text(path) if name is None else f"{path_part_text(name)} of {path_text(path)}"


def _as_bytes(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).view(torch.uint8)
    import numpy as np

    return torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view("u1"))


def _same(first: Any, second: Any) -> bool:
    """Whether two tensors or arrays of one dtype and shape are bitwise equal."""
    return first is second or torch.equal(_as_bytes(first), _as_bytes(second))


def is_same_content(first: Any, second: Any) -> bool:
    """Whether two restored values are the same; tensors are compared bitwise."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor) or stored_arrays.is_array(first):
        same_form = first.shape == second.shape and first.dtype == second.dtype
        return same_form and (not first.nbytes or _same(first, second))
    if isinstance(first, dict):
        return is_same_content(list(first), list(second)) and is_same_content(
            list(first.values()), list(second.values())
        )
    if isinstance(first, list | tuple | deque):
        return len(first) == len(second) and all(map(is_same_content, first, second))
    return first == second or repr(first) == repr(second)


def expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dimension repeats the same memory, so that it cannot be written in place."""
    # The first test decides for almost every tensor, and takes a tenth of the time of the second.
    return 0 in strides and any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True))
