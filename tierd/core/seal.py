"""The seal: how an object of JSON ends in the digest of itself.

Law: every version of the format keeps two things, the seal and the member `version`. So a newer object is never
mistaken for a corrupt one.
"""

from __future__ import annotations

import msgspec
import xxhash

from tierd.core.errors import ManifestError

MAX_MANIFEST_SIZE = 32 << 20
_SEAL = b',"digest":"'
_SEAL_SIZE = len(_SEAL) + 32 + len('"}\n')


class _Version(msgspec.Struct):
    version: int


# Made once, on import: msgspec looks a type up when it meets it first, and two threads that do so at once crash it.
_version = msgspec.json.Decoder(_Version)


def seal(members: msgspec.Struct) -> bytes:
    """One JSON object whose last member, `digest`, is the xxh3-128 of every byte before its comma."""
    body = msgspec.json.encode(members)[:-1]
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(data: bytes, where: str, most: int = MAX_MANIFEST_SIZE) -> bytes:
    """The JSON object in front of an intact seal.

    Raises:
        ManifestError: longer than `most` bytes, truncated, or altered.
    """
    if len(data) > most:
        raise ManifestError(f"{where}: {len(data)} bytes; at most {most} are read")
    body, seal = data[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    if not seal.startswith(_SEAL) or not seal.endswith(b'"}\n'):
        raise ManifestError(f"{where}: truncated, or not a manifest: it does not end in its digest")
    if seal[len(_SEAL) : -3] != xxhash.xxh3_128_hexdigest(body).encode():
        raise ManifestError(f"{where}: its bytes differ from its own digest")
    return body + b"}"


def digest_of(data: bytes) -> str:
    """The digest that an intact object ends in, 32 hex digits."""
    return data[-_SEAL_SIZE + len(_SEAL) : -3].decode()


def version_of(body: bytes) -> int:
    """The version of what `unsealed` gave. Raises `msgspec.DecodeError`, ValueError or RecursionError."""
    return _version.decode(body).version
