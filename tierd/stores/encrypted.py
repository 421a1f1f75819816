"""Any store, encrypted: whoever sees into it reads no checkpoint, and whoever writes to it makes none that is believed.

Law: everything but the tier's README is encrypted and authenticated with the tier's key, each object as the one of its
name, an empty one as well. Pins and marks alone may lie there empty, because earlier versions put them so. What is not,
is refused: a chunk as corrupt; a manifest as corrupt where this key made it, and else as not readable here, since
another key, or none, proves nothing. Nothing is handed on before its tag was checked. `FORMAT.md` is its prose.

Above it, nothing knows of encryption: chunks are encoded, compared, shared and mended by their own bytes and digests.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADCipherContext,
    AEADEncryptionContext,
    Cipher,
    CipherContext,
    algorithms,
    modes,
)

from tierd.core.errors import CorruptChunk, ManifestError, StoreRefused, WrongKey
from tierd.core.ids import parse_retention
from tierd.core.manifest import unwrap, wrap
from tierd.core.run_retention import is_plain
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.device import memory_for
from tierd.priority import POLITE, is_hasty
from tierd.stores.base import Buffer, ObjectInfo, Store, asked_s, check_key, octets, room
from tierd.stores.keys import Key

_NONCE, _TAG = 12, 16  # bytes
_MORE = _NONCE + _TAG  # that an encrypted chunk is longer by
_SMALL = 64 << 10  # bytes; less is done within 0.1 ms
_PIECE = 1 << 20  # bytes that are encrypted between two chances for other threads
_PLAIN = frozenset({"README.md"})
_MARK = re.compile(r"[^/]+/(?:pins|pruning)/[^/]+")
_CHUNK = re.compile(r"([^/]+/chunks/[^/]+/[0-9]{5}/)([0-9a-f]{32})(\.[a-z0-9]{1,16})")
_CHUNKS = re.compile(r"[^/]+/chunks/[^/]+/[0-9]{5}/")
_WRAPPED = len(wrap("0" * 16, b""))


class EncryptedStore:
    """`inner`, as it looks to who has `key`.

    Attributes:
        encrypts: an object is in memory twice while it is moved, as it is and encrypted.
    """

    encrypts = True

    def __init__(self, inner: Store, key: Key) -> None:
        self._inner, self._key = inner, key
        self._names: tuple[str, CipherContext, CipherContext] | None = None  # of one directory, there and back

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r}, {self._key!r})"

    @property
    def asked_s(self) -> float:
        """As `inner` has it."""
        return asked_s(self._inner)

    async def put(self, key: str, data: Buffer) -> str:
        plain = octets(data)
        if check_key(key) in _PLAIN:
            return await self._inner.put(key, data)
        if _CHUNK.fullmatch(key):
            return await self._inner.put(self._hidden(key), await _turned(self._encrypt, key, plain))
        wrapped = await _turned(self._close, key, plain)
        if len(wrapped) > MAX_MANIFEST_SIZE:
            raise StoreRefused(f"{key}: {len(plain)} bytes, which are too many encrypted: no reader would take them")
        return await self._inner.put(key, wrapped)

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        """As the contract says, and:

        Raises:
            CorruptChunk, ManifestError: it is not what this key encrypted under this name; the latter of what is no
                chunk.
            WrongKey: it is encrypted with another key, or not at all.
        """
        if check_key(key) in _PLAIN:
            return await self._inner.get(key, into)
        chunk = _CHUNK.fullmatch(key) is not None
        found = octets(await (self._get_chunk(key, into) if chunk else self._inner.get(key)))
        if not found and _MARK.fullmatch(key):
            data = found  # from before pins and marks had a tag; it says no more than its name does
        elif chunk:
            data = await _turned(self._decrypt, key, found)
        else:
            data = await _turned(self._open, key, found)
        if into is None:
            return data
        filled = room(into, len(data), f"{self!r}: get {key}")
        for at in range(0, len(data), _PIECE):  # on this thread: nothing writes there once the call is cancelled
            filled[at : at + _PIECE] = data[at : at + _PIECE]
            await asyncio.sleep(0)
        return filled

    async def _get_chunk(self, key: str, into: memoryview | None) -> Buffer:
        if into is None:
            return await self._inner.get(self._hidden(key))
        size = into.nbytes + _MORE
        try:
            return await self._inner.get(self._hidden(key), memory_for(size)[:size])
        except StoreRefused:
            async with aclosing(self._inner.scan(self._hidden(key))) as listing:
                async for info in listing:  # larger than there is room for, as the caller counts?
                    room(into, max(info.size - _MORE, 0), f"{self!r}: get {key}")
                    break
            raise

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        directory = _CHUNKS.match(prefix)
        # Names of chunks sort otherwise than they are listed: a directory of them is read whole.
        inner_prefix = prefix
        if directory:
            digest = re.match(r"[0-9a-f]{32}\.", prefix[directory.end() :])
            inner_prefix = directory[0]
            if digest:
                inner_prefix = self._rename(directory[0], digest[0][:32], hide=True) + prefix[directory.end() + 32 :]
        inside = _CHUNKS.match(after)
        inner_after = after
        if inside and after[inside.end() :] < "g":  # behind every digest, all sorts as it is listed
            inner_after = after[: inside.end()]
        page: list[ObjectInfo] = []
        here = ""
        async with aclosing(self._inner.scan(inner_prefix, inner_after)) as listing:
            async for info in listing:
                match = _CHUNKS.match(info.key)
                if page and (match is None or match[0] != here):
                    for one in _sorted(page):
                        yield one
                    page.clear()
                shown = self._shown(info)
                if not shown.key.startswith(prefix) or shown.key <= after:
                    continue
                if match:
                    here = match[0]
                    page.append(shown)
                else:
                    yield shown
        for one in _sorted(page):
            yield one

    async def delete(self, keys: Sequence[str]) -> None:
        await self._inner.delete([self._hidden(check_key(key)) for key in keys])

    async def aclose(self) -> None:
        await self._inner.aclose()

    # -- names ------------------------------------------------------------------------------------------------------

    def _hidden(self, key: str) -> str:
        """Where an object lies in `inner`: a digest of its content in its name would tell what it is."""
        match = _CHUNK.fullmatch(key)
        return self._rename(match[1], match[2], hide=True) + match[3] if match else key

    def _shown(self, info: ObjectInfo) -> ObjectInfo:
        """What `inner` lists, as it is called and as large as it is here."""
        if match := _CHUNK.fullmatch(info.key):
            key = self._rename(match[1], match[2], hide=False) + match[3]
            return ObjectInfo(key, max(info.size - _MORE, 0), info.token)
        if info.key in _PLAIN or not info.size:
            return info
        return ObjectInfo(info.key, max((info.size - _WRAPPED) * 3 // 4 - _MORE, 0), info.token)

    def _rename(self, directory: str, digest: str, *, hide: bool) -> str:
        # A digest is one block, so it is enciphered as it is; blocks of one directory are all different.
        if self._names is None or self._names[0] != directory:
            cipher = Cipher(algorithms.AES(self._key.derive("names", directory[:-1])), modes.ECB())  # noqa: S305
            self._names = directory, cipher.encryptor(), cipher.decryptor()
        _, there, back = self._names
        return directory + (there if hide else back).update(bytes.fromhex(digest)).hex()

    # -- bytes, in threads ------------------------------------------------------------------------------------------

    def _turn(self, key: str, nonce: bytes, tag: bytes | None = None) -> AEADCipherContext:
        """To encrypt the object of this name, or with its tag, to decrypt it."""
        # A key for each directory: random nonces never come near their limit of 2^32 under one.
        secret = self._key.derive("objects", key.rpartition("/")[0])
        cipher = Cipher(algorithms.AES(secret), modes.GCM(nonce, tag))
        turn = cipher.encryptor() if tag is None else cipher.decryptor()
        turn.authenticate_additional_data(key.encode())
        return turn

    def _encrypt(self, key: str, plain: memoryview) -> memoryview:
        nonce, end = os.urandom(_NONCE), _NONCE + len(plain)
        encrypted = memory_for(end + _TAG)[: end + _TAG]
        encrypted[:_NONCE] = nonce
        turn = self._turn(key, nonce)
        for at in range(0, len(plain), _PIECE):
            turn.update_into(plain[at : at + _PIECE], encrypted[_NONCE + at :])
        turn.finalize()
        assert isinstance(turn, AEADEncryptionContext)
        encrypted[end:] = turn.tag
        return encrypted

    def _close(self, key: str, plain: memoryview) -> memoryview:
        return memoryview(wrap(self._key.id, base64.b64encode(self._encrypt(key, plain)).rstrip(b"=")))

    def _decrypt(self, key: str, found: memoryview) -> memoryview:
        try:
            if len(found) < _MORE:
                raise InvalidTag
            if found.readonly:
                memory = memory_for(len(found))[: len(found)]
                memory[:] = found
                found = memory
            turn = self._turn(key, bytes(found[:_NONCE]), bytes(found[-_TAG:]))
            for at in range(_NONCE, len(found) - _TAG, _PIECE):  # where it lies: it is nobody else's
                turn.update_into(found[at : min(at + _PIECE, len(found) - _TAG)], found[at:])
            turn.finalize()
        except InvalidTag:
            raise CorruptChunk(f"{key}: not what key {self._key.id} encrypted under this name") from None
        return found[_NONCE:-_TAG]

    def _open(self, key: str, found: memoryview) -> memoryview:
        data = bytes(found)
        if parse_retention(key.partition("/")[0], key) and is_plain(data):
            raise WrongKey(f"{key}: it is not encrypted, and could be anybody's")
        try:
            wrapped = unwrap(data, key)
            if wrapped is None:
                raise WrongKey(
                    f"{key}: it is not encrypted, and could be anybody's; "
                    "where a tier was written without a key_file, begin another under a URL of its own"
                )
            if wrapped.key_id != self._key.id:
                raise WrongKey(
                    f"{key}: encrypted with key {wrapped.key_id}, and this tier's key_file has {self._key.id}"
                )
            padding = "=" * (-len(wrapped.encrypted) % 4)
            return self._decrypt(key, memoryview(base64.b64decode(wrapped.encrypted + padding, validate=True)))
        except CorruptChunk as error:
            raise ManifestError(str(error)) from None
        except ValueError as error:
            raise ManifestError(f"{key}: {error}") from None


def _sorted(page: list[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(page, key=lambda info: info.key)


async def _turned(turn: Callable[[str, memoryview], memoryview], key: str, data: memoryview) -> memoryview:
    """What `turn` makes of an object's bytes; where they are many, in a thread. What a cancelled call leaves running
    there writes only to memory of its own."""
    if len(data) < _SMALL:
        return turn(key, data)
    pool = None if is_hasty() else POLITE
    return await asyncio.get_running_loop().run_in_executor(pool, turn, key, data)
