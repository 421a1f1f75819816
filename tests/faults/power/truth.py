"""What must and may lie in a spool and on a tier, and what does: read by nobody's code but this.

Invariant: nothing here asks tierd. What a file must hold is made from its part's name, again; what a manifest must say
is in FORMAT.md.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from faults.rounds import Lost
from support import by_hand

# A thing is (place, name). What a place is, and what its names look like:
SPOOL = "spool"  # <run>/<checkpoint>/<part>
QUARANTINED = "set aside in the spool"
PINNED = "pinned in the spool"  # <run>/<checkpoint>
PAUSED = "paused"  # the only name is ""
TIER = "tier"
TIER_QUARANTINED = "set aside on the tier"
TIER_PINNED = "pinned on the tier"
Thing = tuple[str, str]

_STEP = re.compile(r"[^/]+/(\d{12})\.[^/]+/(\d{5})-of-(\d{5})")
_PATCH_OF = re.compile(r"(?<=\.patch|\.delta)[0-9a-f]{11}$")  # the flush that made a patch


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much a scene's parts hold: all that a seed says about content, sizes in bytes."""

    seed: int
    large: int
    small: int
    chunk: int
    files: int = 3
    folder: str = ""
    handed: bool = False  # as a trainer hands them to the daemon: its tensors and its tree

    @lru_cache(64)  # noqa: B019  # few are made, and children find what their parent has worked out
    def files_of(self, name: str) -> dict[str, bytes]:
        """What the part of this name holds: half of the first file is the same at each step of a rank."""
        match = _STEP.fullmatch(name)
        if not match:
            raise Lost(f"{name} is no part's name")
        step, rank = int(match[1]), int(match[2])
        kept, moved = (random.Random(f"{self.seed} {what}") for what in (f"rank {rank}", f"rank {rank} step {step}"))
        half = self.large // 2
        weights, state = kept.randbytes(half) + moved.randbytes(self.large - half), bytes([step % 256]) * self.small
        if self.handed:
            return {"tensors.safetensors": weights, "state.json": state}
        found = {
            "weights.bin": weights,
            "state.json": state,
            "empty": b"",
        }
        more = {f"more-{number}": moved.randbytes(self.small + number) for number in range(3, self.files)}
        return {self.folder + file: data for file, data in list((found | more).items())[: self.files]}


@dataclass(slots=True)
class Truth:
    """What is known of every thing from what was said before the cut: it must be there, or it may.

    Attributes:
        damaged: things whose bytes nobody promised.
        together: of the things of each, at least one is there; and of those of `apart` at most one.
    """

    must: set[Thing] = field(default_factory=set)
    may: set[Thing] = field(default_factory=set)
    damaged: set[Thing] = field(default_factory=set)
    together: list[tuple[Thing, ...]] = field(default_factory=list)
    apart: list[tuple[Thing, ...]] = field(default_factory=list)

    def hear(self, messages: Iterable[list]) -> None:
        """`[verb, adds, drops]`, where a verb is "begun" or "done"; or `["whole", things]`."""
        for verb, *rest in messages:
            if verb == "whole":
                self.damaged -= {(place, name) for place, name in rest[0]}
                continue
            adds, drops = ({(place, name) for place, name in things} for things in rest)
            if verb == "begun":
                self.may |= adds
                self.must -= drops
            elif verb == "done":
                self.may |= adds
                self.must |= adds
                self.may -= drops
                self.must -= drops

    def check(self, seen: Seen) -> None:
        """Compare with what is there after a cut: P1 and P2, P5."""
        if lost := self.must - seen.things:
            raise Lost(f"lost, though it was said to be there: {sorted(lost)}")
        if odd := seen.things - self.may:
            raise Lost(f"is there, and nobody put it there, or it was said to be gone: {sorted(odd)}")
        for some in self.together:
            if not seen.things.intersection(some):
                raise Lost(f"none is left of {some}")
        for some in self.apart:
            if len(seen.things.intersection(some)) > 1:
                raise Lost(f"it is in two places: {some}")
        if bad := {thing: why for thing, why in seen.bad.items() if thing not in self.damaged}:
            raise Lost(f"visible and not whole: {bad}")


@dataclass(slots=True)
class Seen:
    """What lies there: `things`; why one is `bad`; chunks of the tier, those that something names; leftovers."""

    things: set[Thing] = field(default_factory=set)
    bad: dict[Thing, str] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    def at_rest(self) -> None:
        """P6: once a daemon has come to rest, all is whole, and nothing is left over."""
        if self.bad:
            raise Lost(f"not whole, though a daemon has come to rest: {self.bad}")
        if self.left:
            raise Lost(f"left over: {self.left}")
        stays = {_owner(key) for key in self.named}  # a base checkpoint goes with those that share its chunks
        # And of a part that was found corrupt while it was sent, some chunks are there: its checkpoint is hoped for.
        stays |= {name.split("/")[1] for place, name in self.things if place == QUARANTINED}
        if loose := {key for key in self.chunks - self.named if _owner(key) not in stays}:
            raise Lost(f"chunks that no manifest names: {sorted(loose)}")

    def complete(self, *, whole: bool) -> set[str]:
        """Checkpoints every part of which is in the spool or on the tier; `whole`: and not bad."""
        ranks: dict[tuple[str, int], set[int]] = {}
        for place, name in self.things:
            if place in (SPOOL, TIER) and not (whole and (place, name) in self.bad):
                checkpoint, _, part = name.rpartition("/")
                rank, world = map(int, part.split("-of-"))
                ranks.setdefault((checkpoint, world), set()).add(rank)
        return {checkpoint for (checkpoint, world), found in ranks.items() if found == set(range(world))}

    def state(self) -> dict[str, list]:
        """What must be the same whichever way led here. Nobody says who of two put first what both hold, nor which
        flush a patch is of."""
        names = {_PATCH_OF.sub("", key.rpartition("/")[2]) for key in self.named}
        return {"things": sorted(self.things), "chunks": sorted(names)}


