"""From a URL to a store that is ready for use. Called by the composition root only."""

from __future__ import annotations

from pathlib import Path

from tierd.core.errors import ConfigError
from tierd.core.urls import StoreUrl
from tierd.stores.base import Store
from tierd.stores.keys import Key
from tierd.stores.limit import LimitedStore
from tierd.stores.retry import RetryingStore


def open_store(url: StoreUrl, up: int | None = None, down: int | None = None, key: Key | None = None) -> Store:
    """The store at `url`, with deadlines and retries, moving at most `up` and `down` bytes per second, encrypted with
    `key`.

    Nothing is connected to, or looked at, before the first call.

    Raises:
        ConfigError: an s3 URL, and aiobotocore is not installed; a key, and cryptography is not.
    """
    store: Store = RetryingStore(_plain(url))
    store = LimitedStore(store, up, down) if up or down else store
    if key is None:
        return store
    try:
        from tierd.stores.encrypted import EncryptedStore
    except ModuleNotFoundError as error:
        raise ConfigError(f"a key_file needs the package {error.name}: pip install 'tierd[crypt]'") from error
    return EncryptedStore(store, key)


def _plain(url: StoreUrl) -> Store:
    if url.scheme == "file":
        from tierd.stores.file import FileStore

        return FileStore(Path(url.path))
    try:
        from tierd.stores.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url} needs the package {error.name}: pip install 'tierd[s3]'") from error
    return S3Store(url)
