"""The ways to save that are compared: tierd's own, torch.save, torch.distributed.checkpoint, torch_checkpointing.

Invariant: each uses only calls that a user would write, at its best documented setting, and peers get a new file for
every save, as in a run that keeps several. Without a daemon no process prunes a spool, so `clean_up` removes the
checkpoint before the last, as retention would.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

import tierd
from tierd.bench.training import LibraryUnavailable, SaveMethod, Training, Wait
from tierd.core.config import from_urls
from tierd.core.installation import install_command
from tierd.spool.file_io import sync_directory
from tierd.spool.spool import Spool

_TIMEOUT = 600.0  # seconds after which a save or flush counts as hung


class Tierd(SaveMethod):
    """`save` returns when the snapshot is taken. There is a spool and no tier."""

    tier = False
    overlapped = False

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        urls = []
        if self.tier:
            (directory / "tier").mkdir()
            urls = [f"file://{(directory / 'tier').absolute()}"]
            self._tier = from_urls("/", urls).tier[0].name
        self._ckpt = tierd.Checkpointer(directory / "spool", run="bench", to=urls)
        if self.overlapped:
            self._ckpt.attach(training.optimizer)
        self._ckpt.restore(training.state)  # every training begins with a restore; here it finds no checkpoint
        self._last: tierd.Save | None = None

    def save(self) -> Wait:
        save = self._ckpt.save(self.training.number, self.training.state)
        self._last = save
        return lambda: save.wait(timeout=_TIMEOUT)

    def flush_waiter(self) -> Wait | None:
        save = self._last
        if not self.tier or save is None:
            return None
        return lambda: save.wait(tier=self._tier, timeout=_TIMEOUT)

    def clean_up(self) -> None:
        flushed = self.flush_waiter()
        if flushed is not None:
            flushed()  # its daemon prunes by itself
            return
        spool = Spool(self.directory / "spool")
        for part in spool.parts()[:-1]:
            spool.remove([part], {part.writer})

    def close(self) -> None:
        self._ckpt.close()


class TierdDaemon(Tierd):
    tier = True


class TierdOverlapped(Tierd):
    overlapped = True


class TierdOverlappedDaemon(Tierd):
    tier = overlapped = True


TIERD_SAVERS: dict[str, Callable[[Training, Path], SaveMethod]] = {
    "tierd": Tierd,
    "tierd+daemon": TierdDaemon,
    "tierd-overlapped": TierdOverlapped,
    "tierd-overlapped+daemon": TierdOverlappedDaemon,
}


_NO_WAIT: Wait = lambda: None  # noqa: E731


class _Files(SaveMethod):
    """An arm whose checkpoints are entries of its directory, named by step."""

    def path(self) -> Path:
        return self.directory / f"{self.training.number:09}"

    def clean_up(self) -> None:
        for old in sorted(self.directory.iterdir())[:-1]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


class TorchSave(_Files):
    def save(self) -> Wait:
        torch.save(self.training.state_dict(), self.path())
        return _NO_WAIT


class TorchSaveFsync(_Files):
    def save(self) -> Wait:
        with self.path().open("wb") as file:
            torch.save(self.training.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.directory)
        return _NO_WAIT


class DcpSave(_Files):
    def save(self) -> Wait:
        save(self.training.state_dict(), storage_writer=FileSystemWriter(self.path()), no_dist=True)
        return _NO_WAIT


class DcpAsync(_Files):
    """Saves in a thread, with the stager that DCP makes for each save."""

    def stager(self) -> DefaultStager | None:
        return None

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self._stager = self.stager()

    def save(self) -> Wait:
        future = async_save(
            self.training.state_dict(),
            storage_writer=FileSystemWriter(self.path()),
            async_stager=self._stager,
            no_dist=True,
        )
        assert isinstance(future, Future)
        return lambda: _await(future)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class DcpAsyncReused(DcpAsync):
    """The stager keeps its buffers from save to save. Pinning and non-blocking copies need an accelerator."""

    def stager(self) -> DefaultStager:
        pins = self.training.device.type == "cuda"
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=pins, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pins
            )
        )


class DcpProcess(_Files):
    """Saves in a process that gets a stager's shared memory; staging runs behind forward and backward."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        store = directory.with_name(f"{directory.name}.store")
        store.unlink(missing_ok=True)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        pins = training.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pins, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=pins
            )
        )
        self._staged: Future[Any] | None = None

    def save(self) -> Wait:
        answer: Any = async_save(
            self.training.state_dict(),
            storage_writer=FileSystemWriter(self.path()),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        self._staged = answer.staging_completion
        return lambda: _await(answer.upload_completion)

    def update_guard(self) -> AbstractContextManager[object]:
        if self._staged is not None:
            _await(self._staged)
            self._staged = None
        return nullcontext()

    def close(self) -> None:
        self._stager.close()
        dist.destroy_process_group()


class TorchCheckpointing(_Files):
    """DCP's successor. Its staging buffers are made before the first save, which its documentation offers."""

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        try:
            from torch_checkpointing import CheckpointManager
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
        except ImportError as error:
            raise LibraryUnavailable(f"{error.name} is not installed; {install_command('bench')}") from error
        logging.getLogger("torch_checkpointing").setLevel(logging.ERROR)
        config: Any = CheckpointManager.Config.with_async_save()
        # Its O_DIRECT stream ends in EINVAL on ext4: 0.1.1 writes an unaligned tail (tried here).
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = config.build()
        self._manager.prewarm_staging(training.state_dict())

    def save(self) -> Wait:
        future = self._manager.save(str(self.path()), self.training.state_dict())
        return lambda: _await(future)

    def update_guard(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def close(self) -> None:
        self._manager.close()


def _await(future: Future[Any]) -> None:
    future.result(_TIMEOUT)


PEER_SAVERS: dict[str, Callable[[Training, Path], SaveMethod]] = {
    "torch.save": TorchSave,
    "torch.save+fsync": TorchSaveFsync,
    "dcp.save": DcpSave,
    "dcp.async": DcpAsync,
    "dcp.async-reused": DcpAsyncReused,
    "dcp.process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing,
}
