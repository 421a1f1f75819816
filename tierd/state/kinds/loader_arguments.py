"""Read the arguments with which data loaders, samplers and datasets were made from their attributes.

Reading has no side effects: attributes are read, `len()` is called once on objects indexed by number, and nothing is
iterated. `loader_fingerprint` says which arguments are recorded, and why. Of a torch-dataloader-utils dataset its
shards are compared before a load, because the library compares only those that were read to their end, and its state
names the seed without restoring it (torch-dataloader-utils 0.2.0, `dataset/base.py` and `splits/target_size.py`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tierd.state.value_kinds import IMMUTABLE, is_stateful

_BASE = "torch_dataloader_utils.dataset.base"
_files: dict[int, str] = {}  # by the dataset's id, while it lives: a save runs in the training thread


def is_shard_dataset(part: object) -> bool:
    """Whether `part` is a `StructuredDataset`, an `IcebergDataset` or another of the library's datasets."""
    return any(kind.__module__ == _BASE and kind.__name__ == "BaseDataset" for kind in type(part).__mro__)


def shard_facts(part: Any) -> dict[str, object]:
    """Return the seed if the dataset shuffles, how it splits files, and the number and a digest of its files.

    The digest covers the files' order, paths and sizes, because shards are cut from the ordered list.
    """
    facts: dict[str, object] = {}
    if getattr(part, "_shuffle", False):
        facts["shuffle_seed"] = part._shuffle_seed
    if id(part) not in _files:
        weakref.finalize(part, _files.pop, id(part), None)
        _files[id(part)] = _files_digest(part._files)
    return {**facts, "files": _files[id(part)], "split": _strategy_text(part)}


def saved_facts(saved: Any) -> dict[str, object]:
    """Return what a state alone names of these, also if it was saved without a record."""
    seed = saved.get("_shuffle_seed") if isinstance(saved, dict) else None
    return {} if seed is None else {"shuffle_seed": seed}


def mismatch_error(part: object) -> type[Exception] | None:
    """Return the error that the library's documents say to catch, if `part` is one of its datasets."""
    error_class = getattr(sys.modules.get(_BASE), "CheckpointMismatchError", None) if is_shard_dataset(part) else None
    return error_class if isinstance(error_class, type) and issubclass(error_class, Exception) else None


def _files_digest(files: list[Any]) -> str:
    lines = "\n".join(f"{file.path}\t{file.file_size}" for file in files)
    return f"{len(files)} ({hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()[:12]})"


def _strategy_text(part: Any) -> str:
    """Return the strategy's class and arguments, without a seed that is the dataset's or is not used."""
    kind = type(part._strategy)
    values = {name.strip("_"): value for name, value in vars(part._strategy).items()}
    if not values.get("shuffle") or values.get("seed") == getattr(part, "_shuffle_seed", None):
        values.pop("seed", None)
    arguments = [name for name in inspect.signature(kind).parameters if type(values.get(name)) in (int, bool, str)]
    return f"{kind.__name__}({', '.join(f'{name}={values[name]!r}' for name in arguments)})"


Fingerprint = dict[str, dict[str, object]]  # path -> attributes: ".sampler" -> {"rank": 0}; "" is the object itself

_VALUES = IMMUTABLE - {range}
_MAX_ITEMS = 64  # objects; of more, only these are recorded, which are the same ones each time

# Names of attributes that identify the owner of the state.
_WHOSE = re.compile(r"rank|world|world_size|num_(replicas|ranks|shards)|(dp|data_parallel)_(rank|size|world_size)")
# Other names that decide the samples, if a constructor takes them. An attribute that is not an argument may count
# progress.
_AMOUNT = re.compile(r"n|length|size|(num|total)_samples|shard|shard_id")
_CHOICES = re.compile(rf"{_AMOUNT.pattern}|batch_size|drop_last|num_workers|buffer_size|replacement|shuffle|.*seed")
_RETURNS = re.compile(r"shuffle|.*seed")  # names that an object's own state may restore in the objects below it
# Names of attributes that hold another relevant object; in the plural, several.
_LINK = re.compile(r".*(dataset|sampler|loader|source|root|iterable|node)(s?)")
_lengths: dict[int, int] = {}  # by id, while the object lives, because not every dataset can be hashed
LOADER, NODES = "torchdata.stateful_dataloader.", "torchdata.nodes."


def gives_samples(value: object) -> bool:
    """Whether `value` is a loader, sampler, dataset or similar: iterated or indexed, and not part of a model."""
    kind = type(value)
    return not isinstance(value, nn.Module | torch.optim.Optimizer | torch.Tensor) and any(
        hasattr(kind, name) for name in ("__iter__", "__next__", "__getitem__")
    )


def read_arguments(value: object, state: dict[object, object] | None = None) -> Fingerprint:
    """Read the arguments of an object and of those that it holds, without what its `state` restores."""
    fingerprint: Fingerprint = {}
    shard_fingerprint: Fingerprint = {}  # of datasets whose state names arguments that it does not restore
    todo = deque([("", value, True)])
    visited: set[int] = set()
    while todo and len(visited) < _MAX_ITEMS:
        where, part, is_given = todo.popleft()
        if id(part) not in visited:
            visited.add(id(part))
            links, own_values = held_objects(part)
            facts = _facts(where, part, own_values, alone=not links, is_given=is_given)
            if facts:
                fingerprint[where] = facts
            if is_shard_dataset(part):
                shard_fingerprint[where] = shard_facts(part)
            todo += [(where + name, inner, is_given and inner_given) for name, inner, inner_given in links]
    if state is not None:
        _drop_restored(value, fingerprint, state)
    return fingerprint | {where: fingerprint.get(where, {}) | facts for where, facts in shard_fingerprint.items()}


