"""What a flush costs, and its chunk codec: to one tier and to two, of changed rows, and the codec beside others.

The daemon runs in this process, on tiers in directories. Figures are by GB of state. `read_bytes` leaves out what a
flush reads back from each tier to verify it, which is what the tiers then hold. `raw` reads the same file, puts it in
pieces and reads them back, which is the least that a verified flush of bytes that are not encoded can do.

Every codec gets the same bytes of numbers that training made, in the same process, in turn, in every round, on one
thread; each answer is compared with what went in. Rates are raw bytes by the process's CPU seconds, all threads
counted. tierd's include its digests: of the raw bytes and of what is stored. `ceiling` does only what no decoder of
tierd's objects can leave out: zstd's Huffman coder over pairs of exponents, and both digests. A codec whose library is
not installed is left out.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

import tierd
from tierd.bench.growth.checkpoint_counts import RUN, TIERD_NAME, make_daemon, running, tier_directories, wait_flushed
from tierd.bench.growth.growth_result import Clock, Figures, Rows, Samples
from tierd.bench.process_counters import drop_cache
from tierd.bench.training import Training
from tierd.codec import chunk_codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.threads import mark_foreground

GIGABYTES, ROUNDS, PIECE = 0.25, 3, 32 << 20
ROWS, _WIDTH, _CHANGED = 100_000, 256, 0.05
_UPDATES = 18  # two times as many as share one whole chunk


def _state(kind: str) -> dict[str, torch.Tensor]:
    """Weights as training leaves them, or bytes that no codec shortens."""
    draw, count = torch.Generator().manual_seed(1), int(GIGABYTES * 1e9)
    if kind == "noise":
        return {"data": torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)}
    return {f"layer.{n}": torch.randn(count // 64, generator=draw) * 0.02 for n in range(16)}


async def _flush(home: Path, tiers: int) -> Figures:
    """Flush what the spool holds to so many tiers that are empty."""
    daemon, stores = make_daemon(home, tiers)
    clock, read = Clock(), _read_bytes()
    async with running(daemon, stores):
        await wait_flushed(daemon, tiers)
        figures, read = clock.read(), _read_bytes() - read
    return {**figures, "read_bytes": read - sum(map(_stored, tier_directories(home, tiers)))}


def _read_bytes() -> float:
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return float(line.split()[1])


def flush_samples(home: Path, kind: str, tiers: int) -> Samples:
    """Flushes of one state, each to new tiers, in turns with `raw`."""
    state = _state(kind)
    samples: Samples = {TIERD_NAME: [], "raw": []}
    for number in range(ROUNDS):
        place = home / str(number)
        place.mkdir()
        with tierd.Checkpointer(place / "spool", RUN) as checkpointer:
            checkpointer.save(1, state).wait()
        drop_cache(place)
        samples[TIERD_NAME].append(_by_gigabyte(asyncio.run(_flush(place, tiers))))
        drop_cache(place)
        samples["raw"].append(_by_gigabyte(asyncio.run(_raw(place))))
    return samples


def _by_gigabyte(figures: Figures) -> Figures:
    return {name: value / GIGABYTES for name, value in figures.items()}


async def _raw(place: Path) -> Figures:
    mark_foreground()
    part = Spool(place / "spool").parts()[0]
    path = max((place / "spool").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    assert part.checkpoint.run == RUN
    (place / "raw").mkdir()
    store, memory = FileStore(place / "raw"), memory_for(PIECE)
    clock = Clock()
    with path.open("rb", buffering=0) as file:
        for number in range(-(-os.fstat(file.fileno()).st_size // PIECE)):
            size = file.readinto(memory)
            assert size
            name = digest(memory[:size])
            await store.put(f"{number}", memory[:size])
            assert digest(await store.get(f"{number}", memory[:size])) == name
    await store.aclose()
    return clock.read()


def changed_rows(home: Path, rows_in_all: int = ROWS) -> Samples:
    """The share of an embedding that is sent again after some of its rows have changed, update by update."""
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(rows_in_all, _WIDTH, generator=draw) * 0.02
    samples: list[Figures] = []
    for number in range(1 + _UPDATES):
        if number:
            rows = torch.randperm(rows_in_all, generator=draw)[: int(rows_in_all * _CHANGED)]
            table[rows] += 1e-3
        with tierd.Checkpointer(home / "spool", RUN) as checkpointer:
            checkpointer.save(number + 1, {"embedding": table}).wait()
        before, clock = _stored(home / "tier"), Clock()
        asyncio.run(_flush(home, 1))
        samples.append({**clock.read(), "sent_share": (_stored(home / "tier") - before) / table.nbytes})
    mean = {name: sum(sample[name] for sample in samples[1:]) / _UPDATES for name in samples[1]}
    return {"first": samples[:1], "again": samples[1:], "mean of those": [mean]}


def _stored(tier: Path) -> int:
    return sum(path.stat().st_size for path in tier.rglob("*") if path.is_file())


def flush_parts() -> dict[str, Rows]:
    """This module's parts of the page."""
    return {
        "flush": [
            ("weights, one tier", partial(flush_samples, kind="weights", tiers=1)),
            ("weights, two tiers", partial(flush_samples, kind="weights", tiers=2)),
            ("noise, one tier", partial(flush_samples, kind="noise", tiers=1)),
        ],
        "rows": [(f"{_CHANGED:.0%} of {ROWS:,} rows of {4 * _WIDTH:,} bytes", changed_rows)],
    }


