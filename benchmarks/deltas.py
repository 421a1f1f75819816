"""What chunks of bf16 weights cost as deltas of the weights some steps of training before: bytes, and CPU seconds.

    python -m benchmarks.deltas                    2 minutes; writes results/deltas.json

A byte-level transformer of 25 million parameters is trained with AdamW; its weights are cast to bf16 before and after
1 and 10 steps at each learning rate. The first 32 MiB are one chunk. All ways to store it are measured in turns, each
by the CPU seconds of its thread. `encode` and `decode` are those of a flush and of a restore, with digests, and
encoding reads back what it made; `make` and `apply` are the codec alone, `numpy` the same without the compiled loops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.flush.checkpoints import _begin
from tierd.bench.report_page import write_result
from tierd.bench.training import Training
from tierd.codec import byte_planes, chunk_codec, element_deltas, numpy_loops
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Chunk
from tierd.spool.file_io import digest

RATES, STEPS, WARM_STEPS, ROUNDS = (3e-6, 1e-5, 1e-4), (1, 10), 60, 5
CHUNK = 32 << 20
PART = PartId(CheckpointId("deltas", "0123456789ab-01234567", 1), 0, 1)
Arm = Callable[[], object]


def bf16(tensors: Sequence[torch.Tensor]) -> bytes:
    flat = torch.cat([tensor.detach().to(torch.bfloat16).flatten() for tensor in tensors])
    return flat.view(torch.uint8).numpy().tobytes()[:CHUNK]


def described(raw: bytes) -> Chunk:
    return Chunk(size=len(raw), xxh3_128=digest(raw))


def cpu_seconds(arms: dict[str, Arm]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            began = time.thread_time()
            arm()
            samples[name].append(time.thread_time() - began)
    return samples


def with_numpy(arm: Arm) -> Arm:
    def run() -> None:
        compiled, byte_planes.loops = byte_planes.loops, numpy_loops
        try:
            arm()
        finally:
            byte_planes.loops = compiled

    return run


def sampled(raw: bytes) -> bytes:
    return b"".join(raw[at : at + (16 << 10)] for at in range(0, len(raw) - (16 << 10) + 1, len(raw) // 16 & ~7))


def measure(new: bytes, old: bytes) -> dict[str, object]:
    chunk, base, memory = described(new), described(old), memoryview(bytearray(len(new)))
    samples = sampled(new), sampled(old)
    whole = chunk_codec.encode(PART, chunk, new)
    made = element_deltas.make_delta(new, old)
    changed = float((np.frombuffer(new, "<u2") != np.frombuffer(old, "<u2")).mean())
    arms: dict[str, Arm] = {
        "sample": lambda: chunk_codec.cheapest_patch(*samples),
        "whole encode": lambda: chunk_codec.encode(PART, chunk, new),
        "whole decode": lambda: chunk_codec.decode(whole.chunk, whole.data, "here", memory),
    }
    facts = {"kind": chunk_codec.cheapest_patch(*samples), "changed": changed, "whole": len(whole.data) / len(new)}
    if made is not None:
        delta = chunk_codec.encode_patch(PART, chunk, new, base, old, "delta")
        assert delta is not None
        make, apply = (
            (lambda: element_deltas.make_delta(new, old)),
            (lambda: element_deltas.apply_delta(made, old, memory)),
        )
        arms |= {
            "encode": lambda: chunk_codec.encode_patch(PART, chunk, new, base, old, "delta"),
            "decode": lambda: chunk_codec.decode(delta.chunk, delta.data, "here", memory, old),
            "make": make,
            "apply": apply,
            "make numpy": with_numpy(make),
            "apply numpy": with_numpy(apply),
        }
        facts["delta"] = len(made) / len(new)
    seconds = cpu_seconds(arms)
    rates = {name: round(len(new) / statistics.median(values) / 1e9, 2) for name, values in seconds.items()}
    return {**facts, "gb_per_cpu_second": rates, "cpu_seconds": seconds}


def main() -> None:
    training = Training(0.3)
    training.model.apply(_begin)
    parameters = list(training.model.parameters())

    def advance(rate: float, steps: int) -> float:
        training.optimizer.param_groups[0]["lr"] = rate
        return [training.step() for _ in range(steps)][-1]

    def moments() -> bytes:
        return bf16([training.optimizer.state[parameter]["exp_avg"] for parameter in parameters])

    rows: dict[str, object] = {}
    loss = advance(3e-4, WARM_STEPS)
    for rate in RATES:
        old, before = bf16(parameters), moments()
        for steps, further in zip(STEPS, (STEPS[0], STEPS[1] - STEPS[0]), strict=True):
            advance(rate, further)
            rows[f"bf16 weights, {steps} steps at {rate:g}"] = row = measure(bf16(parameters), old)
            print(f"{steps} steps at {rate:g}:", {name: value for name, value in row.items() if name != "cpu_seconds"})
        rows[f"bf16 first moment, 10 steps at {rate:g}"] = measure(moments(), before)
    facts = {"parameters": sum(map(torch.numel, parameters)), "loss after warm-up": loss, "warm-up steps": WARM_STEPS}
    write_result(Path(__file__).parent / "results", "deltas", {**facts, "rows": rows})


if __name__ == "__main__":
    main()
