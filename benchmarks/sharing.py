"""What bounded sharing costs: the figures behind the two constants of `tierd/core/sharing.py`.

    python -m benchmarks.sharing                   tables in Markdown; no bytes of a state are made

Chunk sizes are those of the files that `save` writes, cut by the code that cuts them, of states that have only shapes.
The bound is played by the code that decides, over 100 checkpoints of which nothing changes but an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from unittest import mock

import torch

from tierd.client.tensorfile import plan_layout
from tierd.core import sharing
from tierd.core.cuts import cut
from tierd.core.ids import CheckpointId, PartId
from tierd.core.world import Facts, Place

_CHECKPOINTS = 100
_SMALLEST = (64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)  # bytes


def gpt2() -> Iterator[tuple[str, tuple[int, ...]]]:
    """GPT-2 small: 124 million parameters."""
    yield from {"wte": (50257, 768), "wpe": (1024, 768), "ln_f.weight": (768,), "ln_f.bias": (768,)}.items()
    for layer in range(12):
        for name, out, into in (("attn", 2304, 768), ("attn.out", 768, 768), ("up", 3072, 768), ("down", 768, 3072)):
            yield f"h.{layer}.{name}.weight", (into, out)
            yield f"h.{layer}.{name}.bias", (out,)
        for norm in ("ln_1", "ln_2"):
            yield f"h.{layer}.{norm}.weight", (768,)
            yield f"h.{layer}.{norm}.bias", (768,)


def llama() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Llama 2 7B: 6.7 billion parameters."""
    yield from {"embed": (32000, 4096), "head": (32000, 4096), "norm": (4096,)}.items()
    for layer in range(32):
        yield from ((f"{layer}.{name}", (4096, 4096)) for name in "qkvo")
        yield from ((f"{layer}.{name}", (11008, 4096)) for name in ("gate", "up", "down"))
        yield from ((f"{layer}.norm{number}", (4096,)) for number in (1, 2))


def chunks(shapes: Iterator[tuple[str, tuple[int, ...]]], dtype: torch.dtype, times: int) -> list[int]:
    """The chunks, in bytes, of a file that holds the tensors so many times: weights alone, or with Adam's moments."""
    sizes = dict(shapes)
    tensors = {
        f"{name}.{copy}": torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in sizes.items()
        for copy in range(times)
    }
    layout = plan_layout(tensors)
    return cut(lambda offset, length: layout.header[offset : offset + length], layout.size)


def sent(bound: float, keep: int) -> int:
    """How often the frozen bytes are sent in 100 checkpoints of which each shares with the one before."""
    times, owner = 0, None
    there: dict[PartId, Facts | None] = {}
    with mock.patch.object(sharing, "MOST_SHARERS", bound):
        for step in range(_CHECKPOINTS):
            part = PartId(CheckpointId("run", "0" * 12 + "-" + "0" * 8, step), 0, 1)
            if owner is None or owner in sharing.worn(Place.of(there), part):
                owner, times = part.checkpoint, times + 1
            borrowed = frozenset({owner} - {part.checkpoint})
            there[part] = Facts(datetime.now(UTC), {}, None, 0, 0, borrowed)
            there = dict(list(there.items())[-keep:])
    return times


def main() -> None:
    print("| below | " + " | ".join(f"{size >> 10} KiB" for size in _SMALLEST) + " | chunks, bytes in all |")
    print("| --- " * (len(_SMALLEST) + 2) + "|")
    for name, found in (
        ("GPT-2 small, fp32 with Adam", chunks(gpt2(), torch.float32, 3)),
        ("Llama 2 7B, bf16 weights", chunks(llama(), torch.bfloat16, 1)),
    ):
        small = [[one for one in found if one < size] for size in _SMALLEST]
        shares = [f"{len(some)}, {sum(some) / sum(found):.3%}" for some in small]
        print(f"| {name} | {' | '.join(shares)} | {len(found)}, {sum(found) / 1e9:.2f} GB |")
    print()
    print("| sharers at most | 4 | 8 | 16 | 32 | no bound |")
    print("| --- " * 6 + "|")
    for keep in (3, _CHECKPOINTS):
        times = [sent(bound, keep) for bound in (4, 8, 16, 32, float("inf"))]
        print(f"| frozen bytes sent, keep_last = {keep} | {' | '.join(f'{number}x' for number in times)} |")


if __name__ == "__main__":
    main()
