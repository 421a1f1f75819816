"""Open the tiers that a configuration names: for the daemon, and for the commands that read tiers without one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from tierd.core.config import Config
from tierd.core.rate import rate
from tierd.core.urls import parse_url
from tierd.stores.base import Store
from tierd.stores.keys import read_key
from tierd.stores.open import open_store


async def open_tiers(config: Config, stack: AsyncExitStack, *, trial: bool = False) -> dict[str, Store]:
    """Open every tier's store, in order, perhaps for a `trial` as in `open_store`; `stack` closes them.

    Raises:
        ConfigError: a key cannot be used.
    """
    stores: dict[str, Store] = {}
    for tier in config.tier:
        up, down = (rate(limit) if limit else None for limit in (tier.limit_up, tier.limit_down))
        key = read_key(Path(tier.key_file)) if tier.key_file else None
        stores[tier.name] = open_store(parse_url(tier.url), up, down, key, trial=trial)
        stack.push_async_callback(stores[tier.name].aclose)
    return stores