PART = PartId(CheckpointId("bench", "0123456789ab-01234567", 1), 0, 1)
SIZE, CODEC_ROUNDS, BLOCK = 32 << 20, 5, 1 << 20
_TRAINING_S = 45
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class MeasuredCodec:
    """A way to pack: `encode` takes raw bytes and the size of a number, `decode` what that made and the same."""

    encode: Callable[[bytes, int], Any]
    decode: Callable[[Any, int], Any]
    size: Callable[[Any], int] = len  # the stored bytes of what `encode` made
    exact: bool = True  # whether `decode` returns what went in


def arms() -> dict[str, MeasuredCodec]:
    """The arms whose libraries are installed. tierd's decodes into memory that is used again, as a fetch does."""
    memory = memory_for(SIZE)
    arms = {
        "tierd": MeasuredCodec(
            lambda raw, _: chunk_codec.encode(PART, Chunk(size=len(raw), xxh3_128=digest(raw)), raw),
            lambda encoded, _: chunk_codec.decode(encoded.chunk, encoded.data, "here", memory[: encoded.chunk.size]),
            lambda encoded: len(encoded.data),
        ),
        "ceiling": MeasuredCodec(_pairs, _read_pairs, lambda encoded: len(encoded[1]), exact=False),
    }
    if find_spec("zipnn"):
        zipnn: Any = import_module("zipnn")

        def coder(width: int) -> Any:
            name = {4: "float32", 2: "bfloat16"}[width]
            return zipnn.ZipNN(bytearray_dtype=name, input_format="byte", threads=1)

        # ZipNN changes the bytes that it is given, so that it gets a copy.
        arms["ZipNN"] = MeasuredCodec(
            lambda raw, width: coder(width).compress(bytearray(raw)), lambda data, width: coder(width).decompress(data)
        )
    if find_spec("blosc2"):
        blosc2: Any = import_module("blosc2")

        arms["blosc2, shuffle, zstd -1"] = MeasuredCodec(
            lambda raw, width: blosc2.compress2(
                raw, typesize=width, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE], nthreads=1
            ),
            lambda data, _: blosc2.decompress2(data, nthreads=1),
        )
    arms["zstd -1"] = MeasuredCodec(
        lambda raw, _: zstandard.ZstdCompressor(level=1).compress(raw),
        lambda data, _: zstandard.ZstdDecompressor().decompress(data),
    )
    return arms


