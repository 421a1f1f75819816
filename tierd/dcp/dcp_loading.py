"""`tierd.dcp.load`: a load that falls back to an older checkpoint if one is proven corrupt.

DCP loads in place, and compares every tensor's size with what the object has now. So an optimizer that has not taken a
step, and a module with an extra state, are presented to DCP with tensors of the saved kind.

Invariant: ranks fall back together, and only because of corruption. They agree through the launch's own gather, because
DCP does not have one in every mode. Nothing in the state changes before DCP has planned the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import distributed, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import StateMismatch, StoreUnavailable
from tierd.dcp.storage_reader import UNFIT_ERRORS, OpenReader
from tierd.state.kinds.dtensors import is_dtensor, placement_of
from tierd.state.kinds.training_objects import (
    NameOf,
    align_state,
    is_extra_state,
    misfits,
    names_in,
    parameters_by_number,
)
from tierd.state.state_tree import leaves


class CheckedLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, with a check of DTensor shards."""

    def create_local_plan(self) -> Any:
        """Called by torch. Raises `StateMismatch` if DCP cannot load into a DTensor's shard."""
        for name, value in self.state_dict.items():
            if is_dtensor(value):
                try:
                    placement = placement_of(value)
                    blocks = len(placement.boxes())
                except ValueError as error:
                    raise StateMismatch(f"{name!r}: {error}") from error
                if blocks > 1:
                    raise StateMismatch(
                        f"{name!r}: a DTensor {placement}, whose shard on this rank is {blocks} blocks of the whole; "
                        "DCP loads into one: load it placed otherwise, and redistribute it"
                    )
        return super().create_local_plan()


_IDENTIFYING = ("params", "param_names", "name")  # members of a group that its parameters are compared by


