"""What a data loader, a sampler or a dataset was made with: recorded at each save, compared before anything is loaded.

Law: a position means nothing without what it is a position in, and such a state seldom says that. torchdata 0.11's
`StatefulDataLoader` saves how many samples were drawn and its number of workers, but not of how many samples, for which
rank, by which seed: given another rank's state, or one over another dataset, it repeats some samples, leaves others out
and says nothing. So what decides which samples come, and in which order, is taken from the objects' attributes by one
function at a save and at a restore, and has to be equal. What only says how far they are (an epoch, a position) is
theirs alone, and so is what their own state brings back (a seed, a batch size that grows); a state brings back no rank.
Below an object that its owner was not given but made, no amounts are compared: it may open one shard after the other.

Looking has no effect: attributes are read, `len()` of what is indexed by number is taken once, nothing is iterated.
Nobody's `state_dict()` is called for a comparison (a loader's may start processes) but that of an object with no other
one in it, and only if its saved state names a rank or world size that no attribute does. An object that does not like
to be looked at is neither recorded nor compared.

The record hangs on the state as `_metadata`, the place where `torch.nn.Module` keeps the version of its own, so that it
needs nothing of the format. Objects get back the plain dict that they gave.

Sources: torchdata 0.11, `stateful_dataloader/stateful_dataloader.py` (`_StatefulSingleProcessDataLoaderIter` and
`_StatefulMultiProcessingDataLoaderIter`: `state_dict`, `_get_main_state`) and `nodes/loader.py`; the attributes of
`torch.utils.data.DataLoader` and `DistributedSampler`.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tierd.client.values import IMMUTABLE, Stateful, is_stateful, type_name

Facts = dict[str, dict[str, object]]  # ".sampler" -> {"rank": 0}; "" is the object itself

_RECORD = "made_with"
_VALUES = IMMUTABLE - {range}
_FEW = 64  # objects; what has more of them is recorded up to there, which is the same objects each time

# Whose state it is.
_WHOSE = re.compile(r"rank|world|world_size|num_replicas|num_shards|(dp|data_parallel)_(rank|size|world_size)")
# What else decides the samples, if a constructor takes it: an attribute of this name alone may be a count of progress.
_AMOUNT = re.compile(r"n|length|size|(num|total)_samples|shard|shard_id")
_CHOSEN = re.compile(rf"{_AMOUNT.pattern}|batch_size|drop_last|num_workers|buffer_size|replacement|shuffle|.*seed")
_RETURNS = re.compile(r"shuffle|.*seed")  # what an object's own state may bring back of the objects below it
# Where another object lies that decides; in the plural, several.
_LINK = re.compile(r".*(dataset|sampler|loader|source|root|iterable|node)(s?)")
_lengths: dict[int, int] = {}  # by identity, while the object lives: not every dataset can be hashed
_LOADER, _NODES = "torchdata.stateful_dataloader.", "torchdata.nodes."


def ask(value: Stateful) -> Any:
    """`value.state_dict()`, with the record hung on it if `value` gives samples."""
    own = value.state_dict()
    with suppress(Exception):  # whatever it is: the state is worth saving without
        if type(own) is dict and _gives_samples(value):
            facts = _made_with(value)
            _drop_brought_back(value, facts, own)
            if facts:
                recorded = OrderedDict(own)
                recorded._metadata = {_RECORD: facts}  # type: ignore[attr-defined]
                return recorded
    return own


def as_given(saved: Any) -> Any:
    """The state as its object gave it, without the record."""
    return saved if _record(saved) is None else dict(saved)


def misfits(target: Stateful, saved: Any) -> list[tuple[str, str]]:
    """Where and how `target` was made otherwise than what gave `saved`; where: ``.sampler``, or nothing for itself."""
    there = {where: dict(facts) for where, facts in (_record(saved) or {}).items()}
    try:
        if not _gives_samples(target):
            return []
        defect = _read_loader(target, saved, there)
        if defect:
            return [("", defect)]
        here = _made_with(target)
    except Exception:  # its own load_state_dict decides
        return []
    with suppress(Exception):
        _add_named_in_state(target, saved, there, here)
    return list(_differences(there, here))


def _differences(there: Facts, here: Facts) -> Iterator[tuple[str, str]]:
    said: set[tuple[str, object, object]] = set()  # a loader and its batch sampler both have a batch_size
    strangers: tuple[str, ...] = ()  # of another class: what lies below is not to be compared
    for where, facts in there.items():
        if where not in here or where.startswith(strangers):
            continue
        for name, value in facts.items():
            now = here[where].get(name, value)
            if now == value or (name, value, now) in said:
                continue
            said.add((name, value, now))
            if name == "class":
                strangers += (f"{where}.",)
                yield where, f"{value} in the checkpoint, {now} here"
                break
            yield where, f"{name}={value!r} in the checkpoint, {name}={now!r} here"


def _gives_samples(value: object) -> bool:
    kind = type(value)
    return not isinstance(value, nn.Module | torch.optim.Optimizer | torch.Tensor) and any(
        hasattr(kind, name) for name in ("__iter__", "__next__", "__getitem__")
    )


def _record(saved: object) -> Facts | None:
    metadata = getattr(saved, "_metadata", None) if type(saved) is OrderedDict else None
    facts = metadata.get(_RECORD) if isinstance(metadata, dict) else None
    return facts if isinstance(facts, dict) and all(isinstance(one, dict) for one in facts.values()) else None


# ---- looking


def _made_with(value: object) -> Facts:
    found: Facts = {}
    todo = deque([("", value, True)])
    seen: set[int] = set()
    while todo and len(seen) < _FEW:
        where, part, given = todo.popleft()
        if id(part) not in seen:
            seen.add(id(part))
            links, named = _look(part)
            facts = _facts(where, part, named, alone=not links, given=given)
            if facts:
                found[where] = facts
            todo += [(where + name, inner, given and inner_given) for name, inner, inner_given in links]
    return found


def _look(part: object) -> tuple[list[tuple[str, object, bool]], dict[str, object]]:
    """What objects one leads to, if its constructor takes them, and its own values that decide; runs no property."""
    links: list[tuple[str, Any, bool]] = []
    named: dict[str, object] = {}
    kind: Any = type(part)
    parameters = _parameters(kind)
    for attribute, value in list(getattr(part, "__dict__", {}).items()):
        name, decides, link = _meaning(attribute)
        if decides and type(value) in (int, bool, str) and (decides == "whose" or name in parameters):
            named[name] = value
        items: Iterable[Any] = ()
        if link == "one":
            links.append((f".{name}", value, name in parameters))
        elif link and isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
        links += [(f".{name}[{key!r}]", one, name in parameters) for key, one in islice(items, _FEW)]
    return [link for link in links if type(link[1]) not in _VALUES and _gives_samples(link[1])], named


def _facts(where: str, part: Any, named: dict[str, object], alone: bool, given: bool) -> dict[str, object]:
    """Of one object. `alone`: it leads to no other; `given`: it was to its owner, which so did not make it."""
    facts: dict[str, object] = {}
    kind: Any = type(part)
    is_node, is_sampler = kind.__module__.startswith(_NODES), isinstance(part, Sampler)
    if is_node or is_sampler:
        facts["class"] = kind.__name__
    facts |= {name: value for name, value in named.items() if given or not _AMOUNT.fullmatch(name)}
    is_torchdatas = any(base.__module__.startswith(_LOADER) for base in kind.__mro__)  # its state is of so many
    if isinstance(part, DataLoader) and not is_torchdatas and not isinstance(part.dataset, IterableDataset):
        facts.pop("num_workers", None)
    if where and isinstance(part, IterableDataset):
        facts["stateful"] = is_stateful(part)  # else torchdata counts samples, and skips them
    if is_node and "num_workers" in facts:  # goes on with any number of them, but not with none
        facts["parallel"] = facts.pop("num_workers") != 0
    if facts.get("shuffle") is False:
        facts = {name: value for name, value in facts.items() if not name.endswith("seed")}
    fixed = alone and not is_stateful(part) if is_sampler else _has_a_fixed_length(where, part)
    if given and fixed:  # of a stateful sampler it may be what remains
        with suppress(Exception):
            facts["length"] = _length(part)
    return facts


def _length(part: Any) -> int:
    """Taken once of each object: some count their files, and a save is in the training thread."""
    at = id(part)
    if at in _lengths:
        return _lengths[at]
    length = len(part)
    with suppress(TypeError):  # not to be weakly referenced: a list
        weakref.finalize(part, _lengths.pop, at, None)
        _lengths[at] = length
    return length


def _has_a_fixed_length(where: str, part: object) -> bool:
    """A history or a replay buffer has not: it grows, and its own state brings it back."""
    if isinstance(part, Dataset):
        return hasattr(type(part), "__len__") and not isinstance(part, IterableDataset)
    return where.endswith(("dataset", "data_source")) and hasattr(type(part), "__getitem__") and not is_stateful(part)


@functools.lru_cache(maxsize=4096)
def _meaning(attribute: str) -> tuple[str, str, str]:
    """Its bare name; does it say `"whose"` state it is, or is it `"chosen"`; does it lead to `"one"` or to `"many"`."""
    name = attribute.strip("_")
    link = _LINK.fullmatch(name)
    decides = "whose" if _WHOSE.fullmatch(name) else "chosen" if _CHOSEN.fullmatch(name) else ""
    return name, decides, ("many" if link[2] else "one") if link else ""


@functools.lru_cache(maxsize=256)
def _parameters(kind: Any) -> frozenset[str]:
    """What the constructors of a class and its bases take."""
    found: set[str] = set()
    for base in kind.__mro__[:-1]:
        with suppress(ValueError, TypeError):
            found.update(inspect.signature(vars(base)["__init__"]).parameters if "__init__" in vars(base) else ())
    return frozenset(found)


def _drop_brought_back(value: object, facts: Facts, own: dict[object, object]) -> None:
    """Forget what the state of `value` holds and loads again."""
    of_itself = facts.get("", {})
    stays = {"class", "num_workers"} | _whose(value, {*of_itself, *own})
    for name in _bare(own) - stays:
        of_itself.pop(name, None)
    returns = [(part, name) for part in facts.values() for name in part if _RETURNS.fullmatch(name)]
    keys: set[str] = set()
    seen: set[int] = set()
    todo: list[object] = [own] if returns else []
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict) and id(inner) not in seen:
            seen.add(id(inner))
            keys |= _bare(inner)
            todo += inner.values()
    for part, name in returns:
        if name in keys:
            del part[name]


def _bare(names: Iterable[object]) -> set[str]:
    return {name.strip("_") for name in names if type(name) is str}


def _whose(value: object, names: Iterable[object]) -> set[str]:
    """Those of `names` that say whose state it is; a low rank does not: it has no world, and nobody iterates it."""
    found = {name for name in _bare(names) if _WHOSE.fullmatch(name)}
    iterated = isinstance(value, Dataset) or any(hasattr(type(value), name) for name in ("__iter__", "__next__"))
    return found if iterated or len({"rank" in name for name in found}) == 2 else set()


# ---- what a state says by itself


def _read_loader(target: Stateful, saved: Any, there: Facts) -> str | None:
    """Why `saved` is no state of a torchdata loader such as `target`, which would say so at its first batch only; note
    the number of workers in `there`."""
    source = getattr(getattr(type(target), "load_state_dict", None), "__module__", "")
    if not source.startswith((_LOADER, _NODES)) or isinstance(target, Sampler):
        return None
    defect = f"not the state of a {type_name(target)}"
    if not isinstance(saved, dict):
        return f"{type_name(saved)} in the checkpoint, {defect}"
    if not saved:  # a loader takes it for a fresh start
        return None
    if source.startswith(_NODES):
        return None if {"root", "num_yielded"} <= saved.keys() else defect
    if "_num_yielded" in saved:
        workers = 0
    else:
        try:
            workers = saved["_snapshot"]["_main_snapshot"]["_num_workers"]
        except (KeyError, TypeError):
            return defect
    there[""] = {**there.get("", {}), "num_workers": workers}
    return None


def _add_named_in_state(target: Stateful, saved: Any, there: Facts, here: Facts) -> None:
    """Compare also what only the state names: an object may get its rank from a place that has no telling name."""
    if not isinstance(saved, dict) or type(target).__module__.startswith((_LOADER, _NODES)) or _look(target)[0]:
        return
    known = there.setdefault("", {})
    whose = _whose(target, {*here.get("", {}), *saved})
    named = {key: key.strip("_") for key in saved if type(key) is str and key.strip("_") in whose}
    named = {key: name for key, name in named.items() if name not in known and type(saved[key]) in (int, str)}
    own = target.state_dict() if named else {}
    for key, name in named.items():
        if type(own.get(key)) in (int, str):
            known[name] = saved[key]
            here.setdefault("", {})[name] = own[key]
