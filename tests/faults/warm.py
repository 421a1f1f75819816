"""A process that has loaded what most tests load, and forks for each run of pytest: loading takes longer than most of
the tests that find a fence.

Invariant: it never loads a module of tierd or of its tests, because each run has to read them as they are then.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_LOADED = (
    *(
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "torchdata.stateful_dataloader",
    ),
    *("numpy", "pytest", "hypothesis", "aiobotocore.session", "aiohttp", "cryptography.hazmat.primitives.ciphers.aead"),
    *("xxhash", "zstandard", "watchdog.observers", "typer.testing", "safetensors"),
)
_STARTS_S = 300.0  # that loading may take on a machine that others load


class Warm:
    """Runs of pytest in `tree`, each forked from one process. A run that is cut off ends that process."""

    def __init__(self, tree: Path, environment: dict[str, str]) -> None:
        self._tree, self._environment = tree, environment
        self._output = tree.parent / f"{tree.name}.output"
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.warm"],
            cwd=self._tree,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer(_STARTS_S)

    def pytest(self, arguments: list[str], limit_s: float) -> tuple[int, str]:
        """The exit status of pytest with these arguments, and all that it wrote.

        Raises:
            subprocess.TimeoutExpired: it took more than `limit_s`, and was killed.
        """
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin is not None
        request = {"arguments": arguments, "output": str(self._output), "limit_s": limit_s}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            status = self._answer(limit_s + 60.0)
        except BaseException:  # its answer would be taken for the next run's
            self._process.kill()
            self._process.wait()
            raise
        if status is None:
            raise subprocess.TimeoutExpired(["pytest", *arguments], limit_s)
        return status, self._output.read_text(errors="replace")

    def _answer(self, limit_s: float) -> int | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise RuntimeError(f"the process that forks for pytest did not answer for {limit_s:.0f} s")
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer


def _child(arguments: list[str], output: str) -> int:
    """Run pytest in this process, which was forked for it."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, descriptor), (2, descriptor)):
        os.dup2(source, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in ((0, "r"), (1, "w"), (2, "w")))
    sys.argv = ["pytest", *arguments]
    import pytest

    status = int(pytest.main(arguments))
    atexit._run_exitfuncs()  # os._exit, with which a fork ends, would leave running what ends there
    return status


def _run(arguments: list[str], output: str, limit_s: float) -> int | None:
    """The exit status of pytest in a fork; None if it was killed after `limit_s`."""
    child = os.fork()
    if not child:
        status = 70
        try:
            status = _child(arguments, output)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    descriptor = os.pidfd_open(child)
    try:
        ended = bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test that failed left running
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.split(".")[0] == "tierd"]
    assert not loaded, f"loaded before the first run: {loaded}"
    gc.freeze()  # pytest collects five times, and would walk through all of torch each time
    line = os.fdopen(os.dup(1), "w")  # the answers; what is written to stdout is no answer
    os.dup2(2, 1)
    line.write("0\n")
    line.flush()
    while request := sys.stdin.readline():
        line.write(json.dumps(_run(**json.loads(request))) + "\n")
        line.flush()


if __name__ == "__main__":
    main()
