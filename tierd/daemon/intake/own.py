"""A person's own rules about which paths are checkpoints: those of a `[[watch]]`, and whether a run needs some."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from tierd.core.config import WatchConfig
from tierd.core.errors import ConfigError, ManifestError
from tierd.core.ids import CheckpointId, PartId
from tierd.daemon.intake.each_series import recorded_unit
from tierd.spool.file_io import open_own
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.watching.naming import KnownCheckpoints
from tierd.watching.own_layout import OwnLayout
from tierd.watching.programs import OWN
from tierd.watching.unit_file import MAX_SIZE, UNIT_NAME, UnitFile, decode_unit

_TRIED = 3  # checkpoints whose description is looked for


def own_layout(watch: WatchConfig) -> OwnLayout | None:
    """Return the rules by which a watch finds its units; None: the usual ones."""
    return OwnLayout(watch.unit, watch.step, watch.complete_when) if watch.unit else None


async def check_rules(run: str, history: KnownCheckpoints, spool: Spool | None, stores: Mapping[str, Store]) -> None:
    """Refuse to find the units of a run by the usual rules if a watch found its newest one by a person's own.

    The usual rules may take a part of such a unit for a whole one.

    Args:
        run: the run.
        history: its checkpoints.
        spool: its spool, if this node has one.
        stores: the tiers.

    Raises:
        ConfigError: a watch found the newest unit by a person's own rules.
    """
    for checkpoint in sorted(history.made, key=lambda checkpoint: history.made[checkpoint], reverse=True)[:_TRIED]:
        about = (spool and _in_spool(spool, checkpoint)) or await recorded_unit(stores, checkpoint)
        if about is None:
            continue  # no place has the description, or only a damaged one
        if about.program == OWN.program:
            raise ConfigError(
                f"run {run!r} was watched with --unit: give prepare the same --unit, --step and --complete-when. "
                "Nothing was moved"
            )
        return


def _in_spool(spool: Spool, checkpoint: CheckpointId) -> UnitFile | None:
    path = spool.path(PartId(checkpoint, 0, 1)) / UNIT_NAME
    with suppress(OSError, ConfigError, ManifestError), os.fdopen(open_own(path), "rb") as file:
        return decode_unit(file.read(MAX_SIZE), str(path))
    return None
