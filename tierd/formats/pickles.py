"""Plain pickles (torch_checkpointing's metadata.pkl): the check reads their opcodes one by one and executes none.

Covered: the file is a sequence of opcodes with their arguments up to STOP, so that truncation is always found. Not
covered: the opcodes' content, because a pickle holds no digest. Bound: 16 MiB; a larger file is not read.
"""

from __future__ import annotations

import pickletools
import struct

from tierd.formats.byte_source import ByteSource, DamagedFile, Sound, UncheckedFile
from tierd.formats.torch_legacy import check_legacy, is_legacy

_MAX = 16 << 20


def looks_like_pickle(head: bytes) -> bool:
    """Return whether a file that begins with `head` may be a pickle of protocol 2 to 5."""
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5


def find_int(data: bytes, key: str) -> int | None:
    """Return the integer that follows a string in a pickle, as the first value of this key; None if there is none.

    The opcodes are read one by one, and none is executed.
    """
    is_after_key = False
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
                continue
            if is_after_key and isinstance(argument, int) and "INT" in opcode.name:
                return argument
            is_after_key = argument == key
    except (ValueError, IndexError, struct.error, OverflowError):
        pass
    return None


def check_pickle(source: ByteSource) -> Sound:
    """Check a pickle, or a file of `torch.save` before 1.6.

    Raises:
        DamagedFile: it is truncated, or holds an invalid opcode.
        UncheckedFile: it is too large, or continues after its end.
    """
    if is_legacy(source.read(0, min(source.size, 40))):
        return check_legacy(source)
    if source.size > _MAX:
        raise UncheckedFile(f"a pickle of {source.size} bytes, more than {_MAX}")
    at = 0
    try:
        for _, _, position in pickletools.genops(source.read(0, source.size)):
            at = position or 0
    except (ValueError, IndexError, struct.error, OverflowError) as error:
        raise DamagedFile(at, f"the pickle is cut off or damaged behind there: {str(error)[:200]}") from None
    if at + 1 != source.size:
        raise UncheckedFile(f"a pickle that ends at byte {at + 1}, in a file of {source.size}")
    return Sound("pickle", "a pickle holds no digest")
