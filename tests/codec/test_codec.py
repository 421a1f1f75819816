"""One chunk and its stored bytes: what went in comes out; what a frame claims costs nothing before it is proven."""

from __future__ import annotations

import os
import random
import signal
import struct
import tracemalloc

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierd.codec import chunk_codec
from tierd.core.errors import CorruptChunk, FormatTooNew
from tierd.core.ids import CheckpointId, PartId, chunk_key
from tierd.core.manifest import Chunk, StoredChunk
from tierd.spool.file_io import digest

PART = PartId(CheckpointId("r", "0123456789ab-01234567", 7), 3, 8)
MB = 1 << 20


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def described(raw: bytes) -> Chunk:
    return Chunk(size=len(raw), xxh3_128=digest(raw))


def encoded(raw) -> chunk_codec.EncodedChunk:
    return chunk_codec.encode(PART, described(bytes(raw)), raw)


def crafted(raw: bytes, data: bytes, codec_name: str = "zst") -> Chunk:
    """What a hostile manifest would say: every digest fits, so that only the frame itself can be caught."""
    key = chunk_key(PART, digest(raw), codec_name)
    stored = StoredChunk(codec=codec_name, size=len(data), xxh3_128=digest(data), key=key)
    return Chunk(size=len(raw), xxh3_128=digest(raw), stored=stored)


