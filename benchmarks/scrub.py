"""Does scrubbing find all of what is corrupt, and nothing else? Seeded damage in a spool and two tiers, in real files.

    python -m benchmarks.scrub                     1,000 damages among 11,100 chunks; writes results/scrub.json

Each chunk is a file of the spool and an object on each tier. A damage is one chunk in one place: a flipped bit, a cut,
an addition, another chunk's bytes, or nothing there at all. Most are in one place or in two of the three, and can be
repaired from the rest; twelve in a hundred are the same chunk in every place, and cannot. While tiers are read, one
answer in fifty has a bit flipped on its way, which is nobody's corruption. Judged is against what was damaged and the
bytes that were there before, not by what scrubbing says of itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from tierd.bench.report_page import write_result
from tierd.core.config import Config, TierConfig
from tierd.core.ids import CheckpointId, PartId, manifests_prefix
from tierd.core.manifest import Manifest
from tierd.core.manifest_codec import decode
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.core.planning.place import SPOOL
from tierd.core.retention.policy import RetentionPolicy
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import ReferenceCopy, flush
from tierd.spool.file_io import write_file
from tierd.spool.spool import Spool
from tierd.stores.base import Buffer
from tierd.stores.file_store import FileStore

TIERS = ("first", "second")
FILES = 37  # chunks of a part
Spot: TypeAlias = tuple[str, PartId, int]  # place, part, chunk


class Glitching(FileStore):
    """One get of a chunk in fifty has a bit flipped on its way, once."""

    noise: random.Random | None = None
    glitches = 0
    last = ""

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        data = await super().get(key, into)
        if self.noise and "/chunks/" in key and key != self.last and len(data) and self.noise.random() < 0.02:
            self.glitches, self.last = self.glitches + 1, key
            data = bytearray(data)
            data[self.noise.randrange(len(data))] ^= 1 << self.noise.randrange(8)
        return data


def commit(spool: Spool, step: int, noise: random.Random) -> PartId:
    """A part of many small files, half of which can be packed."""
    part = PartId(CheckpointId("run", f"{1:012x}-{1:08x}", step), 0, 1)
    with spool.stage(part) as stage:
        files = []
        for number in range(FILES):
            name, data = f"{number:02}.bin", noise.randbytes(noise.randint(200, 1500))
            data += bytes([number]) * (noise.randint(100, 2000) if number % 2 else 0)
            files.append(write_file(stage.path / name, name, data))
        stage.commit(Manifest.of(part, None, {}, datetime(2026, 1, 1, tzinfo=UTC), "benchmark", tuple(files)))
    return part


def seeded(parts: list[PartId], count: int, noise: random.Random) -> tuple[set[Spot], set[PartId]]:
    """What will be damaged, and the parts of which some chunk will be right nowhere."""
    places = (SPOOL, *TIERS)
    lost = sorted(noise.sample(parts, max(1, count // 250)))
    everywhere = [(part, number) for part in lost for number in noise.sample(range(FILES), count // 25 // len(lost))]
    others = [(part, number) for part in parts if part not in lost for number in range(FILES)]
    noise.shuffle(others)
    spots = {(place, *one) for one in everywhere for place in places}
    for one in others[: (pairs := count * 14 // 100)]:
        spots |= {(place, *one) for place in noise.sample(places, 2)}
    for one in others[pairs : pairs + count - len(spots)]:
        spots.add((noise.choice(places), *one))
    return spots, set(lost)


def damage(path: Path, other: Path, noise: random.Random) -> str:
    """Harm one file; how."""
    data = bytearray(path.read_bytes())
    how = noise.choice(("flip", "cut", "add", "another's", "missing"))
    match how:
        case "flip":
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        case "cut":
            del data[noise.randrange(len(data)) :]
        case "add":
            data += noise.randbytes(noise.randint(1, 100))
        case "another's":
            data = bytearray(other.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data)
    return how


class Trial:
    """A spool and two tiers in a directory."""

    def __init__(self, root: Path, parts: int, seed: int) -> None:
        self.noise = random.Random(seed)
        self.roots = {name: root / name for name in TIERS}
        for path in self.roots.values():
            path.mkdir(parents=True)
        self.spool = Spool(root / "spool")
        self.stores = {name: Glitching(path) for name, path in self.roots.items()}
        policy = RetentionPolicy(keep_last=parts)
        self.config = Config(
            spool=str(self.spool.root),
            tier=tuple(
                TierConfig(name=name, url=f"file://{path}", retention=policy) for name, path in self.roots.items()
            ),
            retention=policy,
            scrub_rate="900GB/s",
        )
        self.parts = [commit(self.spool, step, self.noise) for step in range(parts)]
        self.paths: dict[Spot, Path] = {}

    async def flush(self) -> None:
        """Put every part on both tiers, in the same form, as the daemon does."""
        for part in self.parts:
            twin: ReferenceCopy | None = None
            for store in self.stores.values():
                await flush(self.spool, part, TierUploadContext(store), twin=twin)
                twin = ReferenceCopy(store, decode(bytes(await store.get(part.manifest_key)), part))
        for part in self.parts:
            for number, file in enumerate(self.spool.manifest(part).files):
                self.paths[SPOOL, part, number] = self.spool.path(part) / file.path
            for name, store in self.stores.items():
                manifest = decode(bytes(await store.get(part.manifest_key)), part)
                for number, chunk in enumerate(manifest.chunks()):
                    assert chunk.stored is not None
                    self.paths[name, part, number] = self.roots[name] / "run" / chunk.stored.key

    def harm(self, spots: set[Spot]) -> Counter[str]:
        kinds: Counter[str] = Counter()
        good = [spot for spot in sorted(self.paths) if spot not in spots]
        for spot in sorted(spots):
            kinds[damage(self.paths[spot], self.paths[self.noise.choice(good)], self.noise)] += 1
        return kinds

    async def scrub(self) -> tuple[Reconciler, Counter[tuple[str, str]]]:
        """Read every copy again; the daemon, and how many chunks it told of by place and part."""
        reported: Counter[tuple[str, str]] = Counter()

        def listen(event) -> None:  # type: ignore[no-untyped-def]
            if event.what == "corrupt":
                match = re.match(r"scrubbed, ([0-9]+) of", event.why)
                reported[event.place, event.subject] += int(match[1]) if match else 0

        daemon = Reconciler(self.config, self.spool, self.stores, listen)
        for name in daemon.workers:
            await daemon.observe(name)
        world = daemon.inventory()
        for place, held in {**world.tiers, SPOOL: world.spool}.items():
            for part in sorted(held.parts()) if held else ():
                await daemon.scrubber.scrub(ScrubbedCopy(place, part))
        return daemon, reported


async def run(root: Path, parts: int, count: int, seed: int = 1) -> dict[str, object]:
    """One trial; its figures."""
    trial = Trial(root, parts, seed)
    await trial.flush()
    before = {spot: path.read_bytes() for spot, path in trial.paths.items()}
    spots, lost = seeded(trial.parts, count, trial.noise)
    kinds = trial.harm(spots)
    for store in trial.stores.values():
        store.noise = trial.noise
    begun = time.monotonic()
    daemon, reported = await trial.scrub()
    took = time.monotonic() - begun
    wanted = Counter((place, str(part)) for place, part, _ in spots)
    right = {spot for spot, path in trial.paths.items() if path.exists() and path.read_bytes() == before[spot]}
    quarantined = {part for part in trial.parts if trial.spool.path(part).is_dir() is False}
    kept = {
        name: {path.parent.name for path in (root / name / manifests_prefix("run")).rglob("*.json")} for name in TIERS
    }
    healable = {spot for spot in spots if spot[1] not in lost}
    counters = daemon.journal.counters
    read = counters["scrubbed_bytes"]
    again, told_again = await trial.scrub()
    return {
        "seed": seed,
        "chunks": len(trial.paths),
        "damaged": len(spots),
        "good": len(trial.paths) - len(spots),
        "kinds": dict(sorted(kinds.items())),
        "found": sum((reported & wanted).values()),
        "false_alarms": sum((reported - wanted).values()) + sum(told_again.values()),
        "counted": counters["scrub_findings"],
        "repairable": len(healable),
        "repaired": len(healable & right),
        "good_that_changed": len({spot for spot in trial.paths if spot not in spots and spot[1] not in lost} - right),
        "parts_beyond_repair": len(lost),
        "set_aside_exactly_those": quarantined == lost
        and all(
            names == {part.checkpoint.name for part in trial.parts} - {p.checkpoint.name for p in lost}
            for names in kept.values()
        ),
        "flipped_on_the_way": sum(store.glitches for store in trial.stores.values()),
        "found_by_a_second_pass": again.journal.counters["scrub_findings"],
        "bytes_read": read,
        "seconds": round(took, 1),
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as directory:
        result = asyncio.run(run(Path(directory), 100, 1000, int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    write_result(Path(__file__).parent / "results", "scrub", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
