"""Checkpoints whose ranks divided replicated tensors among them, made in one process without `torch.distributed`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
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
    node_of = {rank: tuple(node) for node in nodes or [range(world)] for rank in node}
    parts = []
    for rank, state in enumerate(states):
        group = ReplicaGroup(rank, world, node_of[rank], frozenset(declared))
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
