"""Tell a missing object from a 404 that something before the store answers, such as an ingress or a mesh.

Invariant: `ObjectNotFound` is the store's own word: its error code, or its listing without the key. A prune deletes the
chunks of a manifest that is not found, and a restore passes over it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager

from tierd.core.errors import ObjectNotFound, StoreUnavailable, TierdError
from tierd.stores.base import ObjectInfo

UNNAMED = ": a 404 that names no error of the store: something before it may have answered"


class UnnamedNotFound(StoreUnavailable):
    """A 404 without an error code of the store's."""


@asynccontextmanager
async def confirmed(names: Callable[[str], AsyncGenerator[ObjectInfo, None]], key: str) -> AsyncGenerator[None, None]:
    """Confirm an `UnnamedNotFound` of the wrapped request by a listing, because some stores answer so themselves.

    Args:
        names: lists the store's objects by their prefix.
        key: the object of the wrapped request.

    Raises:
        ObjectNotFound: the store's listing does not show the key.
        UnnamedNotFound: the listing shows it, or failed.
    """
    try:
        yield
    except UnnamedNotFound as error:
        try:
            async with aclosing(names(key)) as listing:
                first = await anext(listing, None)  # a key sorts before all others that begin with it
        except TierdError:
            raise error from None
        if first is not None and first.key == key:
            raise
        raise ObjectNotFound(f"{error}; but the store's listing does not show it either") from None
