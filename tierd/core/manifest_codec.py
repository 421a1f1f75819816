"""A manifest's coding: bytes <-> `Manifest`, the object that an encrypted tier has in its place, and the seal of both.

Invariant: metadata is never executable and never trusted. Bytes become a `Manifest` only through `decode`, which checks
the self-digest, the schema, every bound and every path; `encode` is its inverse. The seal is a JSON object's last
member, the digest of the bytes before it. Every version of the format keeps the seal and the member `version`. So a
newer object is never mistaken for a corrupt one.
"""

from __future__ import annotations

from datetime import UTC
from typing import Annotated, Literal, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from tierd.core.errors import FormatTooNew, ManifestError, WrongKey
from tierd.core.ids import ChunkName, PartId
from tierd.core.manifest import (
    DELTA,
    FIRST,
    MAX_PATCHES,
    PATCHED,
    VERSION,
    WITH_DELTAS,
    Chunk,
    Manifest,
    check_path,
    is_patch,
    patch_kind,
)

T = TypeVar("T")

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


def unseal(data: bytes, where: str, limit: int = MAX_MANIFEST_SIZE) -> bytes:
    """Verify the seal and return the JSON object without it.

    Raises `ManifestError` for data that is longer than `limit` bytes, truncated, or altered.
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
    """The version of an object returned by `unseal`. Raises `msgspec.DecodeError`, ValueError or RecursionError."""
    return _version.decode(body).version


def decode_sealed(data: bytes, where: str, limit: int, version: int, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a sealed object of one version that is no manifest: a head, or a summary.

    Raises:
        ManifestError: it is damaged, or longer than `limit` bytes.
        WrongKey: it is encrypted.
        FormatTooNew: a newer tierd wrote it.
    """
    body = unseal(data, where, limit)
    try:
        if (stated := version_of(body)) != version:
            if key_id := encrypted_with(data):
                raise key_missing(where, key_id)
            raise FormatTooNew(f"{where}: version {stated}; this tierd reads {version}: use a newer one")
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error


ENCRYPTED = 2  # the version of the object that an encrypted tier has in place of a manifest
_KNOWN = (FIRST, PATCHED, VERSION, WITH_DELTAS)


class EncryptedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The object that an encrypted tier has in place of a manifest: the encrypted manifest, in unpadded base64."""

    version: int
    cipher: Literal["aes-256-gcm"]
    key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    encrypted: str


def encode(manifest: Manifest) -> bytes:
    """The manifest as one sealed JSON object. It is decoded again, so that every written manifest can be read.

    Raises `ManifestError` if `decode` refuses it, for example for too many files or too long a path.
    """
    data = seal(manifest)
    decode(data, manifest.part)
    return data


def wrap(key_id: str, encrypted: bytes) -> bytes:
    """The object that an encrypted tier has in place of a manifest: `encrypted`, in base64, with the same seal."""
    return seal(EncryptedManifest(version=ENCRYPTED, cipher="aes-256-gcm", key_id=key_id, encrypted=encrypted.decode()))


def unwrap(data: bytes, where: str) -> EncryptedManifest | None:
    """Decode a result of `wrap`; None for an unencrypted object. Raises like `decode`."""
    body = unseal(data, where)
    try:
        version = version_of(body)
        if version in _KNOWN:
            return None
        if version != ENCRYPTED:
            raise FormatTooNew(f"{where}: format version {version}; use a newer tierd")
        return _wrapped.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error


def decode(data: bytes, expected: PartId | None = None) -> Manifest:
    """Decode and check a manifest from an untrusted source. One of another part than `expected` is refused.

    Raises:
        ManifestError: the manifest is truncated, altered, oversized or unsafe; the message says which and where.
        FormatTooNew: the manifest is intact, and of a version that this tierd does not know.
        WrongKey: the manifest is intact and encrypted.
    """
    where = f"manifest of {expected}" if expected else "manifest"
    body = unseal(data, where)
    try:
        version = version_of(body)
        if version == ENCRYPTED and (key_id := _key_id(body)):
            raise key_missing(where, key_id)
        if version not in _KNOWN:
            raise FormatTooNew(
                f"{where}: format version {version}; this tierd reads up to {WITH_DELTAS}: use a newer one"
            )
        manifest = _decoder.decode(body)
        manifest.numbers  # noqa: B018  # raises if a metric is neither a number nor a string that float() parses
        created = manifest.created_at
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error
    if created.tzinfo is None or created.utcoffset() != UTC.utcoffset(None):
        raise ManifestError(f"{where}: created {manifest.created!r} is not in UTC")
    if manifest.rank >= manifest.world_size:
        raise ManifestError(f"{where}: rank {manifest.rank} of {manifest.world_size}")
    if manifest.resumed_from and manifest.resumed_from.attempt >= manifest.attempt:
        raise ManifestError(
            f"{where}: it resumes from {manifest.resumed_from.attempt}, which is not an earlier attempt"
        )
    if PartId.parse(manifest.run, manifest.part.checkpoint.name, manifest.part.name) is None:
        raise ManifestError(f"{where}: run {manifest.run!r} is no run's name")
    if expected is not None and manifest.part != expected:
        raise ManifestError(f"{where}: it says that it is {manifest.part}")
    _check_files(manifest, where)
    return manifest


def key_missing(where: str, key_id: str) -> WrongKey:
    """Return the error for an encrypted object that is read without a key."""
    return WrongKey(f"{where}: encrypted with key {key_id}: name its file by the tier's key_file, or --key-file")


def encrypted_with(data: bytes) -> str:
    """The id of the key that encrypted an object; empty if the object is not encrypted or not intact."""
    try:
        return _key_id(unseal(data, ""))
    except ManifestError:
        return ""


def _key_id(body: bytes) -> str:
    try:
        return _wrapped.decode(body).key_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return ""


# Made once, on import, because msgspec inspects a type on first use, and crashes if two threads do so at once.
_decoder = msgspec.json.Decoder(Manifest)
_wrapped = msgspec.json.Decoder(EncryptedManifest)


def _check_files(manifest: Manifest, where: str) -> None:
    paths: set[str] = set()
    for file in manifest.files:
        check_path(file.path, where)
        if file.path in paths:
            raise ManifestError(f"{where}: {file.path!r} is named twice")
        paths.add(file.path)
        if sum(chunk.size for chunk in file.chunks) != file.size:
            raise ManifestError(f"{where}: the chunks of {file.path!r} do not add up to its {file.size} bytes")
        for chunk in file.chunks:
            if chunk.home is not None and (chunk.home >= manifest.world_size or manifest.version < VERSION):
                subject = f"home {chunk.home}, in version {manifest.version} and with {manifest.world_size} ranks"
                raise ManifestError(f"{where}: {file.path!r}: chunk {chunk.xxh3_128} has {subject}")
            _check_stored(chunk, manifest, f"{where}: {file.path!r}")
    for path in paths:
        pieces = path.split("/")
        if any("/".join(pieces[:depth]) in paths for depth in range(1, len(pieces))):
            raise ManifestError(f"{where}: {path!r} lies inside another file")


def _check_stored(chunk: Chunk, manifest: Manifest, where: str) -> None:
    for patches, link in enumerate(chunk.chain()):
        if link.stored is None:
            if patches:
                raise ManifestError(f"{where}: a patch of chunk {chunk.xxh3_128} has no stored base")
            return
        if patches > MAX_PATCHES:
            raise ManifestError(f"{where}: chunk {chunk.xxh3_128} needs more than {MAX_PATCHES} patches")
        _check_key(link, manifest, where, is_base=patches > 0)
        if link.size != chunk.size:
            raise ManifestError(f"{where}: a base of chunk {chunk.xxh3_128} has {link.size} bytes, not {chunk.size}")
        if is_patch(link.stored.codec) != (link.stored.base is not None):
            problem = "has no stored base" if link.stored.base is None else "is no patch, and has a base"
            raise ManifestError(f"{where}: {link.stored.key!r} {problem}")
        if link.stored.base is not None and manifest.version == FIRST:
            raise ManifestError(f"{where}: {link.stored.key!r} is a patch, in a manifest of version {manifest.version}")
        if patch_kind(link.stored.codec) == DELTA and manifest.version < WITH_DELTAS:
            raise ManifestError(f"{where}: {link.stored.key!r} is a delta, in a manifest of version {manifest.version}")


def _check_key(chunk: Chunk, manifest: Manifest, where: str, *, is_base: bool) -> None:
    assert chunk.stored is not None
    name = ChunkName.parse(chunk.stored.key)
    rank = manifest.rank
    if name and not name.is_old:
        if manifest.version < VERSION:
            name = None  # a reader of that version would not find it
        elif is_base or name.checkpoint != manifest.part.checkpoint.name:
            rank = name.rank  # another checkpoint's ranks may hold other bytes alike
        elif chunk.home is not None:
            rank = chunk.home
    if name is None or name.rank != rank:
        raise ManifestError(f"{where}: {chunk.stored.key!r} is no key of a chunk of rank {rank}")
    if (name.digest, name.codec) != (chunk.xxh3_128, chunk.stored.codec):  # a repair would overwrite another chunk
        raise ManifestError(f"{where}: {chunk.stored.key!r} is another chunk's key than {chunk.xxh3_128}'s")
