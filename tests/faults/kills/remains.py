"""What is left when faults have stopped: looked at by the format's page alone, without tierd's code."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults.kills.victims import RUN, content, is_staged, reported, staged
from faults.rounds import Lost
from support import by_hand
from support.by_hand import files_below


def leftovers(
    spool: Path, tiers: Mapping[str, Path], keep: Mapping[str, int], world: int, newest: tuple[str, int]
) -> list[str]:
    """Whatever does not belong there any more, and whatever lacks. `newest`: attempt and step saved last, the end of a
    launch that saved more than is kept anywhere."""

    def wanted(place: str) -> set[str]:
        attempt, last = newest
        steps, ranks = range(last - keep[place] + 1, last + 1), range(world)
        return {f"{step:012}.{attempt}/{rank:05}-of-{world:05}" for step in steps for rank in ranks}

    found = by_hand.unfinished(spool, RUN, "recycle")
    parts = {f"{home.name}/{name}" for home in (spool / RUN).glob("*.*") for name in _names(home)}
    found += _differ("the spool", parts, wanted("local"))
    for name, tier in tiers.items():
        home = tier / RUN
        kinds = [tier / ".tmp", *(home / kind for kind in ("flushing", "pruning", "quarantine"))]
        found += [str(path) for kind in kinds for path in files_below(kind)]
        names = {path.relative_to(home / "manifests").as_posix() for path in files_below(home / "manifests")}
        found += _differ(name, names, {f"{part}.json" for part in wanted(name)})
        named, there = _named(home), _chunks(home)
        shared = {key.split("/")[1] for key in named}
        # What a cut-off prune left under a checkpoint goes when nobody names any chunk of that any more.
        found += [f"{name}: {key}, which nobody names" for key in there - named if key.split("/")[1] not in shared]
        found += [f"{name}: {key} is missing" for key in named - there]
    return found


def _names(path: Path) -> list[str]:
    """What lies in a directory, which may go just now."""
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _differ(where: str, found: set[str], wanted: set[str]) -> list[str]:
    return [
        *(f"{where} lacks {name}" for name in sorted(wanted - found)),
        *(f"{where} still holds {name}" for name in sorted(found - wanted)),
    ]


def waiting(tiers: Mapping[str, Path]) -> int:
    """How many chunks nobody names, under checkpoints of which somebody names another."""
    return sum(len(_chunks(tier / RUN) - _named(tier / RUN)) for tier in tiers.values())


def _chunks(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix() for path in files_below(home / "chunks")}


def _named(home: Path) -> set[str]:
    found = set[str]()
    for path in files_below(home / "manifests"):
        try:
            found |= by_hand.keys(json.loads(path.read_bytes()))
        except FileNotFoundError:
            continue
    return found


def check_remains(spool: Path, tiers: Mapping[str, Path], seed: int) -> None:
    """Every byte of every part, on every tier and in the spool, is what its rank saved."""
    for tier in tiers.values():
        for path in files_below(tier / RUN / "manifests"):
            _check_part(*by_hand.on_tier(path), seed)
    for path in (spool / RUN).glob("*/*/manifest.json"):
        _check_part(*by_hand.in_spool(path.parent), seed)


def _check_part(manifest: dict[str, Any], files: by_hand.Files, seed: int) -> None:
    who = manifest["attempt"], manifest["step"], manifest["rank"]
    name = f"step {manifest['step']} of rank {manifest['rank']}"
    if is_staged(manifest["step"]):
        if files != {"sub/data": staged(seed, *who)}:
            raise Lost(f"{name} holds other bytes than were staged")
        return
    if json.loads(files["state.json"])["told"] != reported(seed, *who):
        raise Lost(f"{name} holds another's state: {files['state.json'][:200]!r}")
    tensors = by_hand.tensors(files["tensors.safetensors"])
    for tensor, array in content(seed, *who).items():
        if tensors[tensor] != array.tobytes():
            raise Lost(f"{name} holds wrong bytes of {tensor}")
