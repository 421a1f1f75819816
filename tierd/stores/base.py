"""The `Store` contract: how tierd reads and writes objects by key, wherever they are stored.

Invariant: a `Store` moves bytes and makes no decision about them. This module states every promise of an
implementation. The conformance suite in `tests/stores/conformance.py` runs against every store and every wrapper.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from tierd.core.errors import CorruptChunk, DeleteRefused, StoreRefused

Buffer: TypeAlias = bytes | bytearray | memoryview

# No component of a key begins with '.', so no key is '.', '..' or one of a store's own names (FileStore's '.tmp').
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254})*")
MAX_KEY = 512
FIRST_PAGE, PAGE = 16, 1000  # keys of a listing's page: `list_children` needs one key, and a full page takes 20 ms
_MANY = 17 * PAGE  # objects, which take as many requests as to list the names of the 17 prefixes that chunks have
_SKIP_AT = PAGE - 1  # objects of one name after its first, one page of a listing, after which the rest is skipped
LARGEST = 272 << 20  # bytes: the largest object that tierd puts


class BucketAbsent(StoreRefused):
    """The server answers, and has no bucket or container of this name. Clients of a daemon know it as its base."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing."""

    key: str
    size: int
    token: str  # an opaque string that changes whenever other content replaces the object
    modified_ns: int = 0  # when it was put, in ns since 1970 by the server's clock; 0 if the store does not say it


