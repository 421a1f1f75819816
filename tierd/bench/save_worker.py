"""One arm (one way to save), or the machine's own limits, in a process that is driven over a pipe by lines of JSON.

    base      steps without a save: the process's own needs
    start     make the arm; its first save
    round     a window of steps with a save at its beginning, and a quiet save without training
    memory    a window, for the caller to watch this process tree's memory meanwhile

Invariant: nothing runs between two requests, so any number of these processes may wait while one is measured. A round
is measured against steps of the same process immediately before and after it. The memcpy floor copies the same tensors
as a save, into memory that was touched before. The raw ceilings write as many bytes from page-aligned memory past the
page cache, and include the fsync.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tierd.bench import process_counters
from tierd.bench.training import LibraryUnavailable, SaveMethod, Training, Wait
from tierd.bench.worker_pipe import serve
from tierd.state import cuda

_PIECE = 16 << 20  # bytes of one pwrite


class Ceilings:
    """Measures the three limits, one after the other, at each call."""

    def __init__(self, training: Training, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._fresh, self._overwritten = directory / "fresh", directory / "kept"
        self._tensors = training.tensors()
        self._size = -(-training.state_bytes() // mmap.PAGESIZE) * mmap.PAGESIZE
        spare = len(self._tensors) * 64  # every target is aligned to a cache line
        self._memory = mmap.mmap(-1, self._size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._targets, offset = [], 0
        for tensor in self._tensors:
            flat = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            self._targets.append(flat.view(tensor.shape))
            offset += -(-tensor.nbytes // 64) * 64
        self._training = training
        if training.device.type == "cuda":  # the floor is a copy into pinned memory
            first = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
            if failed := cuda.api.register(first, len(self._memory), training.device):
                raise OSError(f"CUDA does not pin {len(self._memory)} bytes: error {failed}")
        self._copy()
        self._write(self._overwritten)

    def measure(self) -> dict[str, float]:
        """Measure the seconds of each limit."""
        self._fresh.unlink(missing_ok=True)
        copy = self._copy()
        fresh = self._write(self._fresh)
        return {"memcpy_s": copy, "raw_fresh_s": fresh, "raw_overwrite_s": self._write(self._overwritten)}

    @torch.no_grad()
    def _copy(self) -> float:
        start_s = time.perf_counter()
        torch._foreach_copy_(self._targets, self._tensors, non_blocking=True)
        self._training.finish()
        return time.perf_counter() - start_s

    def _write(self, path: Path) -> float:
        view = memoryview(self._memory)[: self._size]
        start_s = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size)
            for start in range(0, self._size, _PIECE):
                piece = view[start : start + _PIECE]
                if os.pwrite(fd, piece, start) != len(piece):
                    raise OSError(f"{path}: a short write")
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - start_s


CEILINGS = "ceilings"  # the arm's name of a worker that measures the ceilings
_WARM = 3  # steps before the first save, after Adam's state was made
_LONGEST = 6  # factor by which a window may grow during a flush


class SaveMeasurer:
    """Answers requests about one arm."""

    def __init__(self, name: str, gigabytes: float, directory: Path, device: str = "cpu") -> None:
        self._name, self._directory = name, directory
        self.training = Training(gigabytes, device)
        self._arm = SaveMethod(self.training, directory)
        self._ceilings: Ceilings | None = None

    def base(self, steps: int) -> dict[str, Any]:
        """Train without the arm."""
        self.training.step()  # makes Adam's state
        times_s = [self._step() for _ in range(max(_WARM, steps))]
        shape = self.training.shape
        return {
            "step_s": median(times_s),
            "state_bytes": self.training.state_bytes(),
            "tensors": len(self.training.tensors()),
            "model": f"{shape.depth} blocks of width {shape.width}, {shape.batch} x 32 tokens a step",
        }

    def start(self) -> dict[str, Any]:
        """Make the arm and save once, which makes the memory that later saves reuse."""
        if self._name == CEILINGS:
            self._ceilings = Ceilings(self.training, self._directory)
            return {}
        try:
            self._arm = _make_arm(self._name, self.training, self._directory)
        except LibraryUnavailable as error:
            return {"skipped": str(error)}
        for _ in range(_WARM):
            self._step()
        blocked, durable, _ = self._quiet()
        return {"first_blocked_s": blocked, "first_durable_s": durable}

    def round(self, steps: int) -> dict[str, float]:
        """Run one round and return its samples, in seconds."""
        if self._ceilings is not None:
            return self._ceilings.measure()
        base_steps = max(2, steps // 2)
        before = [self._step() for _ in range(base_steps)]
        samples, flush_window = self.run_measured_steps(steps)
        self._arm.clean_up()
        after = [self._step() for _ in range(base_steps)]
        base = median(before + after)
        samples["step_s"] = base
        samples["added_s"] = samples.pop("window_s") - steps * base
        if flush_window:
            samples["flush_added_s"] = flush_window["window_s"] - flush_window["steps"] * base
            samples["flush_s"] = flush_window["flush_s"]
        if self._name != "none":
            samples["quiet_blocked_s"], samples["quiet_durable_s"], samples["cpu_s"] = self._quiet()
        return samples

    def run_measured_steps(self, steps: int) -> tuple[dict[str, float], dict[str, float]]:
        """Save, train, then wait as the next save would; with a tier, continue until the tier has the checkpoint."""
        arm = self._arm
        start_s = time.perf_counter()
        wait = arm.save()
        blocked = time.perf_counter() - start_s
        durable = _Stamp(wait)
        flushed = _Stamp(arm.flush_waiter() or (lambda: None))
        for _ in range(steps):
            self._step()
        window, waited = durable.join()
        samples = {"window_s": window - start_s, "waited_s": waited}
        if self._name != "none":
            samples |= {"blocked_s": blocked, "durable_s": durable.at - start_s}
        if arm.flush_waiter() is None:
            return samples, {}
        trained_steps = steps
        while not flushed.done() and trained_steps < _LONGEST * steps:
            self._step()
            trained_steps += 1
        end, _ = flushed.join()
        return samples, {"window_s": end - start_s, "steps": trained_steps, "flush_s": flushed.at - start_s}

    def memory(self, steps: int) -> dict[str, float]:
        """Run the same window. Its times are not used, because the process is observed meanwhile."""
        self.run_measured_steps(steps)
        self._arm.clean_up()
        return {}

    def _quiet(self) -> tuple[float, float, float]:
        """Save without training: seconds blocked, seconds until durable, and CPU seconds."""
        cpu = process_counters.cpu_seconds(os.getpid())
        start_s = time.perf_counter()
        wait = self._arm.save()
        blocked = time.perf_counter() - start_s
        wait()
        durable = time.perf_counter() - start_s
        cpu = process_counters.cpu_seconds(os.getpid()) - cpu
        self._step()  # an overlapped arm is idle only after a step
        self._arm.clean_up()
        return blocked, durable, cpu

    def _step(self) -> float:
        start_s = time.perf_counter()
        self.training.step(self._arm.update_guard)
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._arm.close()


class _Stamp:
    """The time at which a wait in a thread ended."""

    def __init__(self, wait: Wait) -> None:
        self.at = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def _run(self, wait: Wait) -> None:
        try:
            wait()
        except BaseException as error:
            self._error = error
        self.at = time.perf_counter()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> tuple[float, float]:
        """Wait for the thread; return the time now, and the length of the wait."""
        start_s = time.perf_counter()
        self._thread.join()
        if self._error is not None:
            raise self._error
        now = time.perf_counter()
        return now, now - start_s


def _make_arm(name: str, training: Training, directory: Path) -> SaveMethod:
    from tierd.bench import library_savers

    return {"none": SaveMethod, **library_savers.PEER_SAVERS, **library_savers.TIERD_SAVERS}[name](training, directory)


def main() -> None:
    """Serve one arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arm")
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("directory", type=Path)
    parser.add_argument("device", nargs="?", default="cpu")
    options = parser.parse_args()

    def open_verbs() -> dict[str, Callable[..., Any]]:
        worker = SaveMeasurer(options.arm, options.gigabytes, options.directory, options.device)
        return {verb.__name__: verb for verb in (worker.base, worker.start, worker.round, worker.memory, worker.close)}

    serve(open_verbs)


if __name__ == "__main__":
    main()
