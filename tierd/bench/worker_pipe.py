"""A process of its own for each arm, and the pipe to it: a line of JSON in, a line of JSON out.

Invariant: nothing runs in a worker between two requests. Its own end, `serve`, needs the standard library alone, so
that the virtual environment of a peer need not have tierd's packages.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_SAMPLE_S = 0.05  # between two samples of a process tree's memory
_END_S = 60.0  # that a process may take to end


def serve(open_verbs: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer on the original standard output, and redirect all other output to standard error; `close` comes last."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    verbs = open_verbs()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = verbs[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    if "close" in verbs:
        verbs["close"]()
    answers.close()
    os._exit(0)  # the interpreter would join DCP's process for ever at its end, because nothing stops that process


class WorkerPipe:
    """One worker process, whose standard error goes to `log`, and the pipe to it. An answer may take `patience_s`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        patience_s: float = 900.0,
    ) -> None:
        self.name, self._log, self._patience_s = name, log, patience_s
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env and dict(env)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, do: str, *, watch: bool = False, **arguments: object) -> tuple[dict[str, Any], int]:
        """Send a request, and return its answer and the peak memory of the tree meanwhile if that was asked for.

        Raises:
            ChildProcessError: the process failed, ended or did not answer in time; the message has the end of its log.
        """
        from tierd.bench import process_counters

        assert self._process.stdin is not None and self._process.stdout is not None
        peak_bytes, remaining_s = 0, self._patience_s
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(do) from error
        pause_s = _SAMPLE_S if watch else self._patience_s
        while not select.select([self._process.stdout], [], [], pause_s)[0]:
            remaining_s -= pause_s
            if remaining_s <= 0:
                raise self._failure(do)
            peak_bytes = max(peak_bytes, process_counters.memory_bytes(self.pid))
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise self._failure(do)
        return answer, peak_bytes

    def _failure(self, do: str) -> ChildProcessError:
        self._process.kill()
        tail = self._log.read_text(errors="replace")[-1500:].strip()
        return ChildProcessError(f"{self.name}: {do} failed; its log ends with:\n{tail}")

    def close(self) -> None:
        """End the process and its descendants."""
        from tierd.bench import process_counters

        assert self._process.stdin is not None and self._process.stdout is not None
        started = {pid: process_counters.start_ticks(pid) for pid in process_counters.process_tree(self.pid)[1:]}
        try:
            self._process.stdin.close()
        except OSError:
            pass
        end_process(self._process, _END_S)
        self._process.stdout.close()
        process_counters.end_processes(started)


def end_process(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Wait for a process to end by itself, else kill it."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