def _pairs(raw: bytes, width: int) -> tuple[list[bytes], bytes, bytes]:
    """Compress the exponents of each block, two in a byte."""
    entropy = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=18, hash_log=6, min_match=7, target_length=0
    )
    coder, frames = zstandard.ZstdCompressor(compression_params=entropy), []
    for start in range(0, len(raw), BLOCK):
        top = np.frombuffer(raw[start : start + BLOCK], f"<u{width}") >> (8 * width - 9)
        codes = (top & 0xFF).astype(np.uint8)
        codes = np.minimum(codes - np.uint8(max(0, int(np.quantile(codes, 0.99)) - 12)), 15).astype(np.uint8)
        frames.append(coder.compress((codes[::2] | (codes[1::2] << 4)).tobytes()))
    encoded = chunk_codec.encode(PART, Chunk(size=len(raw), xxh3_128=digest(raw)), raw)
    return frames, bytes(encoded.data), raw


def _read_pairs(encoded: tuple[list[bytes], bytes, bytes], _: int) -> None:
    expander = zstandard.ZstdDecompressor()
    digest(encoded[1])
    for frame in encoded[0]:
        expander.decompress(frame)
    digest(encoded[2])


def trained_numbers(seconds: float) -> dict[str, tuple[bytes, int]]:
    """Name -> bytes and the size of a number, of a transformer that was trained for so long; bf16 is fp32 rounded."""
    training = Training(0.25)
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        training.step()
    parameters = list(training.model.parameters())
    kinds = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}
    tensors_by_kind = {"weights": [parameter.detach() for parameter in parameters]}
    tensors_by_kind |= {
        kind: [training.optimizer.state[parameter][key] for parameter in parameters] for kind, key in kinds.items()
    }
    numbers = {}
    for name, tensors in tensors_by_kind.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        numbers[f"fp32 {name}"] = flat.numpy().tobytes()[:SIZE], 4
        numbers[f"bf16 {name}"] = flat.bfloat16().view(torch.int16).numpy().tobytes()[:SIZE], 2
    return numbers


def _time_call(call: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
    start = time.process_time()
    answer = call(*arguments)
    return answer, time.process_time() - start


def codec_samples(raw: bytes, width: int) -> Samples:
    """Every arm's rates on these bytes: GB per CPU second, and what is stored of a raw byte."""
    samples: Samples = {}
    codec_arms = arms()
    for number in range(CODEC_ROUNDS + 1):  # the first one only warms up
        for name, arm in codec_arms.items():
            encoded, encode_s = _time_call(arm.encode, raw, width)
            back, decode_s = _time_call(arm.decode, encoded, width)
            assert not arm.exact or np.array_equal(np.frombuffer(back, np.uint8), np.frombuffer(raw, np.uint8)), name
            if number:
                gigabytes = len(raw) / 1e9
                figures: Figures = {"decode_gb_per_cpu_s": gigabytes / decode_s}
                if arm.exact:
                    figures |= {
                        "encode_gb_per_cpu_s": gigabytes / encode_s,
                        "stored_share": arm.size(encoded) / len(raw),
                    }
                samples.setdefault(name, []).append(figures)
    return samples


def codec_parts() -> dict[str, Rows]:
    """This module's part of the page. Its rows share one training, which the first of them does."""
    numbers: dict[str, tuple[bytes, int]] = {}

    def row(_: Path, name: str) -> Samples:
        if not numbers:
            numbers.update(trained_numbers(_TRAINING_S))
        return codec_samples(*numbers[name])

    names = [
        f"{kind} {tensor_kind}"
        for tensor_kind in ("weights", "first moment", "second moment")
        for kind in ("fp32", "bf16")
    ]
    return {"decode": [(name, partial(row, name=name)) for name in names]}
