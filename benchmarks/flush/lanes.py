"""A process of its own for each arm, and the pipe to it: a line of JSON in, a line of JSON out.

Invariant: nothing runs in a worker between two requests. The worker's end (`serve`) needs only the standard library, so
that a peer's venv need not have tierd.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_END = 60.0  # seconds that a worker may take to end


class ArmFailed(Exception):
    """An arm could not do what it was asked; the message is what its row says."""


def serve(verbs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer on the descriptor that standard output was; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"answer": verbs[request.pop("do")](**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    answers.close()
    os._exit(0)  # DCP's process would be joined at the interpreter's end, for ever: nobody tells it to stop


class Lane:
    """One worker process.

    Args:
        script: the worker's file beside this one.
        patience: seconds that one answer may take.
    """

    def __init__(
        self, python: str, script: str, environment: Mapping[str, str], log: Path, patience: float = 1800.0
    ) -> None:
        self._log, self._patience = log, patience
        with log.open("wb") as to:
            self._process = subprocess.Popen(
                [python, str(HERE / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=to,
                text=True,
                env=dict(environment),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Send a request; its answer.

        Raises:
            ArmFailed: the worker said why, or ended, or went silent.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ArmFailed(f"{do}: its process has ended: {self._tail()}") from error
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self._process.kill()
            raise ArmFailed(f"{do}: no answer in {self._patience:g} s: {self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise ArmFailed(f"{do}: its process ended: {self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ArmFailed(f"{do}: {answer['error']}")
        return dict(answer["answer"])

    def _tail(self) -> str:
        return " / ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])

    def close(self) -> None:
        """End the process and all that it started."""
        from tierd.bench import process_counters

        assert self._process.stdin is not None and self._process.stdout is not None
        started = {pid: process_counters.start_ticks(pid) for pid in process_counters.process_tree(self.pid)[1:]}
        try:
            self._process.stdin.close()
        except OSError:
            pass
        end_process(self._process, _END)
        self._process.stdout.close()
        process_counters.end_processes(started)


def end_process(process: subprocess.Popen[Any], patience: float) -> None:
    """Wait for it to end by itself, else kill it."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_seconds(pids: Sequence[int]) -> float:
    """Of these processes and all their descendants so far."""
    from tierd.bench import process_counters

    return sum(process_counters.cpu_seconds(pid) for pid in pids)


def until(what: str, holds: Callable[[], bool], patience: float) -> None:
    """Look ten times a second.

    Raises:
        ArmFailed: it did not come about.
    """
    end = time.monotonic() + patience
    while not holds():
        if time.monotonic() > end:
            raise ArmFailed(f"{what}: not within {patience:g} s")
        time.sleep(0.1)
