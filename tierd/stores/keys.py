"""The key that a tier is encrypted with: 32 random bytes, in a file as 64 hex digits.

Law: a key goes nowhere but into what is derived from it. What is shown of it, in manifests, messages and `repr`, is its
id, which tells keys apart and nothing about them.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from pathlib import Path

from tierd.core.errors import ConfigError

_HEX = re.compile(rb"[0-9a-fA-F]{64}\n?")
_MAKE = "openssl rand -hex 32 > FILE makes one"


class Key:
    """A key, and what is derived from it. Each directory of a tier has keys of its own.

    Attributes:
        id: 16 hex digits.
    """

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != 32:
            raise ConfigError("a key is 32 bytes")
        self._secret = secret
        self.id = hmac.digest(secret, b"tierd id", "sha256")[:8].hex()

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def derive(self, purpose: str, directory: str) -> bytes:
        """32 bytes for one purpose in one directory."""
        return hmac.digest(self._secret, f"tierd {purpose} {directory}".encode(), "sha256")


def read_key(path: Path) -> Key:
    """The key in a file that nobody else can read.

    Raises:
        ConfigError: it cannot be read, is open to others, or holds no key; never shows what it holds.
    """
    data = read_private(path, 66, f"; {_MAKE}")
    if not _HEX.fullmatch(data):
        raise ConfigError(f"{path}: a key is exactly 64 hex digits and a newline; {_MAKE}")
    return Key(bytes.fromhex(data.decode()))


def read_private(path: Path, size: int, hint: str = "") -> bytes:
    """The first `size` bytes of a file that nobody else can read; raises `ConfigError` as `read_key`.

    Args:
        hint: how such a file is made.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is refused, not waited for
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: no plain file")
            if found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{path}: it belongs to user {found.st_uid}, who could change it: chown it")
            if stat.S_IMODE(found.st_mode) & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise ConfigError(f"{path}: its mode {mode:04o} opens it to others: chmod 600 it")
            return file.read(size)
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else ""
        hint = f"; chown it to user {os.geteuid()}" if isinstance(error, PermissionError) else hint
        raise ConfigError(f"{path}: {error.strerror}{hint}") from None
