"""The chunk codec beside others, on numbers that training made: `python benchmarks/codec.py [--seconds 90]`.

Invariant: every arm gets the same bytes in the same process, one thread each, in turn, in every round; each arm's
answer is compared with what went in. Rates are raw bytes by the process's CPU seconds, all threads counted, so that a
busy machine harms all alike and a hidden thread flatters nobody. tierd's include its digests: of the raw bytes and of
what is stored, both ways.

Needs `pip install '.[torch,daemon]' zipnn blosc2`. Writes `results/codec.json` and `results/codec.md`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import blosc2
import numpy as np
import torch
import zipnn
import zstandard

from tierd.bench.training import Training
from tierd.codec import codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk
from tierd.spool.file_io import digest

PART = PartId(CheckpointId("bench", "0123456789ab-01234567", 1), 0, 1)
SIZE = 32 << 20  # raw bytes of a sample
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Arm:
    """A way to pack: `encode` takes raw bytes and the size of a number, `decode` what that made and the same."""

    name: str
    encode: Callable[[bytes, int], object]
    decode: Callable[[object, int], object]
    size: Callable[[object], int] = len


def arms() -> list[Arm]:
    def tierd_encode(raw, width):
        return codec.encode(PART, Chunk(size=len(raw), xxh3_128=digest(raw)), raw)

    def znn(width):
        name = {4: "float32", 2: "bfloat16"}[width]
        return zipnn.ZipNN(bytearray_dtype=name, input_format="byte", threads=1)

    def zstd(level):
        return Arm(
            f"zstd -{level}",
            lambda raw, _: zstandard.ZstdCompressor(level=level).compress(raw),
            lambda data, _: zstandard.ZstdDecompressor().decompress(data),
        )

    return [
        Arm("tierd", tierd_encode, lambda made, _: codec.decode(made.chunk, made.data, "here"), lambda m: len(m.data)),
        # ZipNN changes the bytes that it is given, so that it gets a copy.
        Arm("ZipNN", lambda raw, width: znn(width).compress(bytearray(raw)), lambda data, w: znn(w).decompress(data)),
        Arm(
            "blosc2, shuffle, zstd -1",
            lambda raw, width: blosc2.compress2(
                raw, typesize=width, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE], nthreads=1
            ),
            lambda data, _: blosc2.decompress2(data, nthreads=1),
        ),
        zstd(1),
        zstd(3),
    ]


def samples(seconds: float) -> tuple[dict[str, tuple[bytes, int]], int]:
    """Name -> bytes and the size of a number, of a transformer trained for so long; and its steps."""
    training = Training(0.25)
    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        training.step()
    parameters = list(training.model.parameters())
    held = {
        "weights": parameters,
        "first moment": [training.optimizer.state[each]["exp_avg"] for each in parameters],
        "second moment": [training.optimizer.state[each]["exp_avg_sq"] for each in parameters],
    }
    found = {}
    for name, tensors in held.items():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        found[f"fp32 {name}"] = flat.numpy().tobytes()[:SIZE], 4
        found[f"bf16 {name}"] = flat.bfloat16().view(torch.int16).numpy().tobytes()[:SIZE], 2
    return found, training.number


def timed(call: Callable[..., object], *arguments: object) -> tuple[object, float]:
    start = time.process_time()
    answer = call(*arguments)
    return answer, time.process_time() - start


def measure(found: dict[str, tuple[bytes, int]], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """sample -> arm -> size (stored of a raw byte), encode and decode (GB per CPU second; medians)."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for sample, (raw, width) in found.items():
        rates: dict[str, list[tuple[float, float, float]]] = {}
        for number in range(rounds + 1):  # the first one only warms up
            for arm in arms():
                made, there = timed(arm.encode, raw, width)
                size = arm.size(made) / len(raw)
                back, here = timed(arm.decode, made, width)
                assert np.array_equal(np.frombuffer(back, np.uint8), np.frombuffer(raw, np.uint8)), arm.name
                if number:
                    gigabytes = len(raw) / 1e9
                    rates.setdefault(arm.name, []).append((size, gigabytes / there, gigabytes / here))
        keys = ("size", "encode", "decode")
        results[sample] = {
            name: dict(zip(keys, map(statistics.median, zip(*each, strict=True)), strict=True))
            for name, each in rates.items()
        }
    return results


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def page(result: dict) -> str:
    where = result["where"]
    lines = [
        "# The chunk codec beside others",
        "",
        f"Made by `benchmarks/codec.py`: {where['steps']} steps of a byte-level transformer with AdamW, then "
        f"{SIZE >> 20} MiB of each kind of number; bf16 is the fp32 rounded. {where['processor']}, one thread, "
        f"medians of {where['rounds']} interleaved rounds, GB of raw bytes by the process's CPU seconds. "
        "tierd's rates include its digests.",
        "",
        "Versions: " + ", ".join(f"{name} {each}" for name, each in where["versions"].items()) + ".",
    ]
    for sample, found in result["samples"].items():
        lines += ["", f"## {sample}", "", "| | size | encode GB/s | decode GB/s |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {each['size']:.1%} | {each['encode']:.2f} | {each['decode']:.2f} |"
            for name, each in found.items()
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of training")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found, steps = samples(options.seconds)
    where = {
        "processor": processor(),
        "steps": steps,
        "rounds": options.rounds,
        "versions": {name: version(name) for name in ("numpy", "zstandard", "zipnn", "blosc2")},
    }
    result = {"where": where, "samples": measure(found, options.rounds)}
    (HERE / "results" / "codec.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results" / "codec.md").write_text(page(result))


if __name__ == "__main__":
    main()