def _owner(key: str) -> str:
    """The checkpoint under whose name a chunk lies."""
    return key.split("/")[-3]


def observe(spool: Path, tier: Path, sizes: Sizes) -> Seen:
    """Read every byte that is visible."""
    seen = Seen()
    _observe_spool(seen, spool, sizes)
    _observe_tier(seen, tier, sizes)
    return seen


def _observe_spool(seen: Seen, spool: Path, sizes: Sizes) -> None:
    control = spool / ".tierd"
    for place, base in ((SPOOL, spool), (QUARANTINED, control / "quarantine")):
        for home in base.glob("[!.]*/[!.]*/*"):
            name = home.relative_to(base).as_posix()
            if place == SPOOL and home.parent.name == "pins":
                seen.things.add((PINNED, f"{home.parent.parent.name}/{home.name}"))
                continue
            seen.things.add((place, name))
            if place == SPOOL and (why := _defect(home, sizes.files_of(name))):
                seen.bad[place, name] = why
            seen.left += [str(path) for path in home.glob("manifest.json.*")]
    if (control / "paused").exists():
        seen.things.add((PAUSED, ""))
    for room in ("stage", "fetch", "trash"):
        seen.left += [str(path) for path in (control / room).glob("*")]


def _defect(home: Path, expected: Mapping[str, bytes]) -> str | None:
    """Why a part of the spool is not whole."""
    found = {path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir()}
    if strange := found ^ {*expected, "manifest.json"}:
        return f"files that are missing or too many: {sorted(strange)}"
    for name, data in expected.items():
        there = (home / name).read_bytes()
        if there != data:
            return f"{name} holds {_difference(there, data)}"
    try:
        manifest, _ = by_hand.in_spool(home)
    except by_hand.Damaged as error:
        return str(error)
    if len(manifest["files"]) != len(expected):
        return f"a manifest of other files than {sorted(expected)}"
    return None


def _observe_tier(seen: Seen, tier: Path, sizes: Sizes) -> None:
    for path in tier.rglob("*"):
        if path.is_dir():
            continue
        key = path.relative_to(tier).as_posix()
        match key.split("/"):
            case ["README.md" | "README.md.id"]:
                pass
            case [_, "retention", _]:
                json.loads(path.read_bytes())["retention"]["keep_last"]  # whole, whenever the power went
            case [_, "timeline", _]:
                (by_hand.sealed(path.read_bytes()) or {})["launches"]  # as whole, under a seal of the same kind
            case [run, "manifests", checkpoint, part]:
                _observe_manifest(seen, tier, f"{run}/{checkpoint}/{part.removesuffix('.json')}", path, sizes)
            case [run, "quarantine", checkpoint, part]:
                seen.things.add((TIER_QUARANTINED, f"{run}/{checkpoint}/{part.removesuffix('.json')}"))
                seen.named |= _named(run, path)
            case [run, "pins", checkpoint]:
                seen.things.add((TIER_PINNED, f"{run}/{checkpoint}"))
            case [_, "chunks", *_]:
                seen.chunks.add(key)
            case _:
                seen.left.append(key)


def _observe_manifest(seen: Seen, tier: Path, name: str, path: Path, sizes: Sizes) -> None:
    thing = TIER, name
    seen.things.add(thing)
    try:
        _, files = by_hand.on_tier(path)
        if wrong := [file for file, data in sizes.files_of(name).items() if files.get(file) != data]:
            seen.bad[thing] = f"other bytes of {wrong} than were saved"
    except by_hand.Damaged as error:
        seen.bad[thing] = str(error)
    seen.named |= _named(name.partition("/")[0], path)


def _named(run: str, path: Path) -> set[str]:
    return {f"{run}/{key}" for key in by_hand.keys(by_hand.sealed(path.read_bytes()) or {})}


def _difference(there: bytes, wanted: bytes) -> str:
    if len(there) != len(wanted):
        return f"{len(there)} bytes, not {len(wanted)}"
    bad = [at for at in range(0, len(wanted), 4096) if there[at : at + 4096] != wanted[at : at + 4096]]
    return (
        f"{len(bad)} wrong pages, the first at byte {bad[0]}; {Counter(there[bad[0] : bad[0] + 4096]).most_common(1)}"
    )
