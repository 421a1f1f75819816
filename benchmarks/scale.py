"""The costs of a shared tier of many ranks' checkpoints to a daemon: observing, planning, reporting, and memory.

    python benchmarks/scale.py [--worlds 8x1000,…] [--summarised 128x1000,…] [--out benchmarks/results]

Each world is a tier in memory that holds the manifests of `ranks x checkpoints`; the daemon's spool holds eight ranks
of a few checkpoints, of all, or of all where the tier lacks every second. Writes scale.json and scale.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import zstandard

from tierd.bench.report_page import markdown_table, write_result
from tierd.core.config import Config, TierConfig
from tierd.core.ids import CheckpointId, PartId, chunk_key, summary_key
from tierd.core.manifest import CHUNK_SIZE, TENSORS, Chunk, File, Manifest, StoredChunk
from tierd.core.manifest_codec import decode, encode
from tierd.core.planning.checkpoint_summary import encode_summary, make_summary
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.core.run_report import make_report
from tierd.core.timeline.restore_order import restore_candidates
from tierd.daemon.tiers.manifest_listing import list_checkpoints, listing_digest
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.stores.memory_store import MemoryStore
from tierd.stores.store_wrappers import CountedStore

RUN, LOCAL, FEW, LAUNCH = "run", 8, 3, 100  # ranks of a node; checkpoints in its spool; checkpoints of an attempt
START = datetime(2026, 1, 1, tzinfo=UTC)
ROUNDS = 3


def checkpoint(step: int) -> CheckpointId:
    launch = 1 + step // LAUNCH
    return CheckpointId(RUN, f"{launch:012x}-{launch:08x}", step)


def manifest(part: PartId, size: int) -> Manifest:
    """Of one file of `size` bytes, as it is on a tier, no two digests alike."""
    step = part.checkpoint.step
    origin = checkpoint(step // LAUNCH * LAUNCH - 1) if step >= LAUNCH else None
    noise = os.urandom(16 * (2 * -(-size // CHUNK_SIZE))).hex()
    chunks = []
    for number, left in enumerate(range(size, 0, -CHUNK_SIZE)):
        raw, stored = noise[64 * number :][:32], noise[64 * number + 32 :][:32]
        key = chunk_key(part, raw, "zst")
        held = min(left, CHUNK_SIZE)
        lies = StoredChunk(codec="zst", size=int(held * 0.84), xxh3_128=stored, key=key, checked="crc64nvme")
        chunks.append(Chunk(size=held, xxh3_128=raw, stored=lies))
    file = File(path=TENSORS, size=size, chunks=tuple(chunks))
    return Manifest.of(part, origin, {"loss": 1 / (step + 1)}, START + timedelta(minutes=step), "", (file,))


def filled(ranks: int, checkpoints: int) -> MemoryStore:
    """A tier with every part's manifest; readable are those that a daemon of ranks 0 to 7 reads."""
    store = MemoryStore()
    for step in range(checkpoints):
        for rank in range(ranks):
            part = PartId(checkpoint(step), rank, ranks)
            store.objects[part.manifest_key] = (encode(manifest(part, CHUNK_SIZE)) if rank < LOCAL else b"", 1)
    store.keys = sorted(store.objects)
    return store


def best(call: Callable[..., object], *args: object) -> float:
    """Seconds of the fastest of some rounds."""
    return min(seconds(call, *args)[0] for _ in range(ROUNDS))


def seconds(call: Callable[..., Any], *args: object) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - begun, result


def spool(ranks: int, steps: range) -> Place:
    parts = [PartId(checkpoint(step), rank, ranks) for step in steps for rank in range(min(LOCAL, ranks))]
    return Place.of({part: ManifestFacts.of(manifest(part, CHUNK_SIZE)) for part in parts})


async def put_summaries(store: MemoryStore) -> None:
    """Put the summary of every checkpoint, as the run's janitor would after it read all manifests."""
    async for own, manifests in list_checkpoints(store, RUN):
        facts = ManifestFacts.of(decode(store.objects[PartId(own, 0, len(manifests)).manifest_key][0]))
        summary = make_summary(own, len(manifests), listing_digest(manifests), facts, {})
        await store.put(summary_key(own), encode_summary(summary))


def observed(store: MemoryStore, names: tuple[str, ...]) -> dict[str, object]:
    """The CPU seconds and the requests of a first observation, of a later one, and of one that lists all names."""
    counted, figures = CountedStore(store), {}
    observer, mine = TierObserver(counted), {RUN: frozenset(range(LOCAL))}
    for name in names:
        before, begun = counted.counts.copy(), time.process_time()
        if name == "all":
            observer.list_all()
        asyncio.run(observer.observe({RUN}, mine))
        requests = {kind: counted.counts[kind] - before[kind] for kind in ("list", "get")}
        figures[name] = {"cpu_s": time.process_time() - begun, **requests}
    return figures


def summarised(ranks: int, checkpoints: int) -> dict[str, object]:
    """A tier's observations without summaries and with them."""
    store = filled(ranks, checkpoints)
    without = observed(store, ("first", "again"))
    asyncio.run(put_summaries(store))
    with_them = observed(store, ("first", "again", "all"))
    return {"ranks": ranks, "checkpoints": checkpoints, "without": without, "with": with_them}