def held_objects(part: object) -> tuple[list[tuple[str, object, bool]], dict[str, object]]:
    """Return the relevant objects that `part` holds, and its own values that decide the samples.

    Each object is paired with whether the constructor of `part` takes it. No property is run.
    """
    links: list[tuple[str, Any, bool]] = []
    own_values: dict[str, object] = {}
    kind: Any = type(part)
    parameters = _parameters(kind)
    for attribute, value in list(getattr(part, "__dict__", {}).items()):
        name, decides, link = _meaning(attribute)
        if decides and type(value) in (int, bool, str) and (decides == "whose" or name in parameters):
            own_values[name] = value
        items: Iterable[Any] = ()
        if link == "one":
            links.append((f".{name}", value, name in parameters))
        elif link and isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
        links += [(f".{name}[{key!r}]", item, name in parameters) for key, item in islice(items, _MAX_ITEMS)]
    return [link for link in links if type(link[1]) not in _VALUES and gives_samples(link[1])], own_values


def _facts(where: str, part: Any, own_values: dict[str, object], alone: bool, is_given: bool) -> dict[str, object]:
    """Return the recorded values of one object.

    Args:
        alone: whether it holds no other relevant object.
        is_given: whether its owner received it as an argument, and so did not make it.
    """
    facts: dict[str, object] = {}
    kind: Any = type(part)
    is_node, is_sampler = kind.__module__.startswith(NODES), isinstance(part, Sampler)
    if is_node or is_sampler:
        facts["class"] = kind.__name__
    facts |= {name: value for name, value in own_values.items() if is_given or not _AMOUNT.fullmatch(name)}
    # Because its state contains its number of workers.
    is_torchdatas = any(base.__module__.startswith(LOADER) for base in kind.__mro__)
    if isinstance(part, DataLoader) and not is_torchdatas and not isinstance(part.dataset, IterableDataset):
        facts.pop("num_workers", None)
    if where and isinstance(part, IterableDataset):
        facts["stateful"] = is_stateful(part)  # torchdata counts and skips samples of a dataset that is not stateful
    if is_node and "num_workers" in facts:  # it can resume with any positive number of workers, but not with none
        facts["parallel"] = facts.pop("num_workers") != 0
    if facts.get("shuffle") is False:
        facts = {name: value for name, value in facts.items() if not name.endswith("seed")}
    fixed = alone and not is_stateful(part) if is_sampler else _has_a_fixed_length(where, part)
    if is_given and fixed:  # the length of a stateful sampler may be the number of remaining samples
        with suppress(Exception):
            facts["length"] = _length(part)
    return facts


def _length(part: Any) -> int:
    """Return `len(part)`, computed once per object: some count their files, and a save runs in the training thread."""
    at = id(part)
    if at in _lengths:
        return _lengths[at]
    length = len(part)
    with suppress(TypeError):  # some objects have no weak references, such as a list
        weakref.finalize(part, _lengths.pop, at, None)
        _lengths[at] = length
    return length


def _has_a_fixed_length(where: str, part: object) -> bool:
    """Whether the length never changes, unlike that of a history or a replay buffer, whose own state restores it."""
    if isinstance(part, Dataset):
        return hasattr(type(part), "__len__") and not isinstance(part, IterableDataset)
    return where.endswith(("dataset", "data_source")) and hasattr(type(part), "__getitem__") and not is_stateful(part)


@functools.lru_cache(maxsize=4096)
def _meaning(attribute: str) -> tuple[str, str, str]:
    """Return an attribute's bare name, its role and its link.

    The role is `"whose"` if it identifies the owner of the state, `"chosen"` if it decides the samples, else empty. The
    link is `"one"` or `"many"` if it holds other objects, else empty.
    """
    name = attribute.strip("_")
    link = _LINK.fullmatch(name)
    decides = "whose" if _WHOSE.fullmatch(name) else "chosen" if _CHOICES.fullmatch(name) else ""
    return name, decides, ("many" if link[2] else "one") if link else ""


@functools.lru_cache(maxsize=256)
def _parameters(kind: Any) -> frozenset[str]:
    names: set[str] = set()
    for base in kind.__mro__[:-1]:
        with suppress(ValueError, TypeError):
            names.update(inspect.signature(vars(base)["__init__"]).parameters if "__init__" in vars(base) else ())
    return frozenset(names)


def _drop_restored(value: object, facts: Fingerprint, state: dict[object, object]) -> None:
    """Remove values that the state of `value` contains, because it restores them."""
    of_itself = facts.get("", {})
    kept_names = {"class", "num_workers"} | names_of_owner(value, {*of_itself, *state})
    for name in _bare_names(state) - kept_names:
        of_itself.pop(name, None)
    returns = [(part, name) for part in facts.values() for name in part if _RETURNS.fullmatch(name)]
    keys: set[str] = set()
    visited: set[int] = set()
    todo: list[object] = [state] if returns else []
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict) and id(inner) not in visited:
            visited.add(id(inner))
            keys |= _bare_names(inner)
            todo += inner.values()
    for part, name in returns:
        if name in keys:
            del part[name]


def _bare_names(names: Iterable[object]) -> set[str]:
    return {name.strip("_") for name in names if type(name) is str}


def names_of_owner(value: object, names: Iterable[object]) -> set[str]:
    """Return the names that identify the owner of the state.

    LoRA's `rank` is not one of them, because such objects have no world size and no iterator.
    """
    owner_names = {name for name in _bare_names(names) if _WHOSE.fullmatch(name)}
    iterated = isinstance(value, Dataset) or any(hasattr(type(value), name) for name in ("__iter__", "__next__"))
    return owner_names if iterated or len({name.endswith("rank") for name in owner_names}) == 2 else set()
