"""The trained part of a model whose base is loaded from elsewhere, as LoRA and other adapters of PEFT have one.

    state = {"model": tierd.adapters.trainable.TrainableState(model), "optimizer": optimizer, ...}

A save then holds the parameters that are trained, and all buffers. Of the frozen parameters it holds names, shapes,
dtypes and digests; a restore compares these with the model that was built anew, before it loads anything.

Invariant: a parameter is left out only if its bytes are those that the model was built with. Writes are noticed by
memory, by autograd's counter and, because a write through `.data` does not raise that, by a sample of the elements.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from tierd.core.errors import ConfigError, StateMismatch
from tierd.core.units import list_few
from tierd.state.kinds.dtensors import is_dtensor

log = logging.getLogger("tierd")
_TRAINED, _FROZEN = "trained", "frozen"
_BLOCK = 1 << 26  # bytes that are copied from a device at once
_SAMPLE = 1024  # elements: an update of a hundredth of all of them is missed once in 30,000 times

# The memory of a parameter, how often it was written to, and a sample of its bytes.
_Mark = tuple[tuple[int, int, bytes], ...]


class TrainableState:
    """The trained parameters and the buffers of `model`, as an entry of the state.

    Make it when the model is built and on its device, before it trains: the frozen parameters are digested then, which
    reads each of them once. A parameter that is trained later, or changed in place, is in every save from then on.

    Args:
        model: with the weights that every launch builds it with.

    Raises:
        ConfigError: a parameter is a DTensor, or is on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._trained: set[str] = set()  # ever, in this launch or before
        self._forms: dict[str, str] = {}  # of the frozen parameters: shape, dtype and digest
        self._marks: dict[str, _Mark] = {}
        for name, value in self._parameters():
            if is_dtensor(value) or value.is_meta:
                kind = "a DTensor" if is_dtensor(value) else "on the meta device"
                raise ConfigError(f"{name}: {kind}; save the whole model, or with tierd.dcp")
            if value.requires_grad:
                self._trained.add(name)
            else:
                self._forms[name], self._marks[name] = _form(value), _mark(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the trained parameters, the buffers, and the digests of the others."""
        changed = [
            name for name, value in self._parameters() if name not in self._trained and self._changes(name, value)
        ]
        if changed:
            log.warning("%d parameters were frozen and are saved from now on, as %s is", len(changed), changed[0])
            self._trained.update(changed)
        frozen = {name: form for name, form in self._forms.items() if name not in self._trained}
        trained = {name: value for name, value in self.model.state_dict().items() if name not in frozen}
        return {_TRAINED: trained, _FROZEN: frozen}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or the whole state of the model.

        Raises:
            StateMismatch: the model lacks a parameter, has another one, or its frozen parameters are not those with
                which the saved ones were trained. Nothing was loaded.
        """
        if state_dict.keys() == {_TRAINED, _FROZEN}:
            trained, frozen = state_dict[_TRAINED], state_dict[_FROZEN]
        else:
            trained, frozen = state_dict, {}
        self._check(trained, frozen)
        self.model.load_state_dict(trained, strict=False)
        for name, value in self._parameters():
            if name in frozen:
                continue
            if name not in self._forms or _form(value) != self._forms[name] or frozen:
                self._trained.add(name)
            else:
                self._marks[name] = _mark(value)

    def _changes(self, name: str, value: nn.Parameter) -> bool:
        mark = _mark(value)
        if not value.requires_grad and self._marks.get(name) == mark:
            return False
        # Moved to another device, or written with the same bytes, as DDP does when it begins.
        if not value.requires_grad and self._forms.get(name) == _form(value):
            self._marks[name] = mark
            return False
        return True

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by all their names in the model's state."""
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield name, value

    def _check(self, trained: Mapping[str, Any], frozen: Mapping[str, str]) -> None:
        model_state = self.model.state_dict(keep_vars=True)
        saved = trained.keys() | frozen.keys()
        lacking, extra = sorted(model_state.keys() - saved), sorted(saved - model_state.keys())
        if lacking or extra:
            where = "not in the checkpoint" if lacking else "in the checkpoint, but not in the model"
            names = lacking or extra
            raise StateMismatch(f"{list_few(names)} {where}; build the model with the same base and the same adapter")
        mismatches = [
            f"{name}: {_kind(value)} in the checkpoint, {_kind(model_state[name])} here"
            for name, value in trained.items()
            if isinstance(value, torch.Tensor)
            and isinstance(model_state[name], torch.Tensor)
            and _kind(value) != _kind(model_state[name])
        ]
        if mismatches:
            raise StateMismatch(list_few(mismatches))
        differing = [name for name, form in frozen.items() if self._form_here(name, model_state[name]) != form]
        if differing:
            name = differing[0]
            raise StateMismatch(
                f"{len(differing)} of {len(frozen)} frozen parameters are not those with which this checkpoint was "
                f"trained, and it does not hold them: {name} was {frozen[name]}, and is "
                f"{self._form_here(name, model_state[name])} here. Build the model from the same base weights"
            )

    def _form_here(self, name: str, value: torch.Tensor) -> str:
        is_unchanged = name in self._forms and self._marks[name] == _mark(value)
        return self._forms[name] if is_unchanged else _form(value)


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a tensor; a subclass, as of a quantized one, has several."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _inner_tensors(getattr(tensor, name))
    else:
        yield tensor.detach()


def _mark(tensor: torch.Tensor) -> _Mark:
    return tuple((inner.data_ptr(), inner._version, _sample(inner)) for inner in _inner_tensors(tensor))


def _sample(tensor: torch.Tensor) -> bytes:
    elements = tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, tensor.element_size())
    return elements[:: max(1, len(elements) // _SAMPLE)].cpu().numpy().tobytes()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _form(tensor: torch.Tensor) -> str:
    digest = xxhash.xxh3_128()
    for inner in _inner_tensors(tensor):
        flat = inner.contiguous().reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat), _BLOCK):
            digest.update(flat[begin : begin + _BLOCK].cpu().numpy().data)
    return f"{_kind(tensor)} {digest.hexdigest()}"
