"""Which tensors of a state are replicated, by declaration, and this rank's share of them.

Declared are: a `DistributedDataParallel` module; the optimizers, schedulers and scalers of its parameters; DTensors
along the mesh dimensions that replicate them; and the entries that the user names. Nothing is compared, and no
communication takes place.

Invariant: buffers are each rank's own, because DDP lets them differ between the ranks until the next forward (with
`broadcast_buffers`) or for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tierd.core.replicas.shares import ROUNDS, divide
from tierd.state.kinds.dtensors import ranks_with_shard
from tierd.state.kinds.supported_values import divides_itself
from tierd.state.state_tree import Path, tensor_name_of
from tierd.state.tensor_file import UNSHARED, ReplicaShare, TensorEntry

_Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that may hold the same bytes."""

    rank: int  # this process's rank
    world: int  # the number of ranks
    nodes: tuple[_Ranks, ...]  # the ranks of each node; of this rank's node only, if the others are not known
    declared: frozenset[str] = frozenset()  # the entries that the user named, which are the same on all ranks
    is_divided: bool = True  # whether the ranks of a node divide replicated tensors among them

    @property
    def node(self) -> _Ranks:
        """The ranks among which this rank divides tensors, itself included."""
        return self.nodes[self._number] if self.is_divided else (self.rank,)

    @property
    def _number(self) -> int:
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    def share(
        self, state: Mapping[str, object], tensors: Mapping[str, torch.Tensor], dtensors: Sequence[tuple[str, Any]] = ()
    ) -> ReplicaShare:
        """Return this rank's share of a state's `tensors`, which a walk has named. Among them are the local shards of
        `dtensors`.
        """
        if self.world < 2:
            return UNSHARED
        entries, holders = self._holders(state, tensors)
        for name, dtensor in dtensors if self._is_numbered_alike() else ():
            ranks = ranks_with_shard(dtensor)
            if len(ranks) > 1 and self.rank in ranks:
                holders.setdefault(name, ranks)
        owners: dict[str, int] = {}
        groups, node = sorted(set(holders.values())), set(self.node)
        for ranks in groups:
            sizes = {name: tensors[name].nbytes for name, held_by in holders.items() if held_by == ranks}
            owners |= divide(sizes, sorted(set(ranks) & node))
        if not entries and not owners:
            # Another rank of the node may have divided an entry that this state lacks.
            return ReplicaShare(digest=self._division(()))
        forms = {
            name: TensorEntry(0, tensors[name].nbytes, tensors[name].dtype, tuple(tensors[name].shape))
            for name in sorted(owners)
        }
        facts = [
            f"{name} {form.dtype} {form.shape} {owners[name]}"
            for name, form in forms.items()
            if len(holders[name]) == self.world
        ]
        elsewhere = {name: owners[name] for name in forms if owners[name] != self.rank}
        return ReplicaShare(
            homes={name: holders[name][0] for name in forms},
            elsewhere=elsewhere,
            entries=tuple(entries),
            forms={name: forms[name] for name in elsewhere},
            rounds=_rounds({name: tensors[name].nbytes for name, ranks in holders.items() if len(ranks) == self.world}),
            digest=self._division(facts),
            senders=self._senders(groups),
        )

    def _division(self, facts: Sequence[str]) -> str:
        """Return 16 hex digits that are the same on all ranks of the node, and 16 that are if these divide alike."""
        node = self.nodes[self._number]
        texts = repr(node), "\n".join(facts) if self.is_divided else ""
        return "".join(xxhash.xxh3_64_hexdigest(text.encode()) for text in texts) if len(node) > 1 else ""

    def _senders(self, groups: Sequence[_Ranks]) -> dict[int, tuple[int, int, bool]]:
        """Return, by the lowest rank of each group, the number of this node among those with ranks of the group, how
        many these are, and whether each has equally many of the ranks.
        """
        senders: dict[int, tuple[int, int, bool]] = {}
        number_of = {rank: number for number, ranks in enumerate(self.nodes) for rank in ranks}
        ambiguous = set[int]()
        for ranks in groups:
            counts = Counter(number_of[rank] for rank in ranks if rank in number_of)
            place = sorted(counts).index(self._number), len(counts), len(set(counts.values())) == 1
            if senders.setdefault(ranks[0], place) != place:
                ambiguous.add(ranks[0])
        return {home: place for home, place in senders.items() if place[1] > 1 and home not in ambiguous}

    def undivided(self) -> ReplicaGroup:
        """Return the group of a rank that stores all of its replicated tensors itself."""
        return replace(self, is_divided=False)

    def entries(self, state: Mapping[str, object]) -> list[str]:
        """Return the entries of a state that are the same on all ranks."""
        return self._holders(state, ())[0] if self.world > 1 else []

    def _holders(self, state: Mapping[str, object], tensors: Collection[str]) -> tuple[list[str], dict[str, _Ranks]]:
        """Return the entries that are the same on all ranks, and the ranks that hold each replicated tensor."""
        everybody = tuple(range(self.world))
        modules = {name: module for name, value in state.items() if (module := _data_parallel(value))}
        ranks_of: dict[int, _Ranks] = {}  # by the id of a parameter
        for module in modules.values():
            ranks_of |= dict.fromkeys(map(id, module.parameters()), self._ranks_of(module))
        for name in self.declared:
            ranks_of |= dict.fromkeys(map(id, _parameters_of(state.get(name))), everybody)
        holders: dict[str, _Ranks] = {}
        entries: list[str] = []
        ambiguous = _ambiguous_names(state, tensors)
        for entry, value in state.items():
            if entry in modules and entry not in self.declared:
                ranks, names = self._ranks_of(modules[entry]), _parameter_names(entry, value)
            else:
                ranks = everybody if entry in self.declared else _ranks_of_followed(value, ranks_of)
                names = _names_below(entry, value, tensors) if self.rank in ranks else set()
            if self.rank not in ranks:
                continue
            holders |= dict.fromkeys(names.intersection(tensors) - ambiguous, ranks)
            if ranks == everybody:
                entries.append(entry)
        return entries, holders

    def _ranks_of(self, module: DistributedDataParallel) -> _Ranks:
        """Return the ranks that hold a module's replicas; none if they are not known."""
        group = module.process_group
        if group.size() == self.world:
            return tuple(range(self.world))
        return tuple(sorted(dist.get_process_group_ranks(group))) if self._is_numbered_alike() else ()

    def _is_numbered_alike(self) -> bool:
        """Whether the ranks of this run are those of `torch.distributed`."""
        return dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (self.rank, self.world)


