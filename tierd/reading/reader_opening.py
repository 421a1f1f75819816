"""`tierd.open`: the stores of a run's tiers, and the reader over them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tierd.core.config import from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import check_run
from tierd.core.urls import parse_url
from tierd.reading.run_reader import PathLike, Reader, check_path_argument
from tierd.stores.encryption_keys import read_key
from tierd.stores.open import open_store


def open(url_or_urls: PathLike | Sequence[PathLike], run: str, key_file: PathLike | None = None) -> Reader:
    """Open a run's checkpoints for reading, on one tier or on several, in order of preference.

    The call connects to nothing; the first read does. A reader needs no spool and no daemon, and writes nothing to a
    tier.

    Args:
        url_or_urls: the tiers, as in a configuration: `file:///path`, `s3://bucket/prefix`, …
        run: the training job's name.
        key_file: the file with the key that encrypts the tiers.

    Raises:
        ConfigError: a URL, the run's name or the key is invalid, or a package is missing; the message names it.
    """
    if isinstance(url_or_urls, str | bytes | os.PathLike) or not isinstance(url_or_urls, Iterable):
        url_or_urls = [url_or_urls]
    urls = [
        os.fspath(check_path_argument(url, "tierd.open(url_or_urls): a URL, a path or a list of them"))
        for url in url_or_urls
    ]
    if not urls:
        raise ConfigError("tierd.open: name at least one tier's URL")
    check_run(run)
    path = (
        Path(check_path_argument(key_file, "tierd.open(key_file): a path")).absolute() if key_file is not None else None
    )
    config = from_urls("/", urls, key_file=str(path) if path else None, where="tierd.open")
    key = read_key(path) if path else None
    return Reader({tier.name: open_store(parse_url(tier.url), key=key) for tier in config.tier}, run)
