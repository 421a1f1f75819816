"""Expand zstd frames that must name their size and stand alone.

Invariant: an untrusted frame costs no more memory than `size` and some fixed buffers, even if it claims more.
"""

from __future__ import annotations

import zstandard

WINDOW = 128 << 20  # bytes that a decoder of one frame for a whole chunk may be made to allocate
_PIECE = 16  # bytes; it holds at most a few blocks, and each of them expands to at most 128 KiB


def declared_size(frame: bytes | bytearray | memoryview) -> int:
    """Return the number of bytes that the frame's header names. Raises `ZstdError` if this is no header."""
    return zstandard.get_frame_parameters(bytes(frame[:32])).content_size


def expand_frame(frame: bytes | bytearray | memoryview, size: int, expander: zstandard.ZstdDecompressor) -> bytes:
    """Return the `size` bytes that the frame holds.

    Raises ValueError or `zstandard.ZstdError` unless these bytes are exactly one frame, whose header names `size`.
    """
    # Compared first, because decompress() would trust the size that the frame itself names.
    if declared_size(frame) != size:
        raise ValueError(f"a frame does not promise {size} bytes")
    if not size:
        _check_empty(memoryview(frame), expander)
        return b""
    raw = expander.decompress(frame, max_output_size=size, allow_extra_data=False)
    if len(raw) != size:
        raise ValueError(f"a frame has {len(raw)} bytes, not {size}")
    return raw


def _check_empty(frame: memoryview, expander: zstandard.ZstdDecompressor) -> None:
    """Raise unless this is exactly one frame without content, whose header names the size 0.

    decompress() reads only the header of such a frame. So the frame is read as a stream here, in small pieces, because
    the blocks of a frame that lies could expand to any size.
    """
    if frame[: len(zstandard.FRAME_HEADER)] != zstandard.FRAME_HEADER:
        raise ValueError("a skippable frame holds nothing")
    stream = expander.decompressobj()
    for at in range(0, len(frame), _PIECE):
        if stream.eof or stream.decompress(frame[at : at + _PIECE]):
            raise ValueError("a frame that promises 0 bytes has some, or something follows it")
    if stream.unused_data or not stream.eof:
        raise ValueError("a frame of 0 bytes has no end, or something follows it")
