"""`dcp.load` from the spool and the tiers: each rank reads the bytes that its plan needs, resharded as DCP does.

The checkpoint may be DCP's own, or one of `Checkpointer.save`. `StorageReader` reads the newest one that every rank can
read.

Invariant: every byte is verified in this process, in the same read that uses it. Only torch's weights-only reader
unpickles, unless the caller disables it. Before any rank changes a tensor, all bytes from tiers have been fetched and
all entries that are not tensors have been checked. Both happen while DCP plans, because DCP's own gather of plans
reports a failure to all ranks.

From torch the module uses the documented methods of `StorageReader`, and the fields of `_StorageInfo`, with which DCP's
metadata locates an entry. Methods accept keywords that only newer versions of torch pass.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as Reader
from torch.futures import Future

from tierd.client.checkpointer import Checkpointer, internals
from tierd.client.restoring.candidate_trials import Skipped
from tierd.client.restoring.ranged_reader import PartFiles, Span
from tierd.core.errors import CheckpointNotFound, ConfigError, ManifestError, StateMismatch, StateRefused
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import TENSORS, TREE, Ancestor
from tierd.core.planning.place import SPOOL
from tierd.core.save_rules import MetricGoal
from tierd.core.timeline.restore_order import Candidate
from tierd.dcp import metadata as dcp_metadata
from tierd.dcp.load_sources import SavedState, check_plain, load_tensor, plain_value, position_of

UNFIT_ERRORS = (StateMismatch, StateRefused, ConfigError)  # the checkpoint is sound, but does not fit this load


class OpenReader(Reader):
    """Reads the checkpoint that is open; `candidates` opens one after the other.

    Args:
        best, mode: as for `Checkpointer.restore`: the best checkpoint is the first candidate.

    Attributes:
        restorer: finds the candidates, and gathers the ranks' results.
        step: of the open checkpoint; None on a fresh start.
        checkpoint: its name; None on a fresh start.
        metrics: as given to its writer.
        skipped: newer checkpoints that were skipped, newest first, each with its reason.
        unreached: tiers that did not answer; they may have a newer checkpoint.
        check: called while a load is planned, before any tensor is loaded; it may raise `StateMismatch`.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        weights_only: bool = True,
    ) -> None:
        self._best = None if best is None else MetricGoal(best, mode)
        internals(checkpointer).check_open()
        self.restorer = internals(checkpointer).state_restorer.restorer(keep=False, best=best)
        self._spool, self._launch, self._weights_only = (
            internals(checkpointer).spool,
            internals(checkpointer).launch,
            weights_only,
        )
        self._choice = internals(checkpointer).schedule
        self.step: int | None = None
        self.checkpoint: CheckpointId | None = None
        self.metrics: dict[str, float] = {}
        self.skipped: tuple[Skipped, ...] = ()
        self.unreached: tuple[str, ...] = ()
        self.check: Callable[[], None] = lambda: None
        self._files: PartFiles | None = None
        self._started_from: Ancestor | None = None
        self.metadata: Metadata | None = None  # DCP's, of the open checkpoint
        self._saved: SavedState | None = None  # of a checkpoint that `Checkpointer.save` wrote
        self._by_rank = False  # saved with use_collectives=False: each rank's part has its own metadata
        self._storage: dict[Any, Any] = {}
        self._ready: set[Span] = set()

    def candidates(self, step: int | None, attempt: str | None) -> Iterator[Candidate]:
        """Yield the checkpoints to load, newest first, each opened on every rank. A collective.

        The next one is yielded only after all ranks agreed that this one cannot be loaded. After the last one, the
        launch starts fresh. Raises as `StorageReader`.
        """
        for candidate in self.restorer.candidates(step, attempt, self._best):
            failure: Exception | None = None
            try:
                self._open(candidate)
            except Exception as raised:
                failure = raised
            if self.restorer.settle(candidate, failure, unfit=isinstance(failure, UNFIT_ERRORS)).should_load:
                self.skipped = self.restorer.skipped(candidate.checkpoint)
                yield candidate
        self.step = self.checkpoint = self._files = self.metadata = self._saved = None
        self.skipped = self.restorer.skipped()
        self.go_on()

    @property
    def directory(self) -> Path:
        """The checkpoint's directory in the spool, which holds this node's own parts if they exist."""
        assert self.checkpoint is not None
        return self._spool.root / self.checkpoint.run / self.checkpoint.name

    def go_on(self) -> None:
        """Record that the launch resumes from this checkpoint. Must be called on all ranks, or on none."""
        self._launch.go_on_from(self.checkpoint, self.restorer.resume.attempts, self.restorer.agreement.clocks)
        if self.checkpoint is not None:
            self._launch.started_from = self._started_from
        self._choice.resume(self.checkpoint, self.restorer.resume)

    def _open(self, candidate: Candidate) -> None:
        checkpoint = self.checkpoint = candidate.checkpoint
        resume, source = self.restorer.resume, self.restorer.source
        self._ready.clear()
        self._saved = None
        self._launch.check_given(checkpoint, resume.attempts)
        self._files = PartFiles(self._spool, checkpoint, candidate.world, source.link, source.alone, resume.origins)
        coordinator = self._files.part(0)
        manifest = self._files.manifest(coordinator)
        self._started_from = manifest.started_from
        names = {file.path for file in manifest.files}
        self._by_rank = f"__0{dcp_metadata.NAME}" in names
        if self._by_rank and candidate.world != self._launch.world:
            raise StateMismatch(
                f"{checkpoint} was saved by {candidate.world} ranks with use_collectives=False, which cannot be "
                f"resharded, and this launch has {self._launch.world}: launch {candidate.world} ranks"
            )
        if self._by_rank:
            rank = self._launch.rank
            self.metadata = self._read_own(self._files.part(rank), f"__{rank}{dcp_metadata.NAME}")
        elif dcp_metadata.NAME in names:
            self.metadata = self._read_own(coordinator, dcp_metadata.NAME)
        elif names >= {TREE, TENSORS}:
            self._saved = SavedState(self._files, self._launch.rank, self._launch.world)
            self.metadata = self._saved.metadata
        else:
            raise StateMismatch(
                f"{checkpoint} was written through stage(): call Checkpointer.restore() without a state and read its "
                "`directory`"
            )
        self.step, self.metrics = checkpoint.step, manifest.numbers
        self.unreached = resume.unreached

    def _read_own(self, part: PartId, name: str) -> Metadata:
        assert self._files is not None
        span = self._files.span(part, name)
        if span.length > dcp_metadata.MAX_SIZE:
            raise ManifestError(f"{part}: {name}: {span.length} bytes; at most {dcp_metadata.MAX_SIZE} are read")
        self._files.prefetch([span])
        [(_, data)] = self._files.read([span])
        return dcp_metadata.read_metadata(data, f"{part}: {name}")

    @property
    def tier(self) -> str:
        """The source of the bytes: `"local"`, or the first tier that supplied bytes missing in the spool."""
        return self._files.tiers[0] if self._files and self._files.tiers else SPOOL

    def value(self, name: str) -> object:
        """Return a value that is no tensor, by its name in the flat state; None if it cannot be read.

        It is only compared, so an error is not reported here: the load reads the value again.
        """
        try:
            if self._saved is not None:
                return self._saved.claims.value(name)
            assert self._files is not None and self.metadata is not None
            storage, index = self.metadata.storage_data, MetadataIndex(name)
            if not isinstance(storage, dict) or index not in storage:
                return None
            span = self._files.span(*position_of(storage, index, self._files.part(0)))
            self._files.prefetch([span])
            [(_, data)] = self._files.read([span])
            return plain_value(data)
        except Exception:
            return None

    # -- called by torch, in this order -----------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because the checkpoint was chosen before."""

    @property
    def checkpoint_id(self) -> str:
        return str(self.checkpoint)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            raise CheckpointNotFound("a fresh start: there is no checkpoint to load (the reader's step is None)")
        rank = kwargs.get("rank")
        if self._by_rank and rank != self._launch.rank:  # torch then asks for the metadata of one rank
            raise StateMismatch(f"{self.checkpoint} was saved with use_collectives=False: each rank reads its own part")
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._storage = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Fetch from tiers everything that the plan needs, and check the entries that are not tensors.

        Raises:
            CorruptChunk, ManifestError: needed data is proven wrong in every place.
            StateRefused: an entry needs more than torch's weights-only unpickler.
            StateMismatch: in a checkpoint of `Checkpointer.save`, ranks saved different values under one name; or as
                `check`.
        """
        self.check()
        if self._saved is not None:
            self._saved.prepare(plan)
            return plan
        self._prepare(self._entries(plan))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._launch.loading()
        if self._saved is not None:
            self._saved.load(plan, planner)
            return _done_future()
        entries = self._entries(plan)
        self._prepare({span: items for span, items in entries.items() if span not in self._ready})
        assert self._files is not None and self.checkpoint is not None
        for span, data in self._files.read(entries):
            for item in entries[span]:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(data))
                else:
                    load_tensor(item, data, planner)
        return _done_future()

    def _entries(self, plan: LoadPlan) -> dict[Span, list[ReadItem]]:
        entries: dict[Span, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            entries[self._span(item)].append(item)
        return entries

    def _span(self, item: ReadItem) -> Span:
        assert self._files is not None
        return self._files.span(*position_of(self._storage, item.storage_index, self._files.part(0)))

    def _prepare(self, entries: dict[Span, list[ReadItem]]) -> None:
        if not entries:
            return
        assert self._files is not None
        self._files.prefetch(entries)
        plain = {span for span, items in entries.items() if any(item.type == LoadItemType.BYTE_IO for item in items)}
        # Without collectives everything is read here, because torch gathers the failures of planning, but not those of
        # reading.
        for span, data in self._files.read(entries if self._by_rank else plain if self._weights_only else ()):
            if self._weights_only and span in plain:
                check_plain(entries[span][0], data)
        self._ready |= entries.keys()

    def close(self) -> None:
        """Release the reader's memory. The daemon may then delete the chunks that it fetched for this reader alone."""
        if self._files is not None:
            self._files.close()
        self.restorer.close()


