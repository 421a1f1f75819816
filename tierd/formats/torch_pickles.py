"""Pickles of torch: files of `torch.save` from before torch 1.6, tar archives from before 0.2, and plain pickles such
as torch_checkpointing's metadata.pkl.

Covered: a pickle is a sequence of opcodes with their arguments up to STOP, so that truncation is always found; behind
the five pickles of `torch.save`, each tensor's bytes in the number that the pickle says; the headers of the tar
archive. Not covered: any content, because none of the formats holds a digest of it. No opcode is executed.

Source: torch 2.13 `serialization.py`, `_legacy_save` (magic number, protocol, system, state, keys, then for each key
its number of elements in 8 bytes and the elements) and `_legacy_load` (`legacy_load` of a tar archive).

Bound: 16 MiB of pickles; of larger ones of `torch.save` the rest is not checked, and a larger plain pickle is not read.
Reading takes up to thirty times that in memory for adversarial input.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from typing import IO, Any, cast

from tierd.formats.byte_source import ByteSource, DamagedFile, SoundFile, UncheckedFile, UnknownFormat, read_exactly

_MAX = 16 << 20
_BUFFER = 1 << 16
# Of protocol 2 and later, and before.
_MAGIC = (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_PICKLE_ERRORS = (ValueError, IndexError, struct.error, OverflowError)
_STACK_DEPTH = 8  # values on the stack that are kept; a storage has six
_BLOCK = 512  # bytes of a tar header, and of the padding of a file
_MEMBERS = frozenset(("sys_info", "pickle", "tensors", "storages"))
_SIZES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
_RESAVE_HINT = "`torch.load` reads it, and `torch.save` of what it returns writes today's format"


def is_legacy_save(head: bytes) -> bool:
    """Whether a file that begins with `head`, of 40 bytes, is one of `torch.save` before 1.6."""
    return any(0 <= head.find(magic) <= 11 for magic in _MAGIC)


def is_tar(source: ByteSource) -> bool:
    return source.size >= _BLOCK and source.read(257, 5) == b"ustar"


def check_legacy_save(source: ByteSource) -> SoundFile:
    note = f"a file of torch.save from before torch 1.6, a pickle with the tensors behind it: {_RESAVE_HINT}"
    stream = _Stream(source)
    try:
        for _ in range(3):  # the magic number, the protocol, and the system
            _storages(stream)
        storages = _storages(stream)
        keys = _strings(stream)
    except _TooLargeError:
        return SoundFile("torch.save before 1.6", f"pickles of more than {_MAX} bytes are not read", note)
    except _PICKLE_ERRORS as error:
        raise DamagedFile(stream.tell(), f"the pickle is cut off or damaged before there: {str(error)[:200]}") from None
    at = stream.tell()
    for key in keys:
        count = int.from_bytes(read_exactly(source, at, 8, f"the size of tensor {key[:100]!a}"), "little")
        elements, size = storages.get(key, (count, None))
        if count != elements:
            raise DamagedFile(at, f"tensor {key[:100]!a}: {count} elements, and the pickle says {elements}")
        if size is None:
            return SoundFile("torch.save before 1.6", "a tensor of a type whose size is not known", note)
        at += 8 + count * size
        if at > source.size:
            raise DamagedFile(source.size, f"the file ends there, within tensor {key[:100]!a}, which ends at {at}")
    return SoundFile("torch.save before 1.6", "the format holds no digest", note)


class _TooLargeError(Exception):
    pass


class _Stream:
    """A source as the file that `pickletools` reads, up to `_MAX` bytes."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._at, self._buffer, self._begin = source, 0, b"", 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        if self._at + size > _MAX:
            if self._at + size > self._source.size:
                raise ValueError(f"{size} bytes at {self._at}, in a file of {self._source.size}")
            raise _TooLargeError
        first = self._at - self._begin
        if first + size > len(self._buffer):
            length = min(max(size, _BUFFER), self._source.size - self._at)
            self._buffer, self._begin, first = self._source.read(self._at, length), self._at, 0
        data = self._buffer[first : first + size]
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and (character := self.read(1)):
            line += character
        return bytes(line)


