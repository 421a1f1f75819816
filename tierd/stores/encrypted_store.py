"""A wrapper that encrypts any store: no one can read or forge a checkpoint without the key.

Invariant: every object but the tier's README, an empty one included, is encrypted and authenticated with the tier's key
and bound to its name. Only pins and marks may also be stored as empty objects without encryption, because earlier
versions of tierd put them so.

An object that fails this check is refused. A chunk counts as corrupt. A manifest counts as corrupt if this key made it.
Any other manifest counts as unreadable here, because a different key, or no key, proves nothing. No byte is returned
before its tag was verified. `FORMAT.md` describes the format.

Callers do not notice encryption: they encode, compare, share and repair chunks by their plain bytes and digests.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import xxhash
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
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, unwrap, wrap
from tierd.core.retention.policy import is_plain_policy
from tierd.spool.direct_io import memory_for
from tierd.stores.base import Buffer, ObjectInfo, Store, StoreWrapper, check_key, destination, octets
from tierd.stores.encryption_keys import EncryptionKey
from tierd.threads import BACKGROUND_POOL, is_foreground

_NONCE, _TAG = 12, 16  # bytes
_OVERHEAD = _NONCE + _TAG  # bytes by which an encrypted chunk is longer
_SMALL = 64 << 10  # bytes; a smaller object is encrypted within 0.1 ms
_PIECE = 1 << 20  # bytes that are encrypted before other threads get a chance to run
_PLAIN = frozenset({"README.md", "README.md.id"})  # of the tier, which others may share by another key
_MARK = re.compile(r"[^/]+/(?:pins|pruning)/[^/]+")
_CHUNKS = re.compile(r"[^/]+/chunks/(?:[0-9a-f]/)?[^/]+/[0-9]{5}/")
_CHUNK = re.compile(rf"({_CHUNKS.pattern})([0-9a-f]{{32}})(\.[a-z0-9]{{1,16}})")
_WRAPPED = len(wrap("0" * 16, b""))


class EncryptedStore(StoreWrapper):
    """Present the encrypted objects of `inner` as plain objects, using `key`.

    A digest of what lies there is none of the plain bytes. An object in transfer is in memory plain and encrypted.
    """

    def __init__(self, inner: Store, key: EncryptionKey) -> None:
        super().__init__(inner)
        self._key = key
        self.is_authentic, self.can_digest, self.copies_in_memory = True, False, 1 + inner.copies_in_memory
        # The directory, with the ciphers that encrypt and decrypt its names.
        self._names: tuple[str, CipherContext, CipherContext] | None = None

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r}, {self._key!r})"

    async def put(self, key: str, data: Buffer) -> str:
        return await self._inner.put(*await self._sealed(key, data))

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        return await self._inner.put_if_absent(*await self._sealed(key, data))

    async def _sealed(self, key: str, data: Buffer) -> tuple[str, Buffer]:
        """Return the key and the bytes that an object has in `inner`."""
        plain = octets(data)
        if check_key(key) in _PLAIN:
            return key, data
        if _CHUNK.fullmatch(key):
            return self._hidden(key), await _transform(self._encrypt, key, plain)
        wrapped = await _transform(self._close, key, plain)
        if len(wrapped) > MAX_MANIFEST_SIZE:
            raise StoreRefused(f"{key}: {len(plain)} bytes, which are too many encrypted: no reader would take them")
        return key, wrapped

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        """Read and decrypt an object, as `Store.get` does.

        Raises:
            CorruptChunk: the chunk is not what this key encrypted under this name.
            ManifestError: any other object is not what this key encrypted under this name.
            WrongKey: the object is encrypted with another key, or not at all.
        """
        if check_key(key) in _PLAIN:
            return await self._inner.get(key, into)
        chunk = _CHUNK.fullmatch(key) is not None
        stored = octets(await (self._get_chunk(key, into) if chunk else self._inner.get(key)))
        if not stored and _MARK.fullmatch(key):
            data = stored  # written before pins and marks had a tag; the name carries all the information
        elif chunk:
            data = await _transform(self._decrypt, key, stored)
        else:
            data = await _transform(self._open, key, stored)
        if into is None:
            return data
        filled = destination(into, len(data), f"{self!r}: get {key}")
        # On this thread, because nothing may write to `into` after the call was cancelled.
        for at in range(0, len(data), _PIECE):
            filled[at : at + _PIECE] = data[at : at + _PIECE]
            await asyncio.sleep(0)
        return filled

    async def _get_chunk(self, key: str, into: memoryview | None) -> Buffer:
        if into is None:
            return await self._inner.get(self._hidden(key))
        size = into.nbytes + _OVERHEAD
        try:
            return await self._inner.get(self._hidden(key), memory_for(size)[:size])
        except StoreRefused:
            async with aclosing(self._inner.scan(self._hidden(key))) as listing:
                async for info in listing:  # is the plain chunk larger than `into`?
                    destination(into, max(info.size - _OVERHEAD, 0), f"{self!r}: get {key}")
                    break
            raise

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        directory = _CHUNKS.match(prefix)
        # Encrypted names of chunks sort differently from plain ones, so a directory of chunks is read whole.
        inner_prefix = prefix
        if directory:
            digest = re.match(r"[0-9a-f]{32}\.", prefix[directory.end() :])
            inner_prefix = directory[0]
            if digest:
                inner_prefix = self._rename(directory[0], digest[0][:32], hide=True) + prefix[directory.end() + 32 :]
        inside = _CHUNKS.match(after)
        inner_after = after
        # No digest sorts at or after "g", and all other names sort as `inner` lists them.
        if inside and after[inside.end() :] < "g":
            inner_after = after[: inside.end()]
        page: list[ObjectInfo] = []
        page_directory = ""
        async with aclosing(self._inner.scan(inner_prefix, inner_after)) as listing:
            async for info in listing:
                match = _CHUNKS.match(info.key)
                if page and (match is None or match[0] != page_directory):
                    for entry in _sort_page(page):
                        yield entry
                    page.clear()
                plain_info = self._reveal_info(info)
                if not plain_info.key.startswith(prefix) or plain_info.key <= after:
                    continue
                if match:
                    page_directory = match[0]
                    page.append(plain_info)
                else:
                    yield plain_info
        for entry in _sort_page(page):
            yield entry

    async def directories(self, prefix: str) -> list[str] | None:
        """List a directory of `inner`, unless names in it are encrypted."""
        return None if _CHUNKS.match(prefix) else await super().directories(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._inner.delete([self._hidden(check_key(key)) for key in keys])

    # -- names ------------------------------------------------------------------------------------------------------

    def _hidden(self, key: str) -> str:
        """Return the object's key in `inner`. A chunk's digest in it is encrypted, because it reveals the content."""
        match = _CHUNK.fullmatch(key)
        return self._rename(match[1], match[2], hide=True) + match[3] if match else key

    def _reveal_info(self, info: ObjectInfo) -> ObjectInfo:
        """Convert a listed object of `inner` to its plain name and size."""
        if match := _CHUNK.fullmatch(info.key):
            key = self._rename(match[1], match[2], hide=False) + match[3]
            return ObjectInfo(key, max(info.size - _OVERHEAD, 0), info.token)
        if info.key in _PLAIN or not info.size:
            return info
        return ObjectInfo(info.key, max((info.size - _WRAPPED) * 3 // 4 - _OVERHEAD, 0), info.token)

    def _rename(self, directory: str, digest: str, *, hide: bool) -> str:
        # ECB is safe here: a digest is exactly one block, and all the blocks of one directory differ.
        if self._names is None or self._names[0] != directory:
            cipher = Cipher(algorithms.AES(self._key.derive("names", directory[:-1])), modes.ECB())  # noqa: S305
            self._names = directory, cipher.encryptor(), cipher.decryptor()
        _, encryptor, back = self._names
        return directory + (encryptor if hide else back).update(bytes.fromhex(digest)).hex()

    # -- encryption, in threads -------------------------------------------------------------------------------------

    def _context(self, key: str, nonce: bytes, tag: bytes | None = None) -> AEADCipherContext:
        """Begin to encrypt the object `key`, or to decrypt it if its `tag` is given."""
        # Each directory has its own key, so random nonces never come near the limit of 2^32 under one key.
        secret = self._key.derive("objects", key.rpartition("/")[0])
        cipher = Cipher(algorithms.AES(secret), modes.GCM(nonce, tag))
        context = cipher.encryptor() if tag is None else cipher.decryptor()
        context.authenticate_additional_data(key.encode())
        return context

    def _encrypt(self, key: str, plain: memoryview) -> memoryview:
        nonce, end = os.urandom(_NONCE), _NONCE + len(plain)
        encrypted = memory_for(end + _TAG)[: end + _TAG]
        encrypted[:_NONCE] = nonce
        context = self._context(key, nonce)
        for at in range(0, len(plain), _PIECE):
            context.update_into(plain[at : at + _PIECE], encrypted[_NONCE + at :])
        context.finalize()
        assert isinstance(context, AEADEncryptionContext)
        encrypted[end:] = context.tag
        return encrypted

    def _close(self, key: str, plain: memoryview) -> memoryview:
        return memoryview(wrap(self._key.id, base64.b64encode(self._encrypt(key, plain)).rstrip(b"=")))

    def _decrypt(self, key: str, stored: memoryview) -> memoryview:
        try:
            if len(stored) < _OVERHEAD:
                raise InvalidTag
            if stored.readonly:
                memory = memory_for(len(stored))[: len(stored)]
                memory[:] = stored
                stored = memory
            context = self._context(key, bytes(stored[:_NONCE]), bytes(stored[-_TAG:]))
            for at in range(_NONCE, len(stored) - _TAG, _PIECE):  # in place, because this call alone owns the buffer
                context.update_into(stored[at : min(at + _PIECE, len(stored) - _TAG)], stored[at:])
            context.finalize()
        except InvalidTag:
            error = CorruptChunk(f"{key}: not what key {self._key.id} encrypted under this name")
            error.read_digest = xxhash.xxh3_128_hexdigest(stored)  # decrypted or not, other bytes give another digest
            raise error from None
        return stored[_NONCE:-_TAG]

    def _open(self, key: str, stored: memoryview) -> memoryview:
        data = bytes(stored)
        if parse_retention(key.partition("/")[0], key) and is_plain_policy(data):
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
                    f"{key}: encrypted with key {wrapped.key_id}, which the key in {self._key.file or 'memory'} "
                    f"({self._key.id}) does not decrypt: name that key's file by the tier's key_file, or --key-file"
                )
            padding = "=" * (-len(wrapped.encrypted) % 4)
            return self._decrypt(key, memoryview(base64.b64decode(wrapped.encrypted + padding, validate=True)))
        except (CorruptChunk, ManifestError, ValueError) as error:
            wrong = ManifestError(f"{key}: {error}" if isinstance(error, ValueError) else str(error))
            wrong.read_digest = xxhash.xxh3_128_hexdigest(data)
            raise wrong from None


def _sort_page(page: list[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(page, key=lambda info: info.key)


async def _transform(context: Callable[[str, memoryview], memoryview], key: str, data: memoryview) -> memoryview:
    """Run `context` (encrypt or decrypt) on an object's bytes, in a thread if they are many.

    A thread that outlives its cancelled call writes only to its own memory.
    """
    if len(data) < _SMALL:
        return context(key, data)
    pool = None if is_foreground() else BACKGROUND_POOL
    return await asyncio.get_running_loop().run_in_executor(pool, context, key, data)
