"""Which live tensors may receive saved values directly, before a state is loaded as a whole.

Invariant: of such a tensor the load itself would only copy the saved values into the same memory. So a tensor counts
only if torch's own code copies into it, if no other target shares its memory, and if the saved tensor has no second
reader. Everything else is loaded from an image of the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tierd.state.aliasing import TargetWrite
from tierd.state.kinds import stored_arrays
from tierd.state.kinds.dtensors import local_of, tensors_in
from tierd.state.kinds.training_objects import is_extra_state, keeper_prefixes
from tierd.state.load_check import is_loaded_in_place
from tierd.state.state_tree import SEQUENCES, leaves, pair_values
from tierd.state.value_kinds import PLAIN, LoadKind, load_kind_of


def direct_targets(state: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return, by the address of a saved tensor's first byte, the live tensor that may receive its bytes.

    The saved tensors are views of a file's image, whose values need not be read. Both have the same dtype and shape.
    """
    readers = Counter(tensor.data_ptr() for tensor in tensors_in(saved) if tensor.numel())
    targets: dict[int, torch.Tensor] = {}
    for live, stored in _pairs(state, saved):
        readers[stored.data_ptr()] -= 1
        targets.setdefault(stored.data_ptr(), live)
    shared = _shared_addresses(state)
    shared |= {address for address, n in Counter(live.data_ptr() for live in targets.values()).items() if n > 1}
    return {
        address: live for address, live in targets.items() if not readers[address] and live.data_ptr() not in shared
    }


def _pairs(target: Any, saved: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield live tensors with the saved ones that torch's own code, or this package, copies into them."""
    kind = load_kind_of(target)
    if isinstance(target, nn.Module):
        yield from _module_pairs(target, saved)
    elif kind is LoadKind.TENSOR:
        if is_loaded_in_place(target, saved) and _is_plain(target, saved):
            yield target, saved
    elif kind is LoadKind.MAPPING and isinstance(saved, dict):
        for key, value in target.items():
            if key in saved:
                yield from _pairs(value, saved[key])
    elif kind is LoadKind.SEQUENCE and isinstance(saved, SEQUENCES) and is_loaded_in_place(target, saved):
        for _, live, stored in pair_values(target, saved):
            yield from _pairs(live, stored)


def _module_pairs(module: nn.Module, saved: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    keepers = keeper_prefixes(module)
    if not isinstance(saved, dict) or keepers is None:
        return
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for key, stored in saved.items():
        live = tensors.get(key)
        if live is not None and not key.startswith(keepers) and not is_extra_state(key) and _is_plain(live, stored):
            yield live, stored


def _is_plain(live: torch.Tensor, stored: Any) -> bool:
    return (
        type(live) in PLAIN
        and type(stored) in PLAIN
        and bool(stored.numel())
        and (live.dtype, live.shape, live.device.type) == (stored.dtype, stored.shape, "cpu")
        and live.layout is torch.strided
        and live.is_contiguous()
        and not (live.is_conj() or live.is_neg() or live.is_inference())
    )


def _shared_addresses(state: Mapping[str, Any]) -> set[int]:
    """Return the addresses at which targets begin that share memory with another one, or occur twice."""
    writes = [TargetWrite(((), None), memory, None) for memory in _memory_of(dict(state)) if memory.nbytes]
    spans = Counter((write.start, write.end) for write in writes)
    shared = {start for (start, _), count in spans.items() if count > 1}
    farthest, owner = 0, 0
    for start, end in sorted(spans):
        if start < farthest:
            shared |= {start, owner}
        if end > farthest:
            farthest, owner = end, start
    return shared


def _memory_of(state: object) -> Iterator[Any]:
    """Yield the tensors and arrays on the host into which a load writes, as far as they are known."""
    for leaf in leaves(state):
        if stored_arrays.is_array(leaf):
            yield leaf
        tensors = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
        for tensor in tensors:
            local = local_of(tensor) if isinstance(tensor, torch.Tensor) else tensor
            if type(local) in PLAIN and local.device.type == "cpu" and local.layout is torch.strided:
                yield local
