"""Open a store from its URL. Only the composition roots call this module."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from tierd.core.errors import ConfigError
from tierd.core.urls import StoreUrl
from tierd.stores.base import Store
from tierd.stores.foreign import ForeignStore, RetryingForeignStore
from tierd.stores.keys import Key
from tierd.stores.limit import LimitedStore
from tierd.stores.retry import RetryingStore


def open_store(
    url: StoreUrl,
    up: int | None = None,
    down: int | None = None,
    key: Key | None = None,
    *,
    attempts: int = 5,
    trial: bool = False,
) -> Store:
    """Open the store at `url`, with deadlines and retries.

    It connects to nothing and reads nothing before the first call.

    Args:
        up: the most bytes per second that puts move; None for no limit.
        down: the most bytes per second that gets move; None for no limit.
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
        from tierd.stores.encrypted import EncryptedStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"a key_file needs the package {error.name}: pip install 'tierd[crypt]'") from error
    return EncryptedStore(store, key)


def open_foreign(url: StoreUrl) -> RetryingForeignStore:
    """Open a bucket in which other programs put objects, for reading. Otherwise as `open_store`."""
    if url.scheme == "file":
        raise ConfigError(f"{url}: a directory, whose files are read as files")
    return RetryingForeignStore(_s3(url) if url.scheme == "s3" else _cloud(url))


def _open_bare(url: StoreUrl, trial: bool) -> Store:
    match url.scheme:
        case "file":
            from tierd.stores.file import FileStore

            return FileStore(Path(url.path), trial=trial)
        case "s3":
            return _s3(url)
        case "gs" | "az":
            return _cloud(url)
        case _ as unknown:
            assert_never(unknown)


def _s3(url: StoreUrl) -> ForeignStore:
    try:
        from tierd.stores.s3.foreign import ForeignS3Store
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url} needs the package {error.name}: pip install 'tierd[s3]'") from error
    return ForeignS3Store(url)


def _cloud(url: StoreUrl) -> ForeignStore:
    try:
        from tierd.stores.cloud.cloud_store import CloudStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url} needs the package {error.name}: pip install 'tierd[obstore]'") from error
    return CloudStore(url)
