"""What a value is to the last bit, as text: worked out without tierd, so that two processes can compare.

As a program, `python -m support.exact SPOOL FILE`: restores every step that the file names, into nothing and then into
blank targets of the same kinds, and prints what each came back as.
"""

from __future__ import annotations

import copy
import json
import struct
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

Groups = dict[object, int]
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def described(value: Any, groups: Groups | None = None, *, live: bool = False) -> Any:
    """JSON that is equal for equal values alone, types, order and NaNs included.

    Args:
        groups: numbers the tensors that are one; None: not told.
        live: the value was not restored: parameters count as tensors, objects as their state, and what is the same
            memory seen the same way as one tensor.
    """
    if live and callable(getattr(value, "state_dict", None)):
        return described(value.state_dict(), groups, live=live)
    if isinstance(value, torch.Tensor):
        return ["tensor", *_tensor(value), None if groups is None else _group(value, groups, live)]
    if type(value) is torch.Generator:
        return ["generator", str(value.device), bytes(value.get_state().tolist()).hex()]
    if type(value) is np.ndarray:
        return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, np.generic):
        text = [ord(c) for c in value] if isinstance(value, np.str_) else None
        return ["scalar", type(value).__name__, value.dtype.str, value.tobytes().hex(), text]
    kind = type(value).__name__
    if isinstance(value, dict):
        extra = [vars(value).get("_metadata")] if type(value) is OrderedDict else []
        extra += [getattr(value, "default_factory", None) and value.default_factory.__name__]
        pairs = [
            [described(key, groups, live=live), described(inner, groups, live=live)] for key, inner in value.items()
        ]
        return [kind, pairs, [described(one, groups, live=live) for one in extra]]
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(json.dumps(described(member)) for member in value)]
    if isinstance(value, (list, tuple, deque)):
        inside = list(value) if type(value) is not torch.Size else [int(n) for n in value]
        return [kind, getattr(value, "maxlen", None), [described(inner, groups, live=live) for inner in inside]]
    if isinstance(value, (slice, range)):
        return [kind, [described(part) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, float):
        return [kind, struct.pack(">d", value).hex()]
    if isinstance(value, complex):
        return [kind, described(value.real), described(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return [kind, value.hex()]
    if isinstance(value, str):
        return [kind, [ord(c) for c in value]]
    return [kind, hex(value) if type(value) is int else str(value)]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    if not plain.numel():  # whose strides may be any
        plain = plain.new_empty(plain.shape)
    raw = plain.view(_BYTES[plain.element_size()]).contiguous().reshape(-1).view(torch.uint8)
    return [str(tensor.dtype), list(tensor.shape), raw.numpy().tobytes().hex()]


def _group(tensor: torch.Tensor, groups: Groups, live: bool) -> int | None:
    if not tensor.numel():
        return None
    form = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return groups.setdefault((tensor.data_ptr(), form) if live else id(tensor), len(groups))


def blank(value: Any) -> Any:
    """A target of the same kinds with nothing in it."""
    if isinstance(value, torch.Tensor):
        return (
            torch.empty(value.shape, dtype=value.dtype).view(_BYTES[value.element_size()]).zero_().view(value.dtype)
            if not value.dtype.is_complex
            else torch.zeros(value.shape, dtype=value.dtype)
        )
    if type(value) is torch.Generator:
        return torch.Generator()
    if type(value) is np.ndarray:
        return np.zeros_like(value)
    if isinstance(value, dict) and not any(map(_is_unlike_itself, value)):
        made = copy.copy(value)
        made.clear()
        made.update({key: blank(inner) for key, inner in value.items()} if type(value) is not Counter else {})
        for key in value if type(value) is Counter else ():
            made[key] = blank(value[key])
        return made
    if type(value) in (list, tuple):
        return type(value)(blank(inner) for inner in value)
    return None


def _is_unlike_itself(key: Any) -> bool:
    """Whether it holds a NaN, so that what was saved under it cannot be found again."""
    return any(map(_is_unlike_itself, key)) if isinstance(key, tuple) else bool(key != key)


def main(spool: Path, asked: Path) -> None:
    import tierd

    with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
        for step, names in json.loads(asked.read_text()):
            state: dict[str, Any] = dict.fromkeys(names)
            checkpointer.restore(state, step=step)
            groups: Groups = {}
            first = [[*described(name), described(value, groups)] for name, value in state.items()]
            targets = {name: blank(value) for name, value in state.items()}
            checkpointer.restore(targets, step=step)
            again = [[*described(name), described(value)] for name, value in targets.items()]
            print(json.dumps([step, first, again]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