def measured(ranks: int, checkpoints: int) -> dict[str, object]:
    """One inventory's figures: seconds, and bytes of memory at the peak of an observation and after it."""
    store, mine = filled(ranks, checkpoints), {RUN: frozenset(range(LOCAL))}
    eye = TierObserver(store)
    first, tier = seconds(lambda: asyncio.run(eye.observe({RUN}, mine)))
    again, _ = seconds(lambda: asyncio.run(eye.observe({RUN}, mine)))
    few = range(checkpoints - FEW, checkpoints)
    tracemalloc.start()
    seen = asyncio.run(TierObserver(store).observe({RUN}, mine))
    plan(Inventory(spool(ranks, few), {"tier": seen}), config(RetentionPolicy(keep_last=checkpoints)), {}, 0.0)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    unsent = replace(tier, checkpoints={own: seen for own, seen in tier.checkpoints.items() if own.step % 2})
    spools = {
        "few": Inventory(spool(ranks, few), {"tier": tier}),
        "all": Inventory(spool(ranks, range(checkpoints)), {"tier": tier}),
        "half unsent": Inventory(spool(ranks, range(checkpoints)), {"tier": unsent}),
    }
    policies = {
        "keep all": RetentionPolicy(keep_last=checkpoints),
        "keep some": RetentionPolicy(keep_last=3, keep_every_steps=10, keep_best=Best(metric="loss", count=3)),
    }
    return {
        "ranks": ranks,
        "checkpoints": checkpoints,
        "look_first_s": first,
        "look_again_s": again,
        "held_bytes": held,
        "peak_bytes": peak,
        "spools": [
            {
                "spool": name,
                "policy": kept,
                "plan_s": best(plan, world, config(policy), {}, 0.0),
                "report_s": best(make_report, world, config(policy)),
                "candidates_s": best(restore_candidates, world, RUN),
            }
            for name, world in spools.items()
            for kept, policy in policies.items()
        ],
    }


def config(policy: RetentionPolicy) -> Config:
    return Config(spool="/spool", tier=(TierConfig(name="tier", url="/tier", retention=policy),), retention=policy)


def sizes() -> list[dict[str, int]]:
    """Bytes of a manifest of 1, 10 and 100 GB in full chunks, and of the same through zstd."""
    found = []
    for gigabytes in (1, 10, 100):
        data = encode(manifest(PartId(checkpoint(0), 0, 1), gigabytes * 10**9))
        packed = len(zstandard.ZstdCompressor(level=3).compress(data))
        chunks = -(-gigabytes * 10**9 // CHUNK_SIZE)
        found.append({"part_gb": gigabytes, "chunks": chunks, "bytes": len(data), "zstd": packed})
    return found


ABOUT = """# A tier of many ranks

`python benchmarks/scale.py`, {created}: {machine}. The tier is in memory, so the
seconds of an observation are the daemon's own work and the dictionary's, without a network. The spool holds 8 ranks.
Memory counts Python's allocations. `held`: by the places of spool and tier and the facts of manifests. `peak`: the most
during a first observation and a plan.
"""
SUMMARIES = """With a summary of each checkpoint, and without: CPU seconds, and requests as LIST + GET of a counting
store. The last column is an observation that lists all names although there are summaries.
"""
NOTES = f"""
*few*: {FEW} checkpoints; *all*: every one; *half unsent*: every one, and the tier lacks every second one. *keep all*:
`keep_last` of the total number; *keep some*: the last 3, every tenth, the best 3.

A manifest's size on a tier, of one file in chunks of 32 MiB, and its size with zstd (manifests are not compressed):
"""


def page(result: dict[str, Any]) -> str:
    observations, plans = [], []
    for world in result["worlds"]:
        name = f"{world['ranks']:,} x {world['checkpoints']:,}"
        times = (f"{world[key]:.2f} s" for key in ("look_first_s", "look_again_s"))
        observations.append((name, *times, *(f"{world[key] / 1e6:.0f} MB" for key in ("held_bytes", "peak_bytes"))))
        for case in world["spools"]:
            times = (f"{case[key]:.3f} s" for key in ("plan_s", "report_s", "candidates_s"))
            plans.append((name, case["spool"], case["policy"], *times))
    summaries = [
        (
            f"{world['ranks']:,} x {world['checkpoints']:,}",
            "yes" if way == "with" else "no",
            *(f"{seen['cpu_s']:.2f} s, {seen['list']:,} + {seen['get']:,}" for seen in world[way].values()),
            *([] if way == "with" else ["not measured"]),
        )
        for world in result["summarised"]
        for way in ("without", "with")
    ]
    manifests = [
        (f"{size['part_gb']} GB", f"{size['chunks']:,}", *(f"{size[key] / 1e3:,.1f} kB" for key in ("bytes", "zstd")))
        for size in result["manifests"]
    ]
    return "\n\n".join(
        (
            ABOUT.format(**result).strip(),
            markdown_table(("ranks x checkpoints", "first observation", "a later one", "held", "peak"), observations),
            SUMMARIES.strip(),
            markdown_table(
                ("ranks x checkpoints", "summaries", "first observation, requests", "a later one", "all names"),
                summaries,
            ),
            markdown_table(("ranks x checkpoints", "in the spool", "policy", "plan", "report", "candidates"), plans),
            NOTES.strip(),
            markdown_table(("part", "chunks", "manifest", "zstd"), manifests) + "\n",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8x1000,128x1000,1024x1000")
    parser.add_argument("--summarised", default="128x1000,1024x1000,16384x100")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    result = {
        "created": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other work, Python {platform.python_version()}",
        "worlds": [measured(*map(int, world.split("x"))) for world in asked.worlds.split(",")],
        "summarised": [summarised(*map(int, world.split("x"))) for world in asked.summarised.split(",")],
        "manifests": sizes(),
    }
    write_result(asked.out, "scale", result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
