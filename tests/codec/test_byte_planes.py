"""Planes: any bytes come back, numbers shrink wherever they lie, and an object that lies is refused, not believed."""

from __future__ import annotations

import concurrent.futures
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import by_hand
from support.seeds import examples

from tierd.codec import byte_planes, chunk_codec, number_layout, numpy_loops
from tierd.core.errors import CorruptChunk
from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import Chunk, StoredChunk
from tierd.spool.file_io import digest

PART = PartId(CheckpointId("r", "0123456789ab-01234567", 7), 3, 8)
FORMAT = (Path(__file__).parents[2] / "tierd" / "FORMAT.md").read_text()
MB = 1 << 20


def numbers(kind: str, count: int, seed: int = 1) -> bytes:
    rng = np.random.default_rng(seed)
    normal = (rng.standard_normal(count) * 0.02).astype("<f4")
    made = {
        "fp32": normal,
        "squares": normal * normal,  # one sign, as Adam's second moment
        "bf16": (normal.view("<u4") >> 16).astype("<u2"),
        "bf16-squares": ((normal * normal).view("<u4") >> 16).astype("<u2"),
        "fp16": normal.astype("<f2"),
        "fp64": rng.standard_normal(count).astype("<f8"),
        "fp32-of-bf16": normal.view("<u4") & 0xFFFF0000,
        "int64": rng.integers(0, 50_000, count).astype("<i8"),
        "int32": rng.integers(-100, 100, count).astype("<i4"),
        "rows of zeros": np.where(np.arange(count) // 1000 % 3 == 0, np.float32(0), normal),
    }
    return made[kind].astype(made[kind].dtype, copy=False).tobytes()


# What a bit of luck in packing may cost without a test noticing: a tenth of what is gained.
KINDS = {
    "fp32": 0.85,
    "squares": 0.85,
    "bf16": 0.68,
    "bf16-squares": 0.68,
    "fp16": 0.89,
    "fp64": 0.97,
    "fp32-of-bf16": 0.35,
    "int64": 0.27,
    "int32": 0.4,
    "rows of zeros": 0.65,
}


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def described(raw: bytes) -> Chunk:
    return Chunk(size=len(raw), xxh3_128=digest(raw))


def crafted(raw_size: int, data: bytes) -> Chunk:
    """What a hostile manifest would say of an object that is as its digest says."""
    there = "0" * 32
    stored = StoredChunk(codec="planes", size=len(data), xxh3_128=digest(data), key=chunk_key(PART, there, "planes"))
    return Chunk(size=raw_size, xxh3_128=there, stored=stored)


@pytest.fixture(scope="module")
def join_planes():
    """The decoder of FORMAT.md's own program."""
    return by_hand.program().join_planes


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(byte_planes, "BLOCK_LOG", 12)


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", range(8))
def test_numbers_shrink_wherever_they_begin_and_decode_to_themselves(kind, phase, join_planes):
    raw = noise(phase) + numbers(kind, 70_001) + noise(7 - phase)
    found = chunk_codec.encode(PART, described(raw), raw)
    assert found.stored.codec == "planes" or kind.startswith("int")  # those zstd packs as well, here and there
    assert found.stored.size < KINDS[kind] * len(raw)
    assert chunk_codec.decode(found.chunk, bytes(found.data), "t") == raw
    assert found.stored.codec == "zst" or join_planes(bytes(found.data), len(raw)) == raw


def test_a_chunk_of_many_kinds_is_cut_block_by_block(small_blocks, join_planes):
    raw = b'{"a": "header"}' * 2000 + b"".join(numbers(kind, 9001) for kind in KINDS) + noise(40_000) + b"text " * 5000
    data = byte_planes.pack(raw)
    assert byte_planes.unpack(data, len(raw)) == raw
    assert join_planes(bytes(data), len(raw)) == raw
    forms = {
        number_layout.detect_layout(np.frombuffer(raw, np.uint8)[at : at + 4096]).width
        for at in range(0, len(raw), 4096)
    }
    assert forms == {1, 2, 4, 8}


def test_large_chunks_have_several_blocks_and_an_odd_end():
    raw = numbers("bf16", 2 * MB) + numbers("fp32", MB // 2 + 1) + b"odd"
    found = chunk_codec.encode(PART, described(raw), raw)
    assert found.stored.size < 0.75 * len(raw)
    assert chunk_codec.decode(found.chunk, found.data, "t") == raw


@settings(max_examples=examples(200))
@given(
    st.one_of(
        st.binary(max_size=300),
        st.tuples(st.binary(max_size=40), st.integers(1, 4000)).map(lambda pair: pair[0] * pair[1]),
        st.tuples(st.binary(max_size=9), st.sampled_from(sorted(KINDS)), st.integers(1, 5000), st.integers(0, 99)).map(
            lambda four: four[0] + numbers(four[1], four[2], four[3])
        ),
    )
)
@example(b"\0")
@example(bytes(100_000))
@example(b"\xff" * 99_999)
@example(bytes(4096) + noise(4097))
def test_any_bytes_decode_to_themselves_and_nothing_grows(raw):
    if raw:
        found = chunk_codec.encode(PART, described(raw), raw)
        assert found.stored.size <= len(raw)
        assert chunk_codec.decode(found.chunk, found.data, "t") == raw
    data = byte_planes.pack(raw)
    assert data is None or byte_planes.unpack(data, len(raw)) == raw


@settings(max_examples=examples())
@given(st.lists(st.tuples(st.sampled_from([*KINDS, "noise", "text"]), st.integers(1, 3000)), min_size=1, max_size=8))
def test_any_mixture_in_small_blocks_unpacks_to_itself(parts):
    made = {"noise": noise, "text": lambda size: (b"some text, " * size)[:size]}
    raw = b"".join(made[kind](size) if kind in made else numbers(kind, size) for kind, size in parts)
    before, byte_planes.BLOCK_LOG = byte_planes.BLOCK_LOG, 12
    try:
        data = byte_planes.pack(raw)
    finally:
        byte_planes.BLOCK_LOG = before
    assert data is None or (len(data) < len(raw) and byte_planes.unpack(data, len(raw)) == raw)


def test_a_block_takes_little_more_than_its_bytes_even_under_a_wrong_layout():
    data = np.frombuffer(noise(100_003), np.uint8)
    for width in (1, 2, 4, 8):
        out = byte_planes.Writer(memoryview(bytearray(200_000)))
        at = number_layout.NumberLayout(width, width - 1, width > 1, (True,) * (width // 2 - 1), True)
        byte_planes.write_block(out, data, at)
        assert out.at <= len(data) + 64
        back = np.empty(len(data), np.uint8)
        byte_planes.read_block(byte_planes.Reader(out.array[: out.at].data), back)
        assert back.tobytes() == data.tobytes()


def test_text_is_stored_as_a_single_zstd_frame_and_noise_as_raw():
    for raw, name in ((b'{"weights": [1, 2, 3]}\n' * 99_999, "zst"), (noise(3 * MB), "raw"), (bytes(3 * MB), "zst")):
        assert chunk_codec.encode(PART, described(raw), raw).stored.codec == name


def test_nothing_is_packed_that_shall_not_be():
    raw = numbers("bf16", 50_000)
    found = chunk_codec.encode(PART, described(raw), raw, pack=False)
    assert found.stored.codec == "raw"
    assert found.data is raw


@pytest.mark.parametrize("kind", ["fp32", "bf16-squares", "rows of zeros"])
def test_equal_bytes_pack_to_equal_objects_from_any_buffer_and_any_thread(kind):
    raw = numbers(kind, 700_001)
    first = bytes(byte_planes.pack(raw))
    padded = bytearray(b"x" + raw)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # each thread has tools and scratch memory of its own
        forms = [raw, bytearray(raw), memoryview(raw), memoryview(padded)[1:]] * 4
        packed = [bytes(data) for data in pool.map(byte_planes.pack, forms)]
        assert set(packed) == {first}
        assert all(back == raw for back in pool.map(lambda data: byte_planes.unpack(data, len(raw)), packed))


# -- damage: every digest fits, only the object lies ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "bf16-squares"])
def test_every_flip_and_truncation_is_corruption_or_the_wrong_bytes(kind, small_blocks):
    """`decode` compares digests before and after; here neither helps, and still nothing but CorruptChunk comes out."""
    raw = b"?" + numbers(kind, 3000)
    data = bytes(byte_planes.pack(raw))
    rng = random.Random(7)
    places = {*range(40), *rng.sample(range(len(data)), 400)}
    others = [data[:at] for at in places] + [data + b"\0", data + data, b""]
    for at in places:
        for value in (0, 0xFF, data[at] ^ 1 << rng.randrange(8)):
            others.append(data[:at] + bytes([value]) + data[at + 1 :])
    for other in others:
        if other != data:
            with pytest.raises(CorruptChunk):
                chunk_codec.decode(crafted(len(raw), other), other, "t")


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.integers(1, 5000), st.integers(12, 20))
def test_random_blocks_are_refused(body, size, log):
    data = struct.pack("<4sIB3s", b"TPL1", size, log, bytes(3)) + body
    with pytest.raises(CorruptChunk):
        chunk_codec.decode(crafted(size, data), data, "t")


def head(size: int, log: int = 20, zeros: bytes = bytes(3), magic: bytes = b"TPL1") -> bytes:
    return struct.pack("<4sIB3s", magic, size, log, zeros)


def plane(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


def frame(raw: bytes) -> bytes:
    return zstandard.compress(raw)


def nested(depth: int) -> bytes:
    body = plane(0, b"x")
    for _ in range(depth):
        body = plane(2, struct.pack("<BI", 0, 1) + body)
    return body


NUMBERS = head(8) + bytes([2, 0]) + plane(0, b"lowb")
LIES = {
    "another size": head(9) + bytes([1, 0]) + plane(0, b"12345678"),
    "another magic": head(8, magic=b"TPL2") + bytes([1, 0]) + plane(0, b"12345678"),
    "blocks too small": head(8, log=3) + bytes([1, 0]) + plane(0, b"12345678"),
    "blocks too large": head(8, log=40) + bytes([1, 0]) + plane(0, b"12345678"),
    "no zeros": head(8, zeros=b"\0\0\1") + bytes([1, 0]) + plane(0, b"12345678"),
    "a width of 0": head(8) + bytes([0, 0]) + plane(0, b"12345678"),
    "a width of 3": head(8) + bytes([3, 0]) + plane(0, b"12345678"),
    "a folded byte": head(8) + bytes([129, 0]) + plane(0, b"12345678"),
    "a lead of an element": head(8) + bytes([2, 2]) + b"12" + plane(0, b"123") + plane(0, b"123"),
    "a lead beyond the end": head(2) + bytes([8, 7]) + b"1234567" + plane(0, b"") * 5,
    "a raw plane too short": head(8) + bytes([1, 0]) + plane(0, b"1234567"),
    "a raw plane too long": head(8) + bytes([1, 0]) + plane(0, b"123456789"),
    "a body beyond the end": head(8) + bytes([1, 0]) + struct.pack("<BI", 0, 0xFFFFFFFF) + b"12345678",
    "an unknown kind": head(8) + bytes([1, 0]) + plane(3, b"12345678"),
    "pairs that are no top plane": head(8) + bytes([1, 0]) + plane(2, struct.pack("<BI", 0, 0) + frame(bytes(4))),
    "a frame of another size": head(8) + bytes([1, 0]) + plane(1, frame(b"1234567")),
    "a bomb": head(8) + bytes([1, 0]) + plane(1, frame(bytes(64 * MB))),
    "two frames": head(8) + bytes([1, 0]) + plane(1, frame(b"1234") + frame(b"5678")),
    "something behind a frame": head(8) + bytes([1, 0]) + plane(1, frame(b"12345678") + b"!"),
    "no frame": head(8) + bytes([1, 0]) + plane(1, b"12345678"),
    "others beyond the plane": NUMBERS + plane(2, struct.pack("<BI", 0, 5) + plane(0, b"12345") + frame(b"\xff\xff")),
    "others that nobody needs": NUMBERS + plane(2, struct.pack("<BI", 0, 1) + plane(0, b"1") + frame(b"\0\0")),
    "others that are missing": NUMBERS + plane(2, struct.pack("<BI", 0, 1) + plane(0, b"1") + frame(b"\xff\0")),
    "pairs within pairs": NUMBERS + nested(2000),
    "pairs that bomb": NUMBERS + plane(2, struct.pack("<BI", 0, 0) + frame(bytes(64 * MB))),
    "pairs without a head": NUMBERS + plane(2, b"123"),
    "one block too many": head(8) + (bytes([1, 0]) + plane(0, b"12345678")) * 2,
    "a block missing": head(5000, log=12) + bytes([1, 0]) + plane(0, bytes(4096)),
    "only a head": head(8),
    "less than a head": head(8)[:11],
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_object_is_corruption_and_costs_nothing(name):
    data = LIES[name]
    chunk = crafted(2 if "beyond the end" in name and "lead" in name else 5000 if "missing" in name[-7:] else 8, data)
    tracemalloc.start()
    with pytest.raises(CorruptChunk, match="codec 'planes'"):
        chunk_codec.decode(chunk, data, "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MB  # a thread's scratch memory, at most


@pytest.mark.parametrize("behind", [b"!", frame(b""), frame(b"1234")], ids=["a byte", "an empty frame", "a frame"])
def test_nothing_may_follow_the_frame_of_an_empty_plane(behind):
    def planes(low: bytes, high: bytes) -> bytes:  # a block of one byte, and no element
        return head(1) + bytes([2, 0]) + b"1" + low + high

    empty, no_pairs = plane(1, frame(b"")), struct.pack("<BI", 0, 0) + frame(b"")
    for high in (empty, plane(2, no_pairs)):
        assert byte_planes.unpack(planes(empty, high), 1) == b"1"
    lies = planes(plane(1, frame(b"") + behind), empty), planes(empty, plane(2, no_pairs + behind))
    for data in (*lies, planes(empty, plane(1, frame(b"") + behind))):
        with pytest.raises(CorruptChunk, match="codec 'planes'"):
            chunk_codec.decode(crafted(1, data), data, "t")


def test_fifteen_always_means_another_byte():
    data = NUMBERS + plane(2, struct.pack("<BI", 250, 0) + frame(b"\xff\0"))
    with pytest.raises(ValueError, match="another number of other bytes than 0"):
        byte_planes.unpack(data, 8)


@pytest.mark.parametrize(
    ("codes", "others"), [(b"\xff\x00", b"1"), (b"\x00\x00", b"1"), (b"\x0f\x00", b""), (b"\xf0", b"12")]
)
def test_a_wrong_number_of_others_is_refused_by_the_description_too(codes, others):
    """NumPy would assign one value to any number of elements."""
    body = struct.pack("<BI", 0, len(others)) + (plane(0, others) if others else b"") + frame(codes)
    data = head(4 * len(codes)) + bytes([2, 0]) + plane(0, bytes(2 * len(codes))) + plane(2, body)
    with pytest.raises(ValueError, match="another number of other bytes"):
        byte_planes.unpack(data, 4 * len(codes))
    program = by_hand.program()
    with pytest.raises(program.Damaged, match="another number of others"):
        program.join_planes(data, 4 * len(codes))


@pytest.mark.parametrize("codes", [b"\x21\xe3", b"\xf1\x0f", b"\x10"])
@pytest.mark.parametrize("form", [2, 130])
def test_a_code_beyond_the_largest_byte_begins_anew_as_in_the_description(codes, form, join_planes):
    """A writer's base is at most 241; a reader goes by FORMAT.md all the same."""
    size = 2 * len(codes)
    others = sum(nibble == 15 for byte in codes for nibble in (byte & 15, byte >> 4))
    body = struct.pack("<BI", 250, others) + (plane(0, b"oo"[:others]) if others else b"") + frame(codes)
    data = head(2 * size) + bytes([form, 0]) + plane(0, bytes(range(200, 200 + size))) + plane(2, body)
    assert byte_planes.unpack(data, 2 * size) == join_planes(data, 2 * size)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "rows of zeros", "fp64"])
@pytest.mark.parametrize("odd", [0, 1])
def test_unpack_writes_into_the_given_memory_and_nowhere_else(kind, odd):
    raw = numbers(kind, 3 * MB // 2)[: 3 * MB - 5]
    memory = bytearray(b"#" * (len(raw) + 2 + odd))
    begin = 1 + odd
    into = memoryview(memory)[begin : begin + len(raw)]
    assert byte_planes.unpack(byte_planes.pack(raw), len(raw), into) is into
    assert memory == b"#" * begin + raw + b"#"


@pytest.mark.parametrize("kind", KINDS)
def test_pack_writes_the_same_object_into_given_memory(kind):
    raw = numbers(kind, 3 * MB // 2)[: 3 * MB - 5]
    memory = memoryview(bytearray(b"#" * byte_planes.packing_size(len(raw))))
    packed = byte_planes.pack(raw, memory)
    assert packed == byte_planes.pack(raw) and packed.obj is memory.obj


def test_an_honest_object_is_decoded_in_memory_of_its_own_size():
    raw = numbers("bf16", 16 * MB)
    found = chunk_codec.encode(PART, described(raw), raw)
    chunk = msgspec.structs.replace(found.chunk)
    chunk_codec.decode(chunk, found.data, "t")  # this thread's scratch memory is there
    tracemalloc.start()
    assert len(chunk_codec.decode(chunk, found.data, "t")) == 32 * MB
    assert tracemalloc.get_traced_memory()[1] < 36 * MB
    tracemalloc.stop()


# -- every neighbourhood, and faults of the encoder --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["2", "4", "8", "2 folded", "4 folded", "8 folded"])
def test_any_base_is_read_as_the_description_says(form, join_planes):
    """Sums of the base and a code must not run into the neighbouring word; other bytes are codes as well."""
    width, folded = int(form[0]), form.endswith("folded")
    bases, sizes = (
        (*range(8), 120, 127, 128, *range(224, 256)),
        ((2000, False), (2001, False), (2000, True), (2001, True)),
    )
    for base, (count, ends) in product(bases, sizes):
        rng = np.random.default_rng(2 * base + count + ends)
        codes = rng.integers(0, 16, count + count % 2).astype(np.uint8)
        codes[count - 1] = 15 if ends else 0
        codes[count:] = 0
        others = rng.integers(0, 256, int(np.count_nonzero(codes[:count] == 15))).astype(np.uint8).tobytes()
        halves = (codes[::2] | codes[1::2] << 4).tobytes()
        top = plane(2, struct.pack("<BI", base, len(others)) + plane(0, others) + frame(halves))
        below = b"".join(plane(0, rng.bytes(2 * count)) for _ in range(width // 2 - 1))
        data = head(width * count) + bytes([width | 128 * folded, 0]) + below + plane(0, rng.bytes(count)) + top
        assert byte_planes.unpack(data, width * count) == join_planes(data, width * count), (base, count, ends)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("lowest", range(225, 245))
def test_numbers_of_one_high_byte_and_few_others_decode_to_themselves(width, lowest, caplog):
    """Negative integers, labels that are padded with -100, gradients: the codec must not need its second look."""
    rng = np.random.default_rng(lowest)
    for count in (40_000, 40_001):
        raw = rng.integers(0, 256, (count, width), np.uint8)
        raw[:, -1] = rng.integers(lowest, min(lowest + 15, 256), count)
        rare = rng.random(count) < 0.01
        rare[-1] = True
        raw[rare, -1] = rng.integers(0, 100, np.count_nonzero(rare))
        data = byte_planes.pack(raw.tobytes())
        assert data is not None and byte_planes.unpack(data, raw.size) == raw.tobytes(), count
    assert not caplog.records


class Faulty:
    """The inner loops, of which one call errs as a processor might."""

    def __init__(self, function: str, on_call: Callable[..., object]) -> None:
        self.function, self.on_call, self.sound = function, on_call, byte_planes.loops

    def __getattr__(self, name: str) -> Any:
        return self.on_call if name == self.function else getattr(self.sound, name)


def test_block_that_does_not_read_back_is_not_split(monkeypatch, caplog, join_planes):
    """A processor that errs, or a fault of the writer: what is stored can be read all the same."""
    pack_pairs, calls = byte_planes.loops.pack_pairs, []

    def err(plane, base, halves, escapes):
        calls.append(None)
        number = pack_pairs(plane, base, halves, escapes)
        halves[0] ^= len(calls) == 2
        return number

    monkeypatch.setattr(byte_planes, "loops", Faulty("pack_pairs", err))
    raw = numbers("fp32", 1_000_000)
    found = chunk_codec.encode(PART, described(raw), raw)
    assert found.stored.codec == "planes" and found.stored.size < 0.95 * len(raw)
    assert chunk_codec.decode(found.chunk, found.data, "t") == raw == join_planes(bytes(found.data), len(raw))
    assert [one.levelname for one in caplog.records] == ["ERROR"]


def test_reader_that_fails_counts_as_a_block_that_does_not_read_back(monkeypatch):
    def fail(*_):
        raise OverflowError("out of bounds")

    monkeypatch.setattr(byte_planes, "loops", Faulty("unpack_pairs", fail))
    raw = numbers("bf16", 1_000_000)
    found = chunk_codec.encode(PART, described(raw), raw)
    monkeypatch.undo()
    assert chunk_codec.decode(found.chunk, found.data, "t") == raw


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_both_kinds_of_loops_are_equal(monkeypatch, kind):
    raw = numbers(kind, 300_001)
    expected = byte_planes.pack(raw)
    monkeypatch.setattr(byte_planes, "loops", numpy_loops)
    assert byte_planes.pack(raw) == expected and byte_planes.unpack(expected, len(raw)) == raw


def test_numbers_that_never_read_back_are_stored_another_way(monkeypatch):
    monkeypatch.setattr(byte_planes.libc, "memcmp", lambda *arguments: 1)
    raw = numbers("fp32", 1_000_000)
    found = chunk_codec.encode(PART, described(raw), raw)
    assert found.stored.codec == "raw" and chunk_codec.decode(found.chunk, found.data, "t") == raw


# -- FORMAT.md says what the code does --------------------------------------------------------------------------------


def test_the_numbers_in_the_description_are_those_of_the_code():
    text = FORMAT.split("#### `planes`")[1].split("\n## ")[0]
    assert byte_planes.MAGIC.decode() in text
    assert f"{byte_planes.BLOCK_LOGS[0]} to {byte_planes.BLOCK_LOGS[-1]}; tierd writes {byte_planes.BLOCK_LOG}" in text
    assert (
        byte_planes.HEAD.size,
        byte_planes.BLOCK_HEAD.size,
        byte_planes.PLANE_HEAD.size,
        byte_planes.PAIRS_HEAD.size,
    ) == (12, 2, 5, 5)
    assert (byte_planes.RAW, byte_planes.ZSTD, byte_planes.PAIRS, byte_planes.FOLDED) == (0, 1, 2, 128)
    assert all(
        f"`{name}`" in FORMAT.split("### Codecs")[1].split("#### `planes`")[0]
        for name in (*chunk_codec.CODECS, "patch")
    )


def test_memory_of_threads_that_pack_and_unpack_is_returned_to_the_system():
    """The allocator would keep up to 32 MiB for each of a daemon's threads, beside every budget."""
    code = """
import threading
import numpy as np
from tierd.codec import byte_planes as planes

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def work():
    data = planes.pack(raw)
    assert planes.unpack(data, len(raw)) == raw
    del data
    done.release()
    end.wait()

raw = (np.random.default_rng(1).standard_normal(3 << 20) * 0.02).astype("<f4").tobytes()
planes.unpack(planes.pack(raw), len(raw))
before, done, end = resident(), threading.Semaphore(0), threading.Event()
for _ in range(6):
    threading.Thread(target=work).start()
    done.acquire()
print((resident() - before) / 6)
end.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 10 * MB
