"""The codec `patch`: what it makes is what it reads, small, and bounded whatever it is given."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierd.codec.block_patches import BLOCK, HEAD, MAGIC, apply_patch, differing_share, make_patch


def _changed(base: bytes, blocks: list[int], seed: int) -> bytes:
    noise, data = random.Random(seed), bytearray(base)
    for block in blocks:
        at = block * BLOCK
        data[at : at + BLOCK] = noise.randbytes(len(data[at : at + BLOCK]))
    return bytes(data)


@given(st.integers(0, 40 * BLOCK), st.integers(0, 1000), st.data())
def test_patch_turns_the_base_into_the_chunk(size, seed, data):
    base = random.Random(seed).randbytes(size)
    blocks = -(-size // BLOCK)
    some = data.draw(st.lists(st.integers(0, max(blocks - 1, 0)), max_size=blocks // 4, unique=True)) if blocks else []
    raw = _changed(base, some, seed + 1)
    made = make_patch(raw, base)
    assert made is not None and made == make_patch(raw, base)
    assert bytes(apply_patch(made, base)) == raw
    memory = memoryview(bytearray(base))
    assert apply_patch(made, memory, memory) is memory and bytes(memory) == raw


def test_few_rows_of_an_embedding_make_a_small_patch_and_many_make_none():
    rows, width = 20_000, 64
    noise = random.Random(1)
    base = noise.randbytes(rows * width)
    few = _changed(base, noise.sample(range(rows), rows // 20), 2)
    assert len(make_patch(few, base)) < 0.06 * len(base)
    many = _changed(base, noise.sample(range(rows), rows // 3), 3)
    assert make_patch(many, base) is None
    assert make_patch(base + b"x", base) is None


def _made(size: int, count: int, body: bytes) -> bytes:
    return HEAD.pack(MAGIC, size, count) + zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"TPC",
        HEAD.pack(b"TPC2", 4 * BLOCK, 0),
        _made(5 * BLOCK, 1, b"\x01" + bytes(BLOCK)),  # of another size
        _made(4 * BLOCK, 2, b"\x01" + bytes(BLOCK)),  # names fewer blocks than its head
        _made(4 * BLOCK, 1, b"\x03" + bytes(BLOCK)),  # names more
        _made(4 * BLOCK, 1, b"\x11" + bytes(BLOCK)),  # a bit beyond the chunk's end
        _made(4 * BLOCK, 1, b"\x10" + bytes(BLOCK)),
        _made(4 * BLOCK, 1, b"\x01" + bytes(BLOCK - 1)),
        _made(4 * BLOCK, 1, b"\x01" + bytes(BLOCK)) + b"x",
        _made(4 * BLOCK, 9, b"\xff" + bytes(9 * BLOCK)),
        HEAD.pack(MAGIC, 4 * BLOCK, 1) + b"no frame at all",
    ],
)
def test_anything_else_is_a_value_error(wrong):
    with pytest.raises((ValueError, zstandard.ZstdError)):
        apply_patch(wrong, bytes(4 * BLOCK))


def test_a_frame_that_promises_much_takes_no_memory():
    bomb = HEAD.pack(MAGIC, 4 * BLOCK, 1) + zstandard.ZstdCompressor().compress(bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(ValueError, match="promises"):
        apply_patch(bomb, bytes(4 * BLOCK))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(st.binary(max_size=300))
def test_noise_is_refused(data):
    for wrong in (data, struct.pack("<4sII", MAGIC, 4 * BLOCK, 1) + data):
        with pytest.raises((ValueError, zstandard.ZstdError)):
            apply_patch(wrong, bytes(4 * BLOCK))


def test_the_share_that_differs():
    base = bytes(100 * BLOCK)
    old, new = (np.frombuffer(data, np.uint8) for data in (base, _changed(base, [1, 50], 1)))
    assert differing_share(old, old) == 0
    assert differing_share(new, old) == pytest.approx(0.02)
