"""Record the arguments of data loaders, samplers and datasets at each save, and compare them before a load.

Invariant: a position in a data set is restored only into an object that yields the same samples in the same order. Most
saved states do not contain enough to check that. torchdata 0.11's `StatefulDataLoader` saves how many samples were
drawn and its number of workers. It saves neither the data set's size, nor the rank, nor the seed. With the state of
another rank or another dataset, it silently repeats some samples and skips others. So one function reads everything
that decides the samples and their order from the objects' attributes, at a save and at a restore. Both results must be
equal.

Some values are not compared. An epoch or a position is progress, which belongs to the objects. Values that an object's
own state restores (a seed, a batch size that grows) are left out as well, but a rank is always compared. No amounts are
compared below an object that its owner made itself instead of receiving it, because it may open one shard after the
other.

Recording has no side effects: attributes are read, `len()` is called once on objects indexed by number, and nothing is
iterated. A comparison calls `state_dict()` only on an object that contains no other one, because a loader's may start
processes. It does so only if the saved state names a rank or world size that no attribute has. An object that raises
while its attributes are read is neither recorded nor compared.

The record is stored in the state's `_metadata`, where `torch.nn.Module` keeps the version of its own state, so the
format needs no extension. Objects receive the plain dict that they returned.

Sources: torchdata 0.11, `stateful_dataloader/stateful_dataloader.py` (`_StatefulSingleProcessDataLoaderIter` and
`_StatefulMultiProcessingDataLoaderIter`: `state_dict`, `_get_main_state`) and `nodes/loader.py`; the attributes of
`torch.utils.data.DataLoader` and `DistributedSampler`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import Sampler

from tierd.state.kinds.loader_arguments import (
    LOADER,
    NODES,
    Fingerprint,
    gives_samples,
    held_objects,
    is_shard_dataset,
    names_of_owner,
    read_arguments,
    saved_facts,
)
from tierd.state.single_values import type_name
from tierd.state.value_kinds import Stateful

_RECORD = "made_with"


def state_dict_with_arguments(value: Stateful) -> Any:
    """Return `value.state_dict()`, with the record attached if `value` yields samples."""
    state = value.state_dict()
    with suppress(Exception):  # any error, because the state is worth saving without the record
        if type(state) is dict and gives_samples(value):
            facts = read_arguments(value, state)
            if facts:
                recorded = OrderedDict(state)
                recorded._metadata = {_RECORD: facts}  # type: ignore[attr-defined]
                return recorded
    return state


def without_arguments(saved: Any) -> Any:
    """Return the state as its object returned it, without the record."""
    return saved if _record(saved) is None else dict(saved)


def misfits(target: Stateful, saved: Any) -> list[tuple[str, str]]:
    """Return where and how `target` was made differently from the object that gave `saved`.

    A location is a path such as ``.sampler``, empty for the object itself.
    """
    saved_fingerprint = {where: dict(facts) for where, facts in (_record(saved) or {}).items()}
    try:
        if not gives_samples(target):
            return []
        defect = _read_loader(target, saved, saved_fingerprint)
        if defect:
            return [("", defect)]
        if is_shard_dataset(target):
            saved_fingerprint[""] = {**saved_facts(saved), **saved_fingerprint.get("", {})}
        target_fingerprint = read_arguments(target)
    except Exception:  # then the object's own load_state_dict decides
        return []
    with suppress(Exception):
        _add_named_in_state(target, saved, saved_fingerprint, target_fingerprint)
    return list(_differences(saved_fingerprint, target_fingerprint))


def _differences(saved_fingerprint: Fingerprint, target_fingerprint: Fingerprint) -> Iterator[tuple[str, str]]:
    # Reported before, because a loader and its batch sampler both have a batch_size.
    reported: set[tuple[str, object, object]] = set()
    strangers: tuple[str, ...] = ()  # paths below objects of another class, which cannot be compared
    for where, facts in saved_fingerprint.items():
        if where not in target_fingerprint or where.startswith(strangers):
            continue
        for name, value in facts.items():
            now = target_fingerprint[where].get(name, value)
            if now == value or (name, value, now) in reported:
                continue
            reported.add((name, value, now))
            if name == "class":
                strangers += (f"{where}.",)
                yield where, f"{value} in the checkpoint, {now} here"
                break
            yield where, f"{name}={value!r} in the checkpoint, {name}={now!r} here"


def _record(saved: object) -> Fingerprint | None:
    metadata = getattr(saved, "_metadata", None) if type(saved) is OrderedDict else None
    facts = metadata.get(_RECORD) if isinstance(metadata, dict) else None
    return facts if isinstance(facts, dict) and all(isinstance(members, dict) for members in facts.values()) else None


def _read_loader(target: Stateful, saved: Any, saved_fingerprint: Fingerprint) -> str | None:
    """Return why `saved` is not a state of a torchdata loader such as `target`, or None.

    torchdata itself would report this only at its first batch. Also stores the number of workers in
    `saved_fingerprint`.
    """
    source = getattr(getattr(type(target), "load_state_dict", None), "__module__", "")
    if not source.startswith((LOADER, NODES)) or isinstance(target, Sampler):
        return None
    defect = f"not the state of a {type_name(target)}"
    if not isinstance(saved, dict):
        return f"{type_name(saved)} in the checkpoint, {defect}"
    if not saved:  # which a loader takes for a fresh start
        return None
    if source.startswith(NODES):
        return None if {"root", "num_yielded"} <= saved.keys() else defect
    if "_num_yielded" in saved:
        workers = 0
    else:
        try:
            workers = saved["_snapshot"]["_main_snapshot"]["_num_workers"]
        except (KeyError, TypeError):
            return defect
    saved_fingerprint[""] = {**saved_fingerprint.get("", {}), "num_workers": workers}
    return None


def _add_named_in_state(
    target: Stateful, saved: Any, saved_fingerprint: Fingerprint, target_fingerprint: Fingerprint
) -> None:
    """Add values that only the saved state names, because an attribute of another name may hold the rank."""
    if not isinstance(saved, dict) or type(target).__module__.startswith((LOADER, NODES)) or held_objects(target)[0]:
        return
    own_facts = saved_fingerprint.setdefault("", {})
    whose = names_of_owner(target, {*target_fingerprint.get("", {}), *saved})
    names_by_key = {key: key.strip("_") for key in saved if type(key) is str and key.strip("_") in whose}
    names_by_key = {
        key: name for key, name in names_by_key.items() if name not in own_facts and type(saved[key]) in (int, str)
    }
    target_state = target.state_dict() if names_by_key else {}
    for key, name in names_by_key.items():
        if type(target_state.get(key)) in (int, str):
            own_facts[name] = saved[key]
            target_fingerprint.setdefault("", {})[name] = target_state[key]
