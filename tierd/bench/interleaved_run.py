"""Runs the processes of a benchmark in turns, one at a time; and the process of one restore.

Invariant: they take turns, round by round, so that a noisy machine's drift affects all alike. If all processes fit into
memory they are kept, and only one works at a time. If they do not, each is started anew for a block of a few rounds. Of
a restore only the load from the files is timed: model, optimizer and their memory exist before, and the files are not
in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import tierd
from tierd.bench import process_counters
from tierd.bench.overhead_result import SaveMethodResult, SizeResult
from tierd.bench.save_worker import CEILINGS
from tierd.bench.training import SAVE_METHODS, Training
from tierd.bench.worker_pipe import WorkerPipe

WAYS = ("tierd", "torch.load")


def save_for_restores(training: Training, directory: Path) -> None:
    """Save once for each kind of restore."""
    torch.save(training.state_dict(), directory / "state.pt")
    with tierd.Checkpointer(directory / "spool", run="bench", to=[]) as ckpt:
        ckpt.save(training.number, training.state).wait()


def time_restore(kind: str, training: Training, directory: Path) -> float:
    """Wait for a line on standard input, restore, and return the seconds."""
    if kind == "torch.load":
        _ready()
        start_s = time.perf_counter()
        state = torch.load(directory / "state.pt", mmap=False, weights_only=True, map_location="cpu")
        training.load_state_dict(state)
        training.finish()
        return time.perf_counter() - start_s
    with tierd.Checkpointer(directory / "spool", run="bench", to=[]) as ckpt:
        state = training.state
        _ready()
        start_s = time.perf_counter()
        restored = ckpt.restore(state)
        training.finish()
        restore_s = time.perf_counter() - start_s
    if restored is None:
        raise FileNotFoundError(f"{directory}: no checkpoint in the spool")
    return restore_s


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Run `save_for_restores`, or restore as one of `WAYS` and print the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("make", *WAYS))
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("directory", type=Path)
    parser.add_argument("device")
    options = parser.parse_args()
    training = Training(options.gigabytes, options.device)
    training.step()
    if options.do == "make":
        save_for_restores(training, options.directory)
    else:
        print(time_restore(options.do, training, options.directory), flush=True)


Say = Callable[[str], None]

_TRAINING = 1.4  # memory of one training process, in units of its state: gradients and what a step needs
_PROCESS = 500e6  # bytes of a process that has loaded torch, and of its helper
_SHARE = 0.6  # of the available memory that processes may be planned to take
_BLOCK = 5  # rounds of a process that is not kept
_RESTORES = 5  # rounds of restoring, at most; each is a fresh process


class WorkerProcess(WorkerPipe):
    """The worker of one arm, with a directory of its own, which `close` removes."""

    def __init__(self, arm: str, gigabytes: float, directory: Path, device: str = "cpu") -> None:
        self._directory = directory / arm
        shutil.rmtree(self._directory, ignore_errors=True)
        # A worker of an older checkout (benchmarks/before.py) knows no device.
        on = [device] if device != "cpu" else []
        command = [sys.executable, "-m", "tierd.bench.save_worker", arm, str(gigabytes), str(self._directory), *on]
        super().__init__(f"arm {arm}", command, directory / f"{arm}.log")

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


def measure_size(
    gigabytes: float,
    arms: Sequence[str],
    rounds: int,
    steps_per_save: int | None,
    directory: Path,
    say: Say,
    device: str = "cpu",
) -> SizeResult:
    """Measure all arms at one size, with the ceilings and the restores."""
    run = _Run(gigabytes, arms, rounds, steps_per_save, directory, say, device)
    try:
        run.all_blocks()
    finally:
        run.close()
    restores, dropped = _restores(gigabytes, min(_RESTORES, rounds), directory, say, device)
    ceilings = run.results.pop(CEILINGS).samples
    facts = run.facts
    return SizeResult(
        gigabytes=gigabytes,
        state_bytes=facts["state_bytes"],
        tensors=facts["tensors"],
        model=facts["model"],
        steps=run.steps,
        rounds=rounds,
        schedule=run.schedule,
        step_s=facts["step_s"],
        arms=run.results,
        ceilings=ceilings,
        restore=restores,
        cache_dropped=dropped,
    )


class _Run:
    """One size's processes and their answers so far."""

    def __init__(
        self,
        gigabytes: float,
        arms: Sequence[str],
        rounds: int,
        steps_per_save: int | None,
        directory: Path,
        say: Say,
        device: str,
    ) -> None:
        self._device = device
        self._gigabytes, self._rounds, self._directory, self._say = gigabytes, rounds, directory, say
        self._names = [CEILINGS, *arms]
        self.steps = steps_per_save or 0
        self.facts: dict[str, Any] = {}
        self.results = {name: _empty_result(name) for name in self._names}
        self._workers: dict[str, WorkerProcess] = {}
        self._stay = fits(gigabytes, arms)
        self._block = rounds if self._stay else min(rounds, _BLOCK)
        self.schedule = (
            "every arm's process stays, and they take turns round by round"
            if self._stay
            else f"one process at a time, started anew for {self._block} rounds; arms take turns block by block"
        )

    def all_blocks(self) -> None:
        measured_rounds = 0
        while measured_rounds < self._rounds:
            rounds = min(self._block, self._rounds - measured_rounds)
            self._run_alternately(rounds) if self._stay else self._run_in_sequence(rounds)
            measured_rounds += rounds

    def _run_alternately(self, rounds: int) -> None:
        for name in self._names:
            self._start(name)
        for number in range(rounds):
            self._say(f"{self._gigabytes:g} GB: round {number + 1} of {rounds}")
            for name in self._workers:
                self._round(name)
        for name in list(self._workers):
            self._end(name)

    def _run_in_sequence(self, rounds: int) -> None:
        for name in self._names:
            self._say(f"{self._gigabytes:g} GB: {rounds} rounds of {name}")
            self._start(name)
            if name in self._workers:
                for _ in range(rounds):
                    self._round(name)
                self._end(name)

    def _start(self, name: str) -> None:
        result = self.results[name]
        if result.skipped is not None:
            return
        worker = self._workers[name] = WorkerProcess(name, self._gigabytes, self._directory, self._device)
        facts, self._before = worker.request("base", watch=True, steps=self.steps)
        result.first.setdefault("memory_before_bytes", []).append(self._before)
        if not self.facts:
            self.facts = facts
            self.steps = self.steps or steps_for(self._gigabytes, facts["step_s"])
        answer, _ = worker.request("start")
        result.skipped = answer.pop("skipped", None)
        if result.skipped is not None:
            self._say(f"{name}: skipped: {result.skipped}")
            self._workers.pop(name).close()
        for figure, value in answer.items():
            result.first.setdefault(figure, []).append(value)
        process_counters.sync_filesystem(self._directory)

    def _round(self, name: str) -> None:
        figures, _ = self._workers[name].request("round", steps=self.steps)
        self.results[name].add(figures)
        process_counters.sync_filesystem(self._directory)

    def _end(self, name: str) -> None:
        """Run a last window to measure its memory, then end the process."""
        worker, result = self._workers.pop(name), self.results[name]
        if name != CEILINGS:
            _, peak_bytes = worker.request("memory", watch=True, steps=max(2, self.steps // 2))
            result.extra_memory_bytes.append(max(0, peak_bytes - int(result.first["memory_before_bytes"][-1])))
        worker.close()
        process_counters.sync_filesystem(self._directory)

    def close(self) -> None:
        while self._workers:
            self._workers.popitem()[1].close()


def fits(gigabytes: float, arms: Sequence[str]) -> bool:
    """Return whether all processes may be in memory together."""
    copies = sum(_TRAINING + SAVE_METHODS[name].copies for name in arms) + _TRAINING + 1
    need = copies * gigabytes * 1e9 + (len(arms) + 1) * _PROCESS
    return need <= _SHARE * process_counters.available_bytes()


def steps_for(gigabytes: float, step_s: float) -> int:
    """Steps of a window: enough to write a save meanwhile, 1 s and 1.5 s a gigabyte; between 4 and 10."""
    return min(10, max(4, round((1 + 1.5 * gigabytes) / step_s)))


def _empty_result(name: str) -> SaveMethodResult:
    about = SAVE_METHODS.get(name)
    return SaveMethodResult(about.settings, about.kind, about.durable) if about else SaveMethodResult(name, "", "")


def _restores(
    gigabytes: float, rounds: int, directory: Path, say: Say, device: str
) -> tuple[dict[str, list[float]], bool]:
    """Measure restores in turns; seconds by kind of restore."""
    place = directory / "restore"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        say(f"{gigabytes:g} GB: restores")
        command = [sys.executable, "-m", "tierd.bench.interleaved_run"]
        subprocess.run([*command, "make", str(gigabytes), str(place), device], check=True)
        samples: dict[str, list[float]] = {name: [] for name in WAYS}
        dropped = True
        for _ in range(rounds):
            for kind in WAYS:
                restore_s, is_dropped = _restore([*command, kind, str(gigabytes), str(place), device], place)
                samples[kind].append(restore_s)
                dropped = dropped and is_dropped
        return samples, dropped
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _restore(command: list[str], place: Path) -> tuple[float, bool]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise ChildProcessError("restoring failed; see above")
        dropped = process_counters.drop_cache(place)
        process.stdin.write("go\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if not line:
        raise ChildProcessError("restoring failed; see above")
    return float(line), dropped


if __name__ == "__main__":
    main()
