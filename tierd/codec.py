"""One chunk <-> its stored bytes: numbers as planes, text as zstd, noise raw, and the digests of both sides. Sync.

Law: decoding is bounded by what the manifest promised, not by what the bytes claim: a frame that names another size, or
is followed by anything, is corrupt before a byte of it is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import zstandard

from tierd import planes
from tierd.core.errors import CorruptChunk, FormatTooNew
from tierd.core.ids import PartId, chunk_key
from tierd.core.manifest import Chunk, Stored
from tierd.layout import has_numbers
from tierd.persist import digest

RAW = "raw"
ZSTD = "zst"
PLANES = "planes"
CODECS = (RAW, ZSTD, PLANES)  # every one that this tierd reads
_LEVEL = 1  # what is no number is mostly small: headers and JSON
_SMALL = 1 << 20  # bytes; below it both are tried, as a sample of so little says little
_WINDOW = 128 << 20  # bytes; what a decoder may be made to allocate


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it rests on a tier, and the manifest's entry for it."""

    chunk: Chunk
    data: bytes | bytearray | memoryview

    @property
    def stored(self) -> Stored:
        assert self.chunk.stored is not None
        return self.chunk.stored


def encode(part: PartId, chunk: Chunk, raw: bytes | bytearray | memoryview, pack: bool = True) -> Encoded:
    """Encode one chunk of `part`. `raw` has been verified against `chunk`; equal input gives equal output.

    Args:
        pack: False stores the chunk raw: for a link that takes more than a compressor makes (`core.effort`).
    """
    codec, data = _pack(raw) if pack else (RAW, raw)
    key = chunk_key(part, chunk.xxh3_128, codec)
    stored = Stored(codec=codec, size=len(data), xxh3_128=digest(data), key=key)
    return Encoded(Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored), data)


def _pack(raw: bytes | bytearray | memoryview) -> tuple[str, bytes | bytearray | memoryview]:
    # Nothing is ever longer than `raw`, and where two are equally short the older codec stands.
    numbers = has_numbers(raw)
    found: list[tuple[str, bytes | bytearray | memoryview]] = [(RAW, raw)]
    if not numbers or len(raw) < _SMALL:
        found.append((ZSTD, zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)))
    if numbers and (packed := planes.pack(raw)) is not None:
        found.append((PLANES, packed))
    return min(found, key=lambda each: len(each[1]))


def check_stored(stored: Stored, data: bytes | bytearray | memoryview, where: str) -> None:
    """Compare stored bytes with their entry in the manifest.

    Raises:
        CorruptChunk: size or digest differ.
    """
    if len(data) != stored.size:
        raise CorruptChunk(f"{where}: {stored.key}: {len(data)} bytes, not the {stored.size} of its manifest")
    if digest(data) != stored.xxh3_128:
        raise CorruptChunk(f"{where}: {stored.key}: its bytes differ from their digest")


def decode(chunk: Chunk, data: bytes | bytearray | memoryview, where: str) -> bytes | bytearray | memoryview:
    """The raw bytes of a chunk, verified before and after decoding.

    Args:
        where: the place the bytes came from, for the message.

    Raises:
        CorruptChunk: the stored bytes, the frame or the raw bytes are not what the manifest promised.
        FormatTooNew: the stored bytes are right, and of a codec that this tierd does not know.
    """
    stored = chunk.stored
    if stored is None:
        raise CorruptChunk(f"{where}: the manifest does not say how chunk {chunk.xxh3_128} is stored")
    check_stored(stored, data, where)
    raw = data if stored.codec == RAW else _expand(chunk, stored, data, where)
    if len(raw) != chunk.size or digest(raw) != chunk.xxh3_128:
        raise CorruptChunk(f"{where}: {stored.key}: its decoded bytes differ from their digest")
    return raw


def recognize(
    chunk: Chunk, codec: str, key: str, data: bytes | bytearray | memoryview, where: str
) -> tuple[Chunk, bytes | bytearray | memoryview]:
    """An object that no manifest at hand describes, if it holds `chunk`: its entry for a manifest, and the raw bytes.

    Args:
        codec, key: what it would be, and where it lies, relative to the run.

    Raises:
        CorruptChunk, FormatTooNew: as `decode`.
    """
    stored = Stored(codec=codec, size=len(data), xxh3_128=digest(data), key=key)
    found = Chunk(size=chunk.size, xxh3_128=chunk.xxh3_128, stored=stored)
    return found, decode(found, data, where)


def _expand(
    chunk: Chunk, stored: Stored, data: bytes | bytearray | memoryview, where: str
) -> bytes | bytearray | memoryview:
    try:
        if stored.codec == PLANES:
            return planes.unpack(data, chunk.size)
        if stored.codec == ZSTD:
            return _expand_zstd(chunk, data)
    except (ValueError, zstandard.ZstdError) as error:
        raise CorruptChunk(f"{where}: {stored.key}: not what codec {stored.codec!r} writes: {error}") from error
    raise FormatTooNew(f"{where}: {stored.key}: codec {stored.codec!r} is not known; use a newer tierd")


def _expand_zstd(chunk: Chunk, data: bytes | bytearray | memoryview) -> bytes:
    # decompress() would trust a size that the frame itself names, so that is compared first.
    if zstandard.get_frame_parameters(bytes(data[:32])).content_size != chunk.size:
        raise ValueError(f"the frame does not promise {chunk.size} bytes")
    expander = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    return expander.decompress(data, max_output_size=chunk.size, allow_extra_data=False)
