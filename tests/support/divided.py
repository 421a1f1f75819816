"""Checkpoints whose ranks divided replicated tensors among them, made in one process without `torch.distributed`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from support.state_files import copy_into
from support.world import described, part

from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.commit import write_part
from tierd.spool.spool import Spool
from tierd.state.capturer import Capturer
from tierd.state.replicas import ReplicaGroup
from tierd.stores.base import Store

DECLARED = ("model", "optimizer", "list", "array")


@dataclass
class DividedPart:
    """What a rank writes: its files by name, and the digest of the division."""

    files: dict[str, bytes]
    division: str


def divided_state(rank: int, step: int = 1) -> dict[str, Any]:
    """A state of which the entries of `DECLARED` are the same on all ranks; tensors of them are large and small."""
    generator = torch.Generator().manual_seed(step)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "model": {
            **{f"layer{number}": tensor(40 + number, 50) for number in range(6)},
            "half": tensor(3000, dtype=torch.bfloat16),
            "complex": tensor(2000, dtype=torch.complex64),
            "bias": tensor(7),
            "large": tensor(600, 500),  # more than a chunk of its own
        },
        "optimizer": {"moments": [tensor(1500 + number) for number in range(3)], "lr": 0.1 * step},
        "list": [number + step for number in range(2000)],
        "array": tensor(2000).numpy(),
        "own": torch.arange(5000) + 1000 * rank,
        "rank": rank,
    }


def divided(
    states: Sequence[Mapping[str, Any]], declared: Collection[str] = DECLARED, nodes: Sequence[Sequence[int]] = ()
) -> list[DividedPart]:
    """What each rank writes of its state; `nodes` are the ranks of each node, by default all on one."""
    world = len(states)
    all_nodes = tuple(tuple(node) for node in nodes or [range(world)])
    parts = []
    for rank, state in enumerate(states):
        group = ReplicaGroup(rank, world, all_nodes, frozenset(declared))
        capture = Capturer(group=group).capture(state)
        image = bytearray(capture.layout.size)
        copy_into(capture.layout, capture.tensors, image)
        parts.append(DividedPart({TREE: capture.tree(), TENSORS: bytes(image)}, capture.division))
    return parts


def write_divided(spool: Spool, step: int, parts: Sequence[DividedPart | None]) -> list[PartId]:
    """Commit the ranks' parts to a spool, but those that are None. Returns all of them."""
    named = [part(step, rank=rank, world=len(parts)) for rank in range(len(parts))]
    for which, content in zip(named, parts, strict=True):
        if content is not None:
            manifest = msgspec.structs.replace(described(which), division=content.division)
            write_part(spool, manifest, content.files)
    return named


async def put_divided(spool: Spool, step: int, parts: Sequence[DividedPart | None], *stores: Store) -> list[PartId]:
    """Commit the ranks' parts, and have them on these tiers."""
    named = write_divided(spool, step, parts)
    for store in stores:
        for which, content in zip(named, parts, strict=True):
            if content is not None:
                await flush(spool, which, TierUploadContext(store))
    return named


def header_of(file: bytes) -> dict[str, Any]:
    """What the header of a tensor file says."""
    described_by_name: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return described_by_name


def elsewhere_of(file: bytes) -> dict[str, list[str]]:
    """The tensors that lie in other ranks' files, by rank."""
    by_rank: dict[str, list[str]] = json.loads(header_of(file)["__metadata__"].get("tierd.elsewhere", "{}"))
    return by_rank


def with_elsewhere(content: DividedPart, by_rank: Mapping[Any, Sequence[str]] | str) -> DividedPart:
    """The part with another `tierd.elsewhere`: as JSON, or as the text that is given."""
    file = content.files[TENSORS]
    begin = 8 + int.from_bytes(file[:8], "little")
    header = header_of(file)
    header["__metadata__"]["tierd.elsewhere"] = by_rank if isinstance(by_rank, str) else json.dumps(by_rank)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    changed = len(text).to_bytes(8, "little") + text + file[begin:]
    return DividedPart({**content.files, TENSORS: changed}, content.division)


# -- what ranks do, in processes of `support.dcp_ranks.run` -----------------------------------------------------------


