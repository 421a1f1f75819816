"""Name the kind of a captured value, by its path, its owner and its content.

Invariant: pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tierd.check.history import Taken
from tierd.check.leaves import ValueLeaf

POSITION = "batches read"  # the end of the path of how far a loader is
DATA = frozenset({"position", "epoch", "shuffle", "buffer", "prefetch", "order", "data"})
_EPOCH, _SEED = re.compile(r"epoch"), re.compile(r"seed")
_POSITION = re.compile(r"position|pos|sample|index|idx|offset|cursor|consumed|yielded|drawn|read|at")
_PREFETCH = re.compile(r"queue|prefetch")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CALL_COUNTS = ('["_step_count"]', '["_is_initial"]', '["_get_lr_called_within_step"]')
_OF_DATA = re.compile(r"\(\)( \w+)?\.")  # of a running generator function, or of a variable of the loop


def values(capture: Taken) -> dict[str, ValueLeaf]:
    """Return every value of a capture by its path."""
    return capture.entries | capture.beside | capture.evidence


def same(a: ValueLeaf | None, b: ValueLeaf | None) -> bool:
    """Return whether both are missing, or equal to the last bit."""
    return a is b is None or (a is not None and b is not None and a.digest == b.digest)


def is_count_of_calls(path: str, kinds: Mapping[str, str]) -> bool:
    """Return whether torch's schedulers keep the value for a warning alone.

    A scheduler that is made anew with `last_epoch` is right without it.
    """
    return path.endswith(_CALL_COUNTS) and kind_of_path(path, kinds) == "scheduler"


def kind_of_path(
    path: str,
    kinds: Mapping[str, str],
    was: str = "",
    now: str = "",
    a: ValueLeaf | None = None,
    b: ValueLeaf | None = None,
) -> str:
    """Name the kind of the value at `path`."""
    if path.startswith("gradient of "):
        return "gradients"
    if path.endswith((".training", ".requires_grad")):
        return "mode"
    if "generator" in (was[:9], now[:9]):
        return "generator"
    if path in kinds:
        return kinds[path]
    owner = max((prefix for prefix in kinds if path.startswith(prefix)), key=len, default="")
    kind = kinds.get(owner, "data" if _OF_DATA.search(path) else "state")
    if kind == "weights" and not path.startswith(f'{owner}["'):  # an attribute: a tensor, or a number
        return "state" if a is not None and a.count is None else "buffers"
    return data_kind(path, a, b) if kind == "data" else kind


def data_kind(path: str, a: ValueLeaf | None, b: ValueLeaf | None) -> str:
    """Name the kind of a data pipeline's attribute, by its name and its content."""
    names = _IDENTIFIER.findall(path)
    name = names[-1].lower() if names else ""
    if a is not None and b is not None and a.count is not None and a.count == b.count:
        return "order"  # different items, in the same number
    if (a is not None and a.count is not None) or (b is not None and b.count is not None):
        return "prefetch" if _PREFETCH.search(name) else "buffer"
    if _SEED.search(name):
        return "shuffle"
    if _EPOCH.search(name):
        return "epoch"
    if re.search(r"\[\d+\]$", path):
        return "data"
    return "position" if any(_POSITION.fullmatch(part) for part in name.split("_")) else "data"


def position_of(path: str) -> str | None:
    """Return the loader whose batches are at `path`; None if they are not."""
    return path.removesuffix(f": {POSITION}") if path.endswith(POSITION) else None
