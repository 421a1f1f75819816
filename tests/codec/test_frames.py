"""One zstd frame, whole and alone: an empty one, too, of which python-zstandard reads only the header."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import zstandard

from tierd.codec.zstd_frames import expand_frame

MB = 1 << 20
EMPTY = zstandard.compress(b"")
SKIPPABLE = struct.pack("<II", 0x184D2A50, 0)
HEAD = struct.pack("<IBB", 0xFD2FB528, 0b0010_0000, 0)  # one segment of 0 bytes; RFC 8878, 3.1.1
WIDE_HEAD = struct.pack("<IBBI", 0xFD2FB528, 0b1000_0000, 7 << 3, 0)  # 0 bytes, but a window of 128 KiB


def block(kind: int, size: int, body: bytes = b"", *, last: bool = True) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + body


def checked(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(raw)


@pytest.mark.parametrize("whole", [bytes, bytearray, memoryview])
def test_a_frame_gives_its_bytes(whole):
    for raw in (b"", b"x", b"ab" * 5000):
        for frame in (zstandard.compress(raw), checked(raw)):
            assert expand_frame(whole(frame), len(raw), zstandard.ZstdDecompressor()) == raw


def test_an_empty_frame_may_have_any_number_of_empty_blocks():
    for number in range(20):
        frame = HEAD + block(0, 0, last=False) * number + block(0, 0)
        assert expand_frame(frame, 0, zstandard.ZstdDecompressor()) == b""


WRONG = {
    **{f"{size} bytes behind it": EMPTY + bytes(size) for size in (1, 6, 7, 8, 22, 23, 24, 99)},
    "text behind it": EMPTY + b"text",
    "another empty frame": EMPTY + EMPTY,
    "a frame behind it": EMPTY + zstandard.compress(b"abc"),
    "a skippable frame behind it": EMPTY + SKIPPABLE,
    "a skippable frame first": SKIPPABLE + EMPTY,
    "only a skippable frame": SKIPPABLE,
    "only a header": HEAD,
    "no end": EMPTY[:-1],
    "no last block": HEAD + block(0, 0, last=False),
    "content": HEAD + block(0, 3, b"abc"),
    "content in a wide window": WIDE_HEAD + block(0, 3, b"abc"),
    "a wrong checksum": checked(b"")[:-1] + bytes([checked(b"")[-1] ^ 1]),
    "no checksum": checked(b"")[:-4],
    "no size": zstandard.ZstdCompressor(write_content_size=False).compress(b""),
    "no frame": b"ab" * 20,
    "nothing": b"",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_empty_frame_that_is_not_whole_or_not_alone_is_refused(name):
    with pytest.raises((ValueError, zstandard.ZstdError)):
        expand_frame(WRONG[name], 0, zstandard.ZstdDecompressor())


@pytest.mark.parametrize("last", [True, False])
def test_an_empty_frame_that_expands_to_much_costs_little(last):
    bomb = WIDE_HEAD + block(1, 128 << 10, b"\0", last=False) * 1000 + block(1, 128 << 10, b"\0", last=last)
    tracemalloc.start()
    with pytest.raises((ValueError, zstandard.ZstdError)):
        expand_frame(bomb, 0, zstandard.ZstdDecompressor())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * MB
