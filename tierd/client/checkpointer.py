"""The training process's side: save and go on, restore what is verified.

Law: training never waits for the daemon and never dies of it. What fails after `save` returned is a value on the
`Save`, a log line and a count; only what the caller got wrong is raised.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tierd import __version__
from tierd.client.attachment import Attachment
from tierd.client.launch import agree, exchange, rank_and_world
from tierd.client.load import check_fit, load
from tierd.client.restore import Found, Restored, Restorer
from tierd.client.save import Save, Stats, checked_metrics
from tierd.client.snapshot import Arena
from tierd.client.state import Flattened, flatten, unflatten
from tierd.client.tensorfile import Layout, plan_layout
from tierd.core.errors import ConfigError, StateMismatch, StepRefused, TierdError
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_run, check_step
from tierd.core.manifest import VERSION, Manifest, Origin, metrics_to_json
from tierd.link import Link
from tierd.persist import write_file
from tierd.spool import Spool, condition, translated
from tierd.stage import describe_directory

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("tierd")

TENSORS = "tensors.safetensors"
TREE = "state.json"
Buffer = bytes | bytearray | memoryview


class Checkpointer:
    """Saves and restores one run's checkpoints through a spool.

    Args:
        spool: directory on local disk; made if it is missing.
        run: the training job's name, the same in every launch.
        rank, world_size: from `torch.distributed` or torchrun's environment when not given.
        attempt: this launch's name, shared by all ranks; agreed on through `torch.distributed` when not given.
        to: URLs of the tiers: a daemon for them is started unless one holds the spool. Not given: a daemon is expected
            to be there or to come (systemd). Empty: the spool is all there is, and nothing prunes it.

    Raises:
        ConfigError: a name, rank or URL cannot be used.
        SpoolUnusable: the spool cannot be written to.
        DaemonUnavailable: the daemon for `to` did not start.
    """

    def __init__(
        self,
        spool: str | os.PathLike[str],
        run: str,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: str | None = None,
        to: Sequence[str] | None = None,
    ) -> None:
        self._run = check_run(run)
        self._rank, self._world = rank_and_world(rank, world_size)
        self._given = check_attempt(attempt) if attempt is not None else None
        self._spool = Spool(spool)
        self._origin: CheckpointId | None = None
        self._attempt: str | None = None
        self._steps: set[int] = set()
        self._arena = Arena()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tierd-persist")
        self._closed = False
        self._pid = os.getpid()
        self._hold: Link | None = None  # while it is open, the daemon leaves the last restored directory alone
        self.stats = Stats()
        self._daemon = Attachment(self._spool, to)
        if self._world > 1 and self._given is None:
            self._attempt = agree(self._daemon.attempts(self._run), self._world)

    @property
    def attempt(self) -> str:
        """This launch's name. Settled at the first use: later than everything that was there before."""
        if self._attempt is None:
            self._attempt = self._given or agree(self._daemon.attempts(self._run), self._world)
        return self._attempt

    # -- save -------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, object], metrics: Mapping[str, float] | None = None) -> Save:
        """Snapshot `state` and return; persisting goes on behind.

        Nothing that training changes afterwards gets into the checkpoint. If the last save is still being persisted,
        this one waits for it (`stats.waited_s`).

        Raises:
            StepRefused: no int, negative, or already committed by this attempt.
            StateRefused: a value cannot be stored; names its path.
            ConfigError: a metric is not a number, or the checkpointer is closed.
        """
        begun = time.perf_counter()
        part, numbers = self._begin(step, metrics)
        flat = flatten(state)
        layout = plan_layout(flat.tensors)
        save = Save(part, self._spool)
        try:
            self._writer.submit(self._take, save, layout, flat, self._manifest(part, numbers), time.perf_counter())
        except RuntimeError as error:
            raise ConfigError("the interpreter is ending and runs nothing more: save before its exit") from error
        self._steps.add(part.checkpoint.step)
        try:
            save.wait_for_snapshot()
        except BaseException:
            self._steps.discard(part.checkpoint.step)
            raise
        self.stats.saves += 1
        self.stats.blocked_s += time.perf_counter() - begun
        return save

    @contextmanager
    def stage(self, step: int, metrics: Mapping[str, float] | None = None) -> Iterator[Path]:
        """A directory for any other library to write into; leaving the block without an exception commits it.

        Raises:
            StepRefused: as `save`.
            ManifestError: something other than plain files was written there.
            SpoolFull, SpoolUnusable: it could not be made durable.
        """
        part, numbers = self._begin(step, metrics)
        with translated(f"spool {self._spool.root}"):
            stage = self._spool.stage(part)
        with stage:
            yield stage.path
            with translated(f"spool {self._spool.root}"):
                files = describe_directory(stage.path)
                stage.commit(msgspec.structs.replace(self._manifest(part, numbers), files=files))
        self._steps.add(part.checkpoint.step)
        self.stats.saves += 1
        self._daemon.keep()

    def _begin(self, step: int, metrics: Mapping[str, float] | None) -> tuple[PartId, dict[str, float]]:
        self._check_open()
        number = check_step(step)
        part = PartId(CheckpointId(self._run, self.attempt, number), self._rank, self._world)
        if number in self._steps or self._spool.has(part):
            raise StepRefused(f"{part} is already committed by this attempt; a checkpoint is never overwritten")
        return part, checked_metrics(metrics or {})

    def _manifest(self, part: PartId, metrics: Mapping[str, float]) -> Manifest:
        origin = self._origin
        return Manifest(
            version=VERSION,
            run=self._run,
            step=part.checkpoint.step,
            attempt=part.checkpoint.attempt,
            resumed_from=Origin(step=origin.step, attempt=origin.attempt) if origin else None,
            rank=self._rank,
            world_size=self._world,
            created=datetime.now(UTC).isoformat(),
            writer=f"tierd {__version__}",
            metrics=metrics_to_json(metrics),
            files=(),
        )

    def _take(self, save: Save, layout: Layout, flat: Flattened, manifest: Manifest, asked: float) -> None:
        """Copy, tell the caller, and persist. All of it runs in the one thread that owns the arena."""
        self.stats.waited_s += time.perf_counter() - asked
        try:
            image = self._arena.copy(layout, flat.tensors)
        except Exception as error:
            save.snapshot_taken(error)
            return
        if save.snapshot_taken():
            self._persist(save, manifest, {TENSORS: image, TREE: flat.tree})

    def _persist(self, save: Save, manifest: Manifest, files: Mapping[str, Buffer]) -> None:
        """Make a snapshot durable. Runs behind training; whatever happens ends in the save's handle."""
        try:
            try:
                self._write(save.part, manifest, files)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # What a failed fsync left in the page cache proves nothing: all is written anew, from memory.
                log.warning("%s: %s; writing it anew", save.part, error)
                self._write(save.part, manifest, files)
        except Exception as error:
            self.stats.failed += 1
            self._steps.discard(save.step)
            log.error("save failed, training goes on: %s: %s", save.part, error)
            save.finish(condition(error, f"spool {self._spool.root}") if isinstance(error, OSError) else error)
        else:
            self.stats.persisted_bytes += sum(len(data) for data in files.values())
            save.finish(None)
        self._daemon.keep()

    def _write(self, part: PartId, manifest: Manifest, files: Mapping[str, Buffer]) -> None:
        with self._spool.stage(part) as stage:
            described = tuple(write_file(stage.path / name, name, data) for name, data in sorted(files.items()))
            stage.commit(msgspec.structs.replace(manifest, files=described))

    # -- restore ----------------------------------------------------------------------------------------------------

    def restore(
        self, state: MutableMapping[str, Any] | None = None, step: int | None = None, *, attempt: str | None = None
    ) -> Restored | None:
        """Load the newest verified checkpoint of this run's timeline into `state`.

        Args:
            state: as for `save`. Objects get `load_state_dict`, plain values are replaced in the mapping, tensors are
                filled in place. None: only verify, and return the directory (for what `stage` wrote).
            step: this step and no other.
            attempt: of this attempt; a checkpoint of a branch that the timeline left is asked for so.

        Returns:
            None when the run has no checkpoint anywhere: a fresh start.

        Raises:
            CheckpointNotFound: none could be verified, or not the one asked for; says what was skipped and why.
            StateMismatch: it does not fit `state`; names the first few places. Nothing was loaded, unless an object's
                own `load_state_dict` refused what fitted.
            StoreUnavailable, DaemonUnavailable: a place that may hold a newer or the right copy did not answer.
        """
        self._check_open()
        asked = check_step(step) if step is not None else None
        self._drain()
        self._daemon.renew()
        restorer = Restorer(
            self._spool, self._run, self._rank, self._world, tiers=self._daemon.tiers, keep=state is not None
        )
        self._let_go()
        found = restorer.agreed(asked, check_attempt(attempt) if attempt is not None else None)
        if found is None:
            return None
        self._hold, manifest = found.hold, found.manifest
        restored = self._fitting(state, found)
        if state is not None:
            load(state, restored)
        self._go_on_from(found.part.checkpoint, found.attempts)
        if found.unreached:
            log.warning("restored step %d; not asked for newer ones: %s", manifest.step, ", ".join(found.unreached))
        return Restored(
            step=manifest.step,
            attempt=manifest.attempt,
            tier=found.tier,
            metrics=manifest.numbers,
            skipped=found.skipped,
            unreached=found.unreached,
            directory=found.directory,
        )

    def _fitting(self, state: MutableMapping[str, Any] | None, found: Found) -> dict[str, Any]:
        """What was restored, once every rank has said that its own fits: else one would load, and wait for the rest."""
        restored: dict[str, Any] = {}
        misfit: TierdError | None = None
        try:
            self._check_given(found)
            if state is not None:
                restored = self._tree(found)
                check_fit(state, restored)
        except TierdError as error:
            misfit = error
        told = exchange(misfit and str(misfit), self._world)
        if misfit is not None:
            raise misfit
        for rank, text in enumerate(told or ()):
            if text is not None:
                raise StateMismatch(f"rank {rank}: {text}; nothing was loaded")
        return restored

    def _tree(self, found: Found) -> dict[str, Any]:
        if TREE not in found.files or TENSORS not in found.files:
            raise StateMismatch(
                f"{found.part} was written through stage(): call restore() without a state and read its `directory`"
            )
        return unflatten(found.files[TREE], found.files[TENSORS])

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _check_given(self, found: Found) -> None:
        if self._given is None:
            return
        latest = max(found.attempts)
        if self._steps or self._given < latest or self._given == found.part.checkpoint.attempt:
            raise ConfigError(
                f"attempt {self._given} cannot go on from attempt {latest}: an attempt has one origin, and is later "
                "than what it resumes from; make a new Checkpointer with a new attempt="
            )

    def _go_on_from(self, origin: CheckpointId, attempts: Sequence[str]) -> None:
        """An attempt has one origin: restoring after a save begins another one."""
        self._origin = origin
        self._steps.clear()
        if self._given is None:
            own = [self._attempt] if self._attempt else []
            self._attempt = agree({*attempts, origin.attempt, *own}, self._world)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this Checkpointer is closed")
        if os.getpid() != self._pid:
            raise ConfigError("this process was forked from the one that made the Checkpointer: make one of its own")

    def _drain(self) -> None:
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until every save is durable (or failed) and let go of the daemon, which flushes on by itself."""
        if not self._closed:
            self._drain()
            self._closed = True
            self._writer.shutdown()
            self._let_go()
            self._daemon.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
