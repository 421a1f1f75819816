"""The seam between tierd and a place that holds objects by key.

Law: a `Store` moves bytes and decides nothing. What an implementation promises stands here, once; the conformance suite
in `tests/stores/conformance.py` runs against every store and every wrapper.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tierd.core.errors import CorruptChunk, DeleteRefused, StoreRefused

Buffer: TypeAlias = bytes | bytearray | memoryview

# A component never begins with '.': that leaves '.', '..' and a store's own names (FileStore's '.tmp') out of reach.
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254})*")
MAX_KEY = 512
FIRST_PAGE, PAGE = 16, 1000  # keys of a listing's pages, on S3: `children` needs one key, and a full page takes 20 ms
LARGEST = 272 << 20  # bytes: the largest object that tierd puts


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object. `size` is in bytes; `token` changes whenever other content replaces the object's."""

    key: str
    size: int
    token: str


class Store(Protocol):
    """A flat namespace of immutable-by-convention objects.

    Keys are relative POSIX paths of ``A-Za-z0-9._-`` components that don't begin with ``.``, at most `MAX_KEY` long;
    any other is `StoreRefused`. No key may be another's directory (``a`` and ``a/b``): a file system can't hold both.

    Every method raises `StoreUnavailable` when the place did not answer or said "not now", and `StoreRefused` when it
    said no (credentials, permissions, missing bucket); neither says anything about the object. Calls may run at once.
    Cancelling a call returns at once and leaves the store as it was or as it was to be; its buffer may be reused.
    """

    async def put(self, key: str, data: Buffer) -> str:
        """Make `key` hold exactly `data`: atomic (no reader sees less), durable on return, and idempotent.

        `data` must not change until the call has returned or raised.

        Returns:
            The checksum over the whole of `data` by which the place itself verified what it took ("crc64nvme",
            "crc32c", "crc32"), where it was seen to refuse a wrong one; "" where nothing is proven.
        """
        ...

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        """All bytes of `key`. A short read is `StoreUnavailable`, never a short answer.

        Args:
            into: a writable view of bytes, which may be longer than the object. The object is put at its start, no
                second copy is held, and the filled part is returned; what lies behind it stays. After a call that
                failed or was cancelled its content is undefined, but nothing writes to it any more.

        Raises:
            ObjectNotFound: the place answered, and the key is not there.
            StoreRefused: the object is larger than `into`.
        """
        ...

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Every object whose key begins with `prefix` and sorts after `after`, in the byte order of keys.

        Never shows a put that has not finished, nor a name that is no valid key. Objects put or deleted meanwhile may
        or may not appear. An empty answer is no error; a missing bucket or root is `StoreRefused`.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove every key, in no particular order; one that is not there counts as removed.

        Returns when all of them are gone for good, so that what is deleted next can't go before them. `DeleteRefused`
        where the place lets nothing be deleted.
        """
        ...

    async def aclose(self) -> None:
        """Let go of connections and threads. The store cannot be used afterwards; closing twice is harmless."""
        ...


def check_key(key: str) -> str:
    """Return `key` if it may name an object: the second line of defence, behind the manifest's own bounds.

    Raises:
        StoreRefused: anything else.
    """
    if len(key) > MAX_KEY or not _KEY.fullmatch(key):
        raise StoreRefused(f"{key[:MAX_KEY]!r} is no key: components of A-Za-z0-9._- with no '.' first, joined by '/'")
    return key


def is_key(name: str) -> bool:
    """Whether `name`, found in a listing, can be one of tierd's objects."""
    return len(name) <= MAX_KEY and _KEY.fullmatch(name) is not None


def octets(data: Buffer) -> memoryview:
    """`data` as a flat view of bytes, without a copy."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view with a 0 in its shape can't be cast


def room(into: memoryview, size: int, doing: str) -> memoryview:
    """The part of a get's `into` that an object of `size` bytes fills.

    Raises:
        StoreRefused: it is larger.
    """
    if size > into.nbytes:
        raise StoreRefused(f"{doing}: the object has {size} bytes, and there is room for {into.nbytes}")
    return octets(into)[:size] if size else into[:0]


def check_size(size: int, doing: str) -> None:
    """Raise `CorruptChunk` for an object that is to be read whole and is larger than any of tierd's."""
    if size > LARGEST:
        raise CorruptChunk(f"{doing}: the object has {size} bytes; tierd puts none of more than {LARGEST}")


def weight(store: Store, size: int) -> int:
    """The bytes that an object of `size` takes in memory while it is put or got."""
    return 2 * size if is_authentic(store) else size


def is_authentic(store: Store) -> bool:
    """Whether nobody without this node's key can have put what the store gives."""
    return bool(getattr(store, "encrypts", False))


def asked_s(store: Store) -> float:
    """For how many seconds more a place is left alone, because it asked for that (Retry-After)."""
    return float(getattr(store, "asked_s", 0.0))


async def clear(store: Store, keys: Sequence[str]) -> None:
    """Delete what means nothing any more. Where the place lets nothing be deleted it stays, and does no harm."""
    try:
        await store.delete(keys)
    except DeleteRefused:
        pass


async def children(store: Store, prefix: str) -> AsyncIterator[str]:
    """The names directly under `prefix` (which is empty or ends in ``/``), at about one listing request each.

    Skips from name to name, so that a run's manifests are found without listing its chunks.
    """
    after = ""
    while True:
        found = None
        async with aclosing(store.scan(prefix, after)) as listing:
            async for info in listing:
                found = info.key
                break
        if found is None:
            return
        name, slash, _ = found[len(prefix) :].partition("/")
        yield name
        after = f"{prefix}{name}/\x7f" if slash else found  # '\x7f' sorts after every character of a key
