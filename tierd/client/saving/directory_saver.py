"""Save the files that another library writes: give it a directory in the spool, and commit that as one part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tierd.client.attachment import Attachment
from tierd.client.ranks.launch import Launch
from tierd.client.saving.save_records import SaveRecords
from tierd.client.schedule import Schedule
from tierd.core.disk_full import lacks_inodes
from tierd.spool.adopt import unshare_below
from tierd.spool.conditions import translated
from tierd.spool.spool import Spool
from tierd.spool.stage import describe_directory


class DirectorySaver:
    """Stages and commits directories."""

    def __init__(
        self, spool: Spool, launch: Launch, schedule: Schedule, records: SaveRecords, daemon: Attachment
    ) -> None:
        self._spool, self._launch, self._schedule, self._records = spool, launch, schedule, records
        self._daemon = daemon
        self._staged_bytes = 0  # size of the last staged part; the next one is probably about as large

    @contextmanager
    def stage(self, step: int, metrics: Mapping[str, float] | None) -> Iterator[Path]:
        """Give a directory, and commit it when the block ends, as `Checkpointer.stage` does."""
        part, numbers = self._records.begin(step, metrics)
        try:
            self._launch.claim(part)
            with translated(f"spool {self._spool.root}", self._spool.root):
                # Make room now, because the other library's write is not tried again.
                if self._spool.free()[0] < self._staged_bytes or lacks_inodes(os.statvfs(self._spool.root)):
                    self._daemon.make_room(part, self._staged_bytes, quota=False)
                stage = self._spool.stage(part)
            with stage:
                yield stage.path
                with translated(f"spool {self._spool.root}", self._spool.root):
                    stage.check()  # before anything is read, because a link would lead out of the stage
                    unshare_below(stage.path)
                    files = describe_directory(stage.path)
                    self._staged_bytes = sum(file.size for file in files)
                    stage.commit(msgspec.structs.replace(self._launch.manifest(part, numbers), files=files))
        except BaseException as error:
            self._records.unstaged(part, error)
            raise
        self._schedule.took(part.checkpoint.step)
        self._records.staged(part, numbers)
