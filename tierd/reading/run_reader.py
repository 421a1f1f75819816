"""`Reader`, which `tierd.open` returns.

Invariant: outside of this process, a reader changes only the directory that `download` writes to.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tierd.core.errors import CheckpointNotFound, ConfigError, TierdError
from tierd.core.ids import check_attempt, check_run, check_step
from tierd.core.save_rules import MetricGoal, check_goal
from tierd.core.units import html_table
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.local_files import check_restore_target
from tierd.daemon.transfer.restore_to_directory import RestoredDirectory, restore_to_directory
from tierd.reading.checkpoint_deliveries import DeliveryLog, ListedCheckpoint, follow, list_checkpoints
from tierd.reading.restore_from_tiers import Loaded, restore
from tierd.reading.run_on_tiers import RunOnTiers, no_checkpoint_text
from tierd.stores.base import Store

if TYPE_CHECKING:
    from typing import Self

    import torch

    from tierd.reading.export_from_tiers import StateExport
    from tierd.reading.live_weights import LiveWeights

_MAX_SHOWN = 20  # checkpoints in a notebook
PathLike: TypeAlias = str | os.PathLike[str]


class Reader:
    """Reads one run's checkpoints. Made by `tierd.open`; a context manager.

    Use it in an evaluation, an export or a notebook instead of a `Checkpointer`. A reader starts no daemon, needs no
    spool, and has no influence on retention. It also works inside a running event loop.

    Args:
        stores: the tiers by name, in order of preference; `close` closes them.
        run: the training job's name.

    Attributes:
        tiers: the run on its tiers, for the other modules of this package.
    """

    def __init__(self, stores: Mapping[str, Store], run: str) -> None:
        self.run = check_run(run)
        self.tiers = RunOnTiers(stores, run)

    def __repr__(self) -> str:
        return f"<Reader of run {self.run!r} on {', '.join(self.tiers.stores)}>"

    def _repr_html_(self) -> str:
        try:
            checkpoints = self.checkpoints()[:_MAX_SHOWN]
        except TierdError as error:
            return html_table(f"run {self.run}", ("error",), [(error,)])
        rows = [
            (
                f"{checkpoint.step}{' (resumes)' * checkpoint.resumes}",
                checkpoint.attempt,
                f"{checkpoint.created:%Y-%m-%d %H:%M} UTC" if checkpoint.created else "",
                ", ".join(f"{name} {value:.4g}" for name, value in checkpoint.metrics.items()),
                ", ".join(checkpoint.tiers) or "incomplete",
            )
            for checkpoint in checkpoints
        ]
        return html_table(f"run {self.run}", ("step", "attempt", "made", "metrics", "tiers"), rows)

    @property
    def unreached(self) -> tuple[str, ...]:
        """The tiers that did not answer the most recent listing."""
        return tuple(self.tiers.unreached)

    # -- listing ----------------------------------------------------------------------------------------------------

    def checkpoints(self) -> tuple[ListedCheckpoint, ...]:
        """List the run's checkpoints.

        The order is: first those that a restore would try, in that order, then all others, newest first. The result is
        empty if the run has no checkpoint yet. It lacks the checkpoints that only a tier in `unreached` holds.

        Raises:
            StoreUnavailable: no tier answered.
        """
        return list_checkpoints(self.tiers.observe(), self.run)

    # -- restoring --------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        only: str | Collection[str] | None = None,
        rank: int | None = None,
        at_least: int | None = None,
        ignore_prefixes: bool = False,
    ) -> Loaded:
        """Load the newest verified checkpoint of the run's timeline into `state`, or the best.

        The result is the same as that of `Checkpointer.restore`, with the tiers as its only source.

        Args:
            state, step, attempt, best, mode, only, at_least, ignore_prefixes: as for `Checkpointer.restore`.
            rank: load this rank's part, independently of the present number of ranks. If it is not given, the loaded
                entries must be the same on all ranks that saved.

        Raises:
            CheckpointNotFound: the tiers have no checkpoint, or not the requested one, or none could be verified. The
                message names each skipped checkpoint with the reason, or the runs that exist. A trainer may begin
                without a checkpoint; a reader always expects one.
            StateMismatch: the checkpoint does not fit `state`, or entries differ between ranks and no rank was given;
                the message names them.
            StoreUnavailable: a tier that may hold a newer or the right copy did not answer, or checkpoints vanished
                repeatedly while they were read.
            ConfigError: `state` lacks a name in `only`; the checkpoint has no such rank; the reader is closed.
        """
        names = (only,) if isinstance(only, str) else only if only is None else tuple(only)
        if not isinstance(state, Mapping):
            raise ConfigError("restore(state): a mapping of names to what is loaded into; download(DIR) copies files")
        goal = None if best is None else MetricGoal(best, mode)
        return restore(self.tiers, state, step, attempt, goal, names, rank, at_least, ignore_prefixes=ignore_prefixes)

    # -- following --------------------------------------------------------------------------------------------------

    def follow(
        self, state: PathLike | None = None, *, latest: bool = False, period_s: float = 30.0, once: bool = False
    ) -> Iterator[ListedCheckpoint]:
        """Yield each complete checkpoint as it arrives, oldest first, once over restarts of this process.

        A checkpoint counts as delivered when the loop asks for the next one. So one whose loop body was killed, raised
        or left the loop is delivered again by the next `follow` with the same `state`. Each rank's manifest is read
        before; a flush writes it after it has verified every chunk. `restore` and `download` verify every byte.

        Args:
            state: the file that holds the names of the delivered checkpoints; None forgets them with this process.
            latest: yield only the newest checkpoint, and only if it is newer than all that were delivered.
            period_s: seconds between two listings of the tiers, at least.
            once: end after the checkpoints that are there now, instead of waiting for more.

        Raises:
            ConfigError: another follower uses `state`; or it is damaged, or of another run.
            StoreUnavailable: with `once`, no tier answered. Otherwise the next listing tries again.
        """
        path = Path(check_path_argument(state, "follow(state): a path")) if state is not None else None
        with DeliveryLog(path, self.run) as delivered:
            yield from follow(self.tiers, delivered, latest=latest, period_s=period_s, once=once)

    def live(
        self,
        state: torch.nn.Module | Mapping[str, torch.Tensor] | None = None,
        *,
        only: str | None = None,
        strip: str = "",
        rank: int | None = None,
        period_s: float | None = 1.0,
        cache: PathLike | None = None,
    ) -> LiveWeights:
        """Follow the run's newest weights in memory: fetch only chunks that differ, verify them, and say what changed.

        The first weights are those that a restore would take. In memory are the weights that the caller has and the
        next ones, besides the caller's own tensors. Close the result before the reader.

        Args:
            state: what `LiveWeights.update` copies into, by the names of the checkpoint. Only these tensors are
                fetched, and dtypes and shapes must be the saved ones. None fetches all, and copies nothing.
            only, strip, rank: as for `export`, which gives tensors the same names.
            period_s: seconds between two questions to the tiers. None starts no thread: then `update` asks and fetches.
            cache: a directory of this user, in which followers of one node share what they fetch: each object is
                fetched once. On an encrypted tier, objects lie there decrypted.

        Raises:
            ConfigError: `state` has tensors into which whole ones cannot be copied, or others may write to `cache`.
        """
        from tierd.exporting.weight_image import TensorSelection, live_tensors
        from tierd.reading.live_weights import LiveWeights
        from tierd.reading.weight_feed import WeightFeed

        targets = None if state is None else live_tensors(state)
        names = None if targets is None else frozenset(targets)
        directory = None if cache is None else Path(check_path_argument(cache, "live(cache): a path"))
        return LiveWeights(
            WeightFeed(self.tiers, TensorSelection(only, strip, rank, names), directory), targets, period_s
        )

    # -- downloading ------------------------------------------------------------------------------------------------

    def download(
        self,
        directory: PathLike,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        rank: int | None = None,
        on_progress: Callable[[int, int], None] = lambda done_bytes, total: None,
    ) -> RestoredDirectory:
        """Copy the files of the newest verified checkpoint, or the best, into `directory`, as `tierd restore` does.

        Each rank's files are in their own directory. A call after an interrupted one continues the copy.

        Args:
            directory: empty or absent.
            step, attempt, best, mode: as for `restore`.
            rank: copy this rank's files alone. Tensors that the rank left to another one of its node are not in them.
            on_progress: called with the bytes that are verified in place, and with those in all, after each chunk.

        Raises:
            CheckpointNotFound, StoreUnavailable: as for `restore`; but every tier has to answer.
            SpoolFull: the disk is full.
            ConfigError: `directory` exists and is not usable; the checkpoint has no such rank; or both the best and a
                step were requested.
        """
        target = Path(check_path_argument(directory, "download(directory): a path"))
        if best is not None and step is not None:
            raise ConfigError(f"best={best!r} and step={step}: one of the two")
        goal = None if best is None else check_goal(MetricGoal(best, mode))
        selection = None if step is None else check_step(step), None if attempt is None else check_attempt(attempt)
        moved = Progress(on_progress=lambda at: on_progress(at.done, at.total))
        work = restore_to_directory(
            self.tiers.stores, self.run, target, *selection, moved, self.tiers.budget, goal, rank
        )
        try:
            return self.tiers.loop.run(work)
        except CheckpointNotFound as error:
            if self.run in self.tiers.runs():
                raise
            raise CheckpointNotFound(no_checkpoint_text(self.tiers)) from error

    # -- exporting --------------------------------------------------------------------------------------------------

    def export(
        self,
        directory: PathLike,
        format: str,
        step: int | None = None,
        *,
        attempt: str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        only: str | None = None,
        dtype: str | None = None,
        strip: str = "",
        rank: int | None = None,
        on_progress: Callable[[int, int], None] = lambda done_bytes, total: None,
    ) -> StateExport:
        """Write the newest verified checkpoint, or the best, in another format. `save` or DCP wrote the checkpoint.

        Tensors are streamed: at most 1 GiB of memory is used, whatever their size. Values that are not tensors, which
        only the formats `torch` and `dcp` hold, are in memory at once. Shards of several ranks become whole tensors.

        Args:
            directory: empty or absent. It appears when it is whole, and nothing in it is ever overwritten.
            format: `safetensors`, `hf` (shards with an index, for `from_pretrained`), `torch` (for `torch.load`) or
                `dcp` (for `dcp.FileSystemReader`).
            step, attempt, best, mode: as for `restore`.
            only: one entry of the state, whose name is then left out of all names.
            dtype: `fp32`, `fp16` or `bf16`, for floating-point tensors.
            strip: a prefix that is removed from each name that begins with it, such as `module.`.
            rank: whose value is written where ranks saved different ones under one name, as of the buffers of a
                BatchNorm under DDP. Without it, such a name is refused.
            on_progress: called with the bytes of tensors that were read, and with those in all, after each piece.

        Raises:
            CheckpointNotFound, StoreUnavailable: as for `restore`.
            StateMismatch, StateRefused: the checkpoint does not fit the format; the message says which entry.
            SpoolFull: the disk is full.
            ConfigError: `directory` exists and is not usable, or an argument is unknown.
        """
        from tierd.reading.export_from_tiers import ExportOptions, export_state  # torch.distributed is slow to import

        target = check_restore_target(Path(check_path_argument(directory, "export(directory): a path")))
        goal = None if best is None else MetricGoal(best, mode)
        return export_state(
            self.tiers, target, ExportOptions(format, only, dtype, strip, rank, on_progress), step, attempt, goal
        )

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release connections and threads. Closing twice is harmless."""
        self.tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_path_argument(argument: object, description: str) -> PathLike:
    """Return `argument` if it can be a path or a URL; else raise `ConfigError` with `description`."""
    if not isinstance(argument, str | os.PathLike):
        raise ConfigError(f"{description}, and not a {type(argument).__name__}")
    return argument