class OptimizerStandIn:
    """Presents an optimizer to DCP with state tensors for everything that the checkpoint has for it.

    `value` returns the checkpoint's value of a name, None if it has none or it cannot be read.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, metadata: Metadata | None, value: Callable[[str], object]
    ) -> None:
        self.optimizer, self._saved = optimizer, _members(name, metadata)
        self._groups = _groups(name, metadata, value)
        self._nested = {
            (int(path[2]), path[3])
            for _, path in _paths(metadata)
            if len(path) > 4 and path[:2] == (name, "state") and str(path[2]).isdecimal()
        }

    def misfits(self, name_of: NameOf) -> Iterator[str]:
        """Report why the optimizer cannot load what the checkpoint's metadata describes."""
        optimizer_state = self.optimizer.state_dict()["state"]
        unplaced = [(number, key) for number, key in sorted(self._nested) if key not in optimizer_state.get(number, {})]
        if unplaced:
            number, key = unplaced[0]
            yield (
                f"{key!r} of parameter {number} holds several tensors, which DCP does not load into an optimizer "
                "that has none there; Checkpointer.restore does, or take a step first"
            )
            return
        if not self._groups:
            return
        state: dict[int, dict[str, Any]] = {
            number: {
                key: torch.empty(stored.size, device="meta") for key, stored in members.items() if stored is not None
            }
            for number, members in self._saved.items()
        }
        for number, key in self._nested:
            state.setdefault(number, {})[key] = []
        yield from misfits(self.optimizer, {"state": state, "param_groups": self._groups}, name_of)

    def state_dict(self) -> dict[str, Any]:
        optimizer_state = self.optimizer.state_dict()
        if not any("param_names" in group for group in self._groups):
            # Left out, because DCP refuses what the checkpoint lacks; torch keeps those that the optimizer has.
            groups = [
                {key: value for key, value in group.items() if key != "param_names"}
                for group in optimizer_state["param_groups"]
            ]
            optimizer_state = optimizer_state | {"param_groups": groups}
        parameters = parameters_by_number(self.optimizer, self._groups)
        if optimizer_state["state"] and list(parameters) == list(
            parameters_by_number(self.optimizer, optimizer_state["param_groups"])
        ):
            return optimizer_state
        state = {
            number: {name: _room(parameters[number], stored) for name, stored in members.items()}
            for number, members in self._saved.items()
            if number in parameters
        }
        return optimizer_state | {"state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        members = state["state"]
        for key in [key for key in members if type(key) is str and key.isdecimal()]:
            members.setdefault(int(key), {}).update(members.pop(key))
        self.optimizer.load_state_dict(align_state(self.optimizer, state))


def _room(parameter: torch.Tensor, stored: TensorStorageMetadata | None) -> torch.Tensor | None:
    """Return a tensor to load into, with the parameter's placement if it has the parameter's shape."""
    if stored is None:
        return None
    if stored.size == parameter.size():
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    # load_state_dict() moves it to the parameter's device.
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


def _members(name: str, metadata: Metadata | None) -> dict[int, dict[str, TensorStorageMetadata | None]]:
    """Return by parameter number and key the metadata of each state tensor; None in the place of a plain value."""
    by_number: dict[int, dict[str, TensorStorageMetadata | None]] = {}
    for fqn, path in _paths(metadata):
        if len(path) == 4 and path[:2] == (name, "state") and str(path[2]).isdecimal():
            assert metadata is not None
            stored = metadata.state_dict_metadata.get(fqn)
            members = by_number.setdefault(int(path[2]), {})
            members[str(path[3])] = stored if isinstance(stored, TensorStorageMetadata) else None
    return by_number


def _groups(name: str, metadata: Metadata | None, value: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return what identifies the parameters in the saved `param_groups`; empty if it cannot be read."""
    by_number: dict[int, dict[str, Any]] = {}
    for fqn, path in _paths(metadata):
        if path[:2] != (name, "param_groups"):
            continue
        if len(path) == 2:  # as torch up to 2.3 wrote it: all groups in one value
            groups = value(fqn)
            return groups if isinstance(groups, list) and all(isinstance(group, dict) for group in groups) else []
        if len(path) == 4 and type(path[2]) is int and path[3] in _IDENTIFYING:
            by_number.setdefault(path[2], {})[path[3]] = value(fqn)
    is_read = list(by_number) == list(range(len(by_number))) and all(
        isinstance(group.get("params"), list) for group in by_number.values()
    )
    return list(by_number.values()) if is_read else []


def _paths(metadata: Metadata | None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each name in the flat state with its path in the nested one."""
    paths = metadata.planner_data if metadata is not None else None
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if isinstance(path, tuple):
            yield fqn, path


class _ModuleStandIn:
    """Presents a module to DCP with the extra states that the checkpoint has for it."""

    def __init__(self, name: str, module: nn.Module, metadata: Metadata | None) -> None:
        self._name, self._module, self._metadata = name, module, metadata

    def state_dict(self) -> dict[str, Any]:
        module_state = self._module.state_dict()
        module_state.update(_extra_states(self._name, module_state, self._metadata))
        return module_state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state)


class StandIns:
    """A state as DCP receives it: with stand-ins for optimizers, and for modules and mappings with extra states.

    `value` is as for `OptimizerStandIn`.
    """

    def __init__(
        self, state: MutableMapping[str, Any], metadata: Metadata | None, value: Callable[[str], object]
    ) -> None:
        self._state = state
        self.state: dict[str, Any] = dict(state)
        for name, entry in state.items():
            if isinstance(entry, Optimizer):
                self.state[name] = OptimizerStandIn(name, entry, metadata, value)
            elif isinstance(entry, nn.Module):
                self.state[name] = _ModuleStandIn(name, entry, metadata)
            elif isinstance(entry, dict) and (extra := _extra_states(name, entry, metadata)):
                self.state[name] = {**entry, **extra}

    def check(self) -> None:
        """Compare optimizers with what the checkpoint has for them.

        Raises `StateMismatch`, which names the parameters, if they are others, or have other shapes.
        """
        name_of = names_in(leaves(self._state))
        for name, entry in self.state.items():
            if isinstance(entry, OptimizerStandIn):
                for reason in entry.misfits(name_of):
                    raise StateMismatch(f"{name!r}: {reason}")

    def copy_back(self) -> None:
        """Copy the values that DCP loaded back into the state."""
        for name, value in self.state.items():
            entry = self._state[name]
            if isinstance(value, OptimizerStandIn | _ModuleStandIn) or entry is value:
                continue
            if isinstance(entry, dict) and isinstance(value, dict) and value.keys() == entry.keys():
                entry.update(value)
            else:
                self._state[name] = value


def _extra_states(name: str, module_state: Mapping[Any, Any], metadata: Metadata | None) -> dict[Any, Any]:
    """Return by their keys the extra states to load into, of the kinds and sizes that the checkpoint has."""
    keys = [key for key in module_state if type(key) is str and is_extra_state(key)]
    paths = metadata.planner_data if keys and metadata is not None else None
    extra_states: dict[Any, Any] = {}
    for fqn, path in paths.items() if isinstance(paths, dict) else ():
        if isinstance(path, tuple) and len(path) > 1 and path[0] == name and path[1] in keys:
            assert metadata is not None
            stored = metadata.state_dict_metadata.get(fqn)
            room = None
            if isinstance(stored, TensorStorageMetadata):
                room = torch.zeros(stored.size, dtype=stored.properties.dtype)
            set_element(extra_states, path[1:], room)
    return extra_states


def load(
    state: MutableMapping[str, Any],
    checkpointer: Checkpointer,
    step: int | None = None,
    *,
    attempt: str | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    planner: LoadPlanner | None = None,
    weights_only: bool = True,
) -> Restored | None:
    """`dcp.load` the newest checkpoint that can be verified; if one is proven corrupt, all ranks fall back.

    It loads checkpoints saved through DCP and checkpoints of `Checkpointer.save`. DTensors of the latter are loaded
    onto this launch's meshes, of any shape and number of ranks. Values other than DTensors must then be the same on all
    ranks that saved them; those that a node's ranks divided among them are. If as many ranks load as saved, they may
    differ, and each rank receives its own.

    Args:
        state: as for `dcp.load`; it is loaded in place. Its names must be those of the saved state, as DCP forms them.
            So an optimizer's own state is loaded into an optimizer, not into the result of `get_optimizer_state_dict`,
            and the reverse. An optimizer that has no state yet receives one, and its parameters are compared as
            `Checkpointer.restore` compares them. A module's extra state is loaded as it was saved. Another tensor of
            the checkpoint is converted to the dtype of its target in the state, as DCP does.
        step, attempt, best, mode, weights_only: as for `StorageReader`.
        planner: as for `dcp.load`.

    Returns:
        As `Checkpointer.restore`, with the checkpoint's directory in the spool, which holds this node's own parts if
        they exist; None on a fresh start.

    Raises:
        As `StorageReader`; the message names the rank that failed, if it is another one. Errors other than corruption
        never cause a fallback.
        StateMismatch: DCP cannot plan this load, for example because the state has a key that the checkpoint lacks; or
            values that ranks saved under one name differ and cannot be combined. The message names them. No tensor has
            changed then.
        Some tensors may have been loaded if a checkpoint in the spool proves corrupt and no older one can be loaded.
    """
    with internals(checkpointer).ranks.attending(), internals(checkpointer).launch.restoring():
        return _load(
            state, OpenReader(checkpointer, best=best, mode=mode, weights_only=weights_only), step, attempt, planner
        )


def _load(
    state: MutableMapping[str, Any],
    reader: OpenReader,
    step: int | None,
    attempt: str | None,
    planner: LoadPlanner | None,
) -> Restored | None:
    restorer = reader.restorer
    try:
        for candidate in reader.candidates(step, attempt):
            failure: BaseException | None = None
            try:
                stand_ins = StandIns(state, reader.metadata, reader.value)
                reader.check = stand_ins.check
                dcp_load(stand_ins.state, storage_reader=reader, planner=planner or CheckedLoadPlanner())
                stand_ins.copy_back()
            except BaseException as raised:
                failure = raised
            own_error = _own_failure(failure)
            if own_error is not None and not isinstance(own_error, Exception):
                raise own_error  # an interrupt, of which `attending` notifies the other ranks
            if not restorer.settle(candidate, own_error, unfit=isinstance(own_error, UNFIT_ERRORS)).should_load:
                continue
            if failure is not None:
                raise StoreUnavailable(
                    f"a process of another launch in this group could not load: {failure}"
                ) from failure
            reader.go_on()
            return Restored(
                step=candidate.checkpoint.step,
                attempt=candidate.checkpoint.attempt,
                tier=reader.tier,
                metrics=reader.metrics,
                skipped=reader.skipped,
                unreached=reader.unreached,
                directory=reader.directory,
            )
        return None
    finally:
        reader.close()


def _own_failure(failure: BaseException | None) -> BaseException | None:
    """Return why this rank could not load, or None: other ranks report their own failures."""
    if not isinstance(failure, CheckpointException):
        return failure
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    error = failure.failures[rank][0] if rank in failure.failures else None
    if isinstance(error, RuntimeError | ValueError | KeyError) and not isinstance(error, UNFIT_ERRORS):
        # DCP's planner raises these types; tierd's own findings are a TierdError.
        mismatch = StateMismatch(f"DCP cannot load this into the state: {type(error).__name__}: {error}")
        mismatch.__cause__ = error
        return mismatch
    return error
