"""tierd's worker: what a user would write, and the training loop that a flush runs beside.

    save       Checkpointer.save, until Save.wait(tier) returns: committed and verified there
    restore    Checkpointer.restore(state) through a daemon with an empty spool
    export     `tierd restore URL --to DIR`, then safetensors, then a copy into the state
    train      a live training loop of one thread, for `idle` and `flushing` windows of steps

The daemon is the driver's: it was started before, and it outlives this process. Each `save` is the first of its run, so
that nothing of it can be shared with an older checkpoint; `ready` restores before, as every training does, which makes
the arena ready behind.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import torch
from host import until
from safetensors.torch import load_file

import tierd
from tierd.bench.training import Training
from tierd.bench.worker_pipe import serve

RUN = "bench"
_COMMAND = (sys.executable, "-m", "tierd")
_TIMEOUT = 1800.0  # seconds after which a save or flush counts as hung
_WARM = 5  # steps before the first window


class Ours:
    """One process: a state, and a checkpointer."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._training: Training | None = None
        self._ckpt: tierd.Checkpointer | None = None

    def load(self, path: str) -> dict[str, Any]:
        self._state = dict(checkpoints.load(Path(path)))
        return {}

    def blank(self, path: str) -> dict[str, Any]:
        self._state = dict(checkpoints.blank(Path(path)))
        return {}

    def train(self, gigabytes: float, path: str | None) -> dict[str, Any]:
        """Train a model of that size; save its own state, or where `path` names a file, that one's."""
        torch.set_num_threads(1)
        self._training = Training(gigabytes)
        torch.set_num_threads(1)
        for _ in range(_WARM):
            self._training.step()
        self._state = dict(checkpoints.load(Path(path), mapped=True)) if path else self._training.state
        shape, tensors = self._training.shape, self._training.tensors()
        if path:
            tensors = [tensor for group in self._state.values() for tensor in group.values()]
        return {
            "model": f"{shape.depth} blocks of width {shape.width}",
            "threads": torch.get_num_threads(),
            "bytes": sum(tensor.nbytes for tensor in tensors),
        }

    def open(self, spool: str) -> dict[str, Any]:
        """Only the checkpointer."""
        self._ckpt = tierd.Checkpointer(spool, run=RUN, to=None)
        return {}

    def ready(self, spool: str, state_bytes: int) -> dict[str, Any]:
        """As at a training's start: nothing to restore, and an arena that is touched behind."""
        self.open(spool)
        assert self._ckpt is not None
        if self._ckpt.restore(self._state) is not None:
            raise FileExistsError(f"{spool}: there is a checkpoint already")
        until("an arena that is ready", lambda: _shared_memory() >= 0.95 * state_bytes, 120.0)
        time.sleep(1.0)
        return {}

    def save(self, tiers: list[str]) -> dict[str, Any]:
        """Seconds from the call to each of its ends."""
        assert self._ckpt is not None
        begun = time.perf_counter()
        save = self._ckpt.save(1, self._state)
        blocked = time.perf_counter()
        save.wait(timeout=_TIMEOUT)
        durable = time.perf_counter()
        for tier in tiers:
            save.wait(tier, timeout=_TIMEOUT)
        done = time.perf_counter()
        return {"blocked_s": blocked - begun, "durable_s": durable - begun, "total_s": done - begun}

    def restore(self) -> dict[str, Any]:
        assert self._ckpt is not None
        begun = time.perf_counter()
        found = self._ckpt.restore(self._state)
        took = time.perf_counter() - begun
        if found is None:
            raise FileNotFoundError("no checkpoint")
        return {"total_s": took}

    def warm(self, url: str) -> dict[str, Any]:
        """Have the command line's own files in the page cache: not they are what is measured."""
        subprocess.run([*_COMMAND, "ls", url], stdout=subprocess.DEVNULL, check=True)
        return {}

    def export(self, url: str, to: str) -> dict[str, Any]:
        begun = time.perf_counter()
        command = [*_COMMAND, "restore", url, "--run", RUN, "--to", to, "--json"]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ended.returncode != 0:
            raise ChildProcessError(ended.stderr.strip()[-500:])
        brought = time.perf_counter()
        (file,) = Path(to).rglob("*.safetensors")
        found = load_file(file)
        loaded = time.perf_counter()
        _fill(self._state, found)
        return {
            "brought_s": brought - begun,
            "loaded_s": loaded - begun,
            "total_s": time.perf_counter() - begun,
        }

    def check(self, path: str) -> dict[str, Any]:
        return {"same": checkpoints.same(self._state, Path(path))}

    # -- training beside a flush ------------------------------------------------------------------------------------

    def idle(self, seconds: float) -> dict[str, Any]:
        """Steps with nothing beside them."""
        end = time.monotonic() + seconds
        steps = [self._step()]
        while time.monotonic() < end:
            steps.append(self._step())
        return {"steps_s": steps}

    def flushing(self, tier: str) -> dict[str, Any]:
        """Save, wait until that is durable, then step until the tier has it: steps that a flush ran beside all along.
        The stamps are of the clock that all processes share."""
        assert self._ckpt is not None
        begun = time.monotonic()
        save = self._ckpt.save(1, self._state)
        save.wait(timeout=_TIMEOUT)
        durable = time.monotonic()
        ended: list[BaseException | float] = []

        def wait() -> None:
            try:
                save.wait(tier, timeout=_TIMEOUT)
                ended.append(time.monotonic())
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        steps: list[float] = []
        while thread.is_alive():
            steps.append(self._step())
        thread.join()
        if isinstance(ended[0], BaseException):
            raise ended[0]
        steps.pop()  # the flush ended in it
        return {"steps_s": steps, "begun": begun, "durable": durable, "flushed": ended[0]}

    def _step(self) -> float:
        assert self._training is not None
        begun = time.perf_counter()
        self._training.step()
        return time.perf_counter() - begun


def _shared_memory() -> int:
    """Bytes of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem:"))


def _fill(state: dict[str, Any], found: dict[str, torch.Tensor]) -> None:
    """Copy the file's tensors into the state's; a name in the file is its path in the state."""
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            tensor.copy_(found[f"{group}/{name}"])


def open_verbs() -> dict[str, Callable[..., Any]]:
    """The requests by name: the public methods of the worker."""
    worker = Ours()
    return {name: getattr(worker, name) for name in vars(Ours) if not name.startswith("_")}


if __name__ == "__main__":
    serve(open_verbs)
