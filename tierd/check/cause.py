"""One likely cause of a difference, as a report names it."""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True):
    """One likely cause.

    Attributes:
        kind: `not deterministic`, `never restored`, `ranks`, `steps`, `save before the step`; for data: `position`,
            `epoch`, `shuffle`, `buffer`, `prefetch`, `order`, `data`; for the rest: `weights`, `buffers`, `optimizer`,
            `scheduler`, `scaler`, `generator`, `gradients`, `mode`, `state`, `not in the checkpoint`, `summation`,
            `setting`; or `unknown`.
        says: the observation, and the remedy.
    """

    kind: str
    says: str
