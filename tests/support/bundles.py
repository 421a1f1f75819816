"""Writers of TensorFlow's checkpoints and of the table below them, because TensorFlow is not installed here.

Written after the layouts in TensorFlow's and LevelDB's sources: tensor_bundle.cc, tensor_bundle.proto, table_format.md.
"""

from __future__ import annotations

from pathlib import Path

from tierd.formats.tensorflow_files import slow_crc32c

FLOAT, STRING = 1, 7
BLOCK = 256  # bytes after which a block of the table ends; TensorFlow has 262,144


def masked(data: bytes) -> bytes:
    crc = slow_crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")


def varint(value: int) -> bytes:
    found = b""
    while value >= 0x80:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A message of protobuf: numbers as varints, bytes with their length."""
    found = b""
    for field, value in fields:
        if isinstance(value, int):
            found += varint(field << 3) + varint(value) if value else b""
        else:
            found += varint(field << 3 | 2) + varint(len(value)) + value
    return found


def _block(entries: list[tuple[bytes, bytes]]) -> bytes:
    found, restarts, last = b"", [], b""
    for index, (key, value) in enumerate(entries):
        shared = 0
        if index % 16 == 0:
            restarts.append(len(found))
        else:
            while shared < min(len(last), len(key)) and last[shared] == key[shared]:
                shared += 1
        found += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return (
        found
        + b"".join(one.to_bytes(4, "little") for one in restarts or [0])
        + len(restarts or [0]).to_bytes(4, "little")
    )


def table(entries: dict[bytes, bytes]) -> bytes:
    """A table of these keys and values."""
    file, index, block = b"", [], []

    def add(content: bytes) -> bytes:
        nonlocal file
        handle = varint(len(file)) + varint(len(content))
        file += content + b"\0" + masked(content + b"\0")
        return handle

    for key in sorted(entries):
        block.append((key, entries[key]))
        if sum(len(one) + len(value) for one, value in block) > BLOCK:
            index.append((key, add(_block(block))))
            block = []
    if block:
        index.append((block[-1][0], add(_block(block))))
    footer = add(_block([])) + add(_block(index))
    return file + footer.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def write_bundle(prefix: Path, tensors: dict[str, bytes | list[bytes]], shards: int = 1) -> None:
    """Write a checkpoint: each tensor a vector of bytes, or of strings, on the shards in turn."""
    data = [b""] * shards
    version = message((1, 1))
    entries = {b"": message((1, shards), (3, version))}
    for number, (name, value) in enumerate(sorted(tensors.items())):
        shard = number % shards
        if isinstance(value, bytes):
            stored, crc, dtype, size = value, masked(value), FLOAT, len(value)
        else:
            lengths = b"".join(len(one).to_bytes(4, "little") for one in value)
            summed = masked(lengths)
            stored = b"".join(varint(len(one)) for one in value) + summed + b"".join(value)
            crc, dtype, size = masked(lengths + summed + b"".join(value)), STRING, len(value)
        shape = message((2, message((1, size))))
        entry = message((1, dtype), (2, shape), (3, shard), (4, len(data[shard])), (5, len(stored)))
        entries[name.encode()] = entry + bytes([6 << 3 | 5]) + crc
        data[shard] += stored
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}").write_bytes(content)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))