def sharded_state(seed: int, *, filled: bool = True) -> dict[str, Any]:
    """DTensors over all ranks, and an entry of tensors and DTensors that every rank has whole."""
    from support.dcp_ranks import spread
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    line = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def tensor(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return values if filled else torch.zeros_like(values)

    weights = {f"layer{number}": tensor(2000 + number) for number in range(5)}
    copied = {f"copied{number}": distribute_tensor(tensor(1500), line, [Replicate()]) for number in range(4)}
    runs = {"list": [seed * number for number in range(1500)] if filled else []}
    return {**spread(seed, filled=filled), "weights": {**weights, **copied}, "runs": runs}


def save_sharded(rank: int, spool: str, step: int) -> tuple[dict[str, Any], list[str]]:
    """Save as one of the ranks of a node; the state gathered, and the names that lie in other ranks' files."""
    from support.dcp_ranks import checkpointer, gathered

    from tierd.spool.spool import Spool

    state = sharded_state(step)
    with checkpointer(spool, to=[], replicated=("weights", "runs")) as ckpt:
        ckpt.save(step, state).wait()
    torch.distributed.barrier()
    which = part(step, rank=rank, world=torch.distributed.get_world_size())
    found = next(one for one in Spool(spool).parts() if (one.checkpoint.step, one.rank) == (step, which.rank))
    by_rank = elsewhere_of((Spool(spool).path(found) / TENSORS).read_bytes())
    return gathered(state), [name for names in by_rank.values() for name in names]


def load_sharded(rank: int, spools: list[str], **more: Any) -> tuple[int, str, dict[str, Any]]:
    """Load through DCP: the step, the place, and the state gathered."""
    from support.dcp_ranks import checkpointer, gathered

    import tierd.dcp

    state = sharded_state(0, filled=False)
    with checkpointer(spools[rank], **more) as ckpt:
        loaded = tierd.dcp.load(state, ckpt)
        assert loaded is not None
        return loaded.step, loaded.tier, gathered(state)


def load_entries(rank: int, spools: list[str], names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Load entries of a `divided_state` through DCP, as `comparable`."""
    from support.dcp_ranks import checkpointer

    import tierd.dcp

    state = emptied({name: divided_state(rank)[name] for name in names})
    with checkpointer(spools[rank], **more) as ckpt:
        assert tierd.dcp.load(state, ckpt) is not None
    return {name: comparable(value) for name, value in state.items()}


def restore_divided(rank: int, spools: Sequence[str], harm: str = "") -> tuple[int, str, list[str], dict[str, Any]]:
    """Restore a `divided_state` on one of the ranks, each with its node's spool: step, place, what was logged, state.

    `harm` is what happens to rank 2 when the ranks exchange bytes: it is "killed" or "stopped", or "sends wrong bytes";
    or the ranks are in "groups of two".
    """
    import logging

    import tierd
    from tierd.client.ranks.peer_group import PeerGroup
    from tierd.core.replicas import exchange_plan

    if harm == "groups of two":
        exchange_plan.MOST_MEMBERS = 2
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierd").addHandler(handler)
    logging.getLogger("tierd").setLevel(logging.INFO)
    broadcast = PeerGroup.broadcast

    def harmed(group: PeerGroup, pieces: Any) -> None:
        messages.append("exchanged")
        if rank == 2 and harm in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        pieces = list(pieces)
        if rank == 2 and harm == "sends wrong bytes":
            for sender, memory in pieces:
                if sender == rank:
                    memory[0] ^= 1
        broadcast(group, pieces)

    PeerGroup.broadcast = harmed  # type: ignore[method-assign]
    PeerGroup.__init__.__defaults__ = (3.0,)  # seconds that a wait takes at most
    state = emptied(divided_state(rank))
    with tierd.Checkpointer(spools[rank], "run", replicated=DECLARED, rank_timeout=5.0) as ckpt:
        restored = ckpt.restore(state)
        assert restored is not None
    return restored.step, restored.tier, messages, comparable(state)


def comparable(value: Any) -> Any:
    """A state with dtype, shape and bytes of each tensor and array, which any process compares with `==`."""
    match value:
        case torch.Tensor():
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return str(value.dtype), tuple(value.shape), data
        case np.ndarray():
            return str(value.dtype), value.shape, value.tobytes()
        case dict():
            return {key: comparable(inner) for key, inner in value.items()}
        case list():
            return [comparable(inner) for inner in value]
    return value


def emptied(value: Any) -> Any:
    """A state of the same form, with other values."""
    match value:
        case torch.Tensor():
            return torch.zeros_like(value)
        case dict():
            return {key: emptied(inner) for key, inner in value.items()}
        case list() if any(isinstance(inner, torch.Tensor) for inner in value):
            return [emptied(inner) for inner in value]
    return None
