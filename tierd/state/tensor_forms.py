"""Check in few calls whether tensors have their known forms and lie within their storages.

Invariant: any difference that the layout could show is found. No tensor is held.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierd.state.structure import MOST_ADDED, picker
from tierd.state.values import TensorForm, form_of, span_of

_LARGE = 1 << 20  # bytes
_storage, _nbytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


class Forms:
    """The forms of tensors, compared without holding any tensor."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, TensorForm]]) -> None:
        listed = list(pairs)
        self._forms = [(form, tensor.requires_grad) for tensor, form in listed]
        self._guard = _guard([tensor for tensor, _ in listed])
        self._guarded = list(range(len(listed)))
        self._alone: list[int] = []  # indices of the tensors that the guard does not cover
        self._pick = picker(self._guarded)

    def insert(self, at: int, tensor: torch.Tensor) -> None:
        """Insert a tensor at the index `at`."""
        self._forms.insert(at, (form_of(tensor), tensor.requires_grad))
        self._guarded = [index + (index >= at) for index in self._guarded]
        self._alone = [at, *(index + (index >= at) for index in self._alone)]
        self._pick = picker(self._guarded)

    def fit(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._forms):
            return False
        if self._guard is not None and len(self._alone) <= MOST_ADDED**2:
            guarded = self._pick(tensors)
            if torch.is_grad_enabled():
                passes = self._guard(*guarded)
            else:
                with torch.enable_grad():  # because with grad disabled the guard ignores requires_grad
                    passes = self._guard(*guarded)
            if passes and all(_form_of(tensors[index]) == self._forms[index] for index in self._alone):
                return True
        if list(map(_form_of, tensors)) != self._forms:
            return False
        if self._alone:
            self._guard, self._guarded, self._alone = _guard(tensors), list(range(len(tensors))), []
            self._pick = picker(self._guarded)
        return True


class Extents:
    """The extents of tensors in their storages, so that no tensor is read beyond a storage that was freed or shrunk.

    Freeing memory usually changes a tensor's address too, so only tensors with a new address and large tensors are
    checked. A small tensor is missed only if its memory was freed and a smaller block was allocated at the same
    address.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._spans = list(map(span_of, tensors))
        self._sizes = [tensor.element_size() for tensor in tensors]
        self._large = [index for index, tensor in enumerate(tensors) if tensor.nbytes >= _LARGE]

    def insert(self, at: int, tensor: torch.Tensor) -> None:
        """Insert a tensor at the index `at`."""
        self._spans.insert(at, span_of(tensor))
        self._sizes.insert(at, tensor.element_size())
        self._large = [index + (index >= at) for index in self._large] + [at] * (tensor.nbytes >= _LARGE)

    def fit(self, tensors: list[torch.Tensor], moved: Iterable[int] = ()) -> bool:
        """Return whether the large tensors, and those at the indices `moved`, lie entirely within their storages."""
        pick = picker([*self._large, *moved])
        checked = pick(tensors)
        begins = map(operator.mul, map(torch.Tensor.storage_offset, checked), pick(self._sizes))
        ends = map(operator.add, begins, pick(self._spans))
        return all(map(operator.le, ends, map(_nbytes, map(_storage, checked))))


def _form_of(tensor: torch.Tensor) -> tuple[TensorForm, bool]:
    return form_of(tensor), tensor.requires_grad


def _guard(tensors: list[torch.Tensor]) -> Callable[..., bool] | None:
    """Return torch's own check of many tensors' types, dispatch keys, dtypes, devices, shapes and strides in one call.

    It is ten times as fast as asking each tensor. It is private to torch, so tensors that it does not confirm are
    compared one by one. Where torch lacks it, all tensors are. The check holds no tensor.
    """
    try:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        with torch.enable_grad():
            kind: Any = torch._C._dynamo.guards.TensorGuards
            guards = kind(
                *tensors,
                dynamic_dims_sizes=sizes,
                dynamic_dims_strides=strides,
            )
        check: Callable[..., bool] = guards.check
        return check if tensors and check(*tensors) else None
    except Exception:
        return None
