"""What bounded sharing costs: the figures behind the two constants of `tierd/core/planning/flush_order.py`.

    python -m benchmarks.sharing                   tables in Markdown; no bytes of a state are made

Chunk sizes are those of the files that `save` writes, cut by the code that cuts them, of states that have only shapes.
The bound is played by the code that decides, over 100 checkpoints of which nothing changes but an adapter. The last
table plays a training step on an embedding: which of its bytes lie in a chunk of which nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from unittest import mock

import numpy as np
import torch

from tierd.core.chunk_boundaries import content_chunk_sizes
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning import flush_order
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.place import Place
from tierd.state.tensor_file import TensorFilePlanner

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
    layout = TensorFilePlanner(tensors).layout()
    return content_chunk_sizes(lambda offset, length: layout.header[offset : offset + length], layout.size)


def sent(bound: float, keep: int) -> int:
    """How often the frozen bytes are sent in 100 checkpoints of which each shares with the one before."""
    times, owner = 0, None
    there: dict[PartId, ManifestFacts | None] = {}
    with mock.patch.object(flush_order, "MOST_SHARERS", bound):
        for step in range(_CHECKPOINTS):
            part = PartId(CheckpointId("run", "0" * 12 + "-" + "0" * 8, step), 0, 1)
            if owner is None or owner in flush_order.overshared(Place.of(there), part):
                owner, times = part.checkpoint, times + 1
            bases = frozenset({owner} - {part.checkpoint})
            there[part] = ManifestFacts(datetime.now(UTC), {}, None, 0, 0, bases)
            there = dict(list(there.items())[-keep:])
    return times


_ROWS, _ROW_BYTES, _CHANGED = 50257, 3072, 0.05  # GPT-2 small's embedding in fp32, and what of its rows changed
_PIECES = (32 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 8 << 10, _ROW_BYTES)  # bytes


def changed_rows(by_frequency: bool) -> np.ndarray:
    """Which rows a step has changed: any 5 % of them, or those of the tokens of a text whose frequencies are Zipf's and
    whose numbers are in their order."""
    rng = np.random.default_rng(0)
    wanted = round(_CHANGED * _ROWS)
    rows = np.zeros(_ROWS, bool)
    if not by_frequency:
        rows[rng.choice(_ROWS, wanted, replace=False)] = True
        return rows
    shares = 1 / np.arange(1, _ROWS + 1)
    while rows.sum() < wanted:
        rows[rng.choice(_ROWS, 256, p=shares / shares.sum())] = True
    return rows


def sent_again(rows: np.ndarray, piece: int) -> float:
    """The share of the table's bytes that lie in a chunk of `piece` bytes of which some row has changed."""
    size = _ROWS * _ROW_BYTES
    starts = np.flatnonzero(rows) * _ROW_BYTES
    touched = np.unique(np.concatenate([starts // piece, (starts + _ROW_BYTES - 1) // piece]))
    return float(np.minimum(piece, size - touched * piece).sum() / size)


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

    print()
    print("| chunks of at most | " + " | ".join(f"{piece / 1024:g} KiB" for piece in _PIECES) + " |")
    print("| --- " * (len(_PIECES) + 1) + "|")
    for name, by_frequency in (("any 5 % of the rows", False), ("the rows of a text's tokens", True)):
        rows = changed_rows(by_frequency)
        print(f"| sent again, {name} | " + " | ".join(f"{sent_again(rows, piece):.0%}" for piece in _PIECES) + " |")
    puts = [-(-_ROWS * _ROW_BYTES // piece) for piece in _PIECES]
    print("| puts of the first save | " + " | ".join(f"{count}" for count in puts) + " |")


if __name__ == "__main__":
    main()
