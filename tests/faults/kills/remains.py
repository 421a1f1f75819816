"""What is left when faults have stopped: looked at by the format's page alone, without tierd's code."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from faults.kills.victims import RUN, content, is_staged, reported, staged
from faults.rounds import Lost
from support import by_hand
from support.by_hand import chain

_ROOMS = ("stage", "fetch", "trash", "recycle", "quarantine")


def leftovers(
    spool: Path, tiers: Mapping[str, Path], keep: Mapping[str, int], world: int, newest: tuple[str, int]
) -> list[str]:
    """Whatever does not belong there any more, and whatever lacks. `newest`: attempt and step saved last, the end of a
    launch that saved more than is kept anywhere."""

    def wanted(place: str) -> set[str]:
        attempt, last = newest
        steps, ranks = range(last - keep[place] + 1, last + 1), range(world)
        return {f"{step:012}.{attempt}/{rank:05}-of-{world:05}" for step in steps for rank in ranks}

    found = [f"{path}" for room in _ROOMS for path in (spool / ".tierd" / room).glob("*")]
    found += [f"{path} holds nothing" for path in (spool / RUN).glob("*.*") if not _files(path)]
    parts = {f"{home.name}/{name}" for home in (spool / RUN).glob("*.*") for name in _names(home)}
    found += [f"{part} has no manifest" for part in parts if not (spool / RUN / part / "manifest.json").exists()]
    found += _differ("the spool", parts, wanted("local"))
    for name, tier in tiers.items():
        found += [str(path) for path in (tier / ".tmp").glob("*")]
        found += [str(path) for kind in ("flushing", "pruning", "quarantine") for path in _files(tier / RUN / kind)]
        manifests = _files(tier / RUN / "manifests")
        names = {path.relative_to(tier / RUN / "manifests").as_posix() for path in manifests}
        found += _differ(name, names, {f"{part}.json" for part in wanted(name)})
        named = {one["stored"]["key"] for path in manifests for chunk in _chunks(path) for one in chain(chunk)}
        there = {path.relative_to(tier / RUN).as_posix() for path in _files(tier / RUN / "chunks")}
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
    count = 0
    for tier in tiers.values():
        chunks = [chunk for path in _files(tier / RUN / "manifests") for chunk in _chunks(path)]
        named = {one["stored"]["key"] for chunk in chunks for one in chain(chunk)}
        count += len({path.relative_to(tier / RUN).as_posix() for path in _files(tier / RUN / "chunks")} - named)
    return count


def _files(path: Path) -> list[Path]:
    """All files below; what goes meanwhile is left out."""
    return [Path(directory, name) for directory, _, names in os.walk(path) for name in names]


def _chunks(path: Path) -> list[dict[str, Any]]:
    try:
        return [chunk for file in json.loads(path.read_bytes())["files"] for chunk in file["chunks"]]
    except FileNotFoundError:
        return []


def check_remains(spool: Path, tiers: Mapping[str, Path], seed: int, keep: Mapping[str, int]) -> None:
    """Every byte of every part, on every tier and in the spool, is what its rank saved. Raises `Lost`."""
    judge = by_hand.program()
    try:
        for tier in tiers.values():
            for path in _files(tier / RUN / "manifests"):
                manifest = judge.read_sealed(path)
                _check_part(
                    manifest,
                    seed,
                    {
                        file["path"]: b"".join(judge.read_chunk(tier / RUN, chunk) for chunk in file["chunks"])
                        for file in manifest["files"]
                    },
                )
        for path in (spool / RUN).glob("*/*/manifest.json"):
            manifest = judge.read_sealed(path)
            _check_part(
                manifest, seed, {file["path"]: (path.parent / file["path"]).read_bytes() for file in manifest["files"]}
            )
    except (judge.Damaged, SystemExit) as error:
        raise Lost(f"what is left cannot be read: {error}") from error


def _check_part(manifest: dict[str, Any], seed: int, files: dict[str, bytes]) -> None:
    who = manifest["attempt"], manifest["step"], manifest["rank"]
    name = f"step {manifest['step']} of rank {manifest['rank']}"
    if is_staged(manifest["step"]):
        if files != {"sub/data": staged(seed, *who)}:
            raise Lost(f"{name} holds other bytes than were staged")
        return
    if json.loads(files["state.json"])["told"] != reported(seed, *who):
        raise Lost(f"{name} holds another's state: {files['state.json'][:200]!r}")
    data = files["tensors.safetensors"]
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    for tensor, array in content(seed, *who).items():
        begin, end = header[tensor]["data_offsets"]
        if data[8 + size + begin : 8 + size + end] != array.tobytes():
            raise Lost(f"{name} holds wrong bytes of {tensor}")
