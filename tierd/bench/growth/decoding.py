"""The chunk codec beside others, on numbers that training made, one thread each.

Invariant: every arm gets the same bytes in the same process, in turn, in every round; each arm's answer is compared
with what went in. Rates are raw bytes by the process's CPU seconds, all threads counted, so that a busy machine slows
all arms alike and a hidden thread helps none. tierd's include its digests: of the raw bytes and of what is stored.
`ceiling` does only what no decoder of tierd's objects can leave out: zstd's Huffman coder over pairs of exponents, and
both digests. An arm whose library is not installed is left out.
"""

from __future__ import annotations

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

from tierd.bench.growth.measured import Figures, Rows, Samples
from tierd.bench.training import Training
from tierd.codec import codec
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk
from tierd.spool.direct_io import memory_for
from tierd.spool.file_io import digest

PART = PartId(CheckpointId("bench", "0123456789ab-01234567", 1), 0, 1)
SIZE, ROUNDS, BLOCK = 32 << 20, 5, 1 << 20
_TRAINING_S = 45
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CodecArm:
    """A way to pack: `encode` takes raw bytes and the size of a number, `decode` what that made and the same.

    Attributes:
        size: the stored bytes of what `encode` made.
        exact: whether `decode` returns what went in.
    """

    encode: Callable[[bytes, int], Any]
    decode: Callable[[Any, int], Any]
    size: Callable[[Any], int] = len
    exact: bool = True


def arms() -> dict[str, CodecArm]:
    """The arms whose libraries are installed. tierd's decodes into memory that is used again, as a fetch does."""
    memory = memory_for(SIZE)
    arms = {
        "tierd": CodecArm(
            lambda raw, _: codec.encode(PART, Chunk(size=len(raw), xxh3_128=digest(raw)), raw),
            lambda encoded, _: codec.decode(encoded.chunk, encoded.data, "here", memory[: encoded.chunk.size]),
            lambda encoded: len(encoded.data),
        ),
        "ceiling": CodecArm(_pairs, _read_pairs, lambda encoded: len(encoded[1]), exact=False),
    }
    if find_spec("zipnn"):
        zipnn: Any = import_module("zipnn")

        def coder(width: int) -> Any:
            name = {4: "float32", 2: "bfloat16"}[width]
            return zipnn.ZipNN(bytearray_dtype=name, input_format="byte", threads=1)

        # ZipNN changes the bytes that it is given, so that it gets a copy.
        arms["ZipNN"] = CodecArm(
            lambda raw, width: coder(width).compress(bytearray(raw)), lambda data, width: coder(width).decompress(data)
        )
    if find_spec("blosc2"):
        blosc2: Any = import_module("blosc2")

        arms["blosc2, shuffle, zstd -1"] = CodecArm(
            lambda raw, width: blosc2.compress2(
                raw, typesize=width, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE], nthreads=1
            ),
            lambda data, _: blosc2.decompress2(data, nthreads=1),
        )
    arms["zstd -1"] = CodecArm(
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
    encoded = codec.encode(PART, Chunk(size=len(raw), xxh3_128=digest(raw)), raw)
    return frames, bytes(encoded.data), raw


def _read_pairs(encoded: tuple[list[bytes], bytes, bytes], _: int) -> None:
    expander = zstandard.ZstdDecompressor()
    digest(encoded[1])
    for frame in encoded[0]:
        expander.decompress(frame)
    digest(encoded[2])


def trained(seconds: float) -> dict[str, tuple[bytes, int]]:
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


def measure(raw: bytes, width: int) -> Samples:
    """Every arm's rates on these bytes: GB per CPU second, and what is stored of a raw byte."""
    samples: Samples = {}
    codec_arms = arms()
    for number in range(ROUNDS + 1):  # the first one only warms up
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


def parts() -> dict[str, Rows]:
    """This module's part of the page. Its rows share one training, which the first of them does."""
    numbers: dict[str, tuple[bytes, int]] = {}

    def row(_: Path, name: str) -> Samples:
        if not numbers:
            numbers.update(trained(_TRAINING_S))
        return measure(*numbers[name])

    names = [
        f"{kind} {tensor_kind}"
        for tensor_kind in ("weights", "first moment", "second moment")
        for kind in ("fp32", "bf16")
    ]
    return {"decode": [(name, partial(row, name=name)) for name in names]}
