"""The own layout that a `[[watch]]` describes."""

from __future__ import annotations

from tierd.core.config import WatchConfig
from tierd.watching.own_layout import OwnLayout


def own_layout(watch: WatchConfig) -> OwnLayout | None:
    """Return the rules by which a watch finds its units; None: the usual ones."""
    return OwnLayout(watch.unit, watch.step, watch.complete_when) if watch.unit else None
