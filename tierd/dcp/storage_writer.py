"""`dcp.save` into the spool: torch's own file format, written as a part and digested during the write.

Invariant: bytes are digested as torch hands them over. The save fails unless the file holds the same bytes when it is
read back. A rank's part becomes visible by one rename, its last step. The coordinator's part is the last of all and
holds `.metadata`. So a save that failed on any rank leaves no complete checkpoint.

From torch the module uses `FileSystemWriter` with its `fs` and `path`, and the documented methods of `StorageWriter`.
`set_up_storage_writer` accepts keywords that only newer versions of torch pass (`rank`, `use_collectives`). The module
is longer than 300 lines because torch calls one object through a whole save.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.saving.dcp_arena_staging import ArenaCopy
from tierd.client.saving.save_jobs import checked_metrics
from tierd.core.errors import ConfigError, SaveFailed, StepRefused
from tierd.core.ids import CheckpointId, PartId, check_step
from tierd.core.manifest import Manifest
from tierd.dcp.metadata import NAME, check_readable
from tierd.dcp.save_steps import DigestingFileSystem, RankResults, check_same_checkpoint, stage
from tierd.spool.spool_access import is_disk_full, spool_errors
from tierd.spool.stage import Stage, describe_directory

_LAST = 1.0  # seconds to wait for a save's thread to end after its future is done


class StorageWriter(FileSystemWriter):
    """Storage writer for `dcp.save` and `dcp.async_save` that writes into a checkpointer's spool.

    Every rank saves with a `Checkpointer` of its own. Its part of the checkpoint holds the files that plain
    `FileSystemWriter` would have written for it. A writer may be reused: `dcp.save(state, checkpoint_id="…/step-100",
    storage_writer=writer)` saves step 100, the number at the end of the id. It can be pickled for a save in another
    process; the pickle holds names, not the checkpointer.

    Args:
        checkpointer: of this rank; its spool receives the part.
        step: of the checkpoint; takes precedence over `checkpoint_id`, and may be omitted if each save has one.
        metrics: of the checkpoint. The attribute may be replaced once a save has begun, because that save keeps its own
            copy.
        single_file_per_rank, thread_count, per_thread_copy_ahead, cache_staged_state_dict: as for `FileSystemWriter`.

    Raises:
        StepRefused: the step is not an int, or is negative.
        ConfigError: a metric is not a number, or the checkpointer is closed.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        single_file_per_rank: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
    ) -> None:
        self._spool = internals(checkpointer).spool
        super().__init__(
            self._spool.control / "stage",
            single_file_per_rank=single_file_per_rank,
            sync_files=False,  # because `DigestingFileSystem` syncs each file once
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
        )
        self.fs = DigestingFileSystem()
        self.metrics = dict(metrics or {})
        self._checkpointer: Checkpointer | None = checkpointer
        self._fixed_step = self._step = None if step is None else check_step(step)
        self._staged = self._is_reset = False  # `stage` ran but `reset` not yet; `reset` ran but `storage_meta` not yet
        self._saver: threading.Thread | None = None  # the thread that saves
        self._rank_and_world = internals(checkpointer).launch.rank, internals(checkpointer).launch.world
        self._coordinates = False
        self._copies: ArenaCopy | None = None  # copies made by `stage`, kept until they are written
        self._stage: Stage | None = None
        self._sweep: weakref.finalize[Any, Any] | None = None
        self._draft = self._drafted(self._step or 0)

    # -- called by torch, in this order -----------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin an `async_save`, in the training thread.

        Tensors are copied into an arena of the checkpointer. Those of attached optimizers are copied while training
        continues, as `Checkpointer.save` does it.

        Raises:
            ConfigError: an earlier save through this writer has not ended.
        """
        self._begin()
        staged_state = None
        if self._checkpointer is not None:
            staged_state = stage(self._checkpointer, self._draft, state_dict, super().stage)
        if staged_state is None:
            self._copies, staged = None, super().stage(state_dict)
        else:
            self._copies, staged = staged_state.staged, staged_state
            self.per_thread_copy_ahead = 0  # as torch's own stager sets it, because no tensor is left on a device
        self._staged = True
        return staged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, in the thread that saves.

        The step is the number at the end of `checkpoint_id`, unless the writer has a step.

        Raises:
            ConfigError: `checkpoint_id` does not end with a number and the writer has no step; or as `stage`.
        """
        if not self._staged:
            self._begin()
        self._staged, self._is_reset, self._saver = False, True, threading.current_thread()
        super().reset()
        if checkpoint_id is None or self._fixed_step is not None:
            return
        match = re.search(r"[0-9]+\Z", Path(checkpoint_id).name)
        if match is None:
            raise ConfigError(
                f"checkpoint_id {os.fspath(checkpoint_id)!r}: no number ends it, which would be the step; "
                "or give StorageWriter a step"
            )
        self._step = check_step(int(match[0]))

    def storage_meta(self) -> StorageMeta:
        if not self._is_reset:  # torch has not called `reset`, because no checkpoint_id was given
            self.reset()
        self._is_reset = False
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        return str(self._draft.part.checkpoint)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._coordinates = is_coordinator
        self.rank, self.use_collectives = kwargs.get("rank"), kwargs.get("use_collectives", True)
        if self.rank is not None and self.rank != self._rank_and_world[0]:
            raise self._strangers(f"rank {self.rank}")
        if self._step is None:
            raise ConfigError("which step? give StorageWriter a step, or the save a checkpoint_id that its number ends")
        self._draft = msgspec.structs.replace(self._draft, step=self._step)
        self._check_current()
        part = internals(self._checkpointer).launch.part(self._step) if self._checkpointer else self._draft.part
        if self._spool.has(part):
            raise StepRefused(f"{part} is already committed; a checkpoint is never overwritten")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.use_collectives and len(plans) != self._rank_and_world[1]:
            raise self._strangers(f"one of {len(plans)} ranks")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and commit its part unless `finish` must add to it.

        Raises:
            StepRefused: the part is already committed.
            CorruptChunk: a file does not hold the bytes that were written to it.
            SpoolFull, SpoolUnusable: the part could not be made durable.
            TornSnapshot: something other than an attached optimizer changed a tensor that was copied while training
                continued.
        """
        self._abandon()
        with self._careful():
            try:
                if self._copies is not None:
                    self._copies.wait()
                results = self._write_anyway(plan, planner)
            finally:
                if self._copies is not None:
                    self._copies.release()
                self._copies = None
            if self.use_collectives and not self._coordinates:
                self._commit()
        future: Future[list[WriteResult]] = Future()
        future.set_result(RankResults(str(self._draft.part.checkpoint), map(self._placed, results)))
        return future

    def _write_anyway(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write. If the disk is full, ask the daemon to free space and write again."""
        try:
            return self._write(plan, planner)
        except OSError as error:
            self._abandon()
            if not is_disk_full(error) or not self._is_room_made(plan, quota=error.errno == errno.EDQUOT):
                raise
            return self._write(plan, planner)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._stage = self._spool.stage(self._draft.part)
        self._sweep = weakref.finalize(self, _abandon, self._stage, os.getpid())
        self.fs, self.path = DigestingFileSystem(), self._stage.path
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:  # because torch may only report that its archive could not be finished
            raise self.fs.error or error from None
        self._check_written(plan, results)
        return results

    def _is_room_made(self, plan: SavePlan, *, quota: bool) -> bool:
        if self._checkpointer is None:  # in another process, which has no connection to the daemon
            return False
        chunks = [
            (item.tensor_data.chunk.sizes, item.tensor_data.properties) for item in plan.items if item.tensor_data
        ]
        size = sum(math.prod(sizes) * properties.dtype.itemsize for sizes, properties in chunks)
        return internals(self._checkpointer).daemon.make_room(self._draft.part, size, quota)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, and commit the part that contains it.

        Raises:
            ConfigError: the ranks wrote different checkpoints.
            StateRefused: a planner's own data names a class, so it could never be loaded.
            CorruptChunk, SpoolFull, SpoolUnusable: as `write_data`.
        """
        with self._careful():
            check_same_checkpoint(results, str(self._draft.part.checkpoint))
            check_readable(metadata, f"{self._draft.part}: {NAME}")
            self._is_reset = True  # because torch calls `storage_meta` again
            super().finish(metadata, results)
            self._is_reset = False
            self._commit()

    def _begin(self) -> None:
        """Fix the attempt and the metrics of a new save, after the previous save has ended."""
        saver = self._saver if self._saver is not threading.current_thread() else None
        if saver:
            # A save that failed on another rank ends with its thread, and torch does not notify this writer.
            saver.join(_LAST)
        if self._staged or (saver and saver.is_alive()):
            raise ConfigError(f"this writer still saves step {self._step}: wait for it, or make a writer a save")
        self._abandon()
        self._copies = None  # left by a save that failed on another rank
        self._step = self._fixed_step
        self._draft = self._drafted(self._step or 0)
        if self._checkpointer is not None:
            internals(self._checkpointer).schedule.count_save(self._fixed_step)

    def _drafted(self, step: int) -> Manifest:
        if self._checkpointer is None:  # in another process
            return msgspec.structs.replace(self._draft, step=step)
        internals(self._checkpointer).check_open()
        launch = internals(self._checkpointer).launch
        part = PartId(CheckpointId(launch.run, launch.attempt, step), *self._rank_and_world)
        return launch.manifest(part, checked_metrics(self.metrics))

    def _check_current(self) -> None:
        if self._checkpointer is None:
            return
        internals(self._checkpointer).check_open()
        if internals(self._checkpointer).launch.attempt != self._draft.attempt:
            raise SaveFailed(
                f"{self._draft.part}: the launch went on from another checkpoint while this was being saved"
            )

    def _strangers(self, who: str) -> ConfigError:
        rank, world = self._rank_and_world
        return ConfigError(
            f"this save's process group has this process as {who}, its Checkpointer as rank {rank} of {world}: "
            "make a Checkpointer with the rank= and world_size= of the group that saves"
        )

    def _check_written(self, plan: SavePlan, results: list[WriteResult]) -> None:
        """Check that torch's threads ended without an error: torch loses that of any thread but the first."""
        streams = cast(DigestingFileSystem, self.fs)
        if streams.error is not None:
            raise streams.error
        if len(results) != len(plan.items):
            raise SaveFailed(f"{self._draft.part}: {len(results)} of {len(plan.items)} entries were written")

    def _placed(self, result: WriteResult) -> WriteResult:
        """Return the result with its path relative to the checkpoint's directory, where each part has its own."""
        info = result.storage_data
        path = f"{self._draft.part.name}/{info.relative_path}"
        return dataclasses.replace(result, storage_data=dataclasses.replace(info, relative_path=path))

    def _commit(self) -> None:
        if self._stage is None:
            raise SaveFailed(f"{self._draft.part}: nothing was written")
        files = describe_directory(self._stage.path, cast(DigestingFileSystem, self.fs).digests)
        self._check_current()
        self._stage.commit(msgspec.structs.replace(self._draft, files=files))
        self._abandon()
        self._saver = None
        if self._checkpointer is not None:
            internals(self._checkpointer).records.record_staged(self._draft.part, self._draft.numbers)

    @contextmanager
    def _careful(self) -> Iterator[None]:
        try:
            with spool_errors(f"spool {self._spool.root}", self._spool.root):
                yield
        except BaseException as error:
            self._abandon()
            self._saver = None
            if self._checkpointer is not None:
                internals(self._checkpointer).records.record_unstaged(self._draft.part, error)
            raise

    def _abandon(self) -> None:
        """Remove a part that was not committed: if another rank failed, torch does not notify this one."""
        if self._sweep is not None:
            self._sweep()
        self._stage = self._sweep = None
        self.path = self._spool.control / "stage"

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process that saves needs: names, and the data of the manifest."""
        if self._checkpointer is not None:
            if not self._staged:
                self._draft = self._drafted(self._step or 0)
            self._staged = False  # because that save belongs to the other process
            internals(self._checkpointer).launch.share()
            internals(self._checkpointer).daemon.renew_soon()  # because the other process does not know this daemon
        dropped = {
            "_checkpointer": None,
            "_stage": None,
            "_sweep": None,
            "state_dict_cache": None,
            "fs": DigestingFileSystem(),
        }
        return self.__dict__ | dropped | {"_saver": None, "_copies": None}


def _abandon(stage: Stage, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child, where the writer is finalized as well
        stage.abandon()
