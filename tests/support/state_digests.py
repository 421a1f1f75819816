"""A state's digest, by which processes and launches compare theirs bit for bit."""

from __future__ import annotations

import hashlib

import torch
from torch.utils import _pytree


def state_digest(state: object) -> str:
    """SHA-256, hexadecimal, of the bytes of a state's tensors and the text of its other leaves, in their order."""
    whole = hashlib.sha256()
    for leaf in _pytree.tree_leaves(state):
        if torch.is_tensor(leaf):
            whole.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            whole.update(repr(leaf).encode())
    return whole.hexdigest()
