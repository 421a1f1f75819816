"""Open a store from its URL, or every tier's store of a configuration. Only the composition roots call this module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tierd.core.config import Config
from tierd.core.errors import ConfigError
from tierd.core.installation import install_command
from tierd.core.retention.policy import parse_rate
from tierd.core.urls import StoreUrl, parse_url
from tierd.stores.base import Store
from tierd.stores.encryption_keys import EncryptionKey, read_key
from tierd.stores.retry import ForeignStore, RetryingForeignStore, RetryingStore
from tierd.stores.store_wrappers import LimitedStore


def open_store(
    url: StoreUrl,
    up: int | None = None,
    down: int | None = None,
    key: EncryptionKey | None = None,
    *,
    attempts: int = 5,
    trial: bool = False,
) -> Store:
    """Open the store at `url`, with deadlines and retries. It connects to nothing before the first call.

    Args:
        up, down: the most bytes per second that puts and gets move; None for no limit.
        key: the key to encrypt with; None for no encryption.
        attempts: how often a call is tried while the server does not answer.
        trial: put for a trial: what becomes a tier by its first put becomes none.

    Raises:
        ConfigError: the library for this kind of URL, or for a key, is not installed.
    """
    store: Store = RetryingStore(_open_bare(url, trial), attempts=attempts)
    store = LimitedStore(store, up, down) if up or down else store
    if key is None:
        return store
    try:
        from tierd.stores.encrypted_store import EncryptedStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"a key_file needs the package {error.name}: {install_command('crypt')}") from error
    return EncryptedStore(store, key)


def open_foreign(url: StoreUrl) -> RetryingForeignStore:
    """Open a bucket in which other programs put objects, for reading. Otherwise as `open_store`."""
    store = _open_bare(url, trial=False)
    if not isinstance(store, ForeignStore):
        raise ConfigError(f"{url}: no store in which objects of other programs can be read")
    return RetryingForeignStore(store)


def _open_file(url: StoreUrl, trial: bool) -> Store:
    from tierd.stores.file_store import FileStore

    return FileStore(Path(url.path), trial=trial)


def _open_s3(url: StoreUrl, trial: bool) -> Store:
    from tierd.stores.s3.s3_store import S3Store

    return S3Store(url)


def _open_cloud(url: StoreUrl, trial: bool) -> Store:
    from tierd.stores.cloud.cloud_store import CloudStore

    return CloudStore(url)


# By a scheme of `core.store_schemes`: what opens the store, and the extra of tierd with the libraries that it needs.
_OPENERS: dict[str, tuple[Callable[[StoreUrl, bool], Store], str]] = {
    "file": (_open_file, ""),
    "s3": (_open_s3, "s3"),
    "gs": (_open_cloud, "obstore"),
    "az": (_open_cloud, "obstore"),
}


def _open_bare(url: StoreUrl, trial: bool) -> Store:
    opener, extra = _OPENERS[url.scheme]
    try:
        return opener(url, trial)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url} needs the package {error.name}: {install_command(extra)}") from error


async def open_tiers(config: Config, stack: AsyncExitStack, *, trial: bool = False) -> dict[str, Store]:
    """Open every tier's store, in order, perhaps for a `trial` as in `open_store`; `stack` closes them.

    Raises `ConfigError` if a key cannot be used.
    """
    stores: dict[str, Store] = {}
    for tier in config.tier:
        up, down = (parse_rate(limit) if limit else None for limit in (tier.limit_up, tier.limit_down))
        key = read_key(Path(tier.key_file)) if tier.key_file else None
        stores[tier.name] = open_store(parse_url(tier.url), up, down, key, trial=trial)
        stack.push_async_callback(stores[tier.name].aclose)
    return stores
