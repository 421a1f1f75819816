"""Save and resume what Accelerate's `save_state` writes, as one checkpoint of all ranks.

    ckpt = tierd.Checkpointer("/nvme/tierd", run="bert", rank=0, world_size=1, to=["s3://bucket/checkpoints"])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    ...
    states.save(step, metrics={"loss": loss})

All ranks write to one staged directory of the main process: `save_state` writes the model and the optimizer there on
one rank and generators on each, or a shard of each rank with FSDP. The main process then commits it. If each rank
staged a directory of its own, each would be a whole checkpoint by its manifest, and none could be loaded.

Invariant: a checkpoint is committed only after every rank's `save_state` has returned.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import RandomSampler

from tierd.adapters import framework
from tierd.client.checkpointer import Checkpointer, internals
from tierd.core.errors import ConfigError, SaveFailed, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierd.client.restoring.restorer import Restored

log = logging.getLogger("tierd")
_operations = framework("accelerate.utils", "accelerate")


class TierdStates:
    """Checkpoints of `Accelerator.save_state`, through a `Checkpointer`, which the caller closes.

    Every rank makes one, and calls `save` and `load` together with the others. All ranks have to see the spool, so it
    lies on one node, or on a file system that all nodes share.

    Args:
        checkpointer: made with ``rank=0, world_size=1`` on every rank; only the main process saves through it.

    Raises:
        ConfigError: the checkpointer waits for parts of other ranks; or `automatic_checkpoint_naming` is on, with which
            `save_state` writes to another directory.
    """

    def __init__(self, accelerator: Any, checkpointer: Checkpointer) -> None:
        if internals(checkpointer).ranks.world > 1:
            raise ConfigError(
                "Accelerate's ranks share one directory: make the Checkpointer with rank=0, world_size=1 on every rank"
            )
        if accelerator.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "ProjectConfiguration(automatic_checkpoint_naming=True): save_state would write elsewhere; leave it off"
            )
        self._accelerator, self._checkpointer = accelerator, checkpointer
        self._has_warned = False

    def save(self, step: int, metrics: Mapping[str, float] | None = None, **options: Any) -> None:
        """Save the states of everything that was prepared or registered. It is durable in the spool on return.

        Args:
            step, metrics: as for `Checkpointer.save`; the main process's count.
            options: for `Accelerator.save_state`.

        Raises:
            SaveFailed: another rank could not save; the message names it and the reason.
            As `Checkpointer.stage`; and what `save_state` raises.
        """
        self._warn_of_order()
        with ExitStack() as stack:
            directory, error = None, None
            try:
                if self._accelerator.is_main_process:
                    directory = stack.enter_context(self._checkpointer.stage(step, metrics))
            except Exception as raised:
                error = raised
            path = self._from_main(directory)
            self._agree(error or _unseen(path), SaveFailed)
            try:
                self._accelerator.save_state(str(path), **options)
            except Exception as raised:
                error = raised
            self._agree(error, SaveFailed)
            try:
                stack.close()  # the main process commits
            except Exception as raised:
                error = raised
            self._agree(error, SaveFailed)

    def load(
        self, step: int | None = None, *, best: str | None = None, mode: Literal["min", "max"] = "min", **options: Any
    ) -> Restored | None:
        """Load the newest verified checkpoint on every rank, or the best one by a metric.

        Args:
            step, best, mode: as for `Checkpointer.restore`.
            options: for `Accelerator.load_state`.

        Returns:
            What was restored, the same on every rank; None if the run has no checkpoint.

        Raises:
            StoreUnavailable: another rank could not restore; the message names it and the reason.
            As `Checkpointer.restore`; and what `load_state` raises.
        """
        with internals(self._checkpointer).launch.restoring():  # until every rank has loaded: `restore` only verifies
            return self._load(step, best, mode, options)

    def _load(
        self, step: int | None, best: str | None, mode: Literal["min", "max"], options: dict[str, Any]
    ) -> Restored | None:
        main_restored, error = None, None
        try:
            if self._accelerator.is_main_process:
                main_restored = self._checkpointer.restore(step=step, best=best, mode=mode)
        except Exception as raised:
            error = raised
        restored: Restored | None = self._from_main(main_restored)
        self._agree(error or (_unseen(restored.directory) if restored else None), StoreUnavailable)
        if restored is None:
            return None
        try:
            self._accelerator.load_state(str(restored.directory), **options)
        except Exception as raised:
            error = raised
        self._agree(error, StoreUnavailable)
        return restored

    def _warn_of_order(self) -> None:
        """Warn, once, of a shuffled loader whose order a resumed epoch does not repeat."""
        options = self._accelerator.dataloader_config
        samplers = [_sampler(loader) for loader in self._accelerator._dataloaders]
        if self._has_warned or options.use_stateful_dataloader or RandomSampler not in map(type, samplers):
            return
        self._has_warned = True
        log.warning(
            "a loader is shuffled by the process's generator, so an epoch that is resumed in the middle has another "
            "order: prepare it with DataLoaderConfiguration(use_seedable_sampler=True), or leave epochs whole"
        )

    def _from_main(self, value: Any) -> Any:
        return _operations.broadcast_object_list([value])[0]

    def _agree(self, error: Exception | None, kind: type[Exception]) -> None:
        """Raise this rank's error, or one of another rank's; return if no rank has one."""
        errors = _operations.gather_object([None if error is None else f"{type(error).__name__}: {error}"])
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise kind(f"rank {rank}: {text}")


def _sampler(loader: Any) -> Any:
    """Return the sampler of a loader, within the batch samplers of Accelerate."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)


def _unseen(path: Path | None) -> Exception | None:
    if path is None or path.is_dir():
        return None
    return ConfigError(
        f"{path}: this rank does not see the main process's spool; put the spool on a file system that all nodes "
        "share, or save with Checkpointer.save, which needs none"
    )
