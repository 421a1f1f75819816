"""The seal: a JSON object's last member, which is the digest of the bytes before it.

Invariant: every version of the format keeps the seal and the member `version`. So a newer object is never mistaken for
a corrupt one.
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


# Made once, on import, because msgspec inspects a type on first use, and crashes if two threads do so at once.
_version = msgspec.json.Decoder(_Version)


def seal(members: msgspec.Struct) -> bytes:
    """One JSON object whose last member, `digest`, is the xxh3-128 of every byte before its comma."""
    body = msgspec.json.encode(members)[:-1]
    return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(data: bytes, where: str, limit: int = MAX_MANIFEST_SIZE) -> bytes:
    """Verify the seal and return the JSON object without it.

    Raises:
        ManifestError: the data is longer than `limit` bytes, truncated, or altered.
    """
    if len(data) > limit:
        raise ManifestError(f"{where}: {len(data)} bytes; at most {limit} are read")
    body, seal = data[:-_SEAL_SIZE], data[-_SEAL_SIZE:]
    if not seal.startswith(_SEAL) or not seal.endswith(b'"}\n'):
        raise ManifestError(f"{where}: truncated, or not a manifest: it does not end in its digest")
    if seal[len(_SEAL) : -3] != xxhash.xxh3_128_hexdigest(body).encode():
        raise ManifestError(f"{where}: its bytes differ from its own digest")
    return body + b"}"


def digest_of(data: bytes) -> str:
    """The digest at the end of an intact object, 32 hex digits."""
    return data[-_SEAL_SIZE + len(_SEAL) : -3].decode()


def version_of(body: bytes) -> int:
    """The version of an object returned by `unsealed`. Raises `msgspec.DecodeError`, ValueError or RecursionError."""
    return _version.decode(body).version