class Store(ABC):
    """A flat namespace of objects that tierd treats as immutable.

    A key is a relative POSIX path of ``A-Za-z0-9._-`` components that don't begin with ``.``, of at most `MAX_KEY`
    characters. A store raises `StoreRefused` for any other key. No key may be a directory of another key (``a`` and
    ``a/b``), because a file system can't hold both.

    Every method raises `StoreUnavailable` if the server did not answer or asked to try later, and `StoreRefused` if it
    refused (credentials, permissions, missing bucket). Neither error says anything about the object. Calls may run
    concurrently.

    A cancelled call returns at once. It leaves the store either unchanged or with the whole change applied, and the
    caller may reuse its buffer.

    Attributes, and the properties below, which a store declares where it differs from these defaults:
        copies_in_memory: how many times an object is in memory while it is put or got, the caller's own copy included.
        is_authentic: whether only holders of this node's key can have put the objects.
        can_digest: whether `digest` may be called: this process reads the bytes itself.
        slowest_rate: bytes/s below which the store itself gives up a transfer; None: it does not.
        has_pages: whether `scan_pages` lists pages as they come, so that it takes fewer steps than `scan`.
    """

    copies_in_memory: int = 1
    is_authentic: bool = False
    can_digest: bool = False
    slowest_rate: float | None = None
    has_pages: bool = False

    @property
    def hides_progress(self) -> bool:
        """Whether `signs_of_life` does not grow while a call moves bytes."""
        return False

    @property
    def signs_of_life(self) -> int:
        """A count that grows with each answer of the server, and with bytes that moved within a call."""
        return 0

    @property
    def is_waiting(self) -> bool:
        """Whether a request is under way that could have been answered by now."""
        return False

    @property
    def retry_after_s(self) -> float:
        """For how many more seconds the server has asked for no requests (Retry-After)."""
        return 0.0

    @abstractmethod
    async def put(self, key: str, data: Buffer) -> str:
        """Store exactly `data` under `key`: atomic (no reader sees less), durable on return, and idempotent.

        `data` must not change until the call has returned or raised.

        Returns:
            The name of the checksum over the whole of `data` ("crc64nvme", "crc32c", "crc32") with which the server
            verified the upload. A server counts as verifying only after it has refused a wrong checksum; for any other,
            "".
        """

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        """Store `data` as `put` does, unless an object lies under `key`, which is then left as it is.

        A place that has no such condition replaces the object. After an answer that was lost, the object may be the one
        that this call put.

        Returns:
            What `put` returns; None if an object was there, about whose content nothing is known.
        """
        return await self.put(key, data)

    @abstractmethod
    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        """Read all bytes of `key`. A short read raises `StoreUnavailable`; the result is never shorter than the object.

        Args:
            into: a writable view of bytes, which may be longer than the object. The store writes the object to its
                start, holds no second copy, and returns the filled part; bytes after that part are unchanged. After a
                failed or cancelled call the content of `into` is undefined, but nothing writes to it any more.

        Raises:
            ObjectNotFound: the store itself answered that the key does not exist; see `absence`.
            StoreRefused: the object is larger than `into`.
        """

    async def get_small(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read small objects together, where that takes fewer steps than a `get` of each.

        Returns:
            Each object's bytes; None for one that is to be read by `get`, whatever the reason.
        """
        return [None] * len(keys)

    async def digest(self, key: str) -> tuple[int, str]:
        """Digest an object where it lies, without bringing its bytes to the caller. Only if `can_digest`.

        Like a get after a put, it reads what the device has, not what memory still has of the put. Errors are those of
        `get`.

        Returns:
            The object's size in bytes and its XXH3-128, as 32 hex digits.
        """
        raise NotImplementedError

    @abstractmethod
    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """List every object whose key begins with `prefix` and sorts after `after`, in the byte order of keys.

        The listing never shows an unfinished put or a name that is no valid key. Objects that are put or deleted during
        the scan may or may not appear. An empty result is no error; a missing bucket or root raises `StoreRefused`.
        """

    async def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """List as `scan` does, but any number of objects at a time: a step for each of a million takes long."""
        async with aclosing(single_pages(self.scan(prefix, after))) as listing:
            async for page in listing:
                yield page

    async def directories(self, prefix: str) -> list[str] | None:
        """Return the names directly under `prefix`, which is empty or ends in ``/``; None if the store cannot list them
        without what lies below them.

        Unlike `list_names`, the result may contain names under which no object is left.
        """
        return None

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete every key, in no particular order; a key that does not exist counts as deleted.

        The call returns when all the deletions are durable, so that no later deletion can take effect before them. It
        raises `DeleteRefused` if the store does not permit deletions.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and threads. The store cannot be used afterwards; closing twice is harmless."""

    def memory_for(self, size: int) -> int:
        """Return how many bytes of memory an object of `size` bytes takes while it is put or got."""
        return self.copies_in_memory * size


class StoreWrapper(Store):
    """A store around `inner` to which every call and every ability passes, but for what a subclass changes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.copies_in_memory, self.is_authentic = inner.copies_in_memory, inner.is_authentic
        self.can_digest, self.slowest_rate = inner.can_digest, inner.slowest_rate
        # A wrapper that changes `scan` alone has the pages of its own `scan`.
        self.has_pages = inner.has_pages and (
            type(self).scan is StoreWrapper.scan or type(self).scan_pages is not StoreWrapper.scan_pages
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    @property
    def hides_progress(self) -> bool:
        return self._inner.hides_progress

    @property
    def signs_of_life(self) -> int:
        return self._inner.signs_of_life

    @property
    def is_waiting(self) -> bool:
        return self._inner.is_waiting

    @property
    def retry_after_s(self) -> float:
        return self._inner.retry_after_s

    async def put(self, key: str, data: Buffer) -> str:
        return await self._inner.put(key, data)

    async def put_if_absent(self, key: str, data: Buffer) -> str | None:
        # A wrapper that changes `put` alone has no condition.
        is_passed = type(self).put is StoreWrapper.put
        return await (self._inner.put_if_absent(key, data) if is_passed else super().put_if_absent(key, data))

    async def get(self, key: str, into: memoryview | None = None) -> Buffer:
        return await self._inner.get(key, into)

    async def get_small(self, keys: Sequence[str]) -> list[bytes | None]:
        # A wrapper that changes `get` alone has what its own `get` returns.
        is_passed = type(self).get is StoreWrapper.get
        return await (self._inner.get_small(keys) if is_passed else super().get_small(keys))

    async def digest(self, key: str) -> tuple[int, str]:
        return await self._inner.digest(key)

    def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo, None]:
        return self._inner.scan(prefix, after)

    def scan_pages(self, prefix: str, after: str = "") -> AsyncGenerator[Sequence[ObjectInfo], None]:
        return self._inner.scan_pages(prefix, after) if self.has_pages else super().scan_pages(prefix, after)

    async def directories(self, prefix: str) -> list[str] | None:
        return await self._inner.directories(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._inner.delete(keys)

    async def aclose(self) -> None:
        await self._inner.aclose()


def check_key(key: str) -> str:
    """Return `key` if it is a valid object key, else raise `StoreRefused`: the second check, after the manifest's
    bounds.
    """
    if len(key) > MAX_KEY or not _KEY.fullmatch(key):
        raise StoreRefused(f"{key[:MAX_KEY]!r} is no key: components of A-Za-z0-9._- with no '.' first, joined by '/'")
    return key


def is_key(name: str) -> bool:
    """Return whether `name`, found in a listing, can be one of tierd's objects."""
    return len(name) <= MAX_KEY and _KEY.fullmatch(name) is not None


def may_hold_keys(prefix: str) -> bool:
    """Return whether a key can begin with `prefix`. No other is listed, because some libraries refuse such a path."""
    return "/" not in prefix or is_key(prefix.rpartition("/")[0])


def ns_since_1970(at: datetime | None) -> int:
    """Return a server's time in ns, in full ms, because one server says more digits than another; 0 for None."""
    return 0 if at is None else round(at.timestamp() * 1000) * 1_000_000


def octets(data: Buffer) -> memoryview:
    """View `data` as flat bytes, without a copy."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast() raises for a view with a 0 in its shape


def destination(into: memoryview, size: int, doing: str) -> memoryview:
    """Return the part of a get's `into` that an object of `size` bytes fills. Raises `StoreRefused` if it is larger."""
    if size > into.nbytes:
        raise StoreRefused(f"{doing}: the object has {size} bytes, and there is room for {into.nbytes}")
    return octets(into)[:size] if size else into[:0]


def check_size(size: int, doing: str) -> None:
    """Raise `CorruptChunk` if an object that is to be read whole is larger than any object that tierd puts."""
    if size > LARGEST:
        raise CorruptChunk(f"{doing}: the object has {size} bytes; tierd puts none of more than {LARGEST}")


async def delete_if_permitted(store: Store, keys: Sequence[str]) -> None:
    """Delete objects that have no meaning any more. If the store permits no deletions, they are kept and do no harm."""
    try:
        await store.delete(keys)
    except DeleteRefused:
        pass


async def scan_keys(
    names: Callable[[str, str], AsyncGenerator[ObjectInfo, None]], prefix: str, after: str
) -> AsyncGenerator[ObjectInfo, None]:
    """Scan by a listing of all names, because other programs may put objects below the same prefix."""
    if not may_hold_keys(prefix):
        return
    async with aclosing(names(prefix, after)) as listing:
        async for info in listing:
            if is_key(info.key):
                yield info


async def single_pages(listing: AsyncGenerator[ObjectInfo, None]) -> AsyncGenerator[Sequence[ObjectInfo], None]:
    """Yield each object of a listing as a page of its own, because the next one may never come."""
    async with aclosing(listing) as infos:
        async for info in infos:
            yield (info,)


async def flatten(pages: AsyncGenerator[Sequence[ObjectInfo], None]) -> AsyncGenerator[ObjectInfo, None]:
    """Yield the objects of a listing in pages one by one."""
    async with aclosing(pages) as listing:
        async for page in listing:
            for info in page:
                yield info


async def list_children(store: Store, prefix: str) -> AsyncIterator[str]:
    """List the names directly under `prefix` (which is empty or ends in ``/``), with about one listing request each.

    The scan skips from name to name, so that a run's manifests are found without listing its chunks.
    """
    after = ""
    while True:
        key = None
        async with aclosing(store.scan(prefix, after)) as listing:
            async for info in listing:
                key = info.key
                break
        if key is None:
            return
        name, slash, _ = key[len(prefix) :].partition("/")
        yield name
        after = f"{prefix}{name}/\x7f" if slash else key  # '\x7f' sorts after every character of a key


async def list_names(store: Store, prefix: str, on_answer: Callable[[], None] = lambda: None) -> set[str]:
    """Return the names directly under `prefix` (which is empty or ends in ``/``).

    `on_answer` is called after each answer of the store.
    """

    def group_of(key: str) -> str:
        name, slash, _ = key[len(prefix) :].partition("/")
        return f"{prefix}{name}{slash}"

    groups = await list_groups(store, prefix, group_of, on_answer)
    return {group[len(prefix) :].removesuffix("/") for group in groups}


async def list_groups(
    store: Store,
    prefix: str,
    group_of: Callable[[str], str],
    on_answer: Callable[[], None] = lambda: None,
    list_instead: Callable[[], Awaitable[set[str] | None]] | None = None,
) -> set[str]:
    """Return the groups of the keys under `prefix`.

    A group with few objects is passed by reading on in the listing; after `_SKIP_AT` objects of one group a new listing
    skips the rest. `on_answer` is called after each answer of the store.

    Args:
        group_of: returns the group of a key: a prefix of it that ends in ``/``, or the key itself.
        list_instead: asked for all groups, once, after so many objects of one group or `_MANY` in all; returns None if
            it cannot list them.
    """
    groups, after, count = set[str](), "", 0
    while True:
        on_answer()
        repeats = 0
        async with aclosing(store.scan(prefix, after)) as listing:
            async for info in listing:
                group = group_of(info.key)
                repeats = repeats + 1 if group in groups else 0
                groups.add(group)
                count += 1
                if list_instead and (repeats == _SKIP_AT or count == _MANY):
                    if (listed := await list_instead()) is not None:
                        return listed
                    list_instead = None
                if repeats == _SKIP_AT:
                    after = f"{group}\x7f"  # '\x7f' sorts after every character of a key
                    break
            else:
                return groups