def peak(call) -> int:
    """Bytes allocated at most while `call` ran and was refused; python-zstandard's output buffers are counted."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunk):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- there and back ---------------------------------------------------------------------------------------------------


@given(st.one_of(st.binary(min_size=1, max_size=2000), st.binary(min_size=1, max_size=9).map(lambda b: b * 500)))
def test_encoded_chunk_decodes_to_its_bytes(raw):
    found = encoded(raw)
    assert chunk_codec.decode(found.chunk, found.data, "t") == raw
    assert (found.chunk.size, found.chunk.xxh3_128) == (len(raw), digest(raw))
    assert found.stored.size == len(found.data) <= len(raw)
    assert found.stored.key == chunk_key(PART, digest(raw), found.stored.codec)


def test_incompressible_chunk_is_stored_raw():
    raw = noise(100_000)
    found = encoded(raw)
    assert found.stored.codec == "raw"
    assert found.data is raw
    assert found.stored.xxh3_128 == found.chunk.xxh3_128
    assert encoded(b"x").stored.codec == "raw"


def compressing(monkeypatch, given) -> None:
    """Have zstd compress what `given` returns of the bytes that it is given."""
    real = zstandard.ZstdCompressor

    class Compressor:
        def __init__(self, **options):
            self.compress = lambda raw: real(**options).compress(given(raw))

    monkeypatch.setattr(zstandard, "ZstdCompressor", Compressor)


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """How many bytes were given to zstd each time."""
    sizes: list[int] = []
    compressing(monkeypatch, lambda raw: sizes.append(len(raw)) or raw)
    return sizes


@pytest.mark.parametrize("size", [MB, 3 * MB + 17, 8 * MB])
def test_noise_is_recognised_by_a_sample(tried, size):
    assert encoded(noise(size)).stored.codec == "raw"
    assert sum(tried) <= min(size / 16, 256 << 10)


@pytest.mark.parametrize("size", [100_000, MB, 2 * MB + 5])
@pytest.mark.parametrize(
    "repeated",
    [
        lambda size: noise(3 * size // 4) + b"words, and more words. " * (size // 92 + 1),
        lambda size: b"words, and more words. " * (size // 160 + 1) + noise(6 * size // 7),
        lambda size: noise(20_000) * (size // 20_000 + 1),
        bytes,
    ],
    ids=["text at the end", "text in front", "noise that comes again", "zeros"],
)
def test_partly_noisy_chunk_is_compressed(repeated, size):
    raw = repeated(size)[:size]
    assert encoded(raw).stored.codec == "zst"
    assert encoded(raw).stored.size < 0.9 * size


def test_compressible_chunk_is_a_single_plain_zstd_frame():
    raw = b"weights " * 10_000
    found = encoded(raw)
    assert found.stored.codec == "zst"
    assert found.stored.size < len(raw) // 10
    assert zstandard.ZstdDecompressor().decompress(found.data) == raw
    assert found.stored.xxh3_128 == digest(found.data)


def test_frame_that_does_not_read_back_is_not_stored(monkeypatch, caplog):
    compressing(monkeypatch, lambda raw: b"W" + bytes(raw)[1:])
    raw = b"weights " * 10_000
    found = encoded(raw)
    assert found.stored.codec == "raw" and chunk_codec.decode(found.chunk, found.data, "t") == raw
    assert "which is not stored: other bytes" in caplog.text


def test_patch_that_does_not_read_back_is_not_stored(monkeypatch):
    base = noise(MB)
    raw = b"W" + base[1:]
    of = Chunk(size=MB, xxh3_128=digest(base), stored=encoded(base).stored)
    described = Chunk(size=MB, xxh3_128=digest(raw), stored=None)
    assert chunk_codec.encode_patch(PART, described, raw, of, base) is not None
    make, apply = chunk_codec.PATCHES["patch"]
    monkeypatch.setitem(chunk_codec.PATCHES, "patch", (lambda raw, base: make(b"V" + bytes(raw)[1:], base), apply))
    assert chunk_codec.encode_patch(PART, described, raw, of, base) is None


def test_equal_input_in_any_buffer_gives_equal_output():
    raw = bytes(range(256)) * 300
    first = encoded(raw)
    for other in (bytes(raw), bytearray(raw), memoryview(raw)):
        again = encoded(other)
        assert bytes(again.data) == bytes(first.data)
        assert again.chunk == first.chunk


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("raw", [b"ab" * 5000, noise(5000)], ids=["zst", "raw"])
def test_stored_bytes_decode_from_any_buffer(kind, raw):
    found = encoded(raw)
    assert bytes(chunk_codec.decode(found.chunk, kind(bytes(found.data)), "t")) == raw


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"ab" * 100, noise(60)], ids=["zst", "raw"])
def test_every_flipped_bit_and_every_truncation_is_corruption(raw):
    found = encoded(raw)
    data = bytes(found.data)
    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises(CorruptChunk, match="tier-a"):
                chunk_codec.decode(found.chunk, flipped, "tier-a")
    for other in (*(data[:length] for length in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptChunk, match=f"{len(other)} bytes, not the {len(data)}"):
            chunk_codec.decode(found.chunk, other, "tier-a")


def test_a_chunk_that_is_nowhere_stored_cannot_be_decoded():
    with pytest.raises(CorruptChunk, match="does not say how"):
        chunk_codec.decode(described(b"x"), b"x", "t")


def test_a_codec_of_a_newer_tierd_is_named():
    with pytest.raises(FormatTooNew, match="'lz9' is not known"):
        chunk_codec.decode(crafted(b"x", b"x", "lz9"), b"x", "t")


@pytest.mark.parametrize("codec_name", ["raw", "zst"])
def test_a_codec_that_the_bytes_are_not_is_corruption(codec_name):
    raw = b"ab" * 500
    data = raw if codec_name == "zst" else zstandard.compress(raw)
    with pytest.raises(CorruptChunk):
        chunk_codec.decode(crafted(raw, data, codec_name), data, "t")


def test_right_bytes_for_another_digest_are_corruption():
    found = encoded(b"ab" * 500)
    other = msgspec.structs.replace(found.chunk, xxh3_128="0" * 32)
    with pytest.raises(CorruptChunk, match="decoded bytes differ"):
        chunk_codec.decode(other, found.data, "t")


# -- bombs: every digest in the manifest fits, only the frame lies ----------------------------------------------------

RAW = b"ab" * 500
_ZEROS = zstandard.ZstdCompressor(level=1).compress(bytes(64 * MB))


def frame(raw: bytes, *, named: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=named).compress(raw)


def rle(claims: int, blocks: int) -> bytes:
    """A single-segment frame that names `claims` bytes and expands to `blocks` of 128 KiB each; RFC 8878, 3.1.1."""
    head = struct.pack("<IBQ", 0xFD2FB528, 0b1110_0000, claims)
    size = 128 << 10
    return head + b"".join(
        ((size << 3) | (1 << 1) | (number == blocks - 1)).to_bytes(3, "little") + b"\0" for number in range(blocks)
    )


def giant_window(raw: bytes) -> bytes:
    """A frame with an honest size whose window is 2 GiB (not a single segment), holding `raw` as one raw block."""
    window = (31 - 10) << 3
    head = struct.pack("<IBBI", 0xFD2FB528, 0b1000_0000, window, len(raw))
    return head + ((len(raw) << 3) | 1).to_bytes(3, "little") + raw


BOMBS = {
    "names 64 MiB and holds them": _ZEROS,
    "names 1 TiB": rle(1 << 40, 1),
    "names the right size and expands to 64 MiB": rle(len(RAW), 512),
    "names no size": frame(RAW, named=False),
    "two frames": frame(RAW) + frame(RAW),
    "the rest in a second frame": frame(RAW[:500]) + frame(RAW[500:]),
    "a bomb behind the right frame": frame(RAW) + _ZEROS,
    "trailing bytes": frame(RAW) + b"\0",
    "a skippable frame first": struct.pack("<II", 0x184D2A50, 4) + b"skip" + frame(RAW),
    "a skippable frame behind": frame(RAW) + struct.pack("<II", 0x184D2A50, 4) + b"skip",
    "too short by a byte": frame(RAW)[:-1],
    "only a header": frame(RAW)[:6],
    "nothing": b"",
    "no frame": b"ab" * 20,
    "a dictionary that nobody has": struct.pack("<IBBI", 0xFD2FB528, 0b0110_0001, 7, len(RAW) - 256)[:9] + b"\1\0\0",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_lying_frame_is_corruption_and_costs_no_more_than_the_chunk(name):
    data = BOMBS[name]
    chunk = crafted(RAW, data)
    assert peak(lambda: chunk_codec.decode(chunk, data, "t")) < len(data) + MB


def test_the_bombs_are_bombs():
    """The same frames do expand, or would try to, where nobody compares sizes first."""
    assert len(zstandard.ZstdDecompressor().decompress(_ZEROS)) == 64 * MB
    assert len(zstandard.ZstdDecompressor().decompressobj().decompress(rle(512 * (128 << 10), 512))) == 64 * MB
    parameters = zstandard.get_frame_parameters(rle(1 << 40, 1))
    assert parameters.content_size == 1 << 40
    assert zstandard.get_frame_parameters(giant_window(RAW)).window_size == 2 << 30


def test_a_giant_window_is_not_allocated():
    """The frame is honest but for its window: it is decoded into one buffer of the chunk's size, without a window."""
    data = giant_window(RAW)
    before = _address_space()
    assert chunk_codec.decode(crafted(RAW, data), data, "t") == RAW
    assert _address_space() - before < 256 * MB


def test_an_honest_chunk_is_decoded_in_memory_of_its_own_size():
    raw = bytes(32 * MB)
    found = encoded(raw)
    tracemalloc.start()
    assert len(chunk_codec.decode(found.chunk, found.data, "t")) == 32 * MB
    assert tracemalloc.get_traced_memory()[1] < 33 * MB
    tracemalloc.stop()


def _address_space() -> int:
    """The most virtual memory that this process ever had, bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmPeak"))


def test_a_child_of_a_fork_decodes_although_every_core_was_busy() -> None:
    raw = struct.pack(f"<{MB // 4}f", *(random.Random(1).gauss(0, 0.02) for _ in range(MB // 4)))
    made = encoded(raw)
    assert made.stored.codec == chunk_codec.PLANES
    busy = chunk_codec._cores
    assert all(busy.acquire(timeout=60) for _ in range(chunk_codec._CORES))
    try:
        if not (child := os.fork()):
            signal.alarm(60)
            os._exit(bytes(chunk_codec.decode(made.chunk, made.data, "t")) != raw)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        busy.release(chunk_codec._CORES)