def _opcodes(stream: _Stream) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    return pickletools.genops(cast(IO[bytes], stream))  # it calls `read`, `readline` and `tell` alone


def _strings(stream: _Stream) -> list[str]:
    return [value for opcode, value, _ in _opcodes(stream) if _is_string(opcode) and isinstance(value, str)]


def _storages(stream: _Stream) -> dict[str, tuple[int, int | None]]:
    """Read a pickle, and return the storages that it names: by key their elements, and the bytes of one, if known.

    A storage is a persistent id: the tuple `("storage", class, key, device, elements, view)`.
    """
    storages: dict[str, tuple[int, int | None]] = {}
    memo: dict[int, Any] = {}
    values: list[Any] = []  # that were pushed since the last mark
    last_tuple: tuple[Any, ...] = ()
    for opcode, argument, _ in _opcodes(stream):
        name = opcode.name
        del values[:-_STACK_DEPTH]
        if name == "MARK":
            values = []
        elif name == "TUPLE":
            last_tuple, values = tuple(values), []
        elif name == "MEMOIZE" or "PUT" in name:
            memo[len(memo) if argument is None else argument] = values[-1] if values else None
        elif "GET" in name:
            values.append(memo.get(int(argument or 0)))
        elif name == "STACK_GLOBAL":
            values[-2:] = [" ".join(map(str, values[-2:]))]
        elif name == "BINPERSID" and len(last_tuple) >= 5 and last_tuple[0] == "storage":
            kind = str(last_tuple[1]).rpartition(" ")[2].removesuffix("Storage")
            storages[str(last_tuple[2])] = last_tuple[4], _SIZES.get(kind)
            values = []
        else:
            values.append(argument)
    return storages


def _is_string(opcode: pickletools.OpcodeInfo) -> bool:
    return "STRING" in opcode.name or "UNICODE" in opcode.name


def check_tar(source: ByteSource) -> SoundFile:
    """Check a tar archive of `torch.save` before 0.2; raise `UnknownFormat` for another program's."""
    at, names = 0, set[str]()
    while True:
        header = read_exactly(source, at, _BLOCK, "a header of the tar archive")
        if not any(header):
            break
        blank = header[:148] + b" " * 8 + header[156:]
        if sum(blank) != _octal(header[148:156], at):
            raise DamagedFile(at, "a header of the tar archive does not have its checksum")
        names.add(header[:100].rstrip(b"\0").decode("utf-8", "replace"))
        at += _BLOCK + -(-_octal(header[124:136], at) // _BLOCK) * _BLOCK
    if not names >= _MEMBERS:
        raise UnknownFormat("a tar archive, and none of torch.save")
    note = f"a tar archive of torch.save from before torch 0.2: {_RESAVE_HINT}"
    return SoundFile("torch.save before 0.2", "the format holds no digest", note)


def _octal(field: bytes, at: int) -> int:
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise DamagedFile(at, "a header of the tar archive has no number where one belongs") from None


def looks_like_pickle(head: bytes) -> bool:
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def find_int(data: bytes, key: str) -> int | None:
    """Return the integer that follows a string in a pickle, as the first value of this key; None if there is none."""
    is_after_key = False
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
                continue
            if is_after_key and isinstance(argument, int) and "INT" in opcode.name:
                return argument
            is_after_key = argument == key
    except _PICKLE_ERRORS:
        pass
    return None


def check_pickle(source: ByteSource) -> SoundFile:
    """Check a pickle, or a file of `torch.save` before 1.6."""
    if is_legacy_save(source.read(0, min(source.size, 40))):
        return check_legacy_save(source)
    if source.size > _MAX:
        raise UncheckedFile(f"a pickle of {source.size} bytes, more than {_MAX}")
    at = 0
    try:
        for _, _, position in pickletools.genops(source.read(0, source.size)):
            at = position or 0
    except _PICKLE_ERRORS as error:
        raise DamagedFile(at, f"the pickle is cut off or damaged behind there: {str(error)[:200]}") from None
    if at + 1 != source.size:
        raise UncheckedFile(f"a pickle that ends at byte {at + 1}, in a file of {source.size}")
    return SoundFile("pickle", "a pickle holds no digest")