def _done_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class StorageReader(OpenReader):
    """Storage reader for `dcp.load`: the newest checkpoint of the run's timeline that every rank can read.

    Creating one is a collective of the launch's ranks. The checkpointer then resumes from that checkpoint, as after
    `restore`, and refuses saves until `dcp.load` has read through it. The number of ranks may differ from the number
    that saved.

    Args:
        step, attempt, best, mode: as for `Checkpointer.restore`.
        weights_only: refuse entries that torch's weights-only unpickler does not accept.

    Attributes:
        step, checkpoint, metrics, skipped, unreached: as for `OpenReader`.

    Raises:
        CheckpointNotFound, StoreUnavailable, DaemonUnavailable: as `Checkpointer.restore`.
        StateMismatch: the checkpoint was written through `stage`.
        StateRefused: its metadata names a class that is not one of DCP's.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        weights_only: bool = True,
    ) -> None:
        super().__init__(checkpointer, best=best, mode=mode, weights_only=weights_only)
        try:
            with internals(checkpointer).ranks.attending(), self._launch.restoring():
                if next(self.candidates(step, attempt), None) is not None:
                    self._launch.loading(
                        f"a reader of {self.checkpoint} was made, and nothing has been loaded through it: load on "
                        "every rank, restore, or end"
                    )
                    self.go_on()  # here, because every rank that passed the gather reaches this line
        except BaseException:
            self.close()
            raise
        self._first_attempt = self._launch.attempt

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by torch.

        Raises:
            ConfigError: the launch has since saved, or resumed from another checkpoint, so its next save would not
                follow from the loaded state.
        """
        if self._launch.attempt != self._first_attempt or self._launch.steps:
            raise ConfigError(
                f"this reader of {self.checkpoint} was made before the launch saved or restored again: make a new one"
            )
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._launch.restoring():
            return super().read_data(plan, planner)
