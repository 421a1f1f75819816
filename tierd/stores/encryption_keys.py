"""The encryption key of a tier: 32 random bytes, stored in a file as 64 hex digits.

Invariant: a key is used only to derive other keys. Manifests, messages and `repr` show only its id, which identifies
the key and reveals nothing about it.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from pathlib import Path

from tierd.core.errors import ConfigError

_HEX = re.compile(rb"[0-9a-fA-F]{64}\n?")
_MAKE = "for a new tier alone, openssl rand -hex 32 > FILE makes one"


class EncryptionKey:
    """A tier's key of 32 bytes, identified by `id`, 16 hex digits. Each directory of a tier has its own derived keys.

    `file` holds the key, for messages; it is empty if there is none.
    """

    __slots__ = ("_secret", "file", "id")

    def __init__(self, secret: bytes, file: str = "") -> None:
        if len(secret) != 32:
            raise ConfigError("a key is 32 bytes")
        self._secret, self.file = secret, file
        self.id = hmac.digest(secret, b"tierd id", "sha256")[:8].hex()

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def derive(self, purpose: str, directory: str) -> bytes:
        """Derive a key of 32 bytes for one purpose in one directory."""
        return hmac.digest(self._secret, f"tierd {purpose} {directory}".encode(), "sha256")


def read_key(path: Path) -> EncryptionKey:
    """Read a key from a file that no other user can read. Raises `ConfigError`, which never shows its content."""
    data = read_private_file(path, 66, f"; {_MAKE}")
    if not _HEX.fullmatch(data):
        raise ConfigError(f"{path}: a key is exactly 64 hex digits and a newline; {_MAKE}")
    return EncryptionKey(bytes.fromhex(data.decode()), str(path))


def read_private_file(path: Path, size: int, hint: str = "") -> bytes:
    """Read the first `size` bytes of a file that no other user can read.

    Raises `ConfigError` if it cannot be read or is open to other users; `hint` says there how to create such a file.
    """
    try:
        # O_NONBLOCK, so that a FIFO is refused and does not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: no plain file")
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{path}: it belongs to user {status.st_uid}, who could change it: chown it")
            if stat.S_IMODE(status.st_mode) & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(f"{path}: its mode {mode:04o} opens it to others: chmod 600 it")
            return file.read(size)
    except OSError as error:
        hint = hint if isinstance(error, FileNotFoundError) else ""
        hint = f"; chown it to user {os.geteuid()}" if isinstance(error, PermissionError) else hint
        raise ConfigError(f"{path}: {error.strerror}{hint}") from None