def _ambiguous_names(entries: Collection[str], tensors: Collection[str]) -> set[str]:
    """Return the tensors that may be of two entries by their names, because one entry's name begins with the other's,
    as "model/ema" with "model". They count as each rank's own.
    """
    counts = Counter(tensor_name_of((entry,)) for entry in entries)
    within = {
        prefix
        for prefix, count in counts.items()
        if count > 1 or not counts.keys().isdisjoint(_beginnings(prefix, "/"))
    }
    if not within:
        return set()
    return {name for name in tensors if name in within or not within.isdisjoint(_beginnings(name, "/~"))}


def _beginnings(name: str, ends: str) -> list[str]:
    """Return what comes before each of the characters `ends` in a name."""
    return [name[:at] for at, character in enumerate(name) if character in ends]


def _rounds(sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Divide the tensors by bytes; small ones by a hash of their names, because each costs the same time."""
    numbers = divide(sizes, range(ROUNDS))
    rounds: list[list[str]] = [[] for _ in range(ROUNDS)]
    for name in filter(sizes.get, sorted(sizes)):  # without empty ones
        number = numbers.get(name)
        rounds[xxhash.xxh3_64_intdigest(name.encode()) % ROUNDS if number is None else number].append(name)
    return tuple(map(tuple, rounds))


def _data_parallel(value: object) -> DistributedDataParallel | None:
    module = getattr(value, "_orig_mod", value)  # `torch.compile` wraps it
    return module if isinstance(module, DistributedDataParallel) else None


def _ranks_of_followed(value: object, ranks_of: Mapping[int, _Ranks]) -> _Ranks:
    """Return the ranks on which an object's state is the same because the parameters that it follows are."""
    if isinstance(value, LRScheduler):
        value = value.optimizer
    if isinstance(value, torch.amp.GradScaler):
        held_by = set(ranks_of.values())
    elif isinstance(value, Optimizer) and not divides_itself(value):
        held_by = {ranks_of.get(id(parameter), ()) for group in value.param_groups for parameter in group["params"]}
    else:
        return ()
    return held_by.pop() if len(held_by) == 1 else ()


def _parameters_of(value: object) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Module):
        yield from value.parameters()


def _parameter_names(entry: str, value: object) -> set[str]:
    assert isinstance(value, nn.Module)
    return {tensor_name_of((entry, key)) for key, _ in value.named_parameters(remove_duplicate=False)}


def _names_below(entry: str, value: object, tensors: Collection[str]) -> set[str]:
    """Return those of `tensors` that are of this entry by their names, but for modules' buffers."""
    prefix = tensor_name_of((entry,))
    names = {name for name in tensors if name == prefix or name.startswith(f"{prefix}/")}
    return names - _buffer_names((entry,), value) if names else names


def _buffer_names(path: Path, value: object) -> set[str]:
    """Return the names of the buffers of a module, or of all modules in a mapping or sequence."""
    if isinstance(value, nn.Module):
        return {tensor_name_of((*path, key)) for key, _ in value.named_buffers(remove_duplicate=False)}
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name for key, item in items for name in _buffer_names((*path, key), item)}
