"""tierd's own arms: with and without a daemon, blocking and overlapped.

Invariant: the arms use only calls that a user would write. Without a daemon no process prunes a spool, so `settle`
removes the checkpoint before the last, as retention would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tierd
from tierd.bench.arms import Arm, Wait
from tierd.bench.training import Training
from tierd.core.config import from_urls
from tierd.spool.spool import Spool

_TIMEOUT = 600.0  # seconds after which a save or flush counts as hung


class Tierd(Arm):
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

    def flushed(self) -> Wait | None:
        save = self._last
        if not self.tier or save is None:
            return None
        return lambda: save.wait(tier=self._tier, timeout=_TIMEOUT)

    def settle(self) -> None:
        flushed = self.flushed()
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


ARMS: dict[str, Callable[[Training, Path], Arm]] = {
    "tierd": Tierd,
    "tierd+daemon": TierdDaemon,
    "tierd-overlapped": TierdOverlapped,
    "tierd-overlapped+daemon": TierdOverlappedDaemon,
}
